"""The form of a compiled graph that a run uses: its schedule, or the captured graph, which is compiled here."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.fx import GraphModule

from moepass.models.formulas.text import evaluate_text
from moepass.passes.graph.input_sizes import read_sizes, size_sources, sizes_at_capture
from moepass.passes.ir.plan import BankSpec, Dispatch, LocalBlock
from moepass.passes.ir.segment import Segment
from moepass.passes.schedule.dispatch import EXCHANGED
from moepass.runtime.execute.run_findings import RunFindings
from moepass.runtime.lowering.lower_later import LateGraph, lower_later
from moepass.runtime.ranks.agreement import RunVote, agreement_of
from moepass.runtime.ranks.replicas import ReplicaCheck
from moepass.runtime.system.tensor_memory import MemoryTable, memories_of

logger = logging.getLogger("moepass")

# The inputs of a run that are this rank's tensors of each bank.
BankInputs = Sequence[Sequence[torch.Tensor]]


@dataclasses.dataclass
class FormStatistics:
    """Runs of one graph by form: `gathered_runs` followed the schedule, `exchanged_runs` the captured graph.

    `exchanged_segments` are those of its last compilation; None before that, and if it runs operator by operator.
    """

    gathered_runs: int = 0
    exchanged_runs: int = 0
    exchanged_compilations: int = 0
    exchanged_segments: tuple[Segment, ...] | None = None


class CapturedForm:
    """An alternative to the schedule: the graph `captured`, which still has its collectives.

    The graph is compiled for the sizes of a run, and again for sizes that the guards of earlier compilations exclude.
    `lower` is a key of `LOWERINGS`.
    """

    def __init__(self, captured: GraphModule, lower: str) -> None:
        self.statistics = FormStatistics()
        self._captured, self._lower = captured, lower
        self._sources = size_sources(captured.graph)
        self._compiled: list[LateGraph] = []
        self._lock = threading.Lock()

    def sizes(self, arguments: Sequence[Any]) -> Mapping[str, int]:
        """Return the sizes of a run by their names in the graph."""
        return read_sizes(self._sources, arguments)

    def replaces_schedule(self, arguments: Sequence[Any], banks: Sequence[BankSpec], inputs: BankInputs) -> bool:
        """Return whether this run uses the captured graph instead of the schedule, the same on all ranks.

        `inputs` are this rank's tensors of each of `banks`. Raises PeerError if a rank differs or does not respond.
        """
        raise NotImplementedError

    def run(self, *arguments: Any) -> Any:
        """Return the outputs of the captured graph."""
        self.statistics.exchanged_runs += 1
        sizes = self.sizes(arguments)
        compiled = self._compiled_for(sizes) or self.compile_for(sizes)
        return compiled.run(*arguments)

    def compile_for(self, sizes: Mapping[str, int]) -> LateGraph:
        """Return the compiled graph for `sizes`, and compile it first if necessary."""
        with self._lock:
            if (compiled := self._compiled_for(sizes)) is not None:
                return compiled
            started = time.perf_counter()
            compiled = lower_later(self._captured, sizes, self._lower)
            self._compiled.append(compiled)
            self.statistics.exchanged_compilations += 1
            self.statistics.exchanged_segments = compiled.segments
            logger.info("compiled the graph as it was captured in %.1f s", time.perf_counter() - started)
            return compiled

    def _compiled_for(self, sizes: Mapping[str, int]) -> LateGraph | None:
        return next((compiled for compiled in self._compiled if compiled.is_right_for(sizes)), None)


class CapturedFallback(CapturedForm):
    """Runs the captured graph if `check` finds different tokens although `blocks` need equal tokens.

    The refusals of these blocks are noted in `findings`.
    """

    def __init__(
        self,
        check: ReplicaCheck,
        captured: GraphModule,
        lower: str,
        blocks: Sequence[LocalBlock],
        findings: RunFindings,
    ) -> None:
        super().__init__(captured, lower)
        self._check, self._blocks, self._findings = check, blocks, findings

    def replaces_schedule(self, arguments: Sequence[Any], banks: Sequence[BankSpec], inputs: BankInputs) -> bool:
        """Return whether the tokens differ between ranks, so that the captured graph must run."""
        reason = self._check.difference(arguments, [tensor for tensors in inputs for tensor in tensors])
        if reason is not None:
            self._findings.refuse_blocks(self._blocks, reason)
        return reason is not None


class Dispatcher(CapturedForm):
    """Chooses the form of every run together with the other ranks, by the rule `dispatch` of the plan.

    `group` returns the process group of the graph's blocks; ranks wait `timeout_s` seconds for each other. The first
    run that reads some banks calls `register` with these banks and this rank's tensors of each bank. `blocks` are
    descriptions of the graph's blocks, identical on all ranks.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        captured: GraphModule,
        lower: str,
        group: Callable[[], ProcessGroup],
        register: Callable[[Sequence[BankSpec], BankInputs], None],
        timeout_s: float,
        blocks: tuple[str, ...] = (),
    ) -> None:
        super().__init__(captured, lower)
        self._dispatch, self._group, self._register = dispatch, group, register
        self._timeout_s, self._blocks = timeout_s, blocks
        # The memory of tensors that were registered.
        self._registered: MemoryTable[bool] = MemoryTable()
        self.compile_for(sizes_at_capture(captured.graph))  # now, so that no run has to wait for it

    def replaces_schedule(self, arguments: Sequence[Any], banks: Sequence[BankSpec], inputs: BankInputs) -> bool:
        """Return whether the ranks agreed to exchange tokens in this run. If so, the captured graph runs."""
        tensors = [tensor for tensors_of_bank in inputs for tensor in tensors_of_bank]
        if not self._registered.find(memories_of(tensors)):
            self._register(banks, inputs)
            self._registered.add(memories_of(tensors), tensors, True)
        tokens = evaluate_text(self._dispatch.tokens, self.sizes(arguments))
        vote = RunVote.of(self._dispatch, tokens, self._blocks)
        is_exchanged = agreement_of(self._group()).agree(vote, self._timeout_s) == EXCHANGED
        if not is_exchanged:
            self.statistics.gathered_runs += 1
        return is_exchanged
