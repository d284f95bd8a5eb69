"""`fedstrata flower`: an app that Flower builds, and certificates that hold what they promise."""

from __future__ import annotations

import ssl
import stat
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

import fedstrata as fs
from tests.runs import fedstrata, one_sentence


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's
def test_a_new_app_is_complete_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flwr.cli.build import build_fab_from_disk
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    directory = tmp_path / "My First-App"
    assert fedstrata("flower", "new", directory, "--method", "scaffold+fedpart", "--clients", 4) == 0
    assert "README.md" in capsys.readouterr().out
    config = tomllib.loads((directory / "pyproject.toml").read_text())
    assert config["tool"]["flwr"]["app"]["config"]["method"] == "scaffold + fedpart"
    components = config["tool"]["flwr"]["app"]["components"]
    assert components == {"serverapp": "my_first_app.server_app:app", "clientapp": "my_first_app.client_app:app"}
    assert len(build_fab_from_disk(directory)) > 1000
    monkeypatch.syspath_prepend(str(directory))
    from my_first_app import client_app, server_app, task  # type: ignore[import-not-found]

    assert isinstance(client_app.app, ClientApp)
    assert isinstance(server_app.app, ServerApp)
    assert sum(len(task.data(n, {})) for n in range(4)) == len(fs.load_dataset("digits").train)
    for name in [name for name in sys.modules if name.startswith("my_first_app")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["json", "1", "class", "flwr", "größe"])
def test_a_name_that_python_cannot_import_gets_another(name: str, tmp_path: Path) -> None:
    assert fedstrata("flower", "new", tmp_path / name) == 0
    package = tomllib.loads((tmp_path / name / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
    words = package["serverapp"].partition(".")[0]
    assert words.isidentifier()
    assert words not in sys.stdlib_module_names
    assert (tmp_path / name / words / "task.py").exists()


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    for command in ("new", "certs"):
        assert fedstrata("flower", command, tmp_path) == 2
        assert "is there already and not empty" in one_sentence(capsys)
        assert fedstrata("flower", command, tmp_path / "mine") == 2
        assert "is there already" in one_sentence(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("new", "x", "--method", "fedavgg"), "did you mean"),
        (("new", "x", "--clients", "0"), "clients"),
        (("certs", "x", "--host", "not a host"), "'not a host' is no host"),
        (("certs", "x", "--nodes", "-1"), "nodes are 0 to 100,000"),
        (("certs", "x", "--days", "0"), "days 1 to 36,500"),
    ],
)
def test_refusals(
    words: tuple[str, ...],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fedstrata("flower", *words) == 2
    assert why in one_sentence(capsys)
    assert not (tmp_path / "x").exists()


def test_certificates(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert fedstrata("flower", "certs", keys, "--host", "server.example.org", "--host", "10.0.0.7", "--nodes", 2) == 0
    names = {"ca.crt", "ca.key", "server.crt", "server.key", "node-0.key", "node-0.pub", "node-1.key", "node-1.pub"}
    assert {path.name for path in keys.iterdir()} == names
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in keys.glob("*.key"))
    root, server = (x509.load_pem_x509_certificate((keys / f).read_bytes()) for f in ("ca.crt", "server.crt"))
    server.verify_directly_issued_by(root)
    hosts = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["localhost", "server.example.org"]
    assert [str(a) for a in hosts.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1", "10.0.0.7"]
    assert root.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(keys / "server.crt", keys / "server.key")
    private = load_ssh_private_key((keys / "node-0.key").read_bytes(), None)
    public = load_ssh_public_key((keys / "node-0.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.public_key() == public
