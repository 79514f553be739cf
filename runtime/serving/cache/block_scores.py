"""Scores of the tokens of cached blocks, so that prompt log-probabilities of a cached prefix need no computation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices
from moepass.runtime.serving.requests.answer import ScoredTokens


class BlockScores:
    """The log-probability of each token of each block, and the most likely token with its log-probability.

    Scores are addressed by cache slot. A slot is known once all three values have been written.
    """

    def __init__(self, block_count: int) -> None:
        slots = block_count * BLOCK_TOKENS
        self._known = np.zeros(slots, bool)
        self._log_probabilities = np.zeros(slots, np.float32)
        self._top_tokens = np.zeros(slots, np.int32)
        self._top_log_probabilities = np.zeros(slots, np.float32)

    def known(self, blocks: Indices) -> npt.NDArray[np.bool_]:
        """Return which tokens [blocks, BLOCK_TOKENS] are known; none for block -1."""
        if not len(self._known):
            return np.zeros((len(blocks), BLOCK_TOKENS), bool)
        known: npt.NDArray[np.bool_] = self._known.reshape(-1, BLOCK_TOKENS)[blocks] & (blocks >= 0)[:, None]
        return known

    def write(self, slots: Indices, scored: ScoredTokens) -> None:
        """Write `scored` to `slots`; -1 skips a token. At least one most likely token per position is required.

        Known scores stay, so that answers from the cache do not change as long as the block exists.
        """
        chosen = np.flatnonzero(slots >= 0)
        chosen = chosen[~self._known[slots[chosen]]]
        written_slots = slots[chosen]
        self._log_probabilities[written_slots] = scored.log_probabilities[chosen]
        self._top_tokens[written_slots] = scored.top_tokens[chosen, 0]
        self._top_log_probabilities[written_slots] = scored.top_log_probabilities[chosen, 0]
        self._known[written_slots] = True

    def read(self, slots: Indices, scored_top: int) -> ScoredTokens:
        """Return the scores of `slots`, with 0 or 1 most likely tokens.

        Raises:
            InputError: `scored_top` is larger, or a slot is not known.
        """
        if scored_top not in (0, 1):
            raise InputError.wrong("scored_top", scored_top, "0 or 1 for scores from the cache")
        unknown = slots[~self._known[slots]]
        if len(unknown):
            raise InputError(f"slot {unknown[0]} of the cache stores no score", name="slots", value=int(unknown[0]))
        return ScoredTokens(
            self._log_probabilities[slots],
            self._top_tokens[slots, None][:, :scored_top],
            self._top_log_probabilities[slots, None][:, :scored_top],
        )

    def forget(self, block: int) -> None:
        """Mark the scores of `block` as unknown, because it gets other tokens."""
        self._known[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = False
