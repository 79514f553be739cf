"""A graph that is serialised and read again computes the same; unsupported contents are refused by name."""

from __future__ import annotations

import operator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule

from moepass.passes.graph.graph_records import NodeRecord, NotStorableError, read_graph, record_graph
from moepass.passes.ir.slot_operations import SLOT_OPS

aten = torch.ops.aten

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.strided, torch.contiguous_format, torch.device("cuda", 1)]),
    st.builds(slice, st.none() | st.integers(0, 9), st.integers(0, 9)),
)
ARGUMENTS = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=2) | st.tuples(inner, inner), max_leaves=4)


def _through_bytes(graph: Graph) -> tuple[NodeRecord, ...]:
    return msgspec.json.decode(msgspec.json.encode(record_graph(graph)), type=tuple[NodeRecord, ...])


@given(value=ARGUMENTS, named=ARGUMENTS)
def test_arguments_come_back_as_they_were(value: Any, named: Any) -> None:
    graph = Graph()
    node = graph.call_function(aten.add.Tensor, (graph.placeholder("rows"), value), {"alpha": named})
    graph.output((node,))
    fresh = list(read_graph(_through_bytes(graph), {}).graph.nodes)[1]
    assert repr(fresh.args[1]) == repr(node.args[1])  # 1, 1.0 and True are equal, but have different representations
    assert repr(fresh.kwargs) == repr(node.kwargs)


def test_a_read_graph_computes_the_same() -> None:
    graph = Graph()
    rows, size = graph.placeholder("rows"), graph.placeholder("size")
    wide = graph.call_function(operator.add, (size, 1))
    split = graph.call_function(aten.split.Tensor, (rows, size), {})
    half = graph.call_function(operator.getitem, (split, 0))
    layer = graph.call_module("layer", (half,))
    layer.meta["moepass_layers"] = "model.layers.3"
    graph.output((graph.call_function(aten.view.default, (layer, [wide, -1])),))
    modules = {"layer": torch.nn.Hardtanh(0.0, 5.0)}
    fresh = read_graph(_through_bytes(graph), modules)
    given_rows = torch.arange(12.0).view(4, 3)
    (expected,), (output,) = GraphModule(modules, graph)(given_rows, 2), fresh(given_rows, 2)
    assert torch.equal(expected, output)
    assert [node.name for node in fresh.graph.nodes] == [node.name for node in graph.nodes]
    assert [node.meta.get("moepass_layers") for node in fresh.graph.nodes if node.op == "call_module"] == [
        "model.layers.3"
    ]


@pytest.mark.parametrize("function", SLOT_OPS)
def test_slot_operations_come_back(function: Any) -> None:
    graph = Graph()
    graph.output((graph.call_function(function, (), {"bank": 0, "slot": 1}),))
    assert next(iter(read_graph(_through_bytes(graph), {}).graph.nodes)).target is function


@pytest.mark.parametrize(
    ("target", "argument", "reason"),
    [
        (print, 1, "print"),
        (aten.add.Tensor, object(), "type object"),
        (aten.add.Tensor, torch.ones(1), "type Tensor"),
        (aten.add.Tensor, 1j, "type complex"),
    ],
)
def test_unsupported_graph_contents_are_refused(target: Any, argument: Any, reason: str) -> None:
    graph = Graph()
    node = graph.call_function(target, (graph.placeholder("rows"),))
    node._args = (*node.args, argument)  # FX itself refuses some of these
    graph.output((node,))
    with pytest.raises(NotStorableError, match=reason):
        record_graph(graph)


def test_constants_are_refused() -> None:
    graph = Graph()
    graph.output((graph.get_attr("table"),))
    with pytest.raises(NotStorableError, match="constant table"):
        record_graph(graph)


@pytest.mark.parametrize(
    "record",
    [
        NodeRecord("call_function", "a", "os.system", ["true"], {}),
        NodeRecord("call_function", "a", "torch.ops.aten.missing.default", [], {}),
        NodeRecord("call_function", "a", "torch.ops.aten.add", [], {}),
        NodeRecord("call_function", "a", "torch.ops.aten.__class__.default", [], {}),
        NodeRecord("call_function", "a", "torch.load", [], {}),
        NodeRecord("call_method", "a", "numpy", [], {}),
        NodeRecord("get_attr", "a", "__dict__", [], {}),
        NodeRecord("call_function", "a", "operator.add", [{"node": "later"}], {}),
        NodeRecord("call_function", "a", "operator.add", [{"dtype": "load"}], {}),
    ],
)
def test_records_name_operators_and_nothing_else(record: NodeRecord) -> None:
    with pytest.raises(ValueError, match=r"os\.system|operator|kind|read before|constant"):
        read_graph((record, NodeRecord("output", "output", "output", [{"tuple": [{"node": "a"}]}], {})), {})
