"""The rooms: which may import which, without circles; none holds too many files; the passes stay pure."""

from __future__ import annotations

import ast
import collections
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

# What the rooms of a folder may import of that folder. Files beside the rooms of `models`, `passes` and `runtime` are
# in EVERYWHERE, or import whatever they like and are imported by other folders alone.
_BANKS = ("transfer", "kernels", "system")
_HOMES = ("banks", "ranks", *_BANKS)
_EVERY_HOME = ("homes", "homes/hybrid", "homes/disk", *_HOMES)
_OFFLOAD = ("profiles", "homes/registry", *_EVERY_HOME)
_EXECUTE = ("lowering", "cuda_graphs", *_EVERY_HOME)
_GRAPH = ("graph", "ir")
_BATCHING = ("serving/batching", "serving/requests")
ROOMS = {
    "models": {
        "sizes": (),
        "formulas": ("sizes",),
        "demo": (),
        "checkpoint": ("sizes", "demo"),
        "reference": ("formulas",),
    },
    "passes": {
        "machine": (),
        "ir": ("machine",),
        "graph": ("ir",),
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
        "homes/registry": _EVERY_HOME,
        "offload": _OFFLOAD,
        "kernels": ("system",),
        "kernels/grouped_gemm": ("system",),
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
        "serving/attention": ("serving/cache", "serving/batching"),
        "serving/engine": (
            *("serving/attention", "serving/cache", *_BATCHING),
            *("offload", "homes/registry", "banks"),
        ),
        "serving/router": _BATCHING,
        "serving/workers": ("serving/engine", "serving/router", *_BATCHING, "ranks", "system"),
        "serving/questions": _BATCHING,
        "serving/routes": ("serving/questions", *_BATCHING),
        "serving/offline": (
            *("serving/engine", "serving/questions", *_BATCHING),
            *("offload", "homes/registry", "transfer"),
        ),
        "serving/http": ("serving/routes", "serving/questions", *_BATCHING),
    },
    "moepass": {
        "explaining": (),
        "clients": (),
        "demo": ("explaining", ""),
        "cli": ("clients", "demo", "explaining", ""),
        "ray_serve": ("cli", ""),
        "": ("explaining",),
    },
}
# Errors, homes, limits, the version and the private parts of torch.
EVERYWHERE = {
    *("moepass.models.errors", "moepass.models.homes", "moepass.models.limits", "moepass.models.version"),
    "moepass.runtime.torch_private",
}

# What touches processes, files, memory or the clock is no business of code that maps graphs to graphs.
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


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Every module that `source` imports anywhere, inside functions too; relative imports made absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(value.value) for value in node.args if isinstance(value, ast.Constant))


def room_of(module: str) -> tuple[str, str] | None:
    """Folder and room that `module`, or a name in it, lives in; None for what is not ours."""
    parts = module.split(".")
    if parts[0] != "moepass":
        return None
    inside = parts[1:] if parts[1:2] and parts[1] in FOLDERS[:-1] else parts
    rooms = ROOMS[inside[0]]
    named = next((room for room in ("/".join(inside[1:3]), "/".join(inside[1:2])) if room in rooms), "")
    return inside[0], named


def package_of(folder: str, room: str) -> str:
    return ".".join(part for part in ("moepass", "" if folder == "moepass" else folder, *room.split("/")) if part)


def violations(folder: str, room: str, source: str) -> list[str]:
    """What `source`, a file of that room, imports and may not."""
    found = []
    for name in imported_modules(source, package_of(folder, room)):
        target = room_of(name)
        if target is None or any(name == one or name.startswith(f"{one}.") for one in EVERYWHERE):
            continue
        other, other_room = target
        if FOLDERS.index(other) != FOLDERS.index(folder):
            is_allowed = FOLDERS.index(other) < FOLDERS.index(folder)
        else:
            beside_the_rooms = not room and folder != "moepass"
            is_allowed = other_room == room or beside_the_rooms or other_room in ROOMS[folder][room]
        if not is_allowed:
            found.append(name)
    return found


def _room_of_file(path: Path) -> tuple[str, str]:
    folder, *rest = path.relative_to(ROOT).parent.parts
    return folder, "/".join(rest)


def test_imports_follow_the_table() -> None:
    for path in FILES:
        assert violations(*_room_of_file(path), path.read_text(encoding="utf-8")) == [], path


