"""Run a plan: the top-level graph itself, its slot operations bound to a ring."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef

from moepass.models.errors import InputError, MoepassError
from moepass.passes.blocks.detect import bank_arguments
from moepass.passes.graph.nodes import copy_graph_module, graph_inputs, is_call
from moepass.passes.ir.plan import BANK_TENSOR, SLOT_OPS, BankSpec, Plan, Refusal, acquire, prefetch, release
from moepass.passes.ir.timeline import COMPUTE, HOST
from moepass.runtime.banks.banks import BankStore, find_bank, find_store
from moepass.runtime.execute.dispatching import CapturedFallback, Dispatcher, FormStatistics
from moepass.runtime.system.forking import renew_after_fork
from moepass.runtime.system.tensor_memory import Memory, memory_of
from moepass.runtime.transfer.copying import CopyError
from moepass.runtime.transfer.recording import current_recording
from moepass.runtime.transfer.ring import Ring

logger = logging.getLogger("moepass")


class SegmentError(MoepassError, RuntimeError):
    """An exception inside a segment; the text says in which layers, the cause is the original exception."""


class RingOperation(torch.nn.Module):
    """A slot operation in the bound graph.

    It knows its ring weakly: Dynamo keeps compiled code after the model is gone, and slots must not stay with it.
    """

    def __init__(self, ring: Ring, banks: Mapping[int, BankSpec]) -> None:
        super().__init__()
        self.weak_ring, self.banks = weakref.ref(ring), dict(banks)

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


class ReadTensor(torch.nn.Module):
    """A bank tensor that no block claims, of a bank of which the graph's input is only this rank's part."""

    def __init__(self, store: BankStore) -> None:
        super().__init__()
        self.weak_store = weakref.ref(store)

    def forward(self, shard: torch.Tensor, store: int, bank: int, bank_name: str, index: int, *_: Any) -> torch.Tensor:
        known = find_bank(shard)
        if known is not None:
            return known[0].read_tensor(known[1], index)
        return alive(self.weak_store).read_tensor(bank, index)


class SegmentCall(torch.nn.Module):
    """A segment at one place of the graph: an exception in it names that place."""

    def __init__(self, segment: Callable[..., Any], name: str, layers: str) -> None:
        super().__init__()
        self.segment = segment
        self.name = name
        self.layers = layers

    def forward(self, *inputs: Any) -> Any:
        recording = current_recording()
        if recording is None:
            return self._run(inputs)
        device = device_of(inputs)
        started = recording.now(device)
        outputs = self._run(inputs)
        label = f"{self.name}: {self.layers}" if self.layers else self.name
        recording.add("segment", label, COMPUTE, started, recording.now(device))
        return outputs

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        try:
            return self.segment(*inputs)
        except Exception as error:
            place = f" ({self.layers})" if self.layers else ""
            raise SegmentError(f"in {self.name}{place}: {type(error).__name__}: {error}", name=self.name) from error


_T = TypeVar("_T", Ring, BankStore)


def alive(owned: weakref.ref[_T]) -> _T:
    """Raises InputError where the ring or the banks went away together with their model."""
    found = owned()
    if found is None:
        raise InputError("the model of this compiled graph is gone, and the ring of its experts with it")
    return found


# Takes the banks of a graph and this rank's tensors of each; gives their ring, and the banks as that ring knows them.
Adopt = Callable[[Sequence[BankSpec], Sequence[Sequence[torch.Tensor]]], tuple[Ring, list[BankSpec]]]

_executor_numbers = itertools.count()
_BINDINGS: dict[Any, type[RingOperation]] = {prefetch: Prefetch, acquire: Acquire, release: Release}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The graph, bound to a ring and to banks; None where nothing is streamed."""

    graph_module: GraphModule
    ring: weakref.ref[Ring] | None

    @property
    def is_alive(self) -> bool:
        return self.ring is None or self.ring() is not None


@dataclasses.dataclass(frozen=True)
class AdoptedSchedule:
    """The schedule for banks that are parameters, and the storages of these, which keep their addresses unique."""

    schedule: Schedule
    storages: tuple[StorageWeakRef, ...]

    @property
    def is_alive(self) -> bool:
        return self.schedule.is_alive and not any(storage.expired() for storage in self.storages)


# The banks of a run: for each bank of the plan the number of its store, and its index there.
Banks = tuple[tuple[int, int], ...]


