"""Costs of whole graphs, compared with torch's counter and with closed formulas per family, and stored in the plan."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch.fx import Graph, Node
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import moepass
from moepass.models.errors import InputError
from moepass.models.formulas.attention import DELTA_RULE_CHUNK, attention_flops, score_flops
from moepass.models.formulas.gemms import convolution_flops, gemm_bytes, gemm_flops
from moepass.models.formulas.layers import expert_parameters, flops_per_token, head_flops, layer_parameters
from moepass.models.formulas.memory import attention_traffic_bytes, experts_hit, mlp_traffic_bytes
from moepass.models.formulas.text import evaluate_text
from moepass.models.sizes.architecture import Architecture, Layer
from moepass.models.sizes.families import from_config
from moepass.models.sizes.presets import preset_config
from moepass.passes.cost.graph_cost import graph_cost, total_cost
from moepass.passes.cost.op_costs import node_cost
from moepass.passes.graph.nodes import module_path
from tests.helpers.graphs.backend_helper import Stack, capture, streamed, tokens, up_to
from tests.helpers.graphs.tiny_configs import meta_model, tiny_config
from tests.helpers.models.tiny import TINY_FAMILIES

# A multiple of the delta rule's chunk, so that no padding is computed.
BATCH, SEQUENCE = 2, DELTA_RULE_CHUNK


def captured(config: transformers.PreTrainedConfig) -> tuple[Graph, dict[Any, int]]:
    """Return the graph of a model on the meta device, and the FLOPs that torch counts while it runs there."""
    config.use_cache = False
    model = meta_model(config).to(torch.bfloat16).eval().requires_grad_(False)
    if type(model)._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    ids = torch.zeros((BATCH, SEQUENCE), dtype=torch.int64, device="meta")
    captured = capture(model, input_ids=ids, dynamic=False)
    assert captured.graphs == 1
    with FlopCounterMode(display=False) as counter:
        captured.run()
    return captured.module.graph, dict(counter.get_flop_counts()["Global"])


def by_packet(graph: Graph) -> dict[Any, int]:
    """Return the FLOPs by operator, for the operators that torch's counter supports."""
    flops: Counter[Any] = Counter()
    for node in graph.nodes:
        packet = getattr(node.target, "_overloadpacket", None)
        if packet in flop_registry:
            flops[packet] += node_cost(node).flops
    return dict(flops)


def is_rotary(node: Node) -> bool:
    return "rotary_emb" in module_path(node)


def computed(architecture: Architecture) -> int:
    """Return the closed formula for a captured graph on the meta device, which computes more than necessary.

    Attention is decomposed there: it computes all pairs and masks some. Llama 4 runs every expert on every token. The
    convolutions of linear attention continue after the end of a text, and its last state is not computed. All logits
    are computed.
    """
    tokens_of_step = BATCH * SEQUENCE
    total = head_flops(architecture, tokens_of_step)
    for layer in architecture.layers:
        total += tokens_of_step * flops_per_token(run_layer(architecture, layer), architecture.hidden)
        attention = layer.attention
        if attention.kind == "linear":
            total += attention_flops(attention, BATCH, SEQUENCE)
            written = gemm_flops(DELTA_RULE_CHUNK, attention.head_dim, attention.value_head_dim)
            total -= BATCH * attention.heads * written
        elif attention.kind != "state_space":
            pairs = SEQUENCE * SEQUENCE
            total += BATCH * score_flops(pairs, attention.heads, attention.head_dim, attention.value_head_dim)
        if attention.convolution:
            channels = attention.heads if attention.kind == "state_space" else convolved(layer)
            behind = attention.convolution - 1
            total += convolution_flops(BATCH * behind, channels, 1, attention.convolution)
        if attention.kind == "state_space":
            # The step that reads the states is a product, the rest of the scan is elementwise.
            total += gemm_flops(tokens_of_step * attention.heads, attention.head_dim, 1)
    return total


def convolved(layer: Layer) -> int:
    return 2 * layer.attention.key_width + layer.attention.value_width


def run_layer(architecture: Architecture, layer: Layer) -> Layer:
    if architecture.model_type != "llama4_text" or layer.experts is None:
        return layer
    return dataclasses.replace(layer, experts=dataclasses.replace(layer.experts, top_k=layer.experts.count))


def check(config: transformers.PreTrainedConfig, architecture: Architecture) -> None:
    graph, counted = captured(config)
    assert by_packet(graph) == counted
    rotary = sum(node_cost(node).flops for node in graph.nodes if is_rotary(node))
    assert rotary < 0.01 * graph_cost(graph).flops
    assert graph_cost(graph).flops - rotary == computed(architecture)
    assert {str(node.target) for node in graph.nodes if not node_cost(node).is_known} == set()


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_cost_of_a_family_equals_its_formula(family: str) -> None:
    config = tiny_config(family)
    check(config, from_config(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "deepseek-v3", "gpt-oss-120b"])
