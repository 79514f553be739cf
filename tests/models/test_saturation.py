"""The saturation threshold, compared with a search."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.models.formulas.attention import attention_flops
from moepass.models.formulas.communication import gathered_bytes
from moepass.models.formulas.layers import flops_per_token, layer_flops
from moepass.models.formulas.memory import bank_bytes
from moepass.models.formulas.saturation import saturation
from moepass.models.formulas.text import evaluate_text
from moepass.models.sizes.architecture import Attention, Experts, Layer
from moepass.models.sizes.presets import preset
from tests.helpers.graphs.error_fields import refused

HIDDEN = 64
EXPERTS = Experts(8, 2, 32)


def layer_of(kind: str, window: int | None = None) -> Layer:
    return Layer(Attention(kind, 4, 2, 16, 16, window), EXPERTS, None)


KINDS = [("full", None), ("sliding", 7), ("sliding", 300), ("linear", None), ("state_space", None)]
seconds = st.floats(1e-6, 10, allow_nan=False)


@pytest.mark.parametrize(("kind", "window"), [*KINDS, ("chunked", 5)])
@settings(deadline=None, derandomize=True, max_examples=30)
@given(transfer_seconds=seconds, sequence=st.integers(1, 500))
def test_texts_of_one_length(kind: str, window: int | None, transfer_seconds: float, sequence: int) -> None:
    layer, rate = layer_of(kind, window), 1e9
    threshold = saturation(
        layer, HIDDEN, transfer_seconds=transfer_seconds, flops_per_s=rate, gamma=1.5, sequence=sequence
    )
    texts = -(-threshold.tokens // sequence)
    needed = 1.5 * transfer_seconds * rate
    assert layer_flops(layer, HIDDEN, texts, sequence) >= needed * (1 - 1e-12)
    if texts > 1:
        assert layer_flops(layer, HIDDEN, texts - 1, sequence) < needed * (1 + 1e-12)
    assert threshold.flops == pytest.approx(needed, abs=layer_flops(layer, HIDDEN, 1, sequence) / sequence * 1.01)


def test_the_threshold_of_a_published_model() -> None:
    """Check n·f ÷ F = γ·t with W·(N − 1)/N ÷ link of qwen3-235b-a22b on 8 devices at 450 GB/s and 989 TFLOP/s."""
    model = preset("qwen3-235b-a22b")
    layer = model.typical_moe_layer
    assert layer.experts is not None
    moved = gathered_bytes(bank_bytes(layer.experts, model.hidden, "bf16"), 8)
    threshold = saturation(layer, model.hidden, transfer_seconds=moved / 450e9, flops_per_s=989e12, sequence=1)
    f = flops_per_token(layer, model.hidden) + attention_flops(layer.attention, 1, 1)
    assert threshold.tokens == pytest.approx(1.2 * moved / 450e9 * 989e12 / f, abs=1)
    # 4.23 GB in 9.4 ms, hidden by 25 thousand tokens of 446 MFLOP each.
    assert 24_500 < threshold.tokens < 25_500
    assert threshold.formula == (
        "tokens = flops_per_s*gamma*transfer_seconds/(flops_per_token + score_flops_per_token)"
    )
    exact = evaluate_text(threshold.formula.removeprefix("tokens = "), threshold.values)
    assert exact == pytest.approx(threshold.tokens, abs=1)


def test_a_transfer_of_nothing_needs_no_tokens() -> None:
    assert saturation(layer_of("full"), HIDDEN, transfer_seconds=0, flops_per_s=1e9, sequence=1).tokens == 0


def test_a_dense_layer_hides_a_transfer_too() -> None:
    dense = Layer(Attention("full", 4, 2, 16, 16), None, 256)
    threshold = saturation(dense, HIDDEN, transfer_seconds=1e-3, flops_per_s=1e9, gamma=1, sequence=1)
    assert threshold.tokens == -(
        -1_000_000 // (flops_per_token(dense, HIDDEN) + attention_flops(dense.attention, 1, 1))
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"flops_per_s": 0}, "flops_per_s"),
        ({"gamma": -1}, "gamma"),
        ({"transfer_seconds": -0.5}, "transfer_seconds"),
        ({"transfer_seconds": float("inf")}, "transfer_seconds"),
        ({"sequence": 0}, "sequence"),
    ],
)
def test_errors_name_the_value(changes: dict[str, Any], name: str) -> None:
    arguments: dict[str, Any] = {"transfer_seconds": 1, "flops_per_s": 1e9, "sequence": 4}
    with refused(InputError, name=name, value=changes[name]):
        saturation(layer_of("full"), HIDDEN, **{**arguments, **changes})
