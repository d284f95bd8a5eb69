"""What a release is made of: versions agree, links lead somewhere, and the clean environment holds no extra."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fedstrata
from fedstrata.core.extras import EXTRAS

ROOT = Path(__file__).parents[1]
PAGES = ("SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "README.md")


def clean_environment() -> ModuleType:
    """The module, which is no part of the package."""
    pytest.importorskip("packaging", reason="the release's tools need packaging")
    spec = importlib.util.spec_from_file_location("clean_environment", ROOT / "release" / "clean_environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_said_once() -> None:
    assert f"version: {fedstrata.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    if "dev" not in fedstrata.__version__:
        assert f"## [{fedstrata.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in found:
        if not re.match(r"[a-z]+:", link):
            file, _, anchor = link.partition("#")
            target = ROOT / file if file else ROOT / page
            assert target.exists(), link
            if anchor and target.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.M)
                assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, link


def test_the_tools_are_pinned() -> None:
    lines = (ROOT / "release" / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in lines)
    assert {line.partition("=")[0] for line in lines} == {"build", "twine", "cyclonedx-bom"}


def test_templates_can_be_read() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with extras")
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]
    assert len(files) == 6
    read = {path.name: yaml.safe_load(path.read_text()) for path in files}
    for name in ("bug.yml", "result.yml", "idea.yml"):
        assert {"name", "description", "body"} <= read[name].keys()
        assert all(part["type"] in ("textarea", "input", "checkboxes") for part in read[name]["body"])


def test_the_clean_environment_holds_what_is_required_and_nothing_else() -> None:
    tool = clean_environment()
    required = ["torch>=2", "torchmetrics>=1.4", "kornia>=0.8; extra == 'augment'"]
    found = tool.closure(required)
    assert {"torch", "torchmetrics", "numpy"} <= found.keys()
    assert not {name for extra in EXTRAS.values() for name in extra.distributions} & found.keys()
    with pytest.raises(SystemExit, match="is not installed here"):
        tool.closure(["no-such-package>=1"])
    with pytest.raises(SystemExit, match="is needed"):
        tool.closure(["numpy>=1000"])


def test_distributions_that_share_a_folder_are_linked_file_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole folder would bring the other's files along."""
    tool, source, clean = clean_environment(), tmp_path / "source", tmp_path / "clean"
    for name, files in {"one": ["shared/a.py", "alone/x.py"], "two": ["shared/b.py"]}.items():
        for file in files:
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            (source / file).write_text("")
        about = source / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        own = [*files, f"{about.name}/METADATA", f"{about.name}/RECORD", f"../../bin/{name}"]
        (about / "RECORD").write_text("".join(f"{file},,\n" for file in own))
    monkeypatch.setattr(sys, "path", [str(source)])
    clean.mkdir()
    tool.link([tool.metadata.distribution("one")], clean)
    assert [path.name for path in (clean / "shared").iterdir()] == ["a.py"]
    assert (clean / "alone").is_symlink()
    assert (clean / "alone" / "x.py").exists()
    assert (clean / "one-1.0.dist-info" / "METADATA").exists()
    assert not list(clean.glob("two*"))
