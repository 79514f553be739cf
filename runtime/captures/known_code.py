"""Code that a version tells, or the digest of our own sources: torch, transformers and its hub, NumPy, Python, moepass.

Nothing is stored of a model with other code: what that reads while it is traced has no end.
"""

from __future__ import annotations

import builtins
import dis
import functools
import os
import sys
import sysconfig
import types
from typing import Any

import torch

from moepass.passes.graph.graph_records import NotStorableError

# The folders of this package, whose sources decide what is compiled.
OUR_PACKAGES = ("moepass", "moepass.models", "moepass.passes", "moepass.runtime")


@functools.cache
def is_known_file(file: str) -> bool:
    path = os.path.abspath(file)
    if file.startswith("<frozen ") or path.startswith(known_folders()):
        return True
    python = sysconfig.get_path("stdlib") + os.sep
    return path.startswith(python) and "site-packages" not in path


@functools.cache
def known_folders() -> tuple[str, ...]:
    """What the paths of known files begin with; `fingerprint.versions` has the versions of these packages."""
    import huggingface_hub
    import numpy
    import transformers
    import typing_extensions

    own = [os.path.join(path, "") for name in OUR_PACKAGES for path in sys.modules[name].__path__]
    # The last one, whose decorators torch uses, is a single file.
    packages = (torch, transformers, huggingface_hub, numpy)
    return (*map(_folder_of, packages), *own, os.path.abspath(typing_extensions.__file__))


def is_of_torch(file: str) -> bool:
    return os.path.abspath(file).startswith(_folder_of(torch))


def is_known_module(name: str) -> bool:
    root = name.partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) or getattr(sys.modules.get(root), "__file__", None)
    return root in sys.builtin_module_names or bool(file and is_known_file(file))


def is_known_class(kind: type) -> bool:
    """Whether a known module has it under its name: a class that a program makes may claim any module."""
    if not isinstance(kind.__module__, str) or not is_known_module(kind.__module__):
        return False
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is kind


def check_known(code: types.CodeType, where: str) -> None:
    """Raises NotStorableError for code of another file, and for code of no file that reads globals.

    What dataclasses and named tuples write is in no file, and reads none.
    """
    file = code.co_filename
    if not is_known_file(file) and not (file.startswith("<") and _globals(code) <= vars(builtins).keys()):
        raise NotStorableError(f"{where} is {code.co_name} of {file}, whose code is not known by a version")


def names_read(code: types.CodeType) -> frozenset[str]:
    """The names that `code` reads: of globals, of attributes, and texts that may be names."""
    inner = (names_read(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    texts = (text for text in code.co_consts if isinstance(text, str) and text.isidentifier())
    return frozenset(code.co_names).union(texts, *inner)


def _globals(code: types.CodeType) -> frozenset[str]:
    steps = (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    inner = (_globals(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(steps).union(*inner)


def _folder_of(package: types.ModuleType) -> str:
    assert package.__file__ is not None
    return os.path.dirname(os.path.abspath(package.__file__)) + os.sep


__all__ = [
    "OUR_PACKAGES", "check_known", "is_known_class", "is_known_file", "is_known_module", "is_of_torch", "known_folders",
    "names_read",
]  # fmt: skip
