"""Walks over a graph, from nodes to their inputs or to their users."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from torch.fx import Node

from moepass.passes.ops.traits import Trait, has_trait, is_view

T = TypeVar("T", bound=Hashable)
Predicate = Callable[[Node], bool]


def walk(
    starts: Iterable[T],
    neighbours: Callable[[T], Iterable[T]],
    follow: Callable[[T], bool] | None = None,
    most: float = float("inf"),
) -> Iterator[T]:
    """Yield `starts` and everything that `neighbours` reaches from them, each once, nearest first.

    The walk meets only neighbours for which `follow` is True, and at most `most` nodes. It calls `neighbours`
    of a node after it has yielded the node.
    """
    seen = dict.fromkeys(starts)
    pending = deque(seen)
    while pending:
        node = pending.popleft()
        yield node
        for neighbour in neighbours(node):
            if neighbour not in seen and len(seen) < most and (follow is None or follow(neighbour)):
                seen[neighbour] = None
                pending.append(neighbour)


def ancestors(
    *starts: Node, follow: Predicate | None = None, stop: Predicate | None = None, most: float = float("inf")
) -> Iterator[Node]:
    """Yield `starts`, their inputs, the inputs of those, and so on, each once, nearest first.

    The walk meets only nodes for which `follow` is True, and at most `most` nodes. It yields nodes for which `stop` is
    True, but does not go beyond them.
    """
    return walk(starts, lambda node: () if stop is not None and stop(node) else node.all_input_nodes, follow, most)


def descendants(
    *starts: Node, follow: Predicate | None = None, stop: Predicate | None = None, most: float = float("inf")
) -> Iterator[Node]:
    """Yield `starts`, their users, the users of those, and so on, as `ancestors` does for inputs."""
    return walk(starts, lambda node: () if stop is not None and stop(node) else node.users, follow, most)


def first_inputs(node: Node, passes: Predicate) -> Iterator[Node]:
    """Yield `node`, its first input, the first input of that, .., up to the first node for which `passes` is False."""
    yield node
    while node.all_input_nodes and passes(node):
        node = node.all_input_nodes[0]
        yield node


def origin(node: Node, *traits: Trait, passes: Predicate | None = None) -> Node:
    """Return the first of `node`, its first input, .. that has none of `traits`, or for which `passes` is False."""
    for source in first_inputs(node, passes or (lambda step: has_trait(step, *traits))):
        node = source
    return node


def view_source(node: Node) -> Node:
    """Return the node whose memory `node` views; `node` itself if it is not a view."""
    return origin(node, passes=is_view)


def readers(node: Node) -> Iterator[Node]:
    """Yield every node that reads `node`'s memory, directly or through views, in no fixed order; views included."""
    return (
        reader
        for reader in descendants(node, stop=lambda user: user is not node and not is_view(user))
        if reader is not node
    )
