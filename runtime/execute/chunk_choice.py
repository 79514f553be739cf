"""Choose the number of tokens that a run processes at a time, if the plan leaves this choice to each run."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from moepass.passes.ir.plan import Plan

logger = logging.getLogger("moepass")


class ChunkSizeChoice:
    """Chooses the largest chunk whose activations fit the memory budget of `plan`, once for each set of sizes."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._chosen: dict[tuple[tuple[str, int], ...], int] = {}

    def tokens(self, sizes: Mapping[str, int]) -> int | None:
        """Return the tokens per chunk for a run with these sizes, or None if the plan fixed them.

        Warns if even the smallest chunk exceeds the budget.
        """
        memory = self._plan.activations
        if memory is None or memory.room_bytes is None:
            return None
        key = tuple(sizes.items())
        if key not in self._chosen:
            self._chosen[key], nbytes = memory.chosen_chunk_tokens(sizes, self._plan.sequence_counts(sizes))
            if nbytes > memory.room_bytes:
                logger.warning(
                    "a run with sizes %s needs %.0f bytes of activations even in the smallest chunks, of %d tokens; "
                    "the memory budget leaves %.0f: use a larger memory_budget or shorter inputs",
                    dict(sizes),
                    nbytes,
                    self._chosen[key],
                    memory.room_bytes,
                )
        return self._chosen[key]
