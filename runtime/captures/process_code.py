"""Check that a process runs only installed code: captures are stored and used only in such processes.

A program can change torch, transformers and the model in countless ways: it can replace functions, register operators
or set hooks. So these changes are not searched for. Instead every module must come with Python, with an installed
package or with moepass, and the main program must be moepass's command or one of its modules, run by `python -m`. The
results of such a process depend on the versions of its packages, the sources of moepass, and the values that
`fingerprint` describes.

This does not protect from a program that hides, for example by removing its modules from `sys.modules` or by replacing
`__main__`. Only the versions of packages are compared, and the files that were traced.
"""

from __future__ import annotations

import functools
import itertools
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, FrozenImporter
from typing import Any

# The folders of this package. Their sources decide how a model is compiled.
OUR_PACKAGES = ("moepass", "moepass.models", "moepass.passes", "moepass.runtime")
# Python runs these modules at each start. The installation of Python may have them, and its user may.
_AT_START = ("sitecustomize", "usercustomize")
# Namespace packages have no code.
_OF_NAMESPACES = ("NamespaceLoader",)
# Modules that code written by Cython makes.
_OF_CYTHON = ("cython_runtime", "_cython_")
_OF_PACKAGES = (f"site-packages{os.sep}", f"dist-packages{os.sep}")
_PROCESS = os.getpid()


def foreign_code(modules: Mapping[str, Any] = sys.modules) -> str:
    """Return which code of a program this process runs, as part of a sentence; empty if it runs none."""
    if os.getpid() != _PROCESS:
        # It began after its code was read, so the files may have changed between reading and its start.
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
    """Return the names and versions of all packages that this process can import, from the names of their folders.

    Packages that are not loaded count too, since transformers checks for installed packages. This takes about 1 ms.
    """
    installed = _folders().packages
    folders_on_path = (os.path.join(os.path.abspath(path), "") for path in sys.path)
    # A folder inside a package belongs to that package. setuptools adds its own to the path when Inductor imports it.
    folders = dict.fromkeys((*installed, *(folder for folder in folders_on_path if not folder.startswith(installed))))
    names = (name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder))
    return sorted({name for name in names if name.endswith((".dist-info", ".egg-info"))})


class _Folders:
    """The folders that installed code comes from. Each path ends with a separator."""

    def __init__(self) -> None:
        path = sysconfig.get_path
        packages = [path("purelib"), path("platlib"), *site.getsitepackages()]
        user = sysconfig.get_preferred_scheme("user")
        if site.ENABLE_USER_SITE:
            packages.append(site.getusersitepackages())
        self.python = _prefixes([path("stdlib"), path("platstdlib", vars={"platbase": sys.base_exec_prefix})])
        self.packages = _prefixes(packages)
        self.moepass = _prefixes(path for name in OUR_PACKAGES for path in sys.modules[name].__path__)
        self.known = (*self.packages, *self.moepass)
        self.links = tuple(_development_links(self.packages))
        self.scripts = _prefixes([path("scripts"), path("scripts", user)])

    def have(self, file: str) -> bool:
        is_known = file.startswith(self.known) and not file.startswith(self.links)
        return is_known or self.have_with_python(file)

    def have_with_python(self, file: str) -> bool:
        # Packages of another environment may be in Python's own folder.
        return file.startswith(self.python) and not any(f"{os.sep}{name}" in file for name in _OF_PACKAGES)


@functools.cache
def _folders() -> _Folders:
    return _Folders()


def _development_links(folders: Iterable[str]) -> Iterator[str]:
    """Yield the links in `folders` that lead to code under development. Links to installed packages do not count."""
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
        # Packages have their own module classes, as torch.ops, and their own loaders.
        members = [member for kind in maker.__mro__ for member in vars(kind).values()]
        files = {member.__code__.co_filename for member in members if isinstance(member, types.FunctionType)}
        real_files = [file for file in files if not file.startswith("<frozen ")]
        return bool(real_files) and all(map(_is_installed_file, real_files))
    parents = itertools.accumulate(name.split(".")[:-1], "{}.{}".format)
    return name.startswith(_OF_CYTHON) or any(map(_is_extension, map(modules.get, parents)))


def _is_installed_file(file: str) -> bool:
    # The name alone decides for nearly all of the thousands of files.
    return (".." not in file and _folders().have(file)) or _folders().have(os.path.realpath(file))


def _is_of_inductor(name: str, file: str) -> bool:
    """Return whether the module is code that Inductor generated. Such code follows from its input."""
    if not name.startswith("torch._inductor.runtime.compile_tasks.") and not name.endswith(".kernel"):
        return False
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return file.startswith(_prefixes([cache_dir()]))


def _is_extension(module: Any) -> bool:
    """Return whether `module` is written in C. Such modules create submodules without files, as `torch._C._nn`."""
    file = _own(module, "__file__")
    is_built_in = _own(module, "__name__") in sys.builtin_module_names
    return is_built_in or (
        isinstance(file, str) and file.endswith(tuple(EXTENSION_SUFFIXES)) and _is_installed_file(file)
    )


def _own(module: Any, name: str) -> Any:
    """Return the attribute without calling `__getattr__`, which may import other modules, as in transformers."""
    return getattr(module, "__dict__", {}).get(name)


def _origin(module: Any) -> str:
    file = _own(module, "__file__")
    return file if isinstance(file, str) else "of no file"
