"""`fedstrata flower`: an app that Flower builds, and certificates that hold what they promise."""

from __future__ import annotations

import os
import shutil
import ssl
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

import fedstrata as fs
from tests.small_runs import fedstrata, one_sentence


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


def named(directory: Path) -> tuple[str, str]:
    """The names of a new app's project and package."""
    config = tomllib.loads((directory / "pyproject.toml").read_text())
    package = config["tool"]["flwr"]["app"]["components"]["serverapp"].partition(".")[0]
    assert (directory / package / "task.py").exists()
    return config["project"]["name"], package


@pytest.mark.parametrize("name", ["numpy", "google"])  # a package, and one in parts that other packages bring
def test_an_app_hides_no_package_that_is_installed(name: str, tmp_path: Path) -> None:
    assert fedstrata("flower", "new", tmp_path / name) == 0
    assert named(tmp_path / name) == (f"app-{name}", f"app_{name}")


@pytest.mark.parametrize("place", ["", "."])
def test_what_stands_in_the_current_directory_takes_no_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m fedstrata` looks for modules there too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(place and str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert fedstrata("flower", "new", "mine") == 0
    assert named(tmp_path / "mine") == ("mine", "mine")


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    for command in ("new", "certs"):
        assert fedstrata("flower", command, tmp_path) == 2
        assert "exists and is not empty" in one_sentence(capsys)
        assert fedstrata("flower", command, tmp_path / "mine") == 2
        assert "exists" in one_sentence(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


NO_HOSTS = [
    "not a host",
    "",
    "999.1.1.1",
    "010.1.1.1",
    "1.2.3",
    "a..b",
    ".x",
    "x.",
    "-x",
    "x-.org",
    "a_b",
    "größe.org",
    "*.example.org",
    "::g",
    "a" * 64,
    "a" * 300,
    ".".join(["a" * 62] * 4 + ["org"]),
]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("new", "x", "--method", "fedavgg"), "did you mean"),
        (("new", "x", "--clients", "0"), "clients"),
        *((("certs", "x", f"--host={host}"), "' is not a host") for host in NO_HOSTS),
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


@pytest.mark.parametrize(
    "host", ["2001:db8::7", "10.0.0.7", "3com.example", "A-1.xn--bcher-kva.org", "a" * 63, ".".join(["a" * 62] * 4)]
)
def test_hosts(host: str, tmp_path: Path) -> None:
    assert fedstrata("flower", "certs", tmp_path / "keys", "--host", host, "--nodes", 0) == 0
    server = x509.load_pem_x509_certificate((tmp_path / "keys" / "server.crt").read_bytes())
    hosts = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert host in [str(name.value) for name in hosts]


def test_certificates(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert fedstrata("flower", "certs", keys, "--host", "server.example.org", "--host", "10.0.0.7", "--nodes", 2) == 0
    names = {"ca.crt", "server.crt", "server.key", "node-0.key", "node-0.pub", "node-1.key", "node-1.pub"}
    assert {path.name for path in keys.iterdir()} == {*names, ".gitignore"}
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


def added(repository: Path) -> set[str]:
    """What `git add .` takes along."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("needs git")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for words in (["init", "-q"], ["add", "."], ["status", "--porcelain", "-z", "--untracked-files=all"]):
        done = subprocess.run(
            [git, *words], cwd=repository, env=environment, capture_output=True, text=True, check=True, timeout=60
        )
    return {line[3:] for line in done.stdout.split("\0") if line}


def test_git_takes_no_keys_along(tmp_path: Path) -> None:
    """Nor what runs leave behind."""
    app = tmp_path / "app"
    assert fedstrata("flower", "new", app) == 0
    assert fedstrata("flower", "certs", app / "keys", "--nodes", 1) == 0
    assert fedstrata("flower", "certs", app / "elsewhere" / "secrets", "--nodes", 1) == 0
    (app / "site.key").write_text("secret")
    (app / "superlink.db").write_text("")
    for place in ("runs/first/model.safetensors", "memory/x", "app/__pycache__/task.pyc", "app-0.1.0.fab"):
        (app / place).parent.mkdir(parents=True, exist_ok=True)
        (app / place).write_text("")
    modules = {f"app/{name}.py" for name in ("__init__", "task", "client_app", "server_app")}
    assert added(app) == {".gitignore", "README.md", "pyproject.toml", *modules}


def test_git_takes_no_keys_along_from_a_repository_of_somebody_else(tmp_path: Path) -> None:
    """A directory of keys is safe wherever it is made."""
    (tmp_path / "notes.md").write_text("x")
    assert fedstrata("flower", "certs", tmp_path / "deep" / "keys") == 0
    assert added(tmp_path) == {"notes.md"}