def test_every_folder_with_code_is_a_room_of_the_table() -> None:
    rooms = {(folder, room) for folder, found in ROOMS.items() for room in found if room}
    assert {_room_of_file(path) for path in FILES if _room_of_file(path)[1]} == rooms


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_table_has_no_circles(folder: str) -> None:
    graph = nx.DiGraph([(room, other) for room, others in ROOMS[folder].items() for other in others])
    assert list(nx.simple_cycles(graph)) == []


def drawing() -> str:
    """The rooms as a Mermaid flowchart: an arrow leads to what a room may import, unless a longer way leads there."""
    lines = ["flowchart TD"]
    for folder in reversed(FOLDERS):
        graph = nx.DiGraph([(room, other) for room, others in ROOMS[folder].items() for other in others])
        graph.add_nodes_from(ROOMS[folder])
        lines.append(f"    subgraph {folder}")
        for room in ROOMS[folder]:
            lines.append(f"        {_mermaid_name(folder, room)}[{room or 'backend, options'}]")
        for room, other in sorted(nx.transitive_reduction(graph).edges):
            lines.append(f"        {_mermaid_name(folder, room)} --> {_mermaid_name(folder, other)}")
        lines.append("    end")
    lines += [f"    {upper} --> {lower}" for lower, upper in itertools.pairwise(FOLDERS)]
    return "\n".join(lines)


def _mermaid_name(folder: str, room: str) -> str:
    return f"{folder}_{room or 'face'}".replace("/", "_")


def test_the_drawing_in_the_documentation_is_that_of_the_table() -> None:
    assert drawing() in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), drawing()


def test_folders_with_many_files_are_warned_of() -> None:
    """Warn only: a folder exists because of its meaning, and some meanings need more files than others."""
    for folder, count in collections.Counter(path.parent.relative_to(ROOT) for path in FILES).items():
        if count > MANY_FILES:
            warnings.warn(f"{folder} holds {count} files; is it still about one thing?", stacklevel=1)


def module_name(path: Path) -> str:
    parts = (path.parent if path.name == "__init__.py" else path.with_suffix("")).relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "moepass" else ("moepass", *parts))


def test_no_modules_import_each_other_in_a_circle() -> None:
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


def test_every_package_says_what_it_holds() -> None:
    packages = [path for path in FILES if path.name == "__init__.py"]
    assert [path for path in packages if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []


@pytest.mark.parametrize(
    ("folder", "room"), [(folder, room) for folder, rooms in ROOMS.items() for room in rooms if room]
)
def test_the_docstring_of_a_room_says_what_the_table_lets_it_import(folder: str, room: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / folder / room / "__init__.py").read_text(encoding="utf-8")))
    (contract,) = re.findall(r"May import ([^.]+)\.|Imports no other room\.", docstring or "")
    named = re.split(r",\s+", contract) if contract else []
    assert sorted(named) == sorted(other or "the face" for other in ROOMS[folder][room])


def test_every_room_is_installed() -> None:
    found = re.search(r"^packages = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S)
    assert found
    assert sorted(ast.literal_eval(found[1])) == sorted(
        package_of(*_room_of_file(path)) for path in FILES if path.name == "__init__.py"
    )


def test_passes_know_no_clock_process_or_socket() -> None:
    for path in (ROOT / "passes").rglob("*.py"):
        modules = set(imported_modules(path.read_text(encoding="utf-8"), "moepass.passes")) - PURE_NAMES
        assert not {name.split(".")[0] for name in modules} & IMPURE, path


def test_nothing_unpickles_or_evaluates_what_others_brought() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
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
def test_the_check_sees_imports_that_point_up(folder: str, room: str, source: str) -> None:
    assert violations(folder, room, source)


@pytest.mark.parametrize(
    ("folder", "room", "source"),
    [
        ("passes", "ir", "from moepass.models.errors import MoepassError"),
        ("passes", "parallel", "from moepass.passes.parallel.match import routed_tokens"),
        ("runtime", "homes/disk", "from moepass.runtime.homes import peers\nimport threading"),
        ("runtime", "ranks", "from moepass.runtime.torch_private import compiled_code"),
        ("moepass", "cli", "from moepass.runtime.offload.offload import offload_experts"),
        ("models", "reference", "import torch, passes, runtime"),
    ],
)
def test_the_check_lets_imports_that_point_down_pass(folder: str, room: str, source: str) -> None:
    assert violations(folder, room, source) == []


def test_no_two_classes_share_a_name() -> None:
    names = collections.Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []
