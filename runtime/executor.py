"""Run a plan: the top-level graph itself, its slot operations bound to a ring."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from moepass.models.errors import InputError, MoepassError
from moepass.passes.graph import copy_graph_module, is_call
from moepass.passes.ir import SLOT_OPS, Plan, acquire, prefetch, release
from moepass.runtime.copying import CopyError
from moepass.runtime.ring import Ring


class SegmentError(MoepassError, RuntimeError):
    """An exception inside a segment; the text says in which layers, the cause is the original exception."""


class RingOperation(torch.nn.Module):
    """A slot operation in the bound graph.

    It knows its ring weakly: Dynamo keeps compiled code after the model is gone, and slots must not stay with it.
    """

    def __init__(self, ring: Ring, plan: Plan) -> None:
        super().__init__()
        self.weak_ring, self.banks = weakref.ref(ring), {spec.index: spec for spec in plan.banks}

    @property
    def ring(self) -> Ring:
        return alive(self.weak_ring)


class Prefetch(RingOperation):
    def forward(self, shards: Sequence[torch.Tensor], bank: int, slot: int, after: object) -> object:
        return self.ring.prefetch(shards, self.banks[bank], slot, after)


class Acquire(RingOperation):
    def forward(self, filled: object, bank: int, slot: int) -> tuple[torch.Tensor, ...]:
        return self.ring.acquire(filled, self.banks[bank], slot)


class Release(RingOperation):
    def forward(self, tensors: object, bank: int, slot: int, last: bool) -> object:
        return self.ring.release(slot, last)


class Located(torch.nn.Module):
    """A segment at one place of the graph: an exception in it names that place."""

    def __init__(self, segment: torch.nn.Module, name: str, layers: str) -> None:
        super().__init__()
        self.segment = segment
        self.name = name
        self.layers = layers

    def forward(self, *inputs: Any) -> Any:
        try:
            return self.segment(*inputs)
        except Exception as error:
            place = f" ({self.layers})" if self.layers else ""
            raise SegmentError(f"in {self.name}{place}: {type(error).__name__}: {error}") from error


def alive(ring: weakref.ref[Ring]) -> Ring:
    """Raises InputError where the ring went away together with its model."""
    found = ring()
    if found is None:
        raise InputError("the model of this compiled graph is gone, and the ring of its experts with it")
    return found


_executor_numbers = itertools.count()
_BINDINGS: dict[Any, type[RingOperation]] = {prefetch: Prefetch, acquire: Acquire, release: Release}


class Executor:
    """A compiled graph: call it with the graph's inputs as a list (boxed).

    `graph_module` is the schedule as straight-line Python: print it with `print_readable()`, or run it. Runs that share
    a ring take turns, so threads may call one executor, or several of one model, at the same time.
    """

    _boxed_call = True

    def __init__(self, top: GraphModule, plan: Plan, ring: Ring | None) -> None:
        self.plan = plan
        self._number = next(_executor_numbers)
        self._ring = None if ring is None else weakref.ref(ring)
        self.graph_module = bind(top, plan, ring)

    @property
    def ring(self) -> Ring | None:
        """The ring, which belongs to the model; None where nothing is streamed. Raises InputError once it is gone."""
        return None if self._ring is None else alive(self._ring)

    def __call__(self, inputs: list[Any]) -> Any:
        arguments = tuple(inputs)
        inputs.clear()  # the boxed convention: the caller's references end here
        ring = self.ring
        if ring is None:
            return self.graph_module(*arguments)
        with ring.lock:
            try:
                ring.begin_run(self._number, self.plan.slots)
                return self.graph_module(*arguments)
            except BaseException:
                ring.reset()
                raise


def bind(top: GraphModule, plan: Plan, ring: Ring | None) -> GraphModule:
    """Replace the slot operations of `top` by calls of `ring`, and give every segment call its place in the model."""
    bound = copy_graph_module(top)
    for target, binding in _BINDINGS.items():
        if any(is_call(node, target) for node in bound.graph.nodes):
            assert ring is not None, "a graph with slot operations needs a ring"
            bound.add_module(target.__name__, binding(ring, plan))
    last_releases = {node.kwargs["slot"]: node for node in bound.graph.nodes if is_call(node, release)}
    for position, node in enumerate(list(bound.graph.nodes)):
        if is_call(node, release):
            node.kwargs = {**node.kwargs, "last": last_releases[node.kwargs["slot"]] is node}
        if is_call(node, *SLOT_OPS):
            node.op, node.target = "call_module", node.target.__name__
        elif node.op == "call_module":
            layers = str(node.meta.get("moepass_layers", ""))
            located = f"{node.target}_at_{position}"
            bound.add_module(located, Located(bound.get_submodule(node.target), node.target, layers))
            node.target = located
    bound.graph.lint()
    bound.recompile()
    return bound


__all__ = ["CopyError", "Executor", "SegmentError", "bind"]
