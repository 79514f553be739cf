"""Walks yield each node once, respect `follow` and `stop`, and end at their bound."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from torch.fx import Graph, Node

from moepass.passes.ops.traits import Trait
from moepass.passes.ops.walk import ancestors, descendants, first_inputs, origin, readers

aten = torch.ops.aten


def _random_graph(seed: int) -> list[Node]:
    """Return the nodes of a graph in which each of 40 sums reads two earlier nodes."""
    rng, graph = random.Random(seed), Graph()
    nodes = [graph.placeholder("start")]
    for _ in range(40):
        nodes.append(graph.call_function(operator.add, tuple(rng.choices(nodes, k=2))))
    return nodes


@pytest.mark.parametrize("seed", range(5))
def test_each_node_comes_once_and_after_a_node_that_leads_to_it(seed: int) -> None:
    nodes = _random_graph(seed)
    walked = list(ancestors(nodes[-1], nodes[-2]))
    assert len(walked) == len(set(walked))
    assert set(walked) == {nodes[-1], nodes[-2]} | {used for node in walked for used in node.all_input_nodes}
    for position, node in enumerate(walked[2:], 2):
        assert any(node in earlier.all_input_nodes for earlier in walked[:position])


@pytest.mark.parametrize("seed", range(5))
def test_descendants_and_ancestors_are_inverse(seed: int) -> None:
    nodes = _random_graph(seed)
    for node in nodes:
        assert all(node in ancestors(later) for later in descendants(node))


@pytest.mark.parametrize("seed", range(5))
def test_follow_and_stop(seed: int) -> None:
    nodes = _random_graph(seed)
    followed, stopped = set(nodes[10:]), set(nodes[20:25])
    walked = list(ancestors(nodes[-1], follow=followed.__contains__, stop=stopped.__contains__))
    assert set(walked) <= followed
    beyond = {nodes[-1]} | {used for node in walked if node not in stopped for used in node.all_input_nodes}
    assert set(walked) == beyond & followed


def test_a_start_is_yielded_whether_or_not_it_is_followed() -> None:
    nodes = _random_graph(0)
    assert list(ancestors(nodes[-1], follow=lambda _: False)) == [nodes[-1]]
    assert list(ancestors(nodes[-1], stop=lambda _: True)) == [nodes[-1]]


def test_a_walk_ends_when_it_has_met_enough_nodes() -> None:
    nodes = _random_graph(0)
    assert list(ancestors(nodes[-1], most=10)) == list(ancestors(nodes[-1]))[:10]
    assert len(list(ancestors(nodes[-1]))) > 10


def test_neighbours_are_asked_for_after_a_node_was_yielded() -> None:
    nodes = _random_graph(0)
    blocked: set[Node] = set()
    for node in ancestors(nodes[-1], stop=blocked.__contains__):
        blocked.add(node)
        assert node is nodes[-1]


def test_sources_and_origin_follow_first_inputs() -> None:
    graph = Graph()
    rows, other = graph.placeholder("rows"), graph.placeholder("other")
    cast = graph.call_function(aten._to_copy.default, (rows,), {"dtype": torch.float64})
    copy = graph.call_function(aten.clone.default, (cast,))
    summed = graph.call_function(aten.add.Tensor, (copy, other))
    view = graph.call_function(aten.view.default, (summed, [2, 3]))
    assert list(first_inputs(view, lambda node: node is not copy)) == [view, summed, copy]
    assert list(first_inputs(view, lambda _: True))[-1] is rows
    assert origin(copy, Trait.COPY) is cast
    assert origin(copy, Trait.COPY, Trait.CAST) is rows
    assert origin(summed, Trait.COPY) is summed


def test_readers_read_through_views() -> None:
    graph = Graph()
    rows = graph.placeholder("rows")
    view = graph.call_function(aten.view.default, (rows, [2, 3]))
    through = graph.call_function(aten.neg.default, (view,))
    direct = graph.call_function(aten.exp.default, (rows,))
    graph.call_function(aten.neg.default, (direct,))
    assert set(readers(rows)) == {view, through, direct}
