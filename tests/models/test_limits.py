"""Limits on external inputs, with the errors that name them: numbers, nesting, lengths of files, lines and input."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import moepass
from moepass.cli.score_command import InputLines, parse_labels
from moepass.clients.batch_lines import limited_lines
from moepass.models import limits
from moepass.models.byte_counts import parse_bytes
from moepass.models.checkpoint.checkpoint_folders import load_config, load_prompt, load_tokenizer
from moepass.models.checkpoint.load_model import load_model
from moepass.models.errors import CheckpointError, InputError, OptionError
from moepass.models.formulas.saturation import saturation
from moepass.models.limits import MOST_JSON_DEPTH, TooLargeError, decode_json, read_limited
from moepass.models.sizes.presets import preset, preset_config
from moepass.options import parse_options
from moepass.passes.planner.microbatches import pipeline_seconds
from moepass.runtime.offload.residents import Residents
from moepass.runtime.profiles.hardware_profiles import load_hardware, read_profile
from moepass.runtime.transfer.link import parse_link
from tests.helpers.graphs.error_fields import refused
from tests.helpers.graphs.tiny_checkpoint import broken_copy, edit_config, save_tiny_checkpoint


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_json_is_nested_up_to_the_limit_and_no_deeper(brackets: str) -> None:
    def text(depth: int) -> str:
        if brackets == "[]":
            return nested(depth)
        return '{"a":' * depth + "1" + "}" * depth

    for kind in (str, str.encode):
        assert decode_json(kind(text(MOST_JSON_DEPTH)))
        for depth in (MOST_JSON_DEPTH + 1, 900, 100_000):
            with pytest.raises(InputError, match="nested deeper than 64 levels"):
                decode_json(kind(text(depth)))


def test_wide_json_is_not_deep() -> None:
    assert len(decode_json("[" + "[1]," * 5000 + "[]]")) == 5001


DEEP = nested(100_000)


@pytest.mark.parametrize("depth", [900, 100_000])
def test_deep_json_is_refused_wherever_it_is_read(depth: int, checkpoint: Path, tmp_path: Path) -> None:
    deep = nested(depth)
    lines = InputLines([b'{"text": "a"}\n', f'{{"text": "a", "more": {deep}}}\n'.encode()], "x", skips=False)
    with pytest.raises(InputError, match=r"^line 2 of x is not valid JSON: it is nested deeper"):
        list(lines)
    with refused(InputError, name="labels", value=deep):
        parse_labels(deep)
    profile = tmp_path / "profile.json"
    profile.write_text(f'{{"extends": "h100", "remarks": {deep}}}')
    with pytest.raises(InputError, match="is not JSON: it is nested deeper"):
        read_profile(profile)
    folder = broken_copy(checkpoint, tmp_path / "deep", edit_config())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config)[:-1] + f', "more": {deep}}}')
    with pytest.raises(CheckpointError, match=r"config\.json is malformed: it is nested deeper"):
        load_config(folder)
    (folder / "prompt.json").write_text(f'{{"labels": {deep}}}')
    with pytest.raises(CheckpointError, match=r"prompt\.json is malformed"):
        load_prompt(folder)


def test_a_header_of_weights_that_is_nested_deeply_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    def deepen(folder: Path) -> None:
        header = f'{{"a": {DEEP}}}'.encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)

    folder = broken_copy(checkpoint, tmp_path / "deep", deepen)
    with pytest.raises(CheckpointError, match="truncated or not a safetensors"):
        load_model(folder)
    with pytest.raises(CheckpointError, match="truncated or not a safetensors"):
        moepass.load_pretrained(folder)


def test_files_have_a_most_length(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(b" " * 100)
    assert read_limited(file, 100) == b" " * 100
    with refused(TooLargeError, path=file, value=100, expected=99):
        read_limited(file, 99)
    folder = broken_copy(checkpoint, tmp_path / "long", edit_config())
    for name, read in (("config.json", load_config), ("prompt.json", load_prompt)):
        with (folder / name).open("ab") as opened:
            opened.truncate(limits.MOST_JSON_BYTES + 1)
        with refused(CheckpointError, path=folder / name, value=8388609, expected=8388608):
            read(folder)
    with (folder / "tokenizer.json").open("ab") as opened:
        opened.truncate(limits.MOST_TOKENIZER_BYTES + 1)
    with pytest.raises(TooLargeError, match=r"the size of .*tokenizer\.json is 268435457; the limit is 268435456"):
        load_tokenizer(folder)


# ---- Models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 5000}, "num_hidden_layers is 5000; the limit is 1024"),
        ({"num_experts": 10**9}, "num_experts is 1000000000; the limit is 16384"),
        ({"text_config": {"n_layer": 10**6}}, "text_config: n_layer is 1000000; the limit is 1024"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but num_experts is 8; a token can use 1 to 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, but num_experts is 8"),
        ({"attn_implementation": "some/kernel"}, "'some/kernel', a kernel on the Hugging Face hub; moepass does not"),
    ],
)
def test_a_config_beyond_the_limits_is_refused_before_anything_is_built(
    values: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = broken_copy(checkpoint, tmp_path / "broken", edit_config(**values))
    for read in (load_config, load_model, moepass.load_pretrained, moepass.explain):
        with pytest.raises(CheckpointError, match=message):
            read(folder)


def test_a_configuration_given_from_python_has_the_same_limits() -> None:
    config = preset_config("olmoe-1b-7b", layers=1)
    config.num_experts_per_tok = 65
    with refused(CheckpointError, name="num_experts_per_tok", value=65, expected=range(1, 65)):
        moepass.explain(config)
    config.num_hidden_layers = 10**9
    with refused(CheckpointError, name="num_hidden_layers", value=10**9, expected=1024):
        moepass.explain(config)


@pytest.mark.parametrize("load", [load_model, moepass.load_pretrained])
def test_weights_that_are_not_there_are_not_made_up(load: Any, checkpoint: Path, tmp_path: Path) -> None:
    folder = broken_copy(checkpoint, tmp_path / "broken", edit_config(hidden_size=1 << 20))  # terabytes
    with pytest.raises(CheckpointError, match="lacks weights that the config asks for: its files hold"):
        load(folder)


# ---- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"ranks": 1000}, "ranks is 1000; the limit is 512"),
        ({"hardware": "1000000xh100"}, "ranks is 1,000,000; it must lie between 1 and 512"),
        ({"batch": 10**9}, "batch 1000000000 times seq 4096 is 4096000000000; the limit is 16777216"),
        ({"seq": 1 << 25, "batch": 1}, "seq 33554432 is 33554432; the limit is 16777216"),
        ({"tokens": 10**12}, "tokens is 1000000000000; the limit is 16777216"),
        ({"slots": 10**9}, "slots is 1000000000; the limit is 256"),
        ({"tokens": 0}, "tokens is 0; it must be a whole number from 1 on"),
        ({"batch": 1.5}, "batch is 1.5; it must be a whole number"),
        ({"seq": float("nan")}, "seq is nan; it must be a whole number"),
        ({"ranks": -1}, "ranks is -1; it must be a whole number"),
    ],
)
def test_numbers_of_explain_have_limits(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        moepass.explain("demo", **numbers)


def test_a_profile_has_no_more_ranks_than_a_plan(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('{"extends": "h100", "ranks": 100000}')
    with refused(InputError, name="ranks", value=100_000, expected=(1, 512)):
        load_hardware(profile)
    with refused(InputError, name="hardware"):
        load_hardware("9" * 5000 + "xh100")


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"memory_bytes_per_s": 1e-300}, "memory_bytes_per_s is 1e-300; it must lie between 1000 and 1e"),
        ({"flops": {"bf16": 1e308}}, "flops.bf16 is 1e.308; it must lie between"),
        ({"host": {"bytes_per_s": 1e-300}}, "host.bytes_per_s is 1e-300; it must lie between"),
        ({"host": {"latency_seconds": 1e300}}, "host.latency_seconds is 1e.300; it must lie between 0 and 1"),
        ({"collective_latency_seconds": 1e308}, "collective_latency_seconds is 1e.308; it must lie"),
        (
            {"overlap": {"gemm": {"value": 1e300, "source": "user"}}},
            "overlap.gemm is 1e.300; it must lie between 0",
        ),
        ({"efficiency": {"dense_gemm": {"value": 1e-300, "source": "user"}}}, "efficiency.dense_gemm is 1e-300; it"),
        (
            {"memory": {"axes": [{"name": "bytes", "points": [1]}], "seconds": [1e300], "source": "user"}},
            "the longest time in a table of 1 bytes is 1e.300; the limit is 1",
        ),
    ],
)
def test_figures_of_a_machine_have_limits(figures: dict[str, Any], message: str, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"extends": "8xh100", **figures}))
    with pytest.raises(InputError, match=message):
        load_hardware(profile)


@pytest.mark.slow
def test_the_slowest_machine_within_the_limits_is_explained(tmp_path: Path) -> None:
    least = {"bytes_per_s": limits.LEAST_RATE, "latency_seconds": limits.MOST_SECONDS}
    figures: dict[str, Any] = {"peer": least, "host": least, "memory_bytes_per_s": limits.LEAST_RATE}
    figures |= {"flops": {"bf16": limits.LEAST_RATE}, "collective_latency_seconds": limits.MOST_SECONDS}
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"extends": "8xh100", **figures}))
    report = moepass.explain("deepseek-v3", hardware=profile, dtype="bf16", tokens=limits.MOST_TOKENS)
    assert report.schedule is None or report.schedule.step_seconds > 0
    for word in ("NaN", "Infinity"):
        assert word not in report.to_json()
    assert report.text()


def test_a_threshold_beyond_all_numbers_of_tokens_is_not_searched_one_by_one() -> None:
    model = preset("olmoe-1b-7b")
    for seconds, rate in ((limits.MOST_SECONDS, limits.MOST_RATE), (3.3e11, 7.7e19), (1e12, 1e13)):
        threshold = saturation(
            model.typical_moe_layer, model.hidden, transfer_seconds=seconds, flops_per_s=rate, sequence=1
        )
        assert threshold.flops == pytest.approx(threshold.values["gamma"] * seconds * rate)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), True, "1", float("inf"), 1e300])
def test_ranks_wait_for_a_time_that_there_is(seconds: object) -> None:
    with pytest.raises(OptionError, match=r"timeout_s is .*; (it must be a number of seconds|the limit is 1e\+07 sec)"):
        limits.check_wait("timeout_s", seconds)
    with refused(OptionError, name="timeout_s"):
        parse_options({"timeout_s": seconds})
    limits.check_wait("timeout_s", 1e7)


def test_no_more_layers_stay_than_a_model_has() -> None:
    with refused(OptionError, name="resident_layers", value=10**9, expected=1024):
        Residents(layers=range(10**9))


def test_an_emulated_link_is_no_slower_than_a_run_can_end() -> None:
    with refused(OptionError, name="link", value="emulate:1e-300", expected=1000):
        parse_link("emulate:1e-300")
    assert parse_link("emulate:1000").bytes_per_s == 1000


def test_the_pipeline_of_many_ranks_and_long_texts_is_simulated_in_bounded_steps() -> None:
    # The most micro-batches on the most ranks: 10**11 steps without a limit.
    seconds = [1.0 + number % 3 for number in range(2048)]
    duration = pipeline_seconds(seconds, limits.MOST_RANKS)
    assert sum(seconds) < duration < 3.01 * len(seconds)


# ---- score -----------------------------------------------------------------------------------------------------------


def test_a_line_that_never_ends_is_not_read_to_its_end() -> None:
    class Endless(io.RawIOBase):
        def readinto(self, buffer: Any) -> int:
            buffer[:] = b"x" * len(buffer)
            return len(buffer)

        def readable(self) -> bool:
            return True

    source = io.BufferedReader(Endless())
    lines = InputLines(limited_lines(source, limits.MOST_LINE_BYTES), "x", skips=False)
    with refused(TooLargeError, name="line 1", path="x", expected=4194304):
        next(iter(lines))


def test_of_a_line_that_is_too_long_nothing_is_kept() -> None:
    assert list(limited_lines(io.BytesIO(b"a\n\nb"), 3)) == [b"a\n", b"\n", b"b"]
    assert list(limited_lines(io.BytesIO(b"ab\nabcdefghi\nc"), 3)) == [b"ab\n", None, b"c"]
    with refused(TooLargeError, name="line 2"):
        list(InputLines([b'{"text": "a"}', None], "x", skips=False))


def test_bytes_of_memory_are_no_infinity() -> None:
    for text in ("1e999", "nan", "9" * 400):
        with pytest.raises(InputError, match="is not a number of bytes"):
            parse_bytes(text)
