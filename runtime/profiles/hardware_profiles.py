"""Loading a hardware profile: a preset such as `8xh100-80g`, or a file of the user's own.

A file is JSON: what `moepass calibrate` wrote, or a few figures on top of another profile:

    {"extends": "8xh100-80g", "name": "our-node", "host": {"bytes_per_s": 25e9}}

What stands in such a file replaces what the extended profile says; a number alone becomes a figure with source `user`.
Tables replace each other as a whole.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Collection
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from moepass.models.errors import InputError, MoepassError, one_of
from moepass.models.homes import LINKS
from moepass.models.limits import MOST_JSON_BYTES, TooLargeError, decode_json, read_limited
from moepass.passes.machine.hardware import (
    EMPIRICAL_COLLECTIVE_LATENCY,
    EMPIRICAL_EFFICIENCY,
    HARDWARE_SCHEMA,
    Figure,
    Hardware,
    Overlap,
    TransferLink,
)

_PRESET = re.compile(r"(?:(\d{1,18})x)?([a-z][a-z0-9-]*)")
# A file that extends itself, in however many steps, would never end.
_MOST_EXTENSIONS = 8

# [Empirical] What a copy engine takes between two copies that are queued on one stream: the order of magnitude on
# recent NVIDIA devices. It shows in small transfers alone.
_SLICE_LATENCY_SECONDS = 1e-6


def preset_names() -> list[str]:
    """The devices that are known by name; a profile is a number of them, as in `8xh100-80g`."""
    return list(_presets())


def load_hardware(text: str | os.PathLike[str]) -> Hardware:
    """The profile that `text` names: `[N]x` and a preset (or the beginning of just one), or the path of a JSON file.

    Raises InputError, which names what is wrong: an unknown preset and the nearest one, or the field of a file.
    """
    name = os.fspath(text)
    if name.endswith(".json") or os.sep in name or os.path.isfile(name):
        return read_profile(Path(name))
    return _preset(name)


def read_profile(path: Path) -> Hardware:
    """The profile in a JSON file. Raises InputError naming the file, and the field in it that is wrong."""
    return _from_raw(_read_raw(path, _MOST_EXTENSIONS), f"profile {str(path)!r}")


def profile_json(hardware: Hardware) -> bytes:
    """The profile as `read_profile` reads it."""
    return msgspec.json.format(msgspec.json.encode(hardware), indent=1) + b"\n"


# ---- Presets ---------------------------------------------------------------------------------------------------------


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    text = (resources.files("moepass.runtime.profiles") / "hardware_presets.json").read_bytes()
    devices: dict[str, dict[str, Any]] = msgspec.json.decode(text)["devices"]
    return devices


def _preset(text: str) -> Hardware:
    found = _PRESET.fullmatch(text.strip().lower())
    ranks, name = (int(found[1] or 1), found[2]) if found else (1, text)
    known = preset_names()
    begin = [other for other in known if other.startswith(name)]
    if name not in known and len(begin) != 1:
        close = begin or difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise InputError(
            f"hardware {text!r} is unknown; {hint}Give a number of devices and one of {one_of(known)}, as in "
            "8xh100-80g, or a profile in a .json file",
            name="hardware",
            value=text,
            expected=tuple(known),
        )
    if ranks < 1:
        raise InputError(
            f"hardware {text!r} has no devices; give 1 or more, as in 8xh100-80g",
            name="hardware",
            value=text,
            expected="1 or more devices",
        )
    name = name if name in known else begin[0]
    return _hardware_of(name, _presets()[name], ranks)


def _hardware_of(name: str, raw: dict[str, Any], ranks: int) -> Hardware:
    def stated(value: float, note: str = "") -> Figure:
        return Figure(float(value), "datasheet", note)

    def link(bytes_per_s: float | None) -> TransferLink | None:
        if bytes_per_s is None:
            return None
        latency = Figure(_SLICE_LATENCY_SECONDS, "empirical", "a copy queued behind another one")
        return TransferLink(stated(bytes_per_s, "one direction"), latency)

    flops = {dtype: stated(rate, "dense") for dtype, rate in raw["flops"].items() if rate is not None}
    flops["fp16"] = flops["bf16"]  # they run on the same units
    writes = max(raw["peer_bytes_per_s"] or 0.0, raw["host_bytes_per_s"]) / raw["hbm_bytes_per_s"]
    return Hardware(
        name=f"{ranks}x{name}",
        ranks=ranks,
        flops=flops,
        memory_bytes=stated(raw["hbm_bytes"]),
        memory_bytes_per_s=stated(raw["hbm_bytes_per_s"], "reads and writes"),
        efficiency=EMPIRICAL_EFFICIENCY,
        overlap=Overlap(
            gemm=Figure(1.0, "empirical", "assumed: copies use copy engines, and GEMMs do not wait for memory"),
            memory=Figure(1.0 / (1.0 - writes), "derived", "what arrives takes its part of the memory's rate"),
            copy=Figure(1.0, "empirical", "assumed: copies come first on the link"),
        ),
        collective_latency_seconds=EMPIRICAL_COLLECTIVE_LATENCY,
        processors=stated(raw["processors"], "streaming multiprocessors"),
        peer=link(raw["peer_bytes_per_s"]),
        host=link(raw["host_bytes_per_s"]),
    )


# ---- Files -----------------------------------------------------------------------------------------------------------


def _read_raw(path: Path, extensions_left: int) -> dict[str, Any]:
    what = f"profile {str(path)!r}"
    try:
        raw = decode_json(read_limited(path, MOST_JSON_BYTES))
    except OSError as error:
        raise InputError(f"{what} cannot be read: {error.strerror}", path=path) from error
    except TooLargeError:
        raise
    except InputError as error:
        raise InputError(f"{what} is no JSON: {error}", path=path) from error
    if not isinstance(raw, dict):
        raise InputError(
            f'{what} is no JSON object; it must be one, with "schema": "{HARDWARE_SCHEMA}" or "extends"', path=path
        )
    extended = raw.pop("extends", None)
    if extended is None:
        return raw
    if not isinstance(extended, str):
        raise InputError(
            f'{what}: "extends" is {extended!r}; it must be the name of a preset or of a file',
            name="extends",
            value=extended,
            path=path,
            expected="the name of a preset or of a file",
        )
    if extensions_left == 0:
        raise InputError(
            f"{what} extends profiles that extend others, more than {_MOST_EXTENSIONS} in a row",
            expected=_MOST_EXTENSIONS,
            path=path,
        )
    if extended.endswith(".json"):
        base = _read_raw(path.parent / extended, extensions_left - 1)
    else:
        base = msgspec.to_builtins(_preset(extended))
    _drop_outdated_tables(base, raw)
    return _merged(base, _with_figures(raw))


def _drop_outdated_tables(base: dict[str, Any], over: dict[str, Any]) -> None:
    """Where `over` has a rate, a table that `base` has for the same thing must not be used in its place."""
    for name in (*LINKS, "local"):
        if isinstance(base.get(name), dict) and isinstance(over.get(name), dict):
            base[name].pop("seconds", None)
    if "memory_bytes_per_s" in over:
        base.pop("memory", None)
    known, given = base.get("collectives"), over.get("collectives")
    if isinstance(known, dict) and isinstance(given, dict) and given.get("ranks", known["ranks"]) != known["ranks"]:
        base.pop("collectives")  # all tables of a profile are for one number of ranks


# What stands in a profile where the extended one may have nothing: a number alone is a figure there too.
_FIGURES = {
    "": ("memory_bytes", "memory_bytes_per_s", "host_memory_bytes", "collective_latency_seconds", "processors"),
    **dict.fromkeys((*LINKS, "local"), ("bytes_per_s", "latency_seconds", "emulated_bytes_per_s")),
}


def _with_figures(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw`, in which numbers alone are figures of the user wherever a figure can stand."""

    def renewed(values: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
        return {
            name: {"value": value, "source": "user"} if name in names and _is_number(value) else value
            for name, value in values.items()
        }

    result = renewed(raw, _FIGURES[""])
    for part, value in raw.items():
        if isinstance(value, dict) and (part == "flops" or part in _FIGURES):
            result[part] = renewed(value, value if part == "flops" else _FIGURES[part])
    return result


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` in place of what `base` has; objects field by field, but tables as a whole."""
    result = dict(base)
    for name, value in over.items():
        old = result.get(name)
        if isinstance(old, dict) and {"value", "source"} <= old.keys() and _is_number(value):
            result[name] = {"value": value, "source": "user"}
        elif isinstance(old, dict) and isinstance(value, dict) and "axes" not in value and "value" not in value:
            result[name] = _merged(old, value)
        else:
            result[name] = value
    return result


def _from_raw(raw: dict[str, Any], what: str) -> Hardware:
    raw.setdefault("schema", None)  # must be said: it is what tells a profile from any other JSON
    try:
        hardware = msgspec.convert(raw, Hardware)
    except msgspec.ValidationError as error:
        # What __post_init__ raised comes wrapped, with the field that it was raised for.
        inner = error.__cause__ if isinstance(error.__cause__, MoepassError) else MoepassError()
        raise InputError(f"{what}: {error}", name=inner.name, value=inner.value, expected=inner.expected) from error
    unknown = _unknown("$", raw, msgspec.to_builtins(hardware))
    if unknown is not None:
        field, known = unknown
        close = difflib.get_close_matches(field.rpartition(".")[2], known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(
            f"{what}: {field} is no field; {hint}there are {one_of(known)}", name=field, expected=tuple(known)
        )
    return hardware


def _unknown(path: str, given: Any, understood: Any) -> tuple[str, list[str]] | None:
    """The first field of `given` that was not `understood`, and the fields that there are."""
    if isinstance(given, dict) and isinstance(understood, dict):
        for name, value in given.items():
            if name not in understood:
                return f"{path}.{name}", list(understood)
            found = _unknown(f"{path}.{name}", value, understood[name])
            if found is not None:
                return found
    elif isinstance(given, list) and isinstance(understood, (list, tuple)):
        for index, pair in enumerate(zip(given, understood, strict=False)):
            found = _unknown(f"{path}[{index}]", *pair)
            if found is not None:
                return found
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
