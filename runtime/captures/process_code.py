"""Whether a process runs code of a program: captures are stored and used only where it runs none.

What a program does to torch, to transformers or to a model has no end: it replaces functions, registers operators, sets
hooks. So nothing of that is looked for. Every module must come with Python, with a package that is installed, or with
moepass, and the program must be a part of moepass: its command, or a module that `python -m` runs. What such a process
computes depends on the versions of the packages, on the sources of moepass, and on what `fingerprint` describes.

This is no defence against a program that hides: one that takes its modules out of `sys.modules`, or that puts a module
of moepass in the place of `__main__`. And of a package count its version and the files that are traced, no more.
"""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, FrozenImporter
from typing import Any

# The folders of this package, whose sources decide what is compiled.
OUR_PACKAGES = ("moepass", "moepass.models", "moepass.passes", "moepass.runtime")
# Python runs these at each start. Whoever installs Python may write them, and so may its user.
_AT_START = ("sitecustomize", "usercustomize")
# Namespace packages have no code.
_OF_NAMESPACES = ("NamespaceLoader",)
# Modules that code written by Cython makes.
_OF_CYTHON = ("cython_runtime", "_cython_")
_OF_PACKAGES = (f"site-packages{os.sep}", f"dist-packages{os.sep}")
_PROCESS = os.getpid()


def foreign_code(modules: Mapping[str, Any] = sys.modules) -> str:
    """Which code of a program this process runs, as a part of a sentence; empty if it runs none.

    `modules` are all that it has loaded.
    """
    if os.getpid() != _PROCESS:
        # It began after its code was read, so nothing says whether the files are still what was read.
        return "this process was forked from the one that loaded moepass"
    main = modules["__main__"]
    if not _is_moepass(main):
        return f"the program of this process is {_origin(main)}, not moepass or python -m moepass.cli"
    # Dictionaries change while other threads import.
    for name, module in list(modules.items()):
        if module is not None and module is not main and not _is_installed(name, module, modules):
            return f"this process has loaded the module {name} ({_origin(module)}), which no installed package has"
    return ""


def distributions() -> list[str]:
    """Names and versions of all packages that this process can find, as the names of their folders have them.

    Of all, not of those that are loaded: transformers asks what is installed. The names alone are read in about 1 ms.
    """
    installed = _folders().packages
    others = (os.path.join(os.path.abspath(path), "") for path in sys.path)
    # A folder within a package belongs to its version. setuptools adds one to the path when Inductor imports it.
    folders = dict.fromkeys((*installed, *(folder for folder in others if not folder.startswith(installed))))
    found = (name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder))
    return sorted({name for name in found if name.endswith((".dist-info", ".egg-info"))})


class _Folders:
    """Where code that is installed comes from. Each ends with a separator."""

    def __init__(self) -> None:
        own = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})
        packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
        user = sysconfig.get_preferred_scheme("user")
        if site.ENABLE_USER_SITE:
            packages.append(site.getusersitepackages())
        self.python = _prefixes(own)
        self.packages = _prefixes(packages)
        self.moepass = _prefixes(path for name in OUR_PACKAGES for path in sys.modules[name].__path__)
        self.known = (*self.packages, *self.moepass)
        self.links = tuple(_development_links(self.packages))
        self.scripts = _prefixes([sysconfig.get_path("scripts"), sysconfig.get_path("scripts", user)])

    def have(self, file: str) -> bool:
        is_known = file.startswith(self.known) and not file.startswith(self.links)
        return is_known or self.have_with_python(file)

    def have_with_python(self, file: str) -> bool:
        # Packages of another environment may lie in Python's own folder.
        return file.startswith(self.python) and not any(f"{os.sep}{name}" in file for name in _OF_PACKAGES)


@functools.cache
def _folders() -> _Folders:
    return _Folders()


def _development_links(folders: Iterable[str]) -> Iterator[str]:
    """The links in `folders` to what is being developed elsewhere. Some systems link to packages that are installed."""
    for folder in filter(os.path.isdir, folders):
        for entry in os.scandir(folder):
            if entry.is_symlink() and not any(f"{os.sep}{name}" in os.path.realpath(entry) for name in _OF_PACKAGES):
                yield entry.path


def _prefixes(folders: Iterable[str]) -> tuple[str, ...]:
    both = (path for folder in folders for path in (os.path.abspath(folder), os.path.realpath(folder)))
    return tuple(dict.fromkeys(os.path.join(path, "") for path in both))


def _is_moepass(main: types.ModuleType) -> bool:
    file, spec = vars(main).get("__file__"), vars(main).get("__spec__")
    if not isinstance(file, str):
        return False
    if spec is not None:  # python -m
        return spec.name.partition(".")[0] == "moepass" and os.path.abspath(file).startswith(_folders().moepass)
    script = os.path.realpath(file)
    return os.path.basename(script) == "moepass" and os.path.join(os.path.dirname(script), "") in _folders().scripts


def _is_installed(name: str, module: Any, modules: Mapping[str, Any]) -> bool:
    file, spec = _own(module, "__file__"), _own(module, "__spec__")
    if isinstance(file, str):
        if name in _AT_START:
            return _folders().have_with_python(file)
        return _is_installed_file(file) or _is_of_inductor(name, file)
    loader = getattr(spec, "loader", None)
    if loader in (BuiltinImporter, FrozenImporter) or type(loader).__name__ in _OF_NAMESPACES:
        return True
    maker = type(module if loader is None else loader)
    if maker is not types.ModuleType:
        # Packages make modules of their own kinds, as torch.ops, and load some by their own means.
        members = [member for kind in maker.__mro__ for member in vars(kind).values()]
        files = {member.__code__.co_filename for member in members if isinstance(member, types.FunctionType)}
        own = [file for file in files if not file.startswith("<frozen ")]
        return bool(own) and all(map(_is_installed_file, own))
    return name.startswith(_OF_CYTHON) or any(_is_extension(modules.get(parent)) for parent in _parents(name))


def _is_installed_file(file: str) -> bool:
    # Nearly all files are told by their names alone, and there are thousands.
    return (".." not in file and _folders().have(file)) or _folders().have(os.path.realpath(file))


def _is_of_inductor(name: str, file: str) -> bool:
    """Whether it is code that Inductor wrote, which follows from what it compiled."""
    if not name.startswith("torch._inductor.runtime.compile_tasks.") and not name.endswith(".kernel"):
        return False
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return file.startswith(_prefixes([cache_dir()]))


def _is_extension(module: Any) -> bool:
    """Written in C, which makes modules without files, as `torch._C._nn`."""
    file = _own(module, "__file__")
    is_built_in = _own(module, "__name__") in sys.builtin_module_names
    return is_built_in or (
        isinstance(file, str) and file.endswith(tuple(EXTENSION_SUFFIXES)) and _is_installed_file(file)
    )


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _own(module: Any, name: str) -> Any:
    """Without asking the module, which may do anything to answer, as those of transformers import others."""
    return getattr(module, "__dict__", {}).get(name)


def _origin(module: Any) -> str:
    file = _own(module, "__file__")
    return file if isinstance(file, str) else "of no file"


__all__ = ["OUR_PACKAGES", "distributions", "foreign_code"]
