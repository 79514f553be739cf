"""The source distribution and the wheel, built and installed outside the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
# Files and folders of a checkout that are not sources.
_NO_SOURCES = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "moepass-debug"
)
# Torch finds the backend through its entry point, so moepass is imported afterwards.
_COMPILE = """
import sys
import torch
sys.path.append(sys.argv[1])  # last, so that moepass is the installed package
from tests.helpers.models.tiny import tiny_model
model = tiny_model("qwen3_moe")
ids = torch.arange(32).reshape(2, 16)
with torch.no_grad():
    expected = model(input_ids=ids).logits
    import moepass
    moepass.offload_experts(model)
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"})
    with moepass.record_compilations() as compilations:
        assert torch.equal(compiled(input_ids=ids).logits, expected)
assert compilations[0].plan.slot_stays
print(moepass.__file__)
"""


def _run(*command: str | Path, cwd: Path) -> str:
    """Return the standard output of a command, without Python's variables in its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    finished = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unpacked source distribution of a copy of this repository."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT, folder / "copy", ignore=_NO_SOURCES)
    build = "import setuptools.build_meta as build, sys; build.build_sdist(sys.argv[1])"
    _run(sys.executable, "-c", build, folder, cwd=folder / "copy")
    (archive,) = folder.glob("moepass-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel built from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    _run(*pip, "-w", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new virtual environment with the wheel.

    Requirements are imported from the current environment, so nothing is downloaded.
    `test_the_wheel_requires_the_tested_versions` compares their versions.
    """
    folder = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    made = folder / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", made, "install", "--quiet", "--no-deps", wheel, cwd=folder)
    packages = Path(_run(made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # A path that a .pth file adds is searched last, and .pth files in that path, such as those of an editable moepass,
    # are ignored.
    (packages / "required.pth").write_text(sysconfig.get_path("purelib"))
    return made


def test_the_source_distribution_is_the_repository(source: Path) -> None:
    def files(folder: Path) -> set[str]:
        # Ignore files that a build adds, and those that only a repository needs.
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        return {name for name in names if ".egg-info" not in name} - {"PKG-INFO", "setup.cfg", ".gitignore"}

    assert files(source) == files(source.parent / "copy")


def test_the_wheel_installs_one_package_with_its_data_and_licences(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"moepass"}
    licences = {name.partition("licenses/")[2] for name in names if "licenses/" in name}
    assert licences == {"LICENSE", "models/demo/LICENSE.django.txt"}
    expected = {
        f"moepass/{path.relative_to(ROOT / 'moepass' if folder == 'moepass' else ROOT)}"
        for folder in ("models", "passes", "runtime", "moepass")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".json", ".html", ".safetensors", ".jsonl", ".txt", ".typed")
    }
    assert expected <= names


def test_the_description_has_only_absolute_links(wheel: Path) -> None:
    opened = zipfile.ZipFile(wheel)
    (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
    message = Parser().parsestr(opened.read(name).decode())
    assert message["Description-Content-Type"] == "text/markdown"
    assert re.findall(r"\]\((?!https://)", message.get_payload()) == []
    assert all(url.partition(", ")[2].startswith("https://") for url in message.get_all("Project-URL"))


def test_the_wheel_requires_the_tested_versions(python: Path) -> None:
    names = "import importlib.metadata as m; print('\\n'.join(m.requires('moepass')))"
    required = [Requirement(line) for line in _run(python, "-c", names, cwd=python.parent).splitlines()]
    mandatory = [requirement for requirement in required if requirement.marker is None]
    assert mandatory
    for requirement in mandatory:
        assert requirement.specifier.contains(metadata.version(requirement.name)), requirement


def test_the_installed_command_works_outside_the_repository(python: Path, tmp_path: Path) -> None:
    command = python.parent / "moepass"
    assert "prefill-only" in _run(command, "--help", cwd=tmp_path)
    assert "16 layers, 16 with experts" in _run(command, "explain", "olmoe-1b-7b", cwd=tmp_path)
    assert '"moepass.explain/1"' in _run(command, "explain", "demo", "--format", "json", cwd=tmp_path)


def test_the_installed_package_offloads_and_compiles(source: Path, python: Path, tmp_path: Path) -> None:
    imported = _run(python, "-c", _COMPILE, source, cwd=tmp_path).strip()
    assert Path(imported).is_relative_to(python.parents[1])


def test_the_tests_of_the_source_distribution_are_found(source: Path, python: Path) -> None:
    # The folder moepass/ next to the tests is a part of the package; the installed package is complete.
    collect = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main(['--collect-only', '-q']))"
    output = _run(python, "-c", collect, cwd=source)
    listed = {line.partition(":")[0] for line in output.splitlines() if line.startswith("tests/")}
    left_out = {path for path in (source / "tests").rglob("test_*.py") if str(path.relative_to(source)) not in listed}
    # Files that are not collected need an optional package.
    assert [path.name for path in left_out if "importorskip" not in path.read_text(encoding="utf-8")] == []
    assert len(listed) > 10 * len(left_out)
