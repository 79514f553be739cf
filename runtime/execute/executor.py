"""Run a plan: the top-level graph itself, its slot operations bound to a ring."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from moepass.models.errors import InputError, MoepassError
from moepass.models.homes import home_named
from moepass.passes.blocks.detect import bank_arguments
from moepass.passes.graph.input_sizes import read_sizes, size_sources
from moepass.passes.graph.nodes import copy_graph_module, graph_inputs, is_call
from moepass.passes.graph.source_lines import INPUT_NAME_KEY
from moepass.passes.ir.plan import BankSpec, Plan, Refusal
from moepass.passes.ir.segment import NotRecorded, with_refused_recording
from moepass.passes.ir.slot_operations import BANK_TENSOR, EXPERT_STACK, SLOT_OPS, acquire, decode, prefetch, release
from moepass.passes.ir.timeline import COMPUTE, HOST
from moepass.runtime.banks.banks import find_bank
from moepass.runtime.banks.identity import MemoryTable, memories_of
from moepass.runtime.banks.stacked_parameters import StackedParameters
from moepass.runtime.cuda_graphs.segment_graphs import SegmentGraphs
from moepass.runtime.execute.dispatching import CapturedFallback, Dispatcher, FormStatistics
from moepass.runtime.execute.run_clock import MeasuredRuns, RunClock
from moepass.runtime.lowering.boxed_code import TakesList, run_by_list
from moepass.runtime.lowering.chosen_chunk import chosen_chunk
from moepass.runtime.system.forking import OwnerProcess
from moepass.runtime.system.tensor_memory import Memory
from moepass.runtime.transfer.copying import CopyError
from moepass.runtime.transfer.recording import current_recording
from moepass.runtime.transfer.ring import BankTensor, Ring

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


class Decode(RingOperation):
    def forward(self, copied: object, bank: int, slot: int) -> object:
        return self.ring.decode(copied, self.banks[bank], slot)


class Acquire(RingOperation):
    def forward(self, filled: object, bank: int, slot: int) -> tuple[BankTensor, ...]:
        return self.ring.acquire(filled, self.banks[bank], slot)


class Release(RingOperation):
    def forward(self, tensors: object, bank: int, slot: int, last: bool) -> object:
        return self.ring.release(slot, last)


class ReadTensor(torch.nn.Module):
    """A bank tensor that no block claims, of a bank that the graph's input is not: it is a part, or encoded."""

    def __init__(self, bank: BankSpec) -> None:
        super().__init__()
        self.bank = bank

    def forward(self, shard: torch.Tensor, store: int, bank: int, bank_name: str, index: int, *_: Any) -> torch.Tensor:
        match = find_bank(self.bank, [shard])
        if match is None:
            raise InputError(_GONE)
        owner, spec = match
        return owner.read_tensor(spec, [shard], index)


class SegmentCall(TakesList):
    """A segment at one place of the graph: an exception in it names that place."""

    def __init__(self, segment: Callable[..., Any], name: str, layers: str) -> None:
        super().__init__()
        self.segment = segment
        self.name = name
        self.layers = layers

    def forward(self, *inputs: Any) -> Any:
        return self.run_list(list(inputs))

    def run_list(self, inputs: list[Any]) -> Any:
        recording = current_recording()
        if recording is None:
            return self._run(inputs)
        device = device_of(inputs)
        started = recording.now(device)
        outputs = self._run(inputs)
        label = f"{self.name}: {self.layers}" if self.layers else self.name
        recording.add("segment", label, COMPUTE, started, recording.now(device))
        return outputs

    def _run(self, inputs: list[Any]) -> Any:
        try:
            if isinstance(self.segment, TakesList):
                return self.segment.run_list(inputs)
            return self.segment(*inputs)
        except Exception as error:
            place = f" ({self.layers})" if self.layers else ""
            raise SegmentError(f"in {self.name}{place}: {type(error).__name__}: {error}", name=self.name) from error


_GONE = "the model of this compiled graph is gone, and the ring of its experts with it"


def alive(ring: weakref.ref[Ring]) -> Ring:
    """Raises InputError where the ring went away together with its model."""
    found = ring()
    if found is None:
        raise InputError(_GONE)
    return found


# Takes the banks of a graph and this rank's tensors of each, and lets `find_bank` know them.
Adopt = Callable[[Sequence[BankSpec], Sequence[Sequence[torch.Tensor]]], None]

