"""The two forms of one compiled graph: which one a run takes, and the exchanged one, compiled with the other.

Both read the same inputs, parameters included, so nothing is held twice. In an exchanged run nothing is prefetched, and
the ring stays as the last gathered run left it: what its slots were filled with ahead is what the next one asks for.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import ProcessGroup
from torch.fx import GraphModule

from moepass.models.formulas.text import evaluate_text
from moepass.passes.graph.input_sizes import read_sizes, size_sources, sizes_at_capture
from moepass.passes.ir.plan import BankSpec, Dispatch
from moepass.passes.ir.segment import Segment
from moepass.passes.schedule.dispatch import EXCHANGED
from moepass.runtime.banks.identity import MemoryTable, memories_of
from moepass.runtime.lowering.lower_later import LateGraph, lower_later
from moepass.runtime.ranks.agreement import RunVote, agreement_of
from moepass.runtime.ranks.replicas import ReplicaCheck

logger = logging.getLogger("moepass")


@dataclasses.dataclass
class FormStatistics:
    """Runs of one graph by form, how often the exchanged form was compiled, and the segments of the last compilation.

    These are None if it runs operator by operator, and before it was compiled.
    """

    gathered_runs: int = 0
    exchanged_runs: int = 0
    exchanged_compilations: int = 0
    exchanged_segments: tuple[Segment, ...] | None = None


class ExchangedForm:
    """A graph as it was captured, collectives and all.

    It is compiled for some sizes. Where a run has others, for which that is not right, it is compiled for these too.
    """

    def __init__(self, captured: GraphModule, lower: str, statistics: FormStatistics) -> None:
        """`captured` is kept, and stays as it is. `lower` is a key of `LOWERINGS`."""
        self._captured = captured
        self._lower = lower
        self._statistics = statistics
        self._compiled: list[LateGraph] = []
        self._lock = threading.Lock()

    def run(self, arguments: Sequence[Any], sizes: Mapping[str, int]) -> Any:
        for compiled in self._compiled:
            if compiled.is_right_for(sizes):
                return compiled.run(*arguments)
        return self.compile_for(sizes).run(*arguments)

    def compile_for(self, sizes: Mapping[str, int]) -> LateGraph:
        """The compiled graph for `sizes`, compiled now if there is none."""
        with self._lock:
            for compiled in self._compiled:
                if compiled.is_right_for(sizes):
                    return compiled
            started = time.perf_counter()
            made = lower_later(self._captured, sizes, self._lower)
            self._compiled.append(made)
            self._statistics.exchanged_compilations += 1
            self._statistics.exchanged_segments = made.segments
            logger.info("compiled the graph as it was captured in %.1f s", time.perf_counter() - started)
            return self._compiled[-1]


class CapturedFallback:
    """Runs a graph as it was captured where ranks turn out not to have the same tokens, although the plan needs it."""

    def __init__(self, check: ReplicaCheck, captured: GraphModule, lower: str) -> None:
        self.statistics = FormStatistics()
        self._check = check
        self._sources = size_sources(captured.graph)
        self._form = ExchangedForm(captured, lower, self.statistics)

    def reason(self, arguments: Sequence[Any], parts: Sequence[Sequence[Any]]) -> str | None:
        """Why a run must not follow the schedule, in the same words on all ranks; None where it may.

        `parts` are this rank's tensors of each bank. Raises PeerError where ranks do not come.
        """
        return self._check.difference(arguments, [part for of_bank in parts for part in of_bank])

    def run(self, *arguments: Any) -> Any:
        self.statistics.exchanged_runs += 1
        return self._form.run(arguments, read_sizes(self._sources, arguments))


class Dispatcher:
    """Chooses the form of every run of one compiled graph, with the other ranks, and runs the exchanged one."""

    def __init__(
        self,
        dispatch: Dispatch,
        captured: GraphModule,
        lower: str,
        group: Callable[[], ProcessGroup],
        register: Callable[[Sequence[BankSpec], Sequence[Sequence[Any]]], None],
        timeout_s: float,
        blocks: tuple[str, ...] = (),
    ) -> None:
        """`group` gives the process group of the graph's banks; `register` takes banks and this rank's parts of each,
        and is called where they come first. `blocks` are those of the graph in words that all ranks have in common.

        Compiles the exchanged form for the sizes at capture, so that no run has to wait for that.
        """
        self.statistics = FormStatistics()
        self._dispatch = dispatch
        self._sources = size_sources(captured.graph)
        self._exchanged = ExchangedForm(captured, lower, self.statistics)
        self._group = group
        self._register = register
        self._timeout_s = timeout_s
        self._blocks = blocks
        # The memory of parts that were registered.
        self._registered: MemoryTable[bool] = MemoryTable()
        self._exchanged.compile_for(sizes_at_capture(captured.graph))

    def is_exchanged(self, arguments: Sequence[Any], banks: Sequence[BankSpec], parts: Sequence[Sequence[Any]]) -> bool:
        """Agree with the other ranks on the form of this run, of which `parts` of each bank are this rank's.

        Raises PeerError where ranks differ, are gone or do not come.
        """
        tensors = [part for of_bank in parts for part in of_bank]
        if not self._registered.find(memories_of(tensors)):
            self._register(banks, parts)
            self._registered.add(memories_of(tensors), tensors, True)
        tokens = evaluate_text(self._dispatch.tokens, read_sizes(self._sources, arguments))
        vote = RunVote.of(self._dispatch, tokens, self._blocks)
        return agreement_of(self._group()).agree(vote, self._timeout_s) == EXCHANGED

    def run_exchanged(self, *arguments: Any) -> Any:
        """The run, as the captured graph says."""
        self.statistics.exchanged_runs += 1
        return self._exchanged.run(arguments, read_sizes(self._sources, arguments))
