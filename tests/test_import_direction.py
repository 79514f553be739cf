"""Imports between folders follow one table without cycles, passes stay pure, and tests share code in helpers only."""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the bottom up: a folder may import itself and those before it.
FOLDERS = ("models", "passes", "runtime", "moepass")
MANY_FILES = 20

# The subfolders ("rooms") that each room may import from its own top-level folder. Files directly in `models`, `passes`
# or `runtime` are either listed in EVERYWHERE, or may import anything and are imported by other folders only.
_BANKS = ("transfer", "kernels", "system")
_HOMES = ("banks", "ranks", *_BANKS)
_EVERY_HOME = ("homes", "homes/hybrid", "homes/disk", *_HOMES)
_OFFLOAD = ("profiles", "homes/options", *_EVERY_HOME)
_EXECUTE = ("lowering", "cuda_graphs", *_EVERY_HOME)
_GRAPH = ("graph", "ops", "ir")
_BATCHING = ("serving/batching", "serving/requests")
ROOMS = {
    "models": {
        "sizes": (),
        "formulas": ("sizes",),
        "demo": (),
        "layouts": (),
        "checkpoint": ("sizes", "demo", "layouts"),
        "reference": ("formulas",),
    },
    "passes": {
        "machine": (),
        "ir": ("machine",),
        "ops": (),
        "graph": ("ops", "ir"),
        "blocks": _GRAPH,
        "cost": _GRAPH,
        "rows": _GRAPH,
        "masks": ("rows", "blocks", *_GRAPH),
        "loops": ("masks", "rows", "blocks", *_GRAPH),
        "dense": ("loops", "masks", "rows", "blocks", *_GRAPH),
        "slots": ("dense", "loops", "rows", "blocks", *_GRAPH),
        "tokens": ("rows", "blocks", *_GRAPH),
        "parallel/match": ("blocks", *_GRAPH),
        "parallel/local_form": ("parallel/match", "rows", *_GRAPH),
        "parallel/rows": ("parallel/local_form", "rows", *_GRAPH),
        "parallel/ranges": ("parallel/match", *_GRAPH),
        "parallel/mock": (
            *("parallel/ranges", "parallel/rows", "parallel/local_form", "parallel/match"),
            *("rows", *_GRAPH),
        ),
        "parallel/proof": (
            *("parallel/mock", "parallel/ranges", "parallel/rows", "parallel/local_form", "parallel/match"),
            *("rows", *_GRAPH),
        ),
        "parallel": (
            *("parallel/proof", "parallel/mock", "parallel/ranges", "parallel/rows", "parallel/local_form"),
            *("parallel/match", "rows", "blocks", *_GRAPH),
        ),
        "planner": ("cost", "machine", "ir"),
        "schedule": ("planner", "parallel", "parallel/match", "blocks", *_GRAPH),
        "segments": ("rows", "blocks", "cost", *_GRAPH),
        "memory": ("segments", *_GRAPH),
    },
    "runtime": {
        "system": (),
        "profiles": ("system",),
        "ranks": ("system",),
        "transfer": ("kernels", "system"),
        "banks": _BANKS,
        "homes": _HOMES,
        "homes/hybrid": ("homes", *_HOMES),
        "homes/disk": ("homes", *_HOMES),
        "homes/options": _EVERY_HOME,
        "offload": _OFFLOAD,
        "kernels": ("system",),
        "kernels/grouped_gemm": ("kernels", "system"),
        "lowering": ("kernels/grouped_gemm", "kernels", "system"),
        "cuda_graphs": ("system",),
        "execute": _EXECUTE,
        "captures": (*_EXECUTE, "execute"),
        "calibrate": (*_EXECUTE, "offload", "execute"),
        "integrations": (*_EXECUTE, "offload", "execute"),
        "serving": (),
        "serving/requests": (),
        "serving/batching": ("serving/requests",),
        "serving/cache": _BATCHING,
        "serving/attention": ("serving/cache", "serving/batching", "system"),
        "serving/engine": (
            *("serving/attention", "serving/cache", *_BATCHING),
            *("offload", "homes/options", "banks", "system"),
        ),
        "serving/router": _BATCHING,
        "serving/workers": ("serving/engine", "serving/router", *_BATCHING, "ranks", "system"),
        "serving/questions": _BATCHING,
        "serving/routes": ("serving/questions", *_BATCHING),
        "serving/offline": (
            *("serving/engine", "serving/questions", *_BATCHING),
            *("offload", "homes/options", "transfer"),
        ),
        "serving/http": ("serving/routes", "serving/questions", *_BATCHING),
    },
    "moepass": {
        "explaining": (),
        "clients": ("",),
        "demo": ("explaining", ""),
        "cli": ("clients", "demo", "explaining", ""),
        "ray_serve": ("cli", ""),
        "": ("explaining",),
    },
}
# Modules that every file may import: the version, errors, homes, limits and the private parts of torch.
EVERYWHERE = {
    *("moepass.models.errors", "moepass.models.homes", "moepass.models.limits", "moepass.models.version"),
    "moepass.runtime.torch_private",
}