_executor_numbers = itertools.count()
_BINDINGS: dict[Any, type[RingOperation]] = {
    prefetch: Prefetch, decode: Decode, acquire: Acquire, release: Release,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The graph, bound to a ring and to banks. `ring` is None if the graph streams nothing."""

    graph_module: GraphModule
    ring: weakref.ref[Ring] | None

    @functools.cached_property
    def run(self) -> Callable[[list[Any]], Any]:
        """The graph as a function of a list of its inputs, which it empties."""
        return run_by_list(self.graph_module)

    @property
    def is_alive(self) -> bool:
        return self.ring is None or self.ring() is not None


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
        debug: bool = False,
        cudagraphs: bool = False,
    ) -> None:
        """Where banks are this rank's parameters, `adopt` completes them when they come first.

        `dispatcher` and `fallback` run what does not follow the schedule, because ranks agreed on it or have different
        tokens; only for such banks, which they read as they are. `checks` come before each run, and raise where it must
        not be. `cudagraphs`: segments become CUDA graphs where shapes repeat, but for those that the plan refuses it.
        """
        self.plan = plan
        # Weakly, because the graphs are part of this executor.
        self.graphs = _segment_graphs(plan, _weakly(self._refuse_recording)) if cudagraphs else None
        self._note_copies = _weakly(self._refuse_stack)
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
        self._clock = RunClock()
        self._sizes = size_sources(top.graph)
        self._device: torch.device | None = None
        # Bytes of the first run's inputs; None before it.
        self.weight_bytes: int | None = None
        self._checks = tuple(checks)
        # Chosen before, by sizes.
        self._chunks: dict[tuple[tuple[str, int], ...], int] = {}
        self._is_debug = debug or (ring is not None and ring.debug)
        names = [node.name for node in graph_inputs(top.graph)]
        self._graph_inputs = len(names)
        streamed = {stay.bank: stay.shards for stay in plan.slot_stays if stay.shards}
        self._banks = [plan.bank(index) for index in streamed]
        # The graph inputs that each bank is read from.
        self._inputs = [[names.index(name) for name in shards] for shards in streamed.values()]
        specs = {spec.index: spec for spec in plan.banks}
        bound = top if adopt else bind(top, specs, ring, graphs=self.graphs, note_copies=self._note_copies)
        self._own = Schedule(bound, None if ring is None else weakref.ref(ring))
        # By the memory of the inputs that banks are read from.
        self._schedules: MemoryTable[Schedule] = MemoryTable()
        self._owner = OwnerProcess()

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
        self._owner.check()
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
            if self._dispatcher.is_exchanged(arguments, self._banks, self._inputs_among(arguments)):
                return self._exchanged(*arguments)
            self._dispatcher.statistics.gathered_runs += 1
        if self._fallback is not None and self._captured is not None:
            reason = self._fallback.reason(arguments, self._inputs_among(arguments))
            if reason is not None:
                self._refuse_blocks(reason)
                return self._captured(*arguments)
        schedule = self._schedule_for(arguments)
        # Guards of captured code let no other device come.
        self._device = device = self._device or device_of(arguments)
        sizes = read_sizes(self._sizes, arguments)
        if self.weight_bytes is None:
            self.weight_bytes = self._count_weight_bytes(arguments)
        if schedule.ring is None:
            with self._clock.run(device, sizes, None):
                return self._call(schedule, arguments, device, sizes, ())
        ring = alive(schedule.ring)
        # The clock inside, so that the runs of other threads do not count.
        with ring.run(self._number, self._gathers), self._clock.run(device, sizes, ring):
            return self._call(schedule, arguments, device, sizes, ring.buffers_of_run)

    def _call(
        self,
        schedule: Schedule,
        arguments: tuple[Any, ...],
        device: torch.device,
        sizes: Mapping[str, int],
        buffers: Sequence[torch.Tensor],
    ) -> Any:
        with chosen_chunk(self._chunk_tokens(sizes)):
            return self._call_with_chunk(schedule, arguments, device, sizes, buffers)

    def _chunk_tokens(self, sizes: Mapping[str, int]) -> int | None:
        """The tokens that this run takes at a time where it chooses, by its sizes."""
        memory = self.plan.activations
        if memory is None or memory.room_bytes is None:
            return None
        key = tuple(sizes.items())
        if key not in self._chunks:
            self._chunks[key], nbytes = memory.chosen_chunk_tokens(sizes, self.plan.sequence_counts(sizes))
            if nbytes > memory.room_bytes:
                logger.warning(
                    "a run with sizes %s holds %.0f bytes of activations in chunks of %d tokens, the smallest there "
                    "are; the memory budget leaves %.0f",
                    dict(sizes),
                    nbytes,
                    self._chunks[key],
                    memory.room_bytes,
                )
        return self._chunks[key]

    def _call_with_chunk(
        self,
        schedule: Schedule,
        arguments: tuple[Any, ...],
        device: torch.device,
        sizes: Mapping[str, int],
        buffers: Sequence[torch.Tensor],
    ) -> Any:
        if self.graphs is None:
            return schedule.run(list(arguments))
        fixed: list[torch.Tensor] = [value for value in arguments if isinstance(value, torch.nn.Parameter)]
        fixed += itertools.chain(*self._inputs_among(arguments), buffers)
        with self.graphs.run(device, sizes, fixed) as run:
            outputs = schedule.run(list(arguments))
            return outputs if run is None else run.own(outputs)

    def _refuse_recording(self, name: str, reason: str) -> None:
        """Note in the plan that segment `name` is not recorded, because of `reason`."""
        segments = with_refused_recording(self.plan.segments, name, NotRecorded("", reason))
        self.plan = dataclasses.replace(self.plan, segments=segments)
        logger.warning("%s runs without a CUDA graph: %s", name, reason)

    def _refuse_stack(self, name: str, reason: str) -> None:
        """Note in the plan that the parameters that `name` puts together are copied in each run."""
        fresh = Refusal(name, reason)
        if fresh not in self.plan.refusals:
            self.plan = dataclasses.replace(self.plan, refusals=(*self.plan.refusals, fresh))

    def measured(self) -> MeasuredRuns:
        """Measurements of the last runs. On CUDA this waits until they are over."""
        return self._clock.measured(self._device or torch.device("cpu"))

    def peak_bytes(self) -> int | None:
        """The most that torch has allocated at once on the device of the last run; None where nobody counts."""
        device = self._device
        return None if device is None or device.type != "cuda" else torch.cuda.max_memory_allocated(device)

    def _count_weight_bytes(self, arguments: Sequence[Any]) -> int:
        """Bytes of the inputs on the device of the run, each memory once, but for banks at rest elsewhere."""
        at_rest = {
            place
            for bank, places in zip(self._banks, self._inputs, strict=True)
            if not home_named(bank.home).keeps_shards_on_device
            for place in places
        }
        held = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for place, value in enumerate(arguments)
            if isinstance(value, torch.Tensor) and value.device == self._device and place not in at_rest
        }
        return sum(held.values())

    def _refuse_blocks(self, reason: str) -> None:
        """Note in the plan that its blocks run unchanged, because of `reason`."""
        blocks = [block for block in self.plan.local_blocks if block.tokens]
        refusals = [
            Refusal("the run", f"{reason}; the graph runs as it was captured", block.name, block.group)
            for block in blocks
        ]
        fresh = tuple(refusal for refusal in refusals if refusal not in self.plan.refusals)
        if fresh:
            self.plan = dataclasses.replace(self.plan, refusals=self.plan.refusals + fresh)
            logger.warning("refused %s: %s", ", ".join(refusal.where for refusal in fresh), fresh[0].reason)

    def _schedule_for(self, arguments: Sequence[Any]) -> Schedule:
        if not self._banks or len(arguments) < self._graph_inputs:
            return self._own  # which says what is missing
        inputs = self._inputs_among(arguments)
        found = self._schedules.find(_memories(inputs))
        return found if found is not None and found.is_alive else self._bind_for(inputs)

    def _inputs_among(self, arguments: Sequence[Any]) -> list[list[torch.Tensor]]:
        """The inputs of each bank."""
        return [[arguments[place] for place in places] for places in self._inputs]

    def _bind_for(self, inputs: Sequence[Sequence[torch.Tensor]]) -> Schedule:
        """The schedule for the banks that are read from `inputs`, and come here for the first time.

        Raises InputError where they share no ring, and what `adopt` raises.
        """
        if self._adopt is not None:
            self._adopt(self._banks, inputs)
        matches = [find_bank(bank, of_bank) for bank, of_bank in zip(self._banks, inputs, strict=True)]
        stored = [match for match in matches if match is not None]
        if len(stored) < len(matches):
            raise InputError(_GONE)
        store = stored[0][0]
        if any(owner is not store for owner, _ in stored):
            raise InputError(
                "one graph reads the banks of several offload_experts calls; offload the whole model with one call"
            )
        ring = store.ring(self._is_debug, self.plan.slot_bytes)
        ring.reserve(self.plan.slots, 0)
        specs = {
            planned.index: dataclasses.replace(planned, index=spec.index, name=spec.name)
            for planned, (_, spec) in zip(self._banks, stored, strict=True)
        }
        with self._lock:
            is_own = self._own.ring is not None and self._own.ring() is ring
            if is_own and list(specs.values()) == self._banks:
                schedule = self._own
            else:
                names = f"here for {', '.join(spec.name for spec in specs.values())}"
                remark = names if self._own.ring is None else f"compiled for another layer; {names}"
                others = {spec.index: spec for spec in self.plan.banks}
                bound = bind(self._top, others | specs, ring, remark, self.graphs, self._note_copies)
                schedule = Schedule(bound, weakref.ref(ring))
            # Adoption may have given the parameters new storage; compute the key again.
            self._schedules.add(_memories(inputs), (tensor for of_bank in inputs for tensor in of_bank), schedule)
            if not self._own.is_alive or self._own.ring is None:
                self._own = schedule
            return schedule


def _memories(inputs: Sequence[Sequence[torch.Tensor]]) -> tuple[Memory, ...]:
    return memories_of(tensor for of_bank in inputs for tensor in of_bank)


def device_of(values: Sequence[Any]) -> torch.device:
    """Where something that takes `values` computes: the device of the first tensor that is on none but the CPU."""
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _weakly(method: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """`method` of an object that its parts are not to keep alive: without it nobody is told."""
    reference = weakref.WeakMethod(method)

    def note(name: str, reason: str) -> None:
        found = reference()
        if found is not None:
            found(name, reason)

    return note


def _segment_graphs(plan: Plan, note: Callable[[str, str], None]) -> SegmentGraphs:
    refused = [segment.name for segment in plan.segments if segment.cuda_graph and segment.cuda_graph.refusal]
    return SegmentGraphs(refused, note)


def bind(
    top: GraphModule,
    banks: Mapping[int, BankSpec],
    ring: Ring | None,
    remark: str = "",
    graphs: SegmentGraphs | None = None,
    note_copies: Callable[[str, str], None] | None = None,
) -> GraphModule:
    """Replace the slot operations of `top` by calls of `ring`, and give every segment call its place in the model.

    `banks` are those of the graph, by the index that they have in it. `remark` goes with the place. Segments go through
    `graphs` where it is given.

    Parameters of single experts that are read as one tensor are moved together where they come first; `note_copies` is
    told which of them are copied instead, by the operation's name and the reason. Bank tensors that are still read one
    by one, from shards of several ranks, become calls of their store.
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
        elif is_call(node, EXPERT_STACK):
            names = [str(one.meta.get(INPUT_NAME_KEY) or one.name) for one in node.all_input_nodes]
            note = None if note_copies is None else functools.partial(note_copies, node.name)
            bound.add_module(node.name, StackedParameters(names, note))
            node.op, node.target = "call_module", node.name
        elif is_call(node, BANK_TENSOR) and not bank_arguments(node).is_complete:
            name = f"read_bank_tensor_at_{position}"
            bound.add_module(name, ReadTensor(banks[bank_arguments(node).bank]))
            node.op, node.target = "call_module", name
        elif node.op == "call_module":
            layers = "; ".join(filter(None, (str(node.meta.get("moepass_layers", "")), remark)))
            located = f"{node.target}_at_{position}"
            segment: Callable[..., Any] = bound.get_submodule(node.target)
            if graphs is not None:
                segment = graphs.at(located, node.target, segment)
            bound.add_module(located, SegmentCall(segment, node.target, layers))
            node.target = located
    bound.graph.lint()
    bound.recompile()
    return bound


__all__ = ["CopyError", "Executor", "SegmentError", "bind"]
