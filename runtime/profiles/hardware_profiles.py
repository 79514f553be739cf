"""Loads a hardware profile: a preset such as `8xh100-80g`, or a JSON file.

A file is the output of `moepass calibrate`, or a few figures on top of another profile:

    {"extends": "8xh100-80g", "name": "our-node", "host": {"bytes_per_s": 25e9}}

Fields of such a file replace fields of the extended profile; a plain number becomes a figure with source `user`.
Tables are replaced as a whole.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
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
# The limit stops files that extend each other in a circle.
_MOST_EXTENSIONS = 8

# [Empirical] The time of a copy engine between two copies that are queued on one stream: the order of magnitude on
# recent NVIDIA devices. Only small transfers show it.
_SLICE_LATENCY_SECONDS = 1e-6


def preset_names() -> list[str]:
    """Return the names of the devices with a preset; a profile is a number of them, as in `8xh100-80g`."""
    return list(_presets())


def load_hardware(text: str | os.PathLike[str]) -> Hardware:
    """Return the profile that `text` names: a JSON file, or `[N]x` for N devices and a preset or its unique prefix.

    Raises InputError if the preset is unknown (the message suggests the nearest name), or a field of the file is wrong.
    """
    name = os.fspath(text)
    if name.endswith(".json") or os.sep in name or os.path.isfile(name):
        return read_profile(Path(name))
    return _preset(name)


def read_profile(path: Path) -> Hardware:
    """Return the profile in a JSON file. Raises InputError, which names the file and the wrong field."""
    return _from_raw(_read_raw(path, _MOST_EXTENSIONS), f"profile {str(path)!r}")


def profile_json(hardware: Hardware) -> bytes:
    """Return the profile as JSON for `read_profile`."""
    return msgspec.json.format(msgspec.json.encode(hardware), indent=1) + b"\n"


# ---- Presets ---------------------------------------------------------------------------------------------------------


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    text = (resources.files("moepass.runtime.profiles") / "hardware_presets.json").read_bytes()
    devices: dict[str, dict[str, Any]] = msgspec.json.decode(text)["devices"]
    return devices


def _preset(text: str) -> Hardware:
    match = _PRESET.fullmatch(text.strip().lower())
    ranks, name = (int(match[1] or 1), match[2]) if match else (1, text)
    presets = preset_names()
    beginning = [preset for preset in presets if preset.startswith(name)]
    if name not in presets and len(beginning) != 1:
        close = beginning or difflib.get_close_matches(name, presets, n=1, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise InputError(
            f"hardware {text!r} is unknown; {hint}Give a number of devices and one of {one_of(presets)}, as in "
            "8xh100-80g, or a profile in a .json file",
            name="hardware",
            value=text,
            expected=tuple(presets),
        )
    if ranks < 1:
        message = f"hardware {text!r} has no devices; give 1 or more, as in 8xh100-80g"
        raise InputError(message, name="hardware", value=text, expected="1 or more devices")
    name = name if name in presets else beginning[0]
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
            memory=Figure(1.0 / (1.0 - writes), "derived", "incoming bytes take a share of the memory's rate"),
            copy=Figure(1.0, "empirical", "assumed: copies come first on the link"),
        ),
        collective_latency_seconds=EMPIRICAL_COLLECTIVE_LATENCY,
        processors=stated(raw["processors"], "streaming multiprocessors"),
        peer=link(raw["peer_bytes_per_s"]),
        host=link(raw["host_bytes_per_s"]),
    )


# ---- Files -----------------------------------------------------------------------------------------------------------


def _read_raw(path: Path, extensions_left: int) -> dict[str, Any]:
    subject = f"profile {str(path)!r}"
    try:
        raw = decode_json(read_limited(path, MOST_JSON_BYTES))
    except OSError as error:
        raise InputError(f"{subject} cannot be read: {error.strerror}", path=path) from error
    except TooLargeError:
        raise
    except InputError as error:
        raise InputError(f"{subject} is not JSON: {error}", path=path) from error
    if not isinstance(raw, dict):
        text = f'{subject} is not a JSON object; it must be one, with "schema": "{HARDWARE_SCHEMA}" or "extends"'
        raise InputError(text, path=path)
    extended = raw.pop("extends", None)
    if extended is None:
        return raw
    if not isinstance(extended, str):
        text = f'{subject}: "extends" is {extended!r}; it must be the name of a preset or of a file'
        raise InputError(text, name="extends", value=extended, path=path, expected="the name of a preset or of a file")
    if extensions_left == 0:
        text = f"{subject} extends a chain of more than {_MOST_EXTENSIONS} profiles; shorten the chain"
        raise InputError(text, expected=_MOST_EXTENSIONS, path=path)
    if extended.endswith(".json"):
        base = _read_raw(path.parent / extended, extensions_left - 1)
    else:
        base = msgspec.to_builtins(_preset(extended))
    _drop_outdated_tables(base, raw)
    return _merged(base, raw)


def _drop_outdated_tables(base: dict[str, Any], over: dict[str, Any]) -> None:
    """Remove tables from `base` for which `over` has a rate: a table takes precedence over a rate."""
    for name in (*LINKS, "local"):
        if isinstance(base.get(name), dict) and isinstance(over.get(name), dict):
            base[name].pop("seconds", None)
    if "memory_bytes_per_s" in over:
        base.pop("memory", None)
    old, new = base.get("collectives"), over.get("collectives")
    if isinstance(old, dict) and isinstance(new, dict) and new.get("ranks", old["ranks"]) != old["ranks"]:
        base.pop("collectives")  # all tables of a profile are for one number of ranks


# The fields that are figures, by object: in them a plain number is a figure even if the extended profile lacks it.
_FIGURES = {
    "": ("memory_bytes", "memory_bytes_per_s", "host_memory_bytes", "collective_latency_seconds", "processors"),
    **dict.fromkeys((*LINKS, "local"), ("bytes_per_s", "latency_seconds", "emulated_bytes_per_s")),
}


def _merged(base: dict[str, Any], over: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return `base` with the fields of `over` on top; objects are merged field by field, tables replaced as a whole.

    A plain number becomes a figure of the user where `base` or the schema has a figure.
    """
    result = dict(base)
    for name, value in over.items():
        old = result.get(name)
        is_figure = (
            path == "flops"
            or name in _FIGURES.get(path, ())
            or (isinstance(old, dict) and {"value", "source"} <= old.keys())
        )
        if is_figure and isinstance(value, (int, float)) and not isinstance(value, bool):
            result[name] = {"value": value, "source": "user"}
        elif isinstance(value, dict) and not value.keys() & {"axes", "value"}:
            result[name] = _merged(old if isinstance(old, dict) else {}, value, name)
        else:
            result[name] = value
    return result


