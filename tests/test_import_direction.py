"""Imports point one way: moepass -> runtime -> passes -> models. The passes stay pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# From the bottom up: a folder may import itself and those before it.
LAYERS = ("models", "passes", "runtime", "moepass")
IMPURE = {"threading", "socket", "time", "subprocess", "multiprocessing", "asyncio", "concurrent", "os", "random"}
FILES = [(layer, path) for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Every module that `source` imports anywhere, inside functions too; relative imports made absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(value.value) for value in node.args if isinstance(value, ast.Constant))


def layer_of(module: str) -> str | None:
    """The folder that `module` lives in; None for what is not ours."""
    parts = module.split(".")
    if parts[0] != "moepass":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS[:-1] else "moepass"


def violations(layer: str, source: str) -> list[str]:
    package = "moepass" if layer == "moepass" else f"moepass.{layer}"
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    # `from moepass import x` in a lower layer would be the face, whatever x is.
    return [name for name in imported_modules(source, package) if layer_of(name) not in (None, *allowed)]


@pytest.mark.parametrize(("layer", "path"), FILES, ids=lambda value: str(getattr(value, "name", value)))
def test_imports_point_down(layer: str, path: Path) -> None:
    assert violations(layer, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", sorted((ROOT / "passes").rglob("*.py")), ids=lambda path: path.name)
def test_passes_know_no_clock_process_or_socket(path: Path) -> None:
    modules = {name.split(".")[0] for name in imported_modules(path.read_text(encoding="utf-8"), "moepass.passes")}
    assert not modules & IMPURE


def test_nothing_unpickles_or_evaluates_what_others_brought() -> None:
    for _, path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & {"eval", "exec", "torch.load", "pickle.load", "pickle.loads"}, path.name


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("models", "from moepass.passes.ir.plan import Plan"),
        ("models", "import moepass"),
        ("models", "from .. import passes"),
        ("passes", "import moepass.runtime.transfer.ring"),
        ("passes", "def late():\n    from moepass.runtime import banks"),
        ("passes", "import importlib\nimportlib.import_module('moepass.backend')"),
        ("runtime", "from moepass import Options"),
        ("runtime", "from moepass.options import Options"),
        ("runtime", "from ..backend import asyncep"),
    ],
)
def test_the_check_sees_imports_that_point_up(layer: str, source: str) -> None:
    assert violations(layer, source)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("passes", "from moepass.models.errors import MoepassError"),
        ("runtime", "from moepass.passes.ir.plan import Plan\nimport threading"),
        ("moepass", "from moepass.runtime.offload.offload import offload_experts"),
        ("models", "import torch, passes, runtime"),
    ],
)
def test_the_check_lets_imports_that_point_down_pass(layer: str, source: str) -> None:
    assert violations(layer, source) == []