def test_the_cost_of_a_preset_cut_to_two_layers_equals_its_formula(name: str) -> None:
    config = preset_config(name, layers=2)
    check(config, from_config(config, name=name, dtype="bf16"))


@pytest.mark.slow
def test_memory_traffic_is_at_least_that_of_the_formula() -> None:
    """An unfused graph reads and writes more than the formula, which counts only necessary traffic."""
    config = preset_config("qwen3-30b-a3b", layers=2)
    architecture = from_config(config, dtype="bf16")
    graph, _ = captured(config)
    hidden, count = architecture.hidden, BATCH * SEQUENCE
    least = 0.0
    for layer in architecture.layers:
        assert layer.experts is not None
        unread = layer.experts.count - experts_hit(layer.experts.count, layer.experts.top_k, count)
        least += 2 * (layer_parameters(layer, hidden) - unread * expert_parameters(layer.experts, hidden))
        least += attention_traffic_bytes(layer, hidden, count, "bf16") + mlp_traffic_bytes(layer, hidden, count, "bf16")
    head = gemm_bytes(BATCH * SEQUENCE, architecture.hidden, architecture.vocab, 2)
    assert least + head < graph_cost(graph).memory_bytes < 1.5 * (least + head)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm", "dense_bmm"])
def test_the_plan_holds_totals_of_graph_blocks_and_segments(form: str) -> None:
    plan = up_to("partition", streamed(Stack(form, depth=3), tokens()).module).plan
    assert plan.cost is not None
    total = plan.cost.at({})
    segments = [step.cost.at({}) for step in plan.steps if step.op == "segment" and step.cost is not None]
    assert len(segments) == sum(step.op == "segment" for step in plan.steps) >= 3
    assert tuple(map(sum, zip(*segments, strict=True))) == pytest.approx(total)
    assert all(step.cost is None for step in plan.steps if step.op != "segment")
    flops = [block.cost.at({})[0] for block in plan.blocks if block.cost is not None]
    assert len(flops) == 3
    assert len(set(flops)) == 1
    assert 0 < sum(flops) < total[0]
    assert plan.uncosted == ()
    assert moepass.passes.ir.plan.Plan.from_json(plan.to_json()) == plan


def test_a_block_costs_its_products() -> None:
    block = up_to("cost", capture(Stack("grouped_mm", depth=1), tokens()).module).plan.blocks[0]
    assert block.cost is not None
    assert block.top_k is not None
    rows, matrices = tokens().shape[0] * block.top_k, 3 if block.gated else 2
    assert block.cost.at({})[0] == gemm_flops(rows, block.hidden, matrices * block.intermediate)


@pytest.mark.slow
def test_costs_of_dynamic_shapes_hold_for_other_sizes() -> None:
    x = tokens(24)
    torch._dynamo.mark_dynamic(x, 0)
    plan = up_to("partition", streamed(Stack("grouped_mm", depth=2), x).module).plan
    ((name, size),) = plan.sizes
    assert size == 24
    uniform = up_to("cost", capture(Stack("grouped_mm", depth=2), tokens(40), dynamic=False).module).plan
    assert plan.cost is not None
    assert uniform.cost is not None
    assert plan.cost.at({name: 40})[0] == uniform.cost.at({})[0]
    with pytest.raises(InputError, match=name):
        plan.cost.at({})


def test_without_the_pass_there_are_no_costs() -> None:
    module = streamed(Stack(depth=2), tokens()).module
    plan = up_to("partition", module, disabled=frozenset({"cost"})).plan
    assert plan.cost is None
    assert all(step.cost is None for step in plan.steps)
    assert total_cost(module.graph.nodes) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("2*s0*(s0 + 1) - 3", 2 * 5 * 6 - 3),
        ("Min(s0, 3) + Max(s1, 3) + floor(s0/2)", 3 + 3 + 2),
        ("-s0**2 + 0.5*s1", -25 + 1),
        ("s0//2 + s0 % 3 + CeilDiv(s0, 2)", 2 + 2 + 3),
        (" + ".join(["s0*(s0 - 1)"] * 5000) + " - s0", 5000 * 20 - 5),
        ("128.0 - 128.0*0.9921875**(8*s0)", 128 - 128 * 0.9921875**40),
    ],
)
def test_expressions_are_read_as_arithmetic(text: str, number: float) -> None:
    assert evaluate_text(text, {"s0": 5, "s1": 2}) == pytest.approx(number)


def test_only_finite_numbers_are_sizes() -> None:
    for text in ("1e999", "(-s0)**0.5", "1e999 - 1e999"):
        with pytest.raises(InputError, match="not a valid size"):
            evaluate_text(text, {"s0": 5})


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "s0.real", "[1]", "1 if s0 else 2", "f(1)", "s0 +", "'a'", "9**9**9", "1/0", "Min()", "True"],
)
def test_nothing_but_arithmetic_is_read(text: str) -> None:
    with pytest.raises(InputError, match="not an expression of sizes"):
        evaluate_text(text, {"s0": 5})
