"""Run a compiled graph: its schedule, or the captured graph if the ranks agree on that."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from moepass.passes.graph.input_sizes import read_sizes, size_sources
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.timeline import HOST
from moepass.runtime.cuda_graphs.segment_graphs import SegmentGraphs
from moepass.runtime.execute.bound_graph import SegmentCall, device_of
from moepass.runtime.execute.dispatching import CapturedForm, Dispatcher, FormStatistics
from moepass.runtime.execute.run_findings import RunFindings
from moepass.runtime.execute.run_report import MeasuredRuns, RunClock
from moepass.runtime.execute.schedules import Adopt, Schedules
from moepass.runtime.lowering.lower_token_loop import ChunkOfRun
from moepass.runtime.system.forking import OwnerProcess
from moepass.runtime.transfer.recording import current_recording
from moepass.runtime.transfer.ring import Ring

logger = logging.getLogger("moepass")

_executor_numbers = itertools.count()
# Runs without a ring need not take turns.
_NO_RING = contextlib.nullcontext()


class Executor:
    """A compiled graph: call it with a list of the graph's inputs (boxed).

    One executor serves all layers and models that are alike, and uses the ring of the running model: the memory of the
    shards among a run's inputs identifies the banks. Runs that share a ring take turns, so threads may call one
    executor, or several of one model, at the same time.

    Args:
        top: a graph of lowered segments and slot operations.
        plan: the finished plan of `top`. It never changes; `findings` has what runs add to it.
        ring: the ring of the banks; None if nothing is streamed, or if banks are parameters of the graph.
        adopt: registers banks that are this rank's parameters when a run first reads them.
        forms: other forms of the graph. The first that replaces the schedule runs.
        checks: called before each run. They raise if the run must not begin.
        debug: fills released slots with NaN.
        cudagraphs: records segments as CUDA graphs where shapes repeat, except those that the plan refuses.
    """

    _boxed_call = True

    def __init__(
        self,
        top: GraphModule,
        plan: Plan,
        ring: Ring | None,
        adopt: Adopt | None = None,
        forms: Sequence[CapturedForm] = (),
        checks: Sequence[Callable[[], None]] = (),
        debug: bool = False,
        cudagraphs: bool = False,
        findings: RunFindings | None = None,
    ) -> None:
        self.plan = plan
        self.findings = findings or RunFindings()
        refused = [segment.name for segment in plan.segments if segment.cuda_graph and segment.cuda_graph.refusal]
        self.graphs = SegmentGraphs(refused, self.findings.refuse_recording) if cudagraphs else None
        self._schedules = Schedules(top, plan, ring, adopt, debug, self.graphs, self.findings)
        self._forms = [(form, SegmentCall(form.run, "the captured graph", "")) for form in forms]
        self._checks = tuple(checks)
        # The tokens per chunk by the sizes of a run.
        self._chunk_tokens: dict[tuple[tuple[str, int], ...], int] = {}
        self._clock = RunClock(self._schedules.inputs_at_rest())
        self._sizes = size_sources(top.graph)
        self._gathers = plan.gathers()
        self._number = next(_executor_numbers)
        self._device: torch.device | None = None
        self._owner = OwnerProcess()

    @property
    def graph_module(self) -> GraphModule:
        """The schedule as straight-line Python: print it with `print_readable()`, or run it.

        It is bound to the banks that it was compiled for, or to its first run's banks if banks are parameters.
        """
        return self._schedules.default.graph_module

    @property
    def ring(self) -> Ring | None:
        """The ring of `graph_module`; None if nothing is streamed. Raises InputError if it was deleted."""
        return self._schedules.default.living_ring()

    @property
    def forms(self) -> FormStatistics | None:
        """Runs by form; None unless the plan has a dispatch."""
        return next((form.statistics for form, _ in self._forms if isinstance(form, Dispatcher)), None)

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the graph on `inputs`, which is emptied."""
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
        bank_inputs = self._schedules.bank_inputs(arguments)
        for form, call in self._forms:
            if form.replaces_schedule(arguments, self._schedules.banks, bank_inputs):
                return call(*arguments)
        schedule = self._schedules.schedule_for(bank_inputs)
        # Guards of captured code keep the device the same in all runs.
        self._device = device = self._device or device_of(arguments)
        sizes = read_sizes(self._sizes, arguments)
        ring = schedule.living_ring()
        turn = _NO_RING if ring is None else ring.run(self._number, self._gathers)
        # The clock starts when the ring is locked, so it does not count the runs of other threads.
        with turn, self._clock.run(device, sizes, ring, arguments), ChunkOfRun(self._chunk_tokens_for(sizes)):
            if self.graphs is None:
                return schedule.run(list(arguments))
            fixed: list[torch.Tensor] = [value for value in arguments if isinstance(value, torch.nn.Parameter)]
            fixed += itertools.chain(*bank_inputs, () if ring is None else ring.buffers_of_run)
            with self.graphs.run(device, sizes, fixed) as run:
                outputs = schedule.run(list(arguments))
                return outputs if run is None else run.own(outputs)

    def _chunk_tokens_for(self, sizes: Mapping[str, int]) -> int | None:
        """Return the largest chunk that fits the memory budget, or None if the plan fixed it. Warns if none fits."""
        memory = self.plan.activations
        if memory is None or memory.room_bytes is None:
            return None
        key = tuple(sizes.items())
        if key not in self._chunk_tokens:
            tokens, nbytes = memory.chosen_chunk_tokens(sizes, self.plan.sequence_counts(sizes))
            self._chunk_tokens[key] = tokens
            if nbytes > memory.room_bytes:
                logger.warning(
                    "a run with sizes %s needs %.0f bytes of activations even in the smallest chunks, of %d tokens; "
                    "the memory budget leaves %.0f: use a larger memory_budget or shorter inputs",
                    dict(sizes),
                    nbytes,
                    tokens,
                    memory.room_bytes,
                )
        return self._chunk_tokens[key]

    def measured(self) -> MeasuredRuns:
        """Return measurements of the last runs. On CUDA this waits until these runs have finished."""
        return self._clock.measured()