def _from_raw(raw: dict[str, Any], subject: str) -> Hardware:
    raw.setdefault("schema", None)  # required: it tells a profile from other JSON
    try:
        hardware = msgspec.convert(raw, Hardware)
    except msgspec.ValidationError as error:
        # msgspec wraps the errors of __post_init__.
        inner = error.__cause__ if isinstance(error.__cause__, MoepassError) else MoepassError()
        raise InputError(f"{subject}: {error}", name=inner.name, value=inner.value, expected=inner.expected) from error
    unknown = _unknown("$", raw, msgspec.to_builtins(hardware))
    if unknown is not None:
        field, possible = unknown
        close = difflib.get_close_matches(field.rpartition(".")[2], possible, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        text = f"{subject}: {field} is not a field; {hint}the fields are {one_of(possible)}"
        raise InputError(text, name=field, expected=tuple(possible))
    return hardware


def _unknown(path: str, raw: Any, parsed: Any) -> tuple[str, list[str]] | None:
    """Return the path of the first field of `raw` that is not in `parsed`, and the names that are possible there."""
    if isinstance(raw, dict) and isinstance(parsed, dict):
        for name, value in raw.items():
            if name not in parsed:
                return f"{path}.{name}", list(parsed)
            unknown = _unknown(f"{path}.{name}", value, parsed[name])
            if unknown is not None:
                return unknown
    elif isinstance(raw, list) and isinstance(parsed, (list, tuple)):
        for index, pair in enumerate(zip(raw, parsed, strict=False)):
            unknown = _unknown(f"{path}[{index}]", *pair)
            if unknown is not None:
                return unknown
    return None
