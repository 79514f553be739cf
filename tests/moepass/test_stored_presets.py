"""The stored presets equal those that are read and captured now, and save imports."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib import resources

import msgspec
import pytest

from moepass.explaining import compiler_part
from moepass.explaining.arguments import explained_model
from moepass.explaining.compiler_part import STORED_LOWERING, captured_part, is_stored, preset_part
from moepass.models.errors import InputError, MoepassError
from moepass.models.sizes.families import from_config
from moepass.models.sizes.presets import SIZES_FILE, preset, preset_config, preset_names
from tests.helpers.graphs import store_presets

AGAIN = "run python -m tests.helpers.graphs.store_presets"
# This preset has two MoE layers among the captured ones, so it is captured with every number of slots.
SEVERAL_SLOTS = "gpt-oss-120b"


def test_stored_sizes_are_those_of_the_configurations() -> None:
    assert SIZES_FILE.read_bytes() == store_presets.preset_sizes(), AGAIN
    for name in preset_names():
        assert preset(name) == from_config(preset_config(name), name=name, dtype="bf16")


def test_a_preset_of_fewer_layers_is_read_from_its_configuration() -> None:
    assert len(preset("deepseek-v3", layers=5).layers) == 5
    with pytest.raises(InputError, match="no preset is called 'deepseek'"):
        preset("deepseek")


def test_stored_captures_have_every_field_of_a_plan() -> None:
    """A field that was added to plans after the captures were stored would be read as its default."""
    content = (resources.files("moepass.explaining") / compiler_part.STORED_FILE).read_bytes()
    stored, read = msgspec.json.decode(content), msgspec.json.decode(content, type=compiler_part.StoredCaptures)
    for name, parts in read.parts.items():
        for written, capture in zip(stored["parts"][name], parts, strict=True):
            # msgspec omits fields of a dataclass that have their defaults.
            complete = msgspec.json.encode(dataclasses.asdict(capture.explanation))
            assert msgspec.json.decode(complete) == written["explanation"], AGAIN


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == SEVERAL_SLOTS else pytest.mark.slow) for name in preset_names()]
)
def test_stored_captures_equal_new_ones(name: str) -> None:
    model = explained_model(name)
    assert is_stored(name, STORED_LOWERING), f"stored for other versions: {AGAIN}"
    for slots in (1, 2, 4) if name == SEVERAL_SLOTS else (2,):
        assert preset_part(name, slots) == captured_part(model, slots, STORED_LOWERING), AGAIN


def test_other_versions_and_lowerings_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, captured = explained_model(SEVERAL_SLOTS), preset_part(SEVERAL_SLOTS, 2)
    asked: list[str] = []

    def capture(model: object, slots: int, lower: str) -> object:
        asked.append(lower)
        return captured

    monkeypatch.setattr(compiler_part, "captured_part", capture)
    compiler_part.compiler_part(model, 2, STORED_LOWERING)
    assert asked == []
    compiler_part.compiler_part(model, 2, "eager")
    assert asked == ["eager"]
    monkeypatch.setattr(compiler_part, "installed_versions", lambda: {"torch": "2.99", "transformers": "5.99"})
    assert not is_stored(SEVERAL_SLOTS, STORED_LOWERING)
    compiler_part.compiler_part(model, 2, STORED_LOWERING)
    assert asked == ["eager", STORED_LOWERING]


@pytest.mark.slow
def test_a_preset_is_explained_without_dynamo_and_transformers() -> None:
    """Their import takes longer than the rest of the command."""
    check = (
        "import json, sys\nfrom moepass.cli.main import app\n"
        "try: app(['explain', 'deepseek-v3', '--format', 'json', '--output', '/dev/null'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print(json.dumps([name for name in ('torch._dynamo', 'transformers') if name in sys.modules]))"
    )
    finished = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True, timeout=240)
    assert json.loads(finished.stdout) == []


def test_the_error_for_plans_of_another_version_names_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherCaptures(msgspec.Struct):
        more: int

    monkeypatch.setattr(compiler_part, "StoredCaptures", OtherCaptures)
    compiler_part._stored.cache_clear()
    try:
        with pytest.raises(MoepassError, match=r"`more`.*python -m tests\.helpers\.graphs\.store_presets"):
            is_stored(SEVERAL_SLOTS, STORED_LOWERING)
    finally:
        compiler_part._stored.cache_clear()
