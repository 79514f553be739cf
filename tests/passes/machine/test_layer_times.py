"""Seconds of layers: closed forms without measurements, and properties for all machines."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.models.sizes.architecture import Attention, Experts, Layer
from moepass.models.sizes.presets import preset
from moepass.passes.machine.hardware import (
    BANDWIDTH_EFFICIENCY,
    DENSE_GEMM_EFFICIENCY,
    IRREGULAR_EFFICIENCY,
    Figure,
    Hardware,
)
from moepass.passes.machine.layer_times import Sequences, Split, activation_dtype, head_seconds, layer_seconds
from moepass.passes.machine.times import TILE_ROWS
from moepass.runtime.profiles.hardware_profiles import load_hardware
from tests.helpers.graphs.error_fields import refused

H100 = load_hardware("8xh100-80g")
HIDDEN = 4096
ATTENTION = Attention("full", heads=32, kv_heads=8, head_dim=128, value_head_dim=128)
MOE = Layer(ATTENTION, Experts(64, 8, 1024), None)
DENSE = Layer(ATTENTION, None, 14336)


def _with_rates(hardware: Hardware, factor: float) -> Hardware:
    flops = {name: Figure(rate.value * factor, "user") for name, rate in hardware.flops.items()}
    return dataclasses.replace(hardware, flops=flops)


def _without_tiles(hardware: Hardware) -> Hardware:
    return dataclasses.replace(hardware, processors=None)


def test_large_products_take_their_flops_at_the_reached_rate() -> None:
    sequences = Sequences(16, 4096)
    seconds = layer_seconds(_without_tiles(H100), MOE, HIDDEN, sequences, "bf16")
    dense, irregular = 989e12 * DENSE_GEMM_EFFICIENCY, 989e12 * IRREGULAR_EFFICIENCY
    projections = HIDDEN * 128 * (32 + 8 + 8) + 32 * 128 * HIDDEN
    assert seconds.attention_gemms == pytest.approx(2 * sequences.tokens * projections / dense)
    # The router is so narrow that reading the tokens takes longer than the GEMM.
    read = 2 * (sequences.tokens * HIDDEN + HIDDEN * 64 + sequences.tokens * 64) / (3.35e12 * BANDWIDTH_EFFICIENCY)
    assert seconds.mlp_gemms == pytest.approx(read)
    rows = sequences.tokens * 8 / 64
    padded = (rows + TILE_ROWS / 2) / rows
    routed = 2 * sequences.tokens * 8 * 3 * HIDDEN * 1024 / irregular * padded
    assert seconds.expert_gemms == pytest.approx(routed)
    scores = 16 * 2 * 2 * 32 * 128 * 4096 * 4097 / 2 / irregular
    assert seconds.attention_scores == pytest.approx(scores)
    assert seconds.total == pytest.approx(seconds.attention + seconds.mlp)


def test_a_dense_layer_has_no_experts() -> None:
    seconds = layer_seconds(_without_tiles(H100), DENSE, HIDDEN, Sequences(4, 4096), "bf16")
    assert seconds.expert_gemms == 0
    expected = 2 * 16384 * 3 * HIDDEN * 14336 / (989e12 * DENSE_GEMM_EFFICIENCY)
    assert seconds.mlp_gemms == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [1024, 4096, 65536])
def test_processors_idle_for_half_a_wave_of_tiles(tokens: int) -> None:
    """Tiles are 128 x 128 in the GEMMs before and after attention; a tile of attention is 128 queries of a head."""
    plain, tiled = (
        layer_seconds(hardware, DENSE, HIDDEN, Sequences(1, tokens), "bf16")
        for hardware in (_without_tiles(H100), H100)
    )
    rate = 989e12 * DENSE_GEMM_EFFICIENCY
    wave = 132 * 2 * 128 * 128 * HIDDEN / rate
    assert tiled.attention_gemms - plain.attention_gemms == pytest.approx(2 * wave / 2)
    waves = 32 * tokens / 128 / 132
    assert tiled.attention_scores == pytest.approx(plain.attention_scores * (1 + 0.5 / waves))


def test_few_tokens_take_the_time_to_read_the_weights() -> None:
    of_64, two = (layer_seconds(H100, MOE, HIDDEN, Sequences(1, tokens), "bf16").expert_gemms for tokens in (64, 80))
    assert of_64 == pytest.approx(two, rel=0.02)  # all 64 experts are read either way


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 32), st.integers(1, 4096), st.floats(1.0, 8.0), st.sampled_from([MOE, DENSE]))
def test_a_faster_machine_is_never_slower(batch: int, sequence: int, factor: float, layer: Layer) -> None:
    sequences = Sequences(batch, sequence)
    plain = layer_seconds(H100, layer, HIDDEN, sequences, "bf16").total
    assert layer_seconds(_with_rates(H100, factor), layer, HIDDEN, sequences, "bf16").total <= plain
    rate = Figure(H100.memory_bytes_per_s.value * factor, "user")
    faster = dataclasses.replace(H100, memory_bytes_per_s=rate)
    assert layer_seconds(faster, layer, HIDDEN, sequences, "bf16").total <= plain


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(1, 4096), st.integers(0, 8192), st.sampled_from([MOE, DENSE]))
def test_more_tokens_and_longer_prefixes_are_never_faster(batch: int, sequence: int, prefix: int, layer: Layer) -> None:
    plain = layer_seconds(H100, layer, HIDDEN, Sequences(batch, sequence, prefix), "bf16").total
    for more in (Sequences(batch + 1, sequence, prefix), Sequences(batch, sequence, prefix + 64)):
        assert layer_seconds(H100, layer, HIDDEN, more, "bf16").total >= plain


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(1, 4096), st.sampled_from([2, 4, 8]))
def test_a_part_of_a_layer_takes_no_longer_than_the_whole(batch: int, sequence: int, ranks: int) -> None:
    sequences = Sequences(batch, sequence)
    total = layer_seconds(H100, MOE, HIDDEN, sequences, "bf16")
    for split in (Split(attention=ranks), Split(widths=ranks), Split(experts=ranks)):
        assert layer_seconds(H100, MOE, HIDDEN, sequences, "bf16", split).total <= total.total * (1 + 1e-9)


def test_fp8_products_have_bf16_activations() -> None:
    assert (activation_dtype("fp8"), activation_dtype("fp32")) == ("bf16", "fp32")
    sequences = Sequences(16, 4096)
    wide, narrow = (layer_seconds(H100, MOE, HIDDEN, sequences, dtype) for dtype in ("bf16", "fp8"))
    assert narrow.attention_passes == wide.attention_passes
    assert narrow.attention_scores == wide.attention_scores
    assert narrow.expert_gemms == pytest.approx(wide.expert_gemms * 989 / 1979, rel=1e-3)


def test_a_dtype_without_a_rate() -> None:
    with refused(InputError, name="dtype", value="fp8"):
        layer_seconds(load_hardware("a100-80g"), MOE, HIDDEN, Sequences(1, 64), "fp8")


def test_the_head_sees_one_token_of_each_text() -> None:
    architecture = preset("olmoe-1b-7b")
    short, long = (head_seconds(H100, architecture, Sequences(4, sequence), "bf16") for sequence in (16, 4096))
    assert short == long > 0
