"""The formulas, compared with brute-force counts, with each other, and with numbers from the literature."""

from __future__ import annotations

import time

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.models.formulas.attention import attention_flops, causal_pairs, chunked_pairs, delta_rule_flops
from moepass.models.formulas.communication import (
    STRATEGIES,
    all_gather_bytes,
    communication_bytes,
    exchanged_bytes,
    gathered_bytes,
    part_bytes,
)
from moepass.models.formulas.gemms import gemm_bytes, gemm_flops, triangular_solve_flops
from moepass.models.formulas.layers import flops_per_token, layer_flops, model_flops, model_parameters
from moepass.models.formulas.memory import (
    ELEMENT_BYTES,
    activation_bytes,
    attention_traffic_bytes,
    bank_bytes,
    experts_hit,
    kv_bytes,
    mlp_traffic_bytes,
    model_kv_bytes,
    resident_bytes,
)
from moepass.models.sizes.architecture import Attention, Experts, Layer
from moepass.models.sizes.presets import preset, preset_names
from tests.helpers.graphs.error_fields import refused

small = st.integers(1, 40)
BATCH, SEQUENCE = sympy.symbols("batch sequence", integer=True, positive=True)


def evaluate(expression: sympy.Expr, **values: int) -> float:
    expression = sympy.sympify(expression)
    return float(expression.subs({symbol: values[symbol.name] for symbol in expression.free_symbols}))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(small, st.integers(0, 40), st.none() | small)
def test_pairs_are_those_that_a_mask_leaves(sequence: int, prefix: int, window: int | None) -> None:
    seen = [min(position + 1, window or position + 1) for position in range(prefix, prefix + sequence)]
    assert causal_pairs(sequence, window, prefix) == sum(seen)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(small, st.integers(0, 40), small)
def test_pairs_within_chunks(sequence: int, prefix: int, chunk: int) -> None:
    seen = [position % chunk + 1 for position in range(prefix, prefix + sequence)]
    assert chunked_pairs(sequence, chunk, prefix) == sum(seen)


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    kind = draw(st.sampled_from(["full", "sliding", "chunked", "linear", "state_space"]))
    window = draw(small) if kind in ("sliding", "chunked") else None
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Attention(kind, kv_heads * group, kv_heads, draw(small), draw(small), window)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    attention = draw(attentions())
    if draw(st.booleans()):
        return Layer(attention, None, draw(small))
    count = draw(small)
    shared = draw(st.integers(0, 8))
    return Layer(attention, Experts(count, draw(st.integers(1, count)), draw(small), shared, draw(st.booleans())), None)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(layers(), st.integers(1, 4), small, st.integers(0, 40))
def test_symbols_and_numbers_give_the_same(layer: Layer, batch: int, sequence: int, prefix: int) -> None:
    number = layer_flops(layer, 16, batch, sequence, prefix)
    assert isinstance(number, int)
    prefix_symbol = sympy.Symbol("prefix", integer=True, nonnegative=True)
    expression = layer_flops(layer, 16, BATCH, SEQUENCE, prefix_symbol)
    assert evaluate(expression, batch=batch, sequence=sequence, prefix=prefix) == number
    cached = kv_bytes(layer.attention, BATCH, SEQUENCE, "bf16")
    expected = kv_bytes(layer.attention, batch, sequence, "bf16")
    assert evaluate(cached, batch=batch, sequence=sequence) == expected


@settings(deadline=None, derandomize=True, max_examples=60)
@given(layers(), st.integers(1, 4), st.integers(2, 40), st.data())
def test_a_text_in_two_parts_costs_what_it_costs_whole(
    layer: Layer, batch: int, sequence: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, sequence - 1))
    first = layer_flops(layer, 16, batch, cut)
    second = layer_flops(layer, 16, batch, sequence - cut, prefix=cut)
    assert first + second == layer_flops(layer, 16, batch, sequence)


def test_flops_per_token_of_a_layer() -> None:
    """Check f = 2·(attention projections + H·E + k·3·H·h + 3·H·h shared)."""
    qwen = preset("qwen3-235b-a22b")
    hidden, experts, width, top_k = 4096, 128, 1536, 8
    projections = 2 * hidden * 64 * 128 + 2 * hidden * 4 * 128
    assert flops_per_token(qwen.typical_moe_layer, hidden) == 2 * (
        projections + hidden * experts + top_k * 3 * hidden * width
    )
    deepseek = preset("deepseek-v3")
    hidden, experts, width, top_k = 7168, 256, 2048, 8
    latent = hidden * 1536 + 1536 * 128 * 192 + hidden * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * hidden
    assert flops_per_token(deepseek.typical_moe_layer, hidden) == 2 * (
        latent + hidden * experts + (top_k + 1) * 3 * hidden * width
    )
    assert flops_per_token(deepseek.layers[0], hidden) == 2 * (latent + 3 * hidden * 18432)


def test_scores_are_half_of_the_square() -> None:
    """Check 4·S²·heads·head_dim for all pairs, and the causal half of it with its diagonal."""
    attention = preset("qwen3-235b-a22b").layers[0].attention
    assert attention_flops(attention, 3, 512) == 3 * 4 * 64 * 128 * 512 * 513 // 2
    latent = preset("deepseek-v3").layers[0].attention
    assert attention_flops(latent, 1, 512) == 2 * 128 * (192 + 128) * 512 * 513 // 2


def test_the_delta_rule_counts_the_products_of_a_chunk() -> None:
    chunk, key, value = 64, 128, 32
    of_one_chunk = (
        2 * 2 * chunk * chunk * key  # keys and queries times keys
        + chunk * chunk * (key + value)  # two triangular systems
        + 3 * 2 * chunk * key * value  # the state read twice, written once
        + 2 * chunk * chunk * value  # weights times values
    )
    assert delta_rule_flops(3 * chunk, 5, key, value) == 3 * 5 * of_one_chunk


