"""The options of the backend: one frozen, validated object."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from moepass.models.errors import OptionError, one_of
from moepass.passes.lower import LOWERINGS


@dataclasses.dataclass(frozen=True)
class Options:
    """What `torch.compile(model, backend="asyncep", options={...})` takes.

    lower      how segments are compiled: "inductor" (default), or "eager": operator by operator, bit-identical
    disable    names of passes to leave out
    debug      fill released slots with NaN, so that a read after a release shows in the output
    dump       a folder: the graph before and after every pass, and the plan as JSON, are written there
    """

    lower: str = "inductor"
    disable: tuple[str, ...] = ()
    debug: bool = False
    dump: str | None = None


def parse_options(given: Mapping[str, Any] | None) -> Options:
    """Raises OptionError naming the first option that is unknown or has a wrong value, and what would be right."""
    given = dict(given or {})
    known = [field.name for field in dataclasses.fields(Options)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise OptionError(f"option {name!r} is unknown; {hint}the options are {', '.join(known)}")
    lower = given.get("lower", Options.lower)
    if not isinstance(lower, str) or lower not in LOWERINGS:
        raise OptionError(f"option lower is {lower!r}; it must be one of {one_of(LOWERINGS)}")
    disable = given.get("disable", ())
    if not isinstance(disable, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in disable):
        raise OptionError(f"option disable is {disable!r}; it must be a list of pass names")
    if lower != "eager" and "partition" in disable:
        raise OptionError(f"option disable has 'partition', but lower={lower!r} compiles segments; use lower='eager'")
    debug = given.get("debug", Options.debug)
    if not isinstance(debug, bool):
        raise OptionError(f"option debug is {debug!r}; it must be True or False")
    dump = given.get("dump")
    if dump is not None and not isinstance(dump, (str, bytes)) and not hasattr(dump, "__fspath__"):
        raise OptionError(f"option dump is {dump!r}; it must be the path of a folder")
    return Options(lower, tuple(disable), debug, None if dump is None else str(dump))
