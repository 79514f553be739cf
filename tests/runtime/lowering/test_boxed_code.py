"""A graph that is called with a list returns its own results, and no value outlives its last reader."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from moepass.runtime.lowering.boxed_code import TakesList, run_by_list


class _LastReader(TakesList):
    """Adds up its inputs, and records which of the watched tensors are alive after it has dropped them."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[bool] = []

    def run_list(self, inputs: list[Any]) -> Any:
        total = sum(inputs[1:], inputs[0] + 0)
        inputs.clear()
        self.alive = [watched() is not None for watched in self.watched]
        return total


class _Watcher(nn.Module):
    """Returns a tensor that its reader watches."""

    def __init__(self, reader: _LastReader) -> None:
        super().__init__()
        self.reader = [reader]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = value * 2
        self.reader[0].watched.append(weakref.ref(made))
        return made


def _graph(reader: _LastReader, read_later: bool) -> GraphModule:
    graph = Graph()
    value = graph.placeholder("value")
    made = graph.call_module("make", (value,))
    first = graph.call_module("reader", (made, value))
    graph.output((graph.call_function(operator.add, (first, made)) if read_later else first,))
    root = nn.Module()
    root.reader, root.make = reader, _Watcher(reader)
    return GraphModule(root, graph)


@pytest.mark.parametrize("read_later", [False, True])
def test_a_value_dies_before_its_last_reader_returns(read_later: bool) -> None:
    reader = _LastReader()
    run = run_by_list(_graph(reader, read_later))
    inputs = [torch.ones(3)]
    reader.watched.append(weakref.ref(inputs[0]))
    (result,) = run(inputs)
    assert inputs == []
    assert reader.alive == [False, read_later]
    assert torch.equal(result, torch.full((3,), 5.0 if read_later else 3.0))


def test_a_value_that_nobody_reads_dies_at_once() -> None:
    reader = _LastReader()
    graph = Graph()
    value, unread = graph.placeholder("value"), graph.placeholder("unread")
    graph.call_module("make", (value,))
    graph.output((graph.call_module("reader", (value,)),))
    root = nn.Module()
    root.reader, root.make = reader, _Watcher(reader)
    assert not unread.users
    run = run_by_list(GraphModule(root, graph))
    inputs = [torch.ones(3), torch.zeros(3)]
    reader.watched.append(weakref.ref(inputs[1]))
    run(inputs)
    assert reader.alive == [False, False]


def test_nested_arguments_constants_and_methods_are_those_of_the_graph() -> None:
    graph = Graph()
    # Names of the function that runs the graph.
    inputs, values, arguments_node = (graph.placeholder(name) for name in ("inputs", "values", "given"))
    constant = graph.get_attr("inner.constant")
    joined = graph.call_function(torch.cat, ([inputs, values, constant],), {"dim": 0})
    sliced = graph.call_function(
        lambda tensor, index, options: tensor[index] * options["by"],
        (joined, (slice(1, arguments_node), slice(None)), {"by": constant}),
    )
    bounded = graph.call_method("clamp", (sliced,), {"max": float("inf"), "min": -1.5})
    graph.output((bounded, [joined, arguments_node], {"kept": constant}))
    root = nn.Module()
    root.inner = nn.Module()
    root.inner.register_buffer("constant", torch.full((1, 2), 3.0))
    module = GraphModule(root, graph)
    arguments = [torch.randn(2, 2), torch.randn(3, 2), 5]
    expected = module(*arguments)
    result = run_by_list(module)(list(arguments))
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1][0], expected[1][0])
    assert result[1][1] == 5
    assert result[2]["kept"] is root.inner.constant


def test_nodes_run_in_the_graphs_order() -> None:
    graph = Graph()
    value = graph.placeholder("value")
    order: list[str] = []
    for name in ("second", "first", "third"):
        graph.call_function(lambda _, name: order.append(name), (value, name))
    graph.output(value)
    assert run_by_list(GraphModule(nn.Module(), graph))([7]) == 7
    assert order == ["second", "first", "third"]


def test_a_list_of_another_length_is_an_error() -> None:
    graph = Graph()
    graph.output(graph.placeholder("value"))
    with pytest.raises(ValueError, match=r"shorter|longer"):
        run_by_list(GraphModule(nn.Module(), graph))([1, 2])