def test_kv_bytes_are_two_l_b_s_nkv_dh_b() -> None:
    qwen = preset("qwen3-235b-a22b")
    assert model_kv_bytes(qwen, 7, 1000) == 2 * 94 * 7 * 1000 * 4 * 128 * 2
    # Latent attention caches 512 + 64 values per token and layer, for any number of heads.
    assert model_kv_bytes(preset("deepseek-v3"), 7, 1000) == 61 * 7 * 1000 * 576 * 2
    gpt = preset("gpt-oss-120b")
    assert model_kv_bytes(gpt, 1, 1000) == 2 * 8 * 64 * 2 * 18 * (1000 + 128)


def test_bank_bytes() -> None:
    qwen = preset("qwen3-235b-a22b").typical_moe_layer
    assert qwen.experts is not None
    assert bank_bytes(qwen.experts, 4096, "bf16") == 128 * 3 * 4096 * 1536 * 2
    gpt = preset("gpt-oss-120b").typical_moe_layer
    assert gpt.experts is not None
    # Biases are part of the bank.
    assert bank_bytes(gpt.experts, 2880, "bf16") == 128 * (3 * 2880 * 2880 + 3 * 2880) * 2
    with refused(InputError, name="dtype", value="int4", expected=tuple(ELEMENT_BYTES)):
        bank_bytes(gpt.experts, 2880, "int4")


def test_banks_and_the_rest_are_the_model() -> None:
    for name in preset_names():
        model = preset(name)
        assert resident_bytes(model) < 2 * model_parameters(model)
        banks = [bank_bytes(layer.experts, model.hidden, "bf16") for layer in model.layers if layer.experts]
        assert resident_bytes(model) + sum(banks) == 2 * model_parameters(model)


P, B, S, H, K, KV = 8, 4, 4096, 4096, 8, 4 * 128


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("dp_tp", 4 * 7 / 8 * B * S * H * 2),
        ("tp_tp", 4 * 7 / 8 * B * S * H * 2),
        ("dp_ep", 4 * K * 7 / 8 * B * S * H * 2),
        ("tp_ep", (2 + 4 * K) * 7 / 8 * B * S * H * 2),
        ("pp_pp", 2 * B * S * H * 2),
        ("sp_tp", (2 * KV + 4 * H) * 7 / 8 * B * S * 2),
        ("sp_ep", (2 * KV + 4 * K * H) * 7 / 8 * B * S * 2),
        ("asyncep", 0),
    ],
)
def test_communication_is_the_table_of_the_paper(strategy: str, expected: float) -> None:
    layer = preset("qwen3-235b-a22b").typical_moe_layer
    assert communication_bytes(strategy, layer, H, B * S, P, "bf16") == expected
    symbolic = communication_bytes(strategy, layer, H, *sympy.symbols("tokens ranks"), "bf16")
    assert evaluate(symbolic, tokens=B * S, ranks=P) == expected
    assert strategy in STRATEGIES


def test_communication_refuses_what_it_does_not_know() -> None:
    layer = preset("deepseek-v3").typical_moe_layer
    with refused(InputError, name="strategy", value="ep_ep", expected=STRATEGIES):
        communication_bytes("ep_ep", layer, 7168, 1, 8, "bf16")
    with pytest.raises(InputError, match="this layer has none"):
        communication_bytes("dp_ep", preset("deepseek-v3").layers[0], 7168, 1, 8, "bf16")


def test_a_gather_moves_what_a_rank_lacks() -> None:
    assert gathered_bytes(1000, 4) + part_bytes("own", 1000, 4) == 1000
    assert all_gather_bytes(1000, 4) == 1500
    assert exchanged_bytes(1000, 4) == 750


def test_products_against_their_definition() -> None:
    assert gemm_flops(3, 5, 7) == sum(2 for _ in range(3 * 7) for _ in range(5))
    assert gemm_bytes(3, 5, 7, 2, count=4) == 4 * 2 * (15 + 35 + 21)
    # Substitution: row i takes i multiplications, i - 1 subtractions and a division.
    assert triangular_solve_flops(6, 3) == 3 * sum(2 * i + 1 for i in range(6))


def test_experts_that_are_hit() -> None:
    assert experts_hit(128, 8, 1) == pytest.approx(8)
    assert experts_hit(128, 8, 10_000) == pytest.approx(128)
    assert experts_hit(4, 4, 1) == 4


@settings(deadline=None, derandomize=True, max_examples=60)
@given(layers(), st.integers(1, 100))
def test_traffic_and_activations_hold_the_residual_stream(layer: Layer, tokens: int) -> None:
    hidden = 16
    traffic = [count(layer, hidden, tokens, "bf16") for count in (attention_traffic_bytes, mlp_traffic_bytes)]
    assert sum(traffic) > 2 * tokens * hidden * 10
    live = activation_bytes(layer, hidden, tokens, "bf16")
    assert live >= 2 * 2 * tokens * hidden
    assert live == tokens * activation_bytes(layer, hidden, 1, "bf16")
    if layer.experts is not None:
        matrices = 2 if layer.experts.gated else 1
        assert live >= 2 * matrices * tokens * layer.experts.top_k * layer.experts.width


def test_a_deep_model_is_costed_quickly() -> None:
    model = preset("qwen3-235b-a22b")
    began = time.process_time()
    for _ in range(10):
        symbolic = model_flops(model, BATCH, SEQUENCE)
        evaluate(symbolic, batch=8, sequence=4096)
        model_flops(model, 8, 4096)
        model_parameters(model)
    assert time.process_time() - began < 2
