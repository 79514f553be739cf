"""FLOPs of the router's table equal those of `models.formulas` to the last digit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepass.models.formulas.layers import flops_per_token, head_flops, layer_flops
from moepass.models.sizes.architecture import Architecture, Attention, Experts, Layer
from moepass.models.sizes.presets import preset, preset_names
from moepass.runtime.serving.batching.step_flops import FlopsTable

KINDS = st.sampled_from(["full", "sliding", "chunked", "linear", "state_space"])


def all_layers_flops(architecture: Architecture, batch: int, sequence: int, prefix: int = 0) -> float:
    layers = architecture.layer_counts.items()
    return sum(n * layer_flops(layer, architecture.hidden, batch, sequence, prefix) for layer, n in layers)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(KINDS)
        window = draw(st.integers(1, 40)) if kind in ("sliding", "chunked") else None
        attention = Attention(kind, draw(st.integers(1, 4)), 1, 8, draw(st.integers(1, 8)), window, time_step_rank=2)
        experts = draw(st.sampled_from([None, Experts(4, 2, 16), Experts(4, 2, 16, shared_width=8)]))
        layers.append(Layer(attention, experts, 32 if experts is None else None))
    return Architecture("test", "test", 8, 50, "fp32", tuple(layers))


@given(architectures(), st.integers(0, 130), st.integers(0, 130))
def test_flops_are_those_of_the_formulas(architecture: Architecture, prefix: int, new: int) -> None:
    expected = all_layers_flops(architecture, 1, new, prefix)
    assert FlopsTable(architecture, narrows=False).flops(prefix, new) == expected
    table = FlopsTable(architecture)
    # If all tokens are read, no work of the last layer is skipped.
    assert table.flops(prefix, new) + new * table.read_flops == expected
    assert 0 < table.read_flops <= flops_per_token(architecture.layers[-1], architecture.hidden)
    assert table.logit_flops == head_flops(architecture, 1)


@pytest.mark.parametrize("name", preset_names())
def test_flops_of_presets_are_exact_for_long_sequences(name: str) -> None:
    architecture = preset(name)
    table = FlopsTable(architecture)
    for prefix, new in ((0, 1), (0, 131_072), (1 << 20, 1 << 20), (8191, 2), (1_000_003, 777_777)):
        flops = table.flops(prefix, new)
        assert type(flops) is int
        assert flops + new * table.read_flops == all_layers_flops(architecture, 1, new, prefix)


@given(architectures(), st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_parts_add_up_to_the_whole(architecture: Architecture, lengths: list[int]) -> None:
    table = FlopsTable(architecture)
    at, parts = 0, 0
    for length in lengths:
        parts += table.flops(at, length)
        at += length
    assert parts == table.total(at)
