"""The saturation threshold, compared with a search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models import formulas
from moepass.models.errors import InputError
from moepass.models.sizes.architecture import Attention, Experts, Layer
from moepass.models.sizes.presets import preset
from tests.helpers.graphs.error_fields import refused

HIDDEN = 64
EXPERTS = Experts(8, 2, 32)


def layer_of(kind: str, window: int | None = None) -> Layer:
    return Layer(Attention(kind, 4, 2, 16, 16, window), EXPERTS, None)


def smallest(needed_flops: float, flops_of: object) -> int:
    """Find the smallest number by bisection over an increasing function."""
    assert callable(flops_of)
    low, high = 0, 1
    while flops_of(high) < needed_flops:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if flops_of(middle) < needed_flops else (low, middle)
    return low


KINDS = [("full", None), ("sliding", 7), ("sliding", 300), ("linear", None), ("state_space", None)]
seconds = st.floats(1e-6, 10, allow_nan=False)


@pytest.mark.parametrize(("kind", "window"), KINDS)
@settings(deadline=None, derandomize=True, max_examples=30)
@given(transfer_seconds=seconds, gamma=st.floats(1, 3))
def test_one_text_is_long_enough_and_one_token_less_is_not(
    kind: str, window: int | None, transfer_seconds: float, gamma: float
) -> None:
    layer, rate = layer_of(kind, window), 1e9
    threshold = formulas.saturation(
        layer, HIDDEN, transfer_seconds=transfer_seconds, flops_per_s=rate, gamma=gamma, one_sequence=True
    )
    needed = gamma * transfer_seconds * rate
    assert threshold.tokens == smallest(needed, lambda count: formulas.layer_flops(layer, HIDDEN, 1, count))
    assert threshold.flops >= needed


@pytest.mark.parametrize(("kind", "window"), [*KINDS, ("chunked", 5)])
@settings(deadline=None, derandomize=True, max_examples=30)
@given(transfer_seconds=seconds, sequence=st.integers(1, 500))
def test_texts_of_one_length(kind: str, window: int | None, transfer_seconds: float, sequence: int) -> None:
    layer, rate = layer_of(kind, window), 1e9
    threshold = formulas.saturation(
        layer, HIDDEN, transfer_seconds=transfer_seconds, flops_per_s=rate, gamma=1.5, sequence=sequence
    )
    texts = -(-threshold.tokens // sequence)
    needed = 1.5 * transfer_seconds * rate
    assert formulas.layer_flops(layer, HIDDEN, texts, sequence) >= needed * (1 - 1e-12)
    if texts > 1:
        assert formulas.layer_flops(layer, HIDDEN, texts - 1, sequence) < needed * (1 + 1e-12)
    assert threshold.flops == pytest.approx(
        needed, abs=formulas.layer_flops(layer, HIDDEN, 1, sequence) / sequence * 1.01
    )


@settings(deadline=None, derandomize=True, max_examples=30)
@given(seconds, st.integers(1, 5000))
def test_what_is_left_out_errs_to_the_safe_side(transfer_seconds: float, sequence: int) -> None:
    arguments = {"transfer_seconds": transfer_seconds, "flops_per_s": 1e9}
    layer = layer_of("full")
    without = formulas.saturation(layer, HIDDEN, **arguments)
    assert without.tokens >= formulas.saturation(layer, HIDDEN, **arguments, sequence=sequence).tokens
    assert without.tokens >= formulas.saturation(layer, HIDDEN, **arguments, one_sequence=True).tokens


def test_the_threshold_of_a_published_model() -> None:
    """Check n·f ÷ F = γ·t with W·(N − 1)/N ÷ link of qwen3-235b-a22b on 8 devices at 450 GB/s and 989 TFLOP/s."""
    model = preset("qwen3-235b-a22b")
    layer = model.typical_moe_layer
    assert layer.experts is not None
    moved = formulas.gathered_bytes(formulas.bank_bytes(layer.experts, model.hidden, "bf16"), 8)
    threshold = formulas.saturation(layer, model.hidden, transfer_seconds=moved / 450e9, flops_per_s=989e12)
    f = formulas.flops_per_token(layer, model.hidden)
    assert threshold.tokens == pytest.approx(1.2 * moved / 450e9 * 989e12 / f, abs=1)
    # 4.23 GB in 9.4 ms, hidden by 25 thousand tokens of 446 MFLOP each.
    assert 24_500 < threshold.tokens < 25_500
    assert threshold.formula == (
        "tokens = flops_per_s*gamma*transfer_seconds/(flops_per_token + score_flops_per_token)"
    )
    assert threshold.values["score_flops_per_token"] == 0
    assert formulas.evaluate(threshold.expression, **threshold.values) == pytest.approx(threshold.tokens, abs=1)


def test_a_transfer_of_nothing_needs_no_tokens() -> None:
    assert formulas.saturation(layer_of("full"), HIDDEN, transfer_seconds=0, flops_per_s=1e9).tokens == 0


def test_a_dense_layer_hides_a_transfer_too() -> None:
    dense = Layer(Attention("full", 4, 2, 16, 16), None, 256)
    threshold = formulas.saturation(dense, HIDDEN, transfer_seconds=1e-3, flops_per_s=1e9, gamma=1)
    assert threshold.tokens == -(-1_000_000 // formulas.flops_per_token(dense, HIDDEN))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"flops_per_s": 0}, "flops_per_s"),
        ({"gamma": -1}, "gamma"),
        ({"transfer_seconds": -0.5}, "transfer_seconds"),
        ({"transfer_seconds": float("inf")}, "transfer_seconds"),
        ({"sequence": 4, "one_sequence": True}, "sequence"),
        ({"sequence": 0}, "sequence"),
    ],
)
def test_errors_name_the_value(changes: dict[str, float], name: str) -> None:
    arguments: dict[str, float] = {"transfer_seconds": 1, "flops_per_s": 1e9}
    with refused(InputError, name=name, value=changes[name]):
        formulas.saturation(layer_of("full"), HIDDEN, **{**arguments, **changes})  # type: ignore[arg-type]


def test_one_text_in_chunks_has_no_formula() -> None:
    with refused(InputError, name="kind", value="chunked"):
        formulas.saturation(layer_of("chunked", 8), HIDDEN, transfer_seconds=1, flops_per_s=1e9, one_sequence=True)