# Passes map graphs to graphs, so they must not touch processes, files, memory or the clock.
IMPURE = {
    *("asyncio", "concurrent", "ctypes", "mmap", "multiprocessing", "os", "pathlib", "random", "shutil", "socket"),
    *("subprocess", "tempfile", "threading", "time"),
}
# Pure paths: `source_lines.py` compares the names of source files and opens none.
PURE_NAMES = {"pathlib.PurePath", "pathlib.PurePosixPath"}


FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
MODULES = {
    ".".join((path.parent if path.name == "__init__.py" else path.with_suffix("")).relative_to(ROOT).parts)
    for path in FILES
}


@functools.cache
def statements_of(source: str) -> tuple[ast.AST, ...]:
    """Return all statements of `source`, those inside functions and classes included."""
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:  # the list grows
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, field, ())
    return tuple(nodes)


def calls_of(source: str, *names: str) -> Iterator[ast.Call]:
    """Yield every call in `source` of a function with one of these names, in whatever module it is."""
    if not any(f"{name}(" in source for name in names):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in names:
                yield node


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Yield the absolute name of every module that `source` imports, at the top level or inside a function."""
    for node in statements_of(source):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(name for name in (base, node.module) if name)
            yield from (f"{module}.{name.name}" for name in node.names)
    for call in calls_of(source, "import_module", "__import__"):
        yield from (str(value.value) for value in call.args if isinstance(value, ast.Constant))


def room_of(module: str) -> tuple[str, str] | None:
    """Return the folder and room of `module`, or of a name in it; None if it belongs to another package."""
    parts = module.split(".")
    if parts[0] != "moepass":
        return None
    inside = parts[1:] if parts[1:2] and parts[1] in FOLDERS[:-1] else parts
    rooms = ROOMS[inside[0]]
    named = next((room for room in ("/".join(inside[1:3]), "/".join(inside[1:2])) if room in rooms), "")
    return inside[0], named


def package_of(folder: str, room: str) -> str:
    return ".".join(name for name in ("moepass", "" if folder == "moepass" else folder, *room.split("/")) if name)


def violations(folder: str, room: str, source: str) -> list[str]:
    """Return the modules that `source`, a file of `room`, imports against the table."""
    forbidden = []
    for name in imported_modules(source, package_of(folder, room)):
        target = room_of(name)
        if target is None or any(name == module or name.startswith(f"{module}.") for module in EVERYWHERE):
            continue
        target_folder, target_room = target
        if target_folder != folder:
            is_allowed = FOLDERS.index(target_folder) < FOLDERS.index(folder)
        else:
            is_outside_rooms = not room and folder != "moepass"
            is_allowed = target_room == room or is_outside_rooms or target_room in ROOMS[folder][room]
        if not is_allowed:
            forbidden.append(name)
    return forbidden


def _room_of_file(path: Path) -> tuple[str, str]:
    folder, *subfolders = path.relative_to(ROOT).parent.parts
    return folder, "/".join(subfolders)


def test_imports_follow_the_table() -> None:
    for path in FILES:
        assert violations(*_room_of_file(path), path.read_text(encoding="utf-8")) == [], path


def test_every_folder_with_code_is_a_room_of_the_table() -> None:
    rooms = {(folder, room) for folder, table in ROOMS.items() for room in table if room}
    assert {_room_of_file(path) for path in FILES if _room_of_file(path)[1]} == rooms


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_table_has_no_cycles(folder: str) -> None:
    graph = nx.DiGraph([(room, target) for room, targets in ROOMS[folder].items() for target in targets])
    assert list(nx.simple_cycles(graph)) == []


def flowchart() -> str:
    """Return the table as a Mermaid flowchart, without the arrows that follow from others."""
    lines = ["flowchart TD"]
    for folder in reversed(FOLDERS):
        graph = nx.DiGraph([(room, target) for room, targets in ROOMS[folder].items() for target in targets])
        graph.add_nodes_from(ROOMS[folder])
        lines.append(f"    subgraph {folder}")
        for room in ROOMS[folder]:
            lines.append(f"        {_mermaid_name(folder, room)}[{room or 'backend, options'}]")
        for room, target in sorted(nx.transitive_reduction(graph).edges):
            lines.append(f"        {_mermaid_name(folder, room)} --> {_mermaid_name(folder, target)}")
        lines.append("    end")
    lines += [f"    {upper} --> {lower}" for lower, upper in itertools.pairwise(FOLDERS)]
    return "\n".join(lines)


def _mermaid_name(folder: str, room: str) -> str:
    return f"{folder}_{room or 'face'}".replace("/", "_")


def test_the_documentation_contains_the_flowchart_of_the_table() -> None:
    assert flowchart() in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), flowchart()


def test_folders_with_many_files_emit_a_warning() -> None:
    """A folder exists because of its meaning, so its number of files is never an error."""
    for folder, count in collections.Counter(path.parent.relative_to(ROOT) for path in FILES).items():
        if count > MANY_FILES:
            warnings.warn(f"{folder} contains {count} files; does it still have one purpose?", stacklevel=1)


def module_name(path: Path) -> str:
    parts = (path.parent if path.name == "__init__.py" else path.with_suffix("")).relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "moepass" else ("moepass", *parts))


def test_modules_do_not_import_each_other_in_cycles() -> None:
    """Imports inside functions and those for type checkers count too."""
    paths = {module_name(path): path for path in FILES}
    graph = nx.DiGraph()
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for imported in imported_modules(path.read_text(encoding="utf-8"), package):
            target = imported if imported in paths else imported.rpartition(".")[0]
            if target in paths and target != name:
                graph.add_edge(name, target)
    circles = {frozenset(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1}
    assert circles == set()


def test_every_package_has_a_docstring() -> None:
    packages = [path for path in FILES if path.name == "__init__.py"]
    assert [path for path in packages if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []


@pytest.mark.parametrize(
    ("folder", "room"), [(folder, room) for folder, rooms in ROOMS.items() for room in rooms if room]
)
def test_the_docstring_of_a_room_names_the_imports_that_the_table_allows(folder: str, room: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / folder / room / "__init__.py").read_text(encoding="utf-8")))
    (contract,) = re.findall(r"May import ([^.]+)\.|Imports no other folder\.", docstring or "")
    names = re.split(r",\s+", contract) if contract else []
    assert sorted(names) == sorted(target or "the face" for target in ROOMS[folder][room])


def test_every_room_is_installed() -> None:
    match = re.search(r"^packages = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S)
    assert match
    assert sorted(ast.literal_eval(match[1])) == sorted(
        package_of(*_room_of_file(path)) for path in FILES if path.name == "__init__.py"
    )


def test_passes_do_not_use_clocks_processes_files_or_sockets() -> None:
    for path in (ROOT / "passes").rglob("*.py"):
        modules = set(imported_modules(path.read_text(encoding="utf-8"), "moepass.passes")) - PURE_NAMES
        assert not {name.split(".")[0] for name in modules} & IMPURE, path


def test_no_module_unpickles_or_evaluates_data() -> None:
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        calls = {ast.unparse(call.func) for call in calls_of(source, "eval", "exec", "load", "loads")}
        assert not calls & {"eval", "exec", "torch.load", "pickle.load", "pickle.loads"}, path.name


@pytest.mark.parametrize(
    ("folder", "room", "source"),
    [
        ("models", "sizes", "from moepass.passes.ir.plan import Plan"),
        ("models", "sizes", "import moepass"),
        ("models", "formulas", "from ... import passes"),
        ("models", "sizes", "from moepass.models.formulas import evaluate"),
        ("passes", "ir", "import moepass.runtime.transfer.ring"),
        ("passes", "graph", "def late():\n    from moepass.runtime.banks import banks"),
        ("passes", "graph", "import importlib\nimportlib.import_module('moepass.backend')"),
        ("passes", "ir", "from moepass.passes.graph.nodes import is_call"),
        ("passes", "ir", "from ..graph import nodes"),
        ("passes", "parallel/match", "from moepass.passes.parallel.proof.prove import prove"),
        ("passes", "parallel", "from moepass.passes import pipeline"),
        ("runtime", "banks", "from moepass import Options"),
        ("runtime", "banks", "from moepass.options import Options"),
        ("runtime", "transfer", "from moepass.runtime.homes import peers"),
        ("runtime", "homes", "from moepass.runtime.homes.disk import disk_home"),
        ("runtime", "execute", "from moepass.runtime import serving"),
        ("moepass", "explaining", "from moepass.backend import asyncep"),
    ],
)
def test_violations_reports_imports_that_point_up(folder: str, room: str, source: str) -> None:
    assert violations(folder, room, source)


@pytest.mark.parametrize(
    ("folder", "room", "source"),
    [
        ("passes", "ir", "from moepass.models.errors import MoepassError"),
        ("passes", "parallel", "from moepass.passes.parallel.match import parallel_block"),
        ("runtime", "homes/disk", "from moepass.runtime.homes import peers\nimport threading"),
        ("runtime", "ranks", "from moepass.runtime.torch_private import compiled_code"),
        ("moepass", "cli", "from moepass.runtime.offload.offload import offload_experts"),
        ("models", "reference", "import torch, passes, runtime"),
    ],
)
def test_violations_accepts_imports_that_point_down(folder: str, room: str, source: str) -> None:
    assert violations(folder, room, source) == []


def test_no_two_classes_share_a_name() -> None:
    """Leading underscores are ignored, because a reader who searches for a name finds both."""
    names = collections.Counter(
        node.name.lstrip("_")
        for path in FILES
        for node in statements_of(path.read_text(encoding="utf-8"))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_test_module_imports_another() -> None:
    """Code that several test modules need belongs to `tests/helpers`."""
    importing = {
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in imported_modules(path.read_text(encoding="utf-8"), "tests")
        if re.search(r"^tests\..*\btest_\w+|^tests\.(?!helpers\b|conftest\b)", name)
    }
    assert importing == set()
