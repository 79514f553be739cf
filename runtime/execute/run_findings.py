"""Findings that only runs of a graph can make: they supplement its plan, which stays as it was compiled."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from moepass.passes.ir.plan import LocalBlock, Plan, Refusal
from moepass.passes.ir.segment import NotRecorded, with_refused_recording

logger = logging.getLogger("moepass")


class RunFindings:
    """Refusals of one graph's runs, and segments that CUDA does not record, with reasons. Threads may share them."""

    def __init__(self) -> None:
        # Keys in the order in which they were found.
        self._refusals: dict[Refusal, None] = {}
        self._not_recorded: dict[str, NotRecorded] = {}

    def refuse_stack(self, node: str, reason: str) -> None:
        """Note that the parameters that `node` stacks are copied in each run."""
        self._refusals[Refusal(node, reason)] = None

    def refuse_recording(self, segment: str, reason: str) -> None:
        """Note that CUDA does not record the segment of this name."""
        self._not_recorded[segment] = NotRecorded("", reason)
        logger.warning("%s runs without a CUDA graph: %s", segment, reason)

    def refuse_blocks(self, blocks: Sequence[LocalBlock], reason: str) -> None:
        """Note that a run took the captured graph instead of `blocks`. Warns the first time for each reason."""
        refusals = [
            Refusal("the run", f"{reason}; the graph runs as it was captured", block.name, block.group)
            for block in blocks
        ]
        new = [refusal for refusal in refusals if refusal not in self._refusals]
        if new:
            self._refusals.update(dict.fromkeys(new))
            logger.warning("refused %s: %s", ", ".join(refusal.where for refusal in new), new[0].reason)

    def added_to(self, plan: Plan) -> Plan:
        """Return `plan` with these findings."""
        if not self._refusals and not self._not_recorded:
            return plan
        segments = plan.segments
        for name, refusal in list(self._not_recorded.items()):
            segments = with_refused_recording(segments, name, refusal)
        refusals = dict.fromkeys((*plan.refusals, *list(self._refusals)))
        return dataclasses.replace(plan, segments=segments, refusals=tuple(refusals))