class Executor:
    """A compiled graph: call it with the graph's inputs as a list (boxed).

    `graph_module` is the schedule as straight-line Python: print it with `print_readable()`, or run it. Runs that share
    a ring take turns, so threads may call one executor, or several of one model, at the same time.

    One executor serves all layers and models that are alike, each with the ring of its own model: whose banks a run
    reads is told by the shards among its inputs. `graph_module` and `ring` are those that it was compiled for, or those
    of its first run where banks are parameters of the graph.

    Where the plan has a dispatch, all ranks agree at the beginning of each run whether it follows the schedule at all;
    `forms` counts what came of that, and is None elsewhere.
    """

    _boxed_call = True

    def __init__(
        self,
        top: GraphModule,
        plan: Plan,
        ring: Ring | None,
        adopt: Adopt | None = None,
        dispatcher: Dispatcher | None = None,
        fallback: CapturedFallback | None = None,
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Where banks are this rank's parameters, `adopt` completes them when they come first, and has their ring.

        `dispatcher` and `fallback` run what does not follow the schedule, because ranks agreed on it or have different
        tokens; only for such banks, which they read as they are. `checks` come before each run, and raise where it must
        not be.
        """
        self.plan = plan
        self._gathers = plan.gathers()
        self._number = next(_executor_numbers)
        self._lock = threading.Lock()
        self._adopt = adopt
        self._dispatcher = dispatcher
        self._exchanged = (
            None if dispatcher is None else SegmentCall(dispatcher.run_exchanged, "the captured graph", "")
        )
        self._fallback = fallback
        self._captured = None if fallback is None else SegmentCall(fallback.run, "the captured graph", "")
        self._top = top
        self._checks = tuple(checks)
        self._is_debug = ring is not None and ring.debug
        names = [node.name for node in graph_inputs(top.graph)]
        streamed = {stay.bank: stay.shards[0] for stay in plan.slot_stays if stay.shards and not adopt}
        self._streamed = tuple(streamed)
        self._shards = tuple(names.index(name) for name in streamed.values())
        parts = {stay.bank: tuple(names.index(name) for name in stay.shards) for stay in plan.slot_stays if adopt}
        self._parts = parts
        self._banks = [plan.bank(index) for index in parts]
        bound = top if adopt else bind(top, {spec.index: spec for spec in plan.banks}, ring)
        self._own = Schedule(bound, None if ring is None else weakref.ref(ring))
        self._others: dict[Banks, Schedule] = {}
        self._adopted: dict[tuple[Memory, ...], AdoptedSchedule] = {}
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    @property
    def graph_module(self) -> GraphModule:
        return self._own.graph_module

    @property
    def ring(self) -> Ring | None:
        """The ring, which belongs to the model; None where nothing is streamed. Raises InputError once it is gone."""
        return None if self._own.ring is None else alive(self._own.ring)

    @property
    def forms(self) -> FormStatistics | None:
        return None if self._dispatcher is None else self._dispatcher.statistics

    def __call__(self, inputs: list[Any]) -> Any:
        arguments = tuple(inputs)
        inputs.clear()  # the boxed convention: the caller's references end here
        recording = current_recording()
        if recording is None:
            return self._run(arguments)
        recording.begin_run(device_of(arguments))
        started = time.perf_counter()
        outputs = self._run(arguments)
        recording.add("run", f"graph {self._number}", HOST, started, time.perf_counter())
        return outputs

    def _run(self, arguments: tuple[Any, ...]) -> Any:
        for check in self._checks:
            check()
        if self._dispatcher is not None and self._exchanged is not None:
            banks, parts = self._banks, self._parts_among(arguments)
            if self._dispatcher.is_exchanged(arguments, banks, parts, self._memories(arguments)):
                return self._exchanged(*arguments)
            self._dispatcher.statistics.gathered_runs += 1
        if self._fallback is not None and self._captured is not None:
            reason = self._fallback.reason(arguments, self._parts_among(arguments))
            if reason is not None:
                self._refuse_blocks(reason)
                return self._captured(*arguments)
        schedule = self._schedule_for(arguments) if self._adopt is None else self._adopted_schedule(arguments)
        if schedule.ring is None:
            return schedule.graph_module(*arguments)
        with alive(schedule.ring).run(self._number, self._gathers):
            return schedule.graph_module(*arguments)

    def _refuse_blocks(self, reason: str) -> None:
        """Let the plan say that its blocks run as they came, because of `reason`."""
        blocks = [block for block in self.plan.localised if block.tokens]
        refusals = [
            Refusal("the run", f"{reason}; the graph runs as it was captured", block.name, block.group)
            for block in blocks
        ]
        fresh = tuple(refusal for refusal in refusals if refusal not in self.plan.refusals)
        if fresh:
            self.plan = dataclasses.replace(self.plan, refusals=self.plan.refusals + fresh)
            logger.warning("refused %s: %s", ", ".join(refusal.where for refusal in fresh), fresh[0].reason)

    def _schedule_for(self, arguments: Sequence[Any]) -> Schedule:
        found = [find_bank(arguments[place]) for place in self._shards if place < len(arguments)]
        known = [bank for bank in found if bank is not None]
        if not known or len(known) < len(self._streamed):
            return self._own
        banks = tuple((store.number, index) for store, index in known)
        schedule = self._others.get(banks)
        return schedule if schedule is not None else self._bind_for(banks, known)

    def _bind_for(self, banks: Banks, known: Sequence[tuple[BankStore, int]]) -> Schedule:
        """The schedule for these banks, which come for the first time. Raises InputError where they share no ring."""
        store = known[0][0]
        if any(other is not store for other, _ in known):
            raise InputError(
                "one graph reads the banks of several offload_experts calls; offload the whole model with one call"
            )
        ring = store.ring(self._is_debug)
        ring.reserve(self.plan.slots, 0)
        names = ", ".join(store.banks[index].spec.name for _, index in known)
        specs = {
            planned: dataclasses.replace(self.plan.bank(planned), index=index, name=store.banks[index].spec.name)
            for planned, (_, index) in zip(self._streamed, known, strict=True)
        }
        with self._lock:
            self._others = {key: schedule for key, schedule in self._others.items() if schedule.is_alive}
            if self._own.ring is not None and self._own.ring() is ring and _are_planned(specs):
                self._others[banks] = self._own
            elif banks not in self._others:
                bound = bind(self._top, specs, ring, f"compiled for another layer; here for {names}")
                self._others[banks] = Schedule(bound, weakref.ref(ring))
            return self._others[banks]

    def _adopted_schedule(self, arguments: Sequence[Any]) -> Schedule:
        memories = self._memories(arguments)
        found = self._adopted.get(memories)
        return found.schedule if found is not None and found.schedule.is_alive else self._adopt_for(arguments)

    def _memories(self, arguments: Sequence[Any]) -> tuple[Memory, ...]:
        return tuple(memory_of(arguments[place]) for places in self._parts.values() for place in places)

    def _parts_among(self, arguments: Sequence[Any]) -> list[list[torch.Tensor]]:
        """This rank's tensors of each bank."""
        return [[arguments[place] for place in places] for places in self._parts.values()]

    def _adopt_for(self, arguments: Sequence[Any]) -> Schedule:
        """The schedule for the banks of which these arguments are parts, and which come here for the first time."""
        assert self._adopt is not None
        with self._lock:
            self._adopted = {key: known for key, known in self._adopted.items() if known.is_alive}
            parts = self._parts_among(arguments)
            ring, specs = self._adopt(self._banks, parts)
            if ring is not None:
                ring.reserve(self.plan.slots, 0)
            # The memory of these tensors may be another one now.
            memories = self._memories(arguments)
            if memories not in self._adopted:
                remark = f"here for {', '.join(spec.name for spec in specs)}" if specs else ""
                bound = bind(self._top, dict(zip(self._parts, specs, strict=True)), ring, remark)
                references = tuple(StorageWeakRef(tensor.untyped_storage()) for tensors in parts for tensor in tensors)
                reference = None if ring is None else weakref.ref(ring)
                self._adopted[memories] = AdoptedSchedule(Schedule(bound, reference), references)
            schedule = self._adopted[memories].schedule
            if not self._own.is_alive or self._own.ring is None:
                self._own = schedule
            return schedule


def device_of(values: Sequence[Any]) -> torch.device:
    """Where something that takes `values` computes: the device of the first tensor that is on none but the CPU."""
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _are_planned(specs: Mapping[int, BankSpec]) -> bool:
    return all(planned == spec.index for planned, spec in specs.items())


def bind(top: GraphModule, banks: Mapping[int, BankSpec], ring: Ring | None, remark: str = "") -> GraphModule:
    """Replace the slot operations of `top` by calls of `ring`, and give every segment call its place in the model.

    `banks` are those of the graph, by the index that they have in it. `remark` goes with the place.

    Bank tensors that are still read one by one, from shards of several ranks, become calls of their store.
    """
    bound = copy_graph_module(top)
    for target, binding in _BINDINGS.items():
        if any(is_call(node, target) for node in bound.graph.nodes):
            assert ring is not None, "a graph with slot operations needs a ring"
            bound.add_module(target.__name__, binding(ring, banks))
    last_releases = {node.kwargs["slot"]: node for node in bound.graph.nodes if is_call(node, release)}
    for position, node in enumerate(list(bound.graph.nodes)):
        if is_call(node, release):
            node.kwargs = {**node.kwargs, "last": last_releases[node.kwargs["slot"]] is node}
        if is_call(node, *SLOT_OPS):
            node.op, node.target = "call_module", node.target.__name__
        elif is_call(node, BANK_TENSOR) and bank_arguments(node).expert_bounds:
            name = f"read_bank_tensor_at_{position}"
            bound.add_module(name, ReadTensor(find_store(bank_arguments(node).store)))
            node.op, node.target = "call_module", name
        elif node.op == "call_module":
            layers = "; ".join(filter(None, (str(node.meta.get("moepass_layers", "")), remark)))
            located = f"{node.target}_at_{position}"
            bound.add_module(located, SegmentCall(bound.get_submodule(node.target), node.target, layers))
            node.target = located
    bound.graph.lint()
    bound.recompile()
    return bound


__all__ = ["CopyError", "Executor", "SegmentError", "bind"]
