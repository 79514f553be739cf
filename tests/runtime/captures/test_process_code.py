"""Captures are stored and used only in processes that run nothing but installed code."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import site
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

from moepass.runtime.captures import process_code
from moepass.runtime.captures.capture_store import CaptureStore
from moepass.runtime.captures.process_code import distributions, foreign_code
from moepass.stored_compile import StoredModule
from tests.helpers.models.tiny import tiny_model
from tests.helpers.processes.forked import in_child

PACKAGES = sysconfig.get_path("purelib")
PYTHON = sysconfig.get_path("stdlib")
SCRIPTS = sysconfig.get_path("scripts")
CACHE = "torch._inductor.runtime.compile_tasks.cabc"


def _module(name: str, file: str | None = None) -> types.ModuleType:
    made = types.ModuleType(name)
    if file is not None:
        made.__file__ = file
    return made


def _namespace(name: str) -> types.ModuleType:
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    return importlib.util.module_from_spec(spec)


class OwnKind(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return 3


@pytest.fixture
def as_moepass() -> Callable[[types.ModuleType], str]:
    """Return `foreign_code` of a process of the command, which has loaded torch, transformers, moepass and a module."""
    roots = {"torch", "transformers", "numpy", "moepass", "typing", "os", "pyexpat", "_remote_module_non_scriptable"}
    tiny_model("qwen3_moe", num_hidden_layers=1)
    loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in roots}
    loaded["__main__"] = _module("__main__", f"{SCRIPTS}/moepass")

    def found(module: types.ModuleType) -> str:
        return foreign_code({**loaded, module.__name__: module})

    return found


@pytest.mark.parametrize(
    "module",
    [
        _module("own", f"{PACKAGES}/own.py"),
        _module("math2", f"{PYTHON}/lib-dynload/math2.so"),
        _module("sitecustomize", f"{PYTHON}/sitecustomize.py"),  # as Debian installs it
        _module("torch._C.made_by_c"),
        _module("cython_runtime"),
        _namespace("own"),
        _module("moepass.own", str(Path(process_code.__file__).parent / "own.py")),
    ],
)
def test_installed_code_is_told(as_moepass: Callable[[types.ModuleType], str], module: types.ModuleType) -> None:
    assert as_moepass(module) == ""


@pytest.mark.parametrize(
    "module",
    [
        _module("own", "/srv/own.py"),
        _module("own", "own.py"),
        _module("own"),
        _module("torch.own"),  # made by hand, in a package that is not written in C
        _module("torch.nn", "/srv/torch/nn.py"),
        _module("own", f"{PACKAGES}-of-mine/own.py"),
        _module("own", f"{PYTHON}/../own.py"),
        _module("sitecustomize", f"{PACKAGES}/sitecustomize.py"),
        _module("usercustomize", "/home/me/usercustomize.py"),
        _module("transformers_modules.own", "/home/me/.cache/huggingface/modules/transformers_modules/own.py"),
        _module(CACHE, "/srv/cabc.py"),
        OwnKind("own"),
    ],
    ids=lambda module: f"{module.__name__}-{vars(module).get('__file__')}",
)
def test_code_of_a_program_is_named(as_moepass: Callable[[types.ModuleType], str], module: types.ModuleType) -> None:
    reason = as_moepass(module)
    assert f"the module {module.__name__} ({vars(module).get('__file__', 'of no file')})" in reason


def test_code_that_inductor_wrote_is_installed(as_moepass: Callable[[types.ModuleType], str], tmp_path: Path) -> None:
    # The cache of this process: other tests may have loaded code from it.
    folder = cache_dir()
    assert as_moepass(_module(CACHE, f"{folder}/ab/cabc.py")) == ""
    assert as_moepass(_module("cabc.kernel", f"{folder}/ab/cabc.main.so")) == ""
    assert "the module own" in as_moepass(_module("own", f"{tmp_path}/own.py"))


@pytest.mark.parametrize(("target", "counts"), [("src", False), ("other/site-packages", True)])
def test_a_link_to_code_that_is_developed_elsewhere_is_told(
    as_moepass: Callable[[types.ModuleType], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    counts: bool,
) -> None:
    installed, code = tmp_path / "site-packages", tmp_path / target / "own"
    installed.mkdir()
    code.mkdir(parents=True)
    (installed / "own").symlink_to(code)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(installed)])
    process_code._folders.cache_clear()
    try:
        assert (as_moepass(_module("own", f"{installed}/own/__init__.py")) == "") == counts
    finally:
        process_code._folders.cache_clear()


def _run_as(name: str, file: str) -> types.ModuleType:
    main = _module("__main__", file)
    main.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return main


@pytest.mark.parametrize(
    ("main", "is_ours"),
    [
        (_module("__main__", f"{SCRIPTS}/moepass"), True),
        (_run_as("moepass.cli.__main__", sys.modules["moepass"].__path__[0] + "/cli/__main__.py"), True),
        (_module("__main__"), False),  # interactive, or python -c
        (_module("__main__", "/srv/moepass"), False),
        (_module("__main__", f"{SCRIPTS}/pytest"), False),
        (_run_as("moepass.cli.__main__", "/srv/moepass/cli/__main__.py"), False),
        (_run_as("own", f"{PACKAGES}/own.py"), False),
    ],
)
def test_only_programs_of_moepass_count(
    as_moepass: Callable[[types.ModuleType], str], main: types.ModuleType, is_ours: bool
) -> None:
    reason = as_moepass(main)
    assert (reason == "") == is_ours
    if not is_ours:
        assert f"the program of this process is {vars(main).get('__file__', 'of no file')}" in reason


def test_a_link_to_the_script_counts(as_moepass: Callable[[types.ModuleType], str], tmp_path: Path) -> None:
    link = tmp_path / "moe"
    link.symlink_to(Path(os.path.realpath(SCRIPTS)) / "moepass")
    assert as_moepass(_module("__main__", str(link))) == ""


def test_a_forked_child_stores_nothing(as_moepass: Callable[[types.ModuleType], str]) -> None:
    """The child began after its parent had read the code, so times of files prove nothing."""
    assert as_moepass(_namespace("own")) == ""
    in_child(lambda: "forked" in as_moepass(_namespace("own")))


def test_all_packages_count_by_their_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = distributions()
    assert f"numpy-{sys.modules['numpy'].__version__}.dist-info" in names
    (tmp_path / "own-1.0.dist-info").mkdir()
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    process_code._folders.cache_clear()
    try:
        assert set(distributions()) - set(names) == {"own-1.0.dist-info"}
    finally:
        process_code._folders.cache_clear()


def test_a_package_that_the_search_path_has_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = distributions()
    (tmp_path / "own-1.0.dist-info").mkdir()
    (tmp_path / "own-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.metadata.version("own") == "1.0"
    assert set(distributions()) - set(names) == {"own-1.0.dist-info"}


def test_what_a_package_brings_with_it_is_not_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor imports setuptools, which adds its own folder to the search path after the first graph was described."""
    brought = tmp_path / "tools" / "_vendor"
    (brought / "own-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    process_code._folders.cache_clear()
    try:
        names = distributions()
        monkeypatch.syspath_prepend(str(brought))
        assert distributions() == names
    finally:
        process_code._folders.cache_clear()


def test_a_program_of_its_own_stores_nothing(store: CaptureStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="moepass")
    stored, rows = StoredModule(nn.Identity(), {"lower": "eager"}, "model", store), torch.ones(4)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(stored(rows), rows)
    assert store.entries() == []
    assert caplog.text.count("the program of this process is") == 1
