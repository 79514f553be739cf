"""The stored presets of the package equal what reading and capturing them returns today, and save imports."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib import resources

import msgspec
import pytest

from moepass.explaining import compiler_part
from moepass.explaining.compiler_part import STORED_LOWERING, captured_part, is_stored, preset_part
from moepass.explaining.explained_models import explained_model
from moepass.models.errors import InputError, MoepassError
from moepass.models.sizes.families import from_config
from moepass.models.sizes.presets import SIZES_FILE, preset, preset_config, preset_names
from tests.helpers.graphs import store_presets

AGAIN = "run python -m tests.helpers.graphs.store_presets"
# Captured with every number of slots: this one has two layers with experts among those that are captured.
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
    """A field that was added to plans after they were stored would be read as its default."""
    content = (resources.files("moepass.explaining") / compiler_part.STORED_FILE).read_bytes()
    stored, read = msgspec.json.decode(content), msgspec.json.decode(content, type=compiler_part.StoredCaptures)
    for name, parts in read.parts.items():
        for written, stored_part in zip(stored["parts"][name], parts, strict=True):
            # msgspec leaves out what a dataclass has by default.
            complete = msgspec.json.encode(dataclasses.asdict(stored_part.explanation))
            assert msgspec.json.decode(complete) == written["explanation"], AGAIN


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == SEVERAL_SLOTS else pytest.mark.slow) for name in preset_names()]
)
def test_stored_captures_are_what_capture_gives(name: str) -> None:
    explained = explained_model(name)
    assert is_stored(name, STORED_LOWERING), f"stored for other versions: {AGAIN}"
    for slots in (1, 2, 4) if name == SEVERAL_SLOTS else (2,):
        assert preset_part(name, slots) == captured_part(explained, slots, STORED_LOWERING), AGAIN


def test_other_versions_and_lowerings_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    explained, captured = explained_model(SEVERAL_SLOTS), preset_part(SEVERAL_SLOTS, 2)
    asked: list[str] = []

    def capture(explained: object, slots: int, lower: str) -> object:
        asked.append(lower)
        return captured

    monkeypatch.setattr(compiler_part, "captured_part", capture)
    compiler_part.compiler_part(explained, 2, STORED_LOWERING)
    assert asked == []
    compiler_part.compiler_part(explained, 2, "eager")
    assert asked == ["eager"]
    monkeypatch.setattr(compiler_part, "installed_versions", lambda: {"torch": "2.99", "transformers": "5.99"})
    assert not is_stored(SEVERAL_SLOTS, STORED_LOWERING)
    compiler_part.compiler_part(explained, 2, STORED_LOWERING)
    assert asked == ["eager", STORED_LOWERING]


@pytest.mark.slow
def test_a_preset_is_explained_without_dynamo_and_transformers() -> None:
    """These imports take longer than everything else together."""
    check = (
        "import json, sys\nfrom moepass.cli.main import app\n"
        "try: app(['explain', 'deepseek-v3', '--format', 'json', '--output', '/dev/null'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print(json.dumps([name for name in ('torch._dynamo', 'transformers') if name in sys.modules]))"
    )
    finished = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True, timeout=240)
    assert json.loads(finished.stdout) == []


def test_stored_plans_of_another_version_say_how_they_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherCaptures(msgspec.Struct):
        more: int

    monkeypatch.setattr(compiler_part, "StoredCaptures", OtherCaptures)
    compiler_part._stored.cache_clear()
    try:
        with pytest.raises(MoepassError, match=r"`more`.*store_presets\.py makes it anew"):
            is_stored(SEVERAL_SLOTS, STORED_LOWERING)
    finally:
        compiler_part._stored.cache_clear()
