"""Scores beside cached blocks, so that prompt log-probabilities of a cached prefix need no computation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices
from moepass.runtime.serving.requests.answer import ScoredTokens


class BlockScores:
    """Of each token of each block: log-probability, rank, the most likely token in its place and that one's.

    Slot block * BLOCK_TOKENS + place is a token. It is known once all four have been written.
    """

    def __init__(self, block_count: int) -> None:
        slots = block_count * BLOCK_TOKENS
        self._known = np.zeros(slots, bool)
        self._log_probabilities = np.zeros(slots, np.float32)
        self._ranks = np.zeros(slots, np.int32)
        self._top_tokens = np.zeros(slots, np.int32)
        self._top_log_probabilities = np.zeros(slots, np.float32)

    def known(self, blocks: Indices) -> npt.NDArray[np.bool_]:
        """[blocks, BLOCK_TOKENS] which tokens are known; none of block -1."""
        if not len(self._known):
            return np.zeros((len(blocks), BLOCK_TOKENS), bool)
        found: npt.NDArray[np.bool_] = self._known.reshape(-1, BLOCK_TOKENS)[blocks] & (blocks >= 0)[:, None]
        return found

    def write(self, slots: Indices, scored: ScoredTokens) -> None:
        """Write `scored`, with one most likely token or more, beside `slots`; -1: nowhere.

        What is known stays: an answer from the cache is the same for as long as the block is there.
        """
        chosen = np.flatnonzero(slots >= 0)
        chosen = chosen[~self._known[slots[chosen]]]
        kept = slots[chosen]
        self._log_probabilities[kept] = scored.log_probabilities[chosen]
        self._ranks[kept] = scored.ranks[chosen]
        self._top_tokens[kept] = scored.top_tokens[chosen, 0]
        self._top_log_probabilities[kept] = scored.top_log_probabilities[chosen, 0]
        self._known[kept] = True

    def read(self, slots: Indices, scored_top: int) -> ScoredTokens:
        """The scores beside `slots`, with `scored_top` most likely tokens, 0 or 1.

        Raises InputError for more of them, and for a slot that is not known.
        """
        if scored_top not in (0, 1):
            raise InputError.wrong("scored_top", scored_top, "0 or 1 where scores come from the cache")
        unknown = slots[~self._known[slots]]
        if len(unknown):
            raise InputError(
                f"the score beside slot {unknown[0]} of the cache is not known", name="slots", value=int(unknown[0])
            )
        return ScoredTokens(
            self._log_probabilities[slots],
            self._ranks[slots],
            self._top_tokens[slots, None][:, :scored_top],
            self._top_log_probabilities[slots, None][:, :scored_top],
        )

    def forget(self, block: int) -> None:
        """The block gets other tokens."""
        self._known[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = False
