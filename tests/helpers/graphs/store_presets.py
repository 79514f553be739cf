"""What the package stores of its presets, made anew: sizes and captures.

`python -m tests.helpers.graphs.store_presets` writes the files that tests compare with what this makes today.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

import moepass
from moepass.explaining.compiler_part import (
    STORED_FILE,
    STORED_LOWERING,
    StoredCaptures,
    captured_part,
    installed_versions,
)
from moepass.explaining.explained_models import explained_model
from moepass.explaining.report_parts import CompilerPart
from moepass.models.sizes.families import from_config
from moepass.models.sizes.presets import SIZES_FILE, StoredSizes, preset_config, preset_names


def preset_sizes() -> bytes:
    """The content of `preset_sizes.json`."""
    sizes = {name: StoredSizes.of(from_config(preset_config(name), name=name, dtype="bf16")) for name in preset_names()}
    return msgspec.json.format(msgspec.json.encode(sizes), indent=1) + b"\n"


def captured_parts(name: str) -> tuple[CompilerPart, ...]:
    """A preset captured with 1 slot, with 2, and so on, to as many as it has layers with experts that are captured."""
    found = explained_model(name)
    first = captured_part(found, 1, STORED_LOWERING)
    most = max(1, first.explanation.expert_layers)
    return first, *(captured_part(found, slots, STORED_LOWERING) for slots in range(2, most + 1))


def captures() -> bytes:
    """The content of `captured_presets.json`."""
    stored = StoredCaptures(installed_versions(), {name: captured_parts(name) for name in preset_names()})
    return msgspec.json.format(msgspec.json.encode(stored), indent=1) + b"\n"


if __name__ == "__main__":
    SIZES_FILE.write_bytes(preset_sizes())
    explaining = Path(str(moepass.__file__)).parent / "explaining"
    (explaining / STORED_FILE).write_bytes(captures())
