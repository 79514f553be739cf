"""The schedules of one compiled graph. Each binds the top-level graph to one ring and one set of banks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from moepass.models.errors import InputError
from moepass.models.homes import home_named
from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.ir.plan import BankSpec, Plan
from moepass.runtime.banks.banks import find_bank
from moepass.runtime.cuda_graphs.segment_graphs import SegmentGraphs
from moepass.runtime.execute.bound_graph import MODEL_IS_GONE, bind, living_ring
from moepass.runtime.execute.run_findings import RunFindings
from moepass.runtime.kernels.slot_tensors import check_fp8
from moepass.runtime.lowering.boxed_code import run_by_list
from moepass.runtime.system.tensor_memory import MemoryTable, memories_of
from moepass.runtime.transfer.ring import Ring

# Takes the banks of a graph and this rank's tensors of each, and registers them for `find_bank`.
Adopt = Callable[[Sequence[BankSpec], Sequence[Sequence[torch.Tensor]]], None]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A graph bound to a ring and to banks. Without streamed banks it has no ring."""

    graph_module: GraphModule
    ring: weakref.ref[Ring] | None

    @functools.cached_property
    def run(self) -> Callable[[list[Any]], Any]:
        """The graph as a callable that takes a list of its inputs and empties it."""
        return run_by_list(self.graph_module)

    @property
    def is_alive(self) -> bool:
        """True unless the ring was deleted."""
        return self.ring is None or self.ring() is not None

    def living_ring(self) -> Ring | None:
        """Return the ring, or None if nothing is streamed. Raises InputError if the ring was deleted."""
        return None if self.ring is None else living_ring(self.ring)


class Schedules:
    """Looks up a run's schedule by the addresses of its bank inputs, and binds a new one for banks not seen before.

    `default` is the schedule that the graph was compiled for, or the first run's schedule if banks are parameters.
    `banks` are the banks that the graph streams.
    """

    def __init__(
        self,
        top: GraphModule,
        plan: Plan,
        ring: Ring | None,
        adopt: Adopt | None,
        debug: bool,
        graphs: SegmentGraphs | None,
        findings: RunFindings,
    ) -> None:
        self._top, self._plan, self._adopt = top, plan, adopt
        self._debug = debug or (ring is not None and ring.debug)
        self._bind = functools.partial(bind, graphs=graphs, findings=findings)
        names = [node.name for node in graph_inputs(top.graph)]
        self._input_count = len(names)
        shards = {stay.bank: stay.shards for stay in plan.slot_stays if stay.shards}
        self.banks = [plan.bank(index) for index in shards]
        # Positions of the graph inputs that each bank is read from.
        self._positions = [[names.index(name) for name in shard_names] for shard_names in shards.values()]
        self._specs = {spec.index: spec for spec in plan.banks}
        bound = top if adopt else self._bind(top, self._specs, ring)
        self.default = Schedule(bound, None if ring is None else weakref.ref(ring))
        # Keys are the memory of bank inputs.
        self._schedules: MemoryTable[Schedule] = MemoryTable()
        self._lock = threading.Lock()

    def inputs_at_rest(self) -> frozenset[int]:
        """Return the positions of bank inputs whose home is not the compute device."""
        return frozenset(
            position
            for bank, positions in zip(self.banks, self._positions, strict=True)
            if not home_named(bank.home).keeps_shards_on_device
            for position in positions
        )

    def bank_inputs(self, arguments: Sequence[Any]) -> list[list[torch.Tensor]]:
        """Return this rank's tensors of each bank, or nothing if `arguments` are too few for the graph."""
        if len(arguments) < self._input_count:
            return []
        return [[arguments[position] for position in positions] for positions in self._positions]

    def schedule_for(self, inputs: Sequence[Sequence[torch.Tensor]]) -> Schedule:
        """Return the schedule for banks that are read from `inputs`.

        Raises InputError if the banks share no ring, and the errors of `adopt`.
        """
        if not inputs:
            return self.default  # if arguments are missing, its code raises the error that says so
        schedule = self._schedules.find(memories_of(itertools.chain(*inputs)))
        return schedule if schedule is not None and schedule.is_alive else self._schedule_for_new(inputs)

    def _schedule_for_new(self, inputs: Sequence[Sequence[torch.Tensor]]) -> Schedule:
        if self._adopt is not None:
            self._adopt(self.banks, inputs)
        matches = [find_bank(bank, tensors) for bank, tensors in zip(self.banks, inputs, strict=True)]
        stored = [match for match in matches if match is not None]
        if len(stored) < len(matches):
            raise InputError(MODEL_IS_GONE)
        store = stored[0][0]
        if any(owner is not store for owner, _ in stored):
            raise InputError(
                "one graph reads the banks of several offload_experts calls; offload the whole model with one call"
            )
        ring = store.ring(self._debug, self._plan.slot_bytes)
        ring.reserve(self._plan.slots, 0)
        # Layers that share code have other banks, and the plan does not know how banks are decoded.
        specs = {
            planned.index: dataclasses.replace(
                planned, index=spec.index, name=spec.name, stored=spec.stored, parts=spec.parts
            )
            for planned, (_, spec) in zip(self.banks, stored, strict=True)
        }
        for spec in specs.values():
            check_fp8(spec)
        with self._lock:
            has_default_ring = self.default.ring is not None and self.default.ring() is ring
            if has_default_ring and list(specs.values()) == self.banks:
                schedule = self.default
            else:
                remark = f"here for {', '.join(spec.name for spec in specs.values())}"
                if self.default.ring is not None:
                    is_own = [spec.index for spec in specs.values()] == [bank.index for bank in self.banks]
                    remark = "" if has_default_ring and is_own else f"compiled for another layer; {remark}"
                bound = self._bind(self._top, self._specs | specs, ring, remark)
                schedule = Schedule(bound, weakref.ref(ring))
            # Adoption may have given the parameters new storage; compute the key again.
            tensors = list(itertools.chain(*inputs))
            self._schedules.add(memories_of(tensors), tensors, schedule)
            if not self.default.is_alive or self.default.ring is None:
                self.default = schedule
            return schedule
