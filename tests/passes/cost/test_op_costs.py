"""Costs of single operators, compared with torch's counter or with the costs of their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.utils.flop_counter import FlopCounterMode

from moepass.models.formulas.attention import score_flops
from moepass.models.formulas.gemms import gemm_bytes, triangular_solve_flops
from moepass.models.formulas.memory import experts_hit
from moepass.passes.cost.graph_cost import graph_cost
from moepass.passes.cost.op_costs import OpCost, is_elementwise, node_cost, op_cost
from tests.helpers.graphs.backend_helper import capture

aten = torch.ops.aten


def call(target: Any, *args: Any, value: Any, **kwargs: Any) -> Node:
    """Return a node that calls `target`; tensors among the arguments become inputs."""
    graph = Graph()

    def enter(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            node = graph.placeholder(f"input_{len(graph.nodes)}")
            node.meta["val"] = argument
            return node
        return [enter(item) for item in argument] if isinstance(argument, list) else argument

    arguments = [enter(argument) for argument in args]
    keywords = {key: enter(argument) for key, argument in kwargs.items()}
    node = graph.call_function(target, tuple(arguments), keywords)
    node.meta["val"] = value
    return node


def run(target: Any, *args: Any, **kwargs: Any) -> Node:
    return call(target, *args, value=target(*args, **kwargs), **kwargs)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


COUNTED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "mm": lambda: (aten.mm.default, zeros(3, 5), zeros(5, 7)),
    "addmm": lambda: (aten.addmm.default, zeros(7), zeros(3, 5), zeros(5, 7)),
    "bmm": lambda: (aten.bmm.default, zeros(2, 3, 5), zeros(2, 5, 7)),
    "baddbmm": lambda: (aten.baddbmm.default, zeros(2, 3, 7), zeros(2, 3, 5), zeros(2, 5, 7)),
    "convolution": lambda: (
        aten.convolution.default, zeros(2, 6, 20), zeros(6, 1, 4), None, [1], [3], [1], False, [0], 6,
    ),
    "convolution 2d": lambda: (
        aten.convolution.default, zeros(2, 4, 9, 8), zeros(10, 2, 3, 3), None, [2, 1], [1, 1], [1, 1], False, [0, 0], 2,
    ),
    "transposed convolution": lambda: (
        aten.convolution.default, zeros(2, 4, 9), zeros(4, 5, 3), None, [2], [1], [1], True, [0], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    target, *args = COUNTED[name]()
    with FlopCounterMode(display=False) as counter:
        value = target(*args)
    assert counter.get_total_flops() > 0
    assert node_cost(call(target, *args, value=value)).flops == counter.get_total_flops()


ATTENTION = {
    "flash": aten._scaled_dot_product_flash_attention.default,
    "efficient": aten._scaled_dot_product_efficient_attention.default,
    "cudnn": aten._scaled_dot_product_cudnn_attention.default,
    "overrideable": aten._scaled_dot_product_fused_attention_overrideable.default,
    "math": aten._scaled_dot_product_attention_math.default,
    "cpu": aten._scaled_dot_product_flash_attention_for_cpu.default,
    "composite": aten.scaled_dot_product_attention.default,
}


def attention(name: str, queries: int, keys: int, is_causal: bool, value_dim: int = 16) -> Node:
    # Two key-value heads for four query heads: grouped queries save no FLOPs.
    query, key, value = zeros(3, 4, queries, 16), zeros(3, 2, keys, 16), zeros(3, 2, keys, value_dim)
    more: tuple[Any, ...] = {"efficient": (None, False), "cudnn": (None, False), "overrideable": (None,)}.get(name, ())
    dropout_first: tuple[Any, ...] = (None, 0.0) if name in ("math", "composite") else (*more, 0.0)
    return call(ATTENTION[name], query, key, value, *dropout_first, is_causal, value=zeros(3, 4, queries, value_dim))


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_costs_its_pairs(name: str) -> None:
    everything = node_cost(attention(name, 12, 12, is_causal=False)).flops
    packet = ATTENTION[name]._overloadpacket
    if packet in torch.utils.flop_counter.flop_registry:
        shapes = (3, 4, 12, 16), (3, 2, 12, 16), (3, 2, 12, 16)
        assert everything == torch.utils.flop_counter.sdpa_flop_count(*shapes)
    assert everything == 3 * score_flops(12 * 12, 4, 16, 16)
    assert node_cost(attention(name, 12, 12, is_causal=True)).flops * 2 * 12 == everything * 13
    assert node_cost(attention(name, 5, 9, is_causal=True)).flops == 3 * score_flops(15, 4, 16, 16)
    assert node_cost(attention(name, 9, 5, is_causal=True)).flops == 3 * score_flops(15 + 20, 4, 16, 16)
    assert node_cost(attention(name, 4, 4, False, value_dim=8)).flops == 3 * score_flops(16, 4, 16, 8)


def test_a_grouped_gemm_costs_its_rows_and_reads_the_experts_that_they_hit() -> None:
    rows, weights = zeros(40, 16, dtype=torch.bfloat16), zeros(8, 16, 32, dtype=torch.bfloat16)
    offsets = zeros(8, dtype=torch.int32)
    cost = node_cost(run(aten._grouped_mm.default, rows, weights, offsets))
    assert cost.flops == 2 * 40 * 16 * 32
    hit = experts_hit(8, 1, 40)
    assert 7.9 < hit < 8
    expected = 2 * (40 * 16 + hit * 16 * 32 + 40 * 32) + 8 * 4
    assert cost.memory_bytes == pytest.approx(expected)


def test_the_fallback_of_transformers_is_a_grouped_gemm() -> None:
    import transformers.integrations.moe

    assert transformers.integrations.moe is not None
    target = torch.ops.transformers.grouped_mm_fallback.default
    node = call(target, zeros(40, 16), zeros(8, 16, 32), zeros(8, dtype=torch.int32), value=zeros(40, 32))
    assert node_cost(node).flops == 2 * 40 * 16 * 32


def test_grouped_gemms_of_further_operators_have_the_same_cost() -> None:
    offsets = zeros(2, dtype=torch.int32)
    of_columns = (zeros(2, 5, 16), zeros(16, 14), zeros(5, 14))
    of_inner = (zeros(5, 16), zeros(16, 7), zeros(2, 5, 7))
    of_one_size = (zeros(2, 5, 16), zeros(2, 16, 7), zeros(2, 5, 7))
    for (left, right, value), flops in (
        (of_columns, 2 * 5 * 16 * 14),
        (of_inner, 2 * 5 * 16 * 7),
        (of_one_size, 2 * 2 * 5 * 16 * 7),
    ):
        assert node_cost(call(aten._grouped_mm.default, left, right, offsets, value=value)).flops == flops


def test_products_with_scales() -> None:
    eighth = torch.float8_e4m3fn
    scale = zeros(1)
    product = aten._scaled_mm.default, zeros(32, 64, dtype=eighth), zeros(64, 16, dtype=eighth), scale, scale
    assert node_cost(call(*product, value=zeros(32, 16))).flops == 2 * 32 * 64 * 16
    rows, weights = zeros(40, 16, dtype=eighth), zeros(8, 16, 32, dtype=eighth)
    offsets = zeros(8, dtype=torch.int32)
    grouped = call(
        aten._scaled_grouped_mm.default, rows, weights, zeros(40), zeros(8, 32), offsets, value=zeros(40, 32)
    )
    assert node_cost(grouped).flops == 2 * 40 * 16 * 32
    assert node_cost(grouped).memory_bytes < 40 * 16 + 8 * 16 * 32 + 4 * (40 * 32 + 40 + 8 * 32 + 8)


def test_flex_attention_counts_all_pairs() -> None:
    target = torch.ops.higher_order.flex_attention
    query, key, value = zeros(3, 4, 12, 16), zeros(3, 2, 20, 16), zeros(3, 2, 20, 8)
    node = call(target, query, key, value, None, (), 0.25, {}, value=(zeros(3, 4, 12, 8), zeros(3, 4, 12)))
    assert node_cost(node).flops == 3 * score_flops(12 * 20, 4, 16, 8)
    assert node_cost(node).is_known


def test_attention_over_a_trie_counts_one_sequence() -> None:
    """The cost is the maximum for the number of tokens, which sharing can only reduce."""
    from moepass.runtime.serving.attention import trie_attention as trie_attention

    query, key, value = zeros(1, 4, 12, 16), zeros(1, 2, 12, 16), zeros(1, 2, 12, 8)
    node = run(torch.ops.moepass.trie_attention.default, query, key, value, None, 0, 0.25, 0.0)
    assert node_cost(node).flops == score_flops(12 * 13 // 2, 4, 16, 8)
    assert node_cost(node).memory_bytes == 4 * 12 * (4 * 16 + 2 * 16 + 2 * 8 + 4 * 8)
    assert node_cost(node).is_known


def test_triangular_systems() -> None:
    node = run(aten.linalg_solve_triangular.default, zeros(3, 6, 6), zeros(3, 6, 5), upper=False)
    assert node_cost(node).flops == triangular_solve_flops(6, 5, count=3)


def test_products_move_their_operands_and_their_result() -> None:
    node = run(aten.mm.default, zeros(3, 5), zeros(5, 7))
    assert node_cost(node).memory_bytes == gemm_bytes(3, 5, 7, 4)


@pytest.mark.parametrize(
    ("node", "memory_bytes"),
    [
        (run(aten.add.Tensor, zeros(6, 4), zeros(4)), 4 * (24 + 4 + 24)),
        (run(aten.silu.default, zeros(6, 4, dtype=torch.bfloat16)), 2 * 48),
        (run(aten.view.default, zeros(6, 4), [24]), 0),
        (run(aten.expand.default, zeros(6, 1), [6, 4]), 0),
        (run(aten.sum.dim_IntList, zeros(6, 4), [1]), 4 * (24 + 6)),
        (run(aten._to_copy.default, zeros(6, 4), dtype=torch.bfloat16), 24 * 4 + 24 * 2),
        # Only indexed rows are read: 3 rows of 4 values and 3 ids are read, and the rows are written.
        (run(aten.index.Tensor, zeros(100, 4), [zeros(3, dtype=torch.int64)]), 4 * 12 + 4 * 12 + 8 * 3),
        (run(aten.embedding.default, zeros(100, 4), zeros(3, dtype=torch.int64)), 4 * 12 + 4 * 12 + 8 * 3),
        (run(aten.topk.default, zeros(6, 4), 2), 4 * 24 + 12 * (4 + 8)),
        (run(aten.zeros.default, [6, 4], device="meta"), 4 * 24),
        # Expanded tensors are in memory once.
        (run(aten.mul.Tensor, zeros(6, 1).expand(6, 4), zeros(6, 4)), 4 * (6 + 24 + 24)),
    ],
    ids=lambda value: str(value.target) if isinstance(value, Node) else "",
)  # fmt: skip
def test_elementwise_work_costs_its_traffic(node: Node, memory_bytes: int) -> None:
    assert node_cost(node) == OpCost(0, memory_bytes)


def test_collectives() -> None:
    c10d = torch.ops._c10d_functional
    rows = zeros(8, 16)
    gathered = call(c10d.all_gather_into_tensor.default, rows, 4, "0", value=zeros(32, 16))
    assert node_cost(gathered).communication_bytes == 2 * 3 / 4 * 32 * 16 * 4
    reduced = call(c10d.reduce_scatter_tensor.default, rows, "sum", 4, "0", value=zeros(2, 16))
    assert node_cost(reduced).communication_bytes == 2 * 3 / 4 * 8 * 16 * 4
    summed = call(c10d.all_reduce.default, rows, "sum", "0", value=rows)
    assert node_cost(summed, {"0": 4}).communication_bytes == 4 * 3 / 4 * 8 * 16 * 4
    assert node_cost(summed).communication_bytes == 4 * 8 * 16 * 4
    exchanged = call(c10d.all_to_all_single.default, rows, [2] * 4, [2] * 4, "0", value=rows)
    assert node_cost(exchanged, {"0": 4}).communication_bytes == 2 * 3 / 4 * 8 * 16 * 4
    assert node_cost(call(c10d.wait_tensor.default, rows, value=rows)) == OpCost()


@pytest.fixture
def foreign() -> Any:
    library = torch.library.Library("moepass_cost_test", "DEF")
    library.define("secret_product(Tensor x, Tensor y) -> Tensor")
    yield torch.ops.moepass_cost_test.secret_product.default
    library._destroy()


def test_unknown_operators_are_listed_and_count_with_their_traffic(foreign: Any) -> None:
    cost = node_cost(call(foreign, zeros(3, 5), zeros(5, 7), value=zeros(3, 7)))
    assert cost == OpCost(0, 4 * (15 + 35 + 21), is_known=False)


def test_products_are_never_taken_for_elementwise_work() -> None:
    """Every ATen operator that multiplies matrices in an inference graph has its own cost."""
    words = ("mm", "matmul", "bmm", "conv", "attention", "linear", "einsum", "lstm", "gru", "rnn", "dot", "mv", "fft")
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace != "aten" or "backward" in name:
            continue
        base, _, overload = operator.partition(".")
        if any(word in base.split("_") or base.endswith(word) for word in words):
            target = getattr(getattr(aten, base), overload or "default", None)
            assert target is None or not is_elementwise(target), name


def test_an_operator_has_one_cost() -> None:
    with pytest.raises(ValueError, match=r"aten.mm.default already has a cost"):
        op_cost(aten.mm.default)(lambda call: OpCost())


def test_costs_are_expressions_in_the_graphs_own_symbols() -> None:
    weight, up = torch.randn(16, 16), torch.randn(16, 64)

    def model(x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = (x @ weight).view(batch, length, 2, 8).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return torch.relu(mixed.transpose(1, 2).reshape(batch, length, 16) @ up)

    x = torch.randn(3, 10, 16)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    graph = capture(model, x).module.graph
    cost = graph_cost(graph)
    symbols = {str(size.node.expr): size.node.hint for node in graph.nodes if node.op == "placeholder"
               for size in getattr(node.meta["val"], "shape", ()) if isinstance(size, torch.SymInt)}  # fmt: skip
    assert {symbol.name for symbol in cost.flops.free_symbols} == set(symbols)
    for batch, length in ((3, 10), (7, 33)):
        sizes = {name: batch if hint == 3 else length for name, hint in symbols.items()}
        tokens = batch * length
        expected = 2 * tokens * (16 * 16 + 16 * 64) + batch * score_flops(length * (length + 1) // 2, 2, 8, 8)
        assert cost.flops.subs({symbol: sizes[symbol.name] for symbol in cost.flops.free_symbols}) == expected
