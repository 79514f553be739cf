"""Compute the files about presets that the package ships: sizes and captures.

`python -m tests.helpers.graphs.store_presets` writes them; tests compare the files with the functions of this module.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

import moepass
from moepass.explaining.arguments import explained_model
from moepass.explaining.compiler_part import (
    STORED_FILE,
    STORED_LOWERING,
    StoredCaptures,
    captured_part,
    installed_versions,
)
from moepass.explaining.report_parts import CompilerPart
from moepass.models.sizes.architecture import Architecture
from moepass.models.sizes.families import from_config
from moepass.models.sizes.presets import SIZES_FILE, StoredSizes, preset_config, preset_names


def _stored_sizes(architecture: Architecture) -> StoredSizes:
    kinds = tuple(architecture.layer_counts)
    order = tuple(kinds.index(layer) for layer in architecture.layers)
    return StoredSizes(dataclasses.replace(architecture, layers=()), kinds, order)


def preset_sizes() -> bytes:
    """Return the content of `preset_sizes.json`."""
    sizes = {name: _stored_sizes(from_config(preset_config(name), name=name, dtype="bf16")) for name in preset_names()}
    return msgspec.json.format(msgspec.json.encode(sizes), indent=1) + b"\n"


def captured_parts(name: str) -> tuple[CompilerPart, ...]:
    """Return a preset captured with 1 slot, 2 slots and so on, up to the number of its captured layers with experts."""
    model = explained_model(name)
    first = captured_part(model, 1, STORED_LOWERING)
    most = max(1, first.explanation.expert_layers)
    return first, *(captured_part(model, slots, STORED_LOWERING) for slots in range(2, most + 1))


def captures() -> bytes:
    """Return the content of `captured_presets.json`."""
    stored = StoredCaptures(installed_versions(), {name: captured_parts(name) for name in preset_names()})
    return msgspec.json.format(msgspec.json.encode(stored), indent=1) + b"\n"


if __name__ == "__main__":
    SIZES_FILE.write_bytes(preset_sizes())
    explaining = Path(str(moepass.__file__)).parent / "explaining"
    (explaining / STORED_FILE).write_bytes(captures())
