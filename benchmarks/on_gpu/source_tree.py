"""Make `moepass` importable from the source tree, on machines where pip can install nothing.

    python -m benchmarks.on_gpu.source_tree FOLDER

makes FOLDER, which PYTHONPATH then names: links show the four folders as the one package that they install as, and a
description of the package registers the backend "asyncep" of torch.compile, as in an installed package.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The packages that the compiler and the benchmark need in addition to torch; serving needs more.
NEEDED = ("torch", "transformers", "msgspec", "networkx", "numpy", "psutil", "rich", "safetensors", "sympy", "typer")


def link_source_tree(folder: Path) -> None:
    """Create `folder`, replacing an earlier one.

    Raises FileExistsError if it has files that are not of a source tree.
    """
    package = folder / "moepass"
    if folder.exists():
        if any(folder.iterdir()) and not package.is_dir():
            raise FileExistsError(f"{folder} has other files; give a folder that is empty or does not exist")
        shutil.rmtree(folder)
    package.mkdir(parents=True)
    for path in (ROOT / "moepass").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for name in ("models", "passes", "runtime"):
        (package / name).symlink_to(ROOT / name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    described = folder / f"moepass-{project['version']}.dist-info"
    described.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (described / "METADATA").write_text(metadata, encoding="utf-8")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (described / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def use_source_tree() -> None:
    """Make this process and its children import moepass from the source tree, unless it is installed.

    Exits with status 2 and the names of missing packages, if there are any.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            _print_error(
                f"moepass needs {', '.join(missing)}, which are not installed for this Python ({sys.executable})"
            )
        )
    if not _is_installed():
        folder = ROOT / "build" / "source-tree"
        link_source_tree(folder)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
        # A child that runs a module would find the folder `moepass` in the current folder first.
        os.environ["PYTHONSAFEPATH"] = "1"
        importlib.invalidate_caches()


def _is_installed() -> bool:
    try:
        importlib.metadata.version("moepass")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _print_error(message: str) -> int:
    print(f"{message}; install them, or name a folder that has them in PYTHONPATH", file=sys.stderr)
    return 2


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m benchmarks.on_gpu.source_tree FOLDER")
    link_source_tree(Path(sys.argv[1]))
