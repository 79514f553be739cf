"""A step's trie as calls of a kernel for sequences of different lengths.

One call covers the tokens of all nodes among themselves, then one call covers each level of the trie. This suits
devices on which the launch of a kernel dominates the cost of a part. No two parts of a call share a query, so the
results of a call are merged at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moepass.runtime.serving.attention.trie_parts import EarlierPart, TrieParts

Rows = npt.NDArray[np.int64]
Ends = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class VarlenCall:
    """Sequences of queries over as many sequences of keys; the first ends at `query_ends[1]` and `key_ends[1]`.

    Attributes:
        queries: rows of the stream; None for the complete stream.
        keys: rows of the stream, followed by the chains of cached blocks; None for causal attention over the queries.
        query_ends: [sequences + 1] cumulative lengths, from 0.
        key_ends: [sequences + 1] cumulative lengths, from 0.
    """

    queries: Rows | None
    keys: Rows | None
    query_ends: Ends
    key_ends: Ends

    @property
    def most_queries(self) -> int:
        """Length of the longest sequence of queries."""
        return int(np.diff(self.query_ends).max())

    @property
    def most_keys(self) -> int:
        """Length of the longest sequence of keys."""
        return int(np.diff(self.key_ends).max())

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it sees."""
        queries, keys = np.diff(self.query_ends).astype(np.int64), np.diff(self.key_ends).astype(np.int64)
        return int((queries * (queries + 1) // 2 if self.keys is None else queries * keys).sum())


def varlen_calls(parts: TrieParts, context_tokens: Sequence[int], tokens: int) -> tuple[VarlenCall, ...] | None:
    """Return the calls for `parts` of a stream of `tokens` tokens; None if a part needs a mask.

    `context_tokens` are the lengths of the chains of cached blocks.
    """
    if not all(own_part.is_causal for own_part in parts.own) or not all(part.sees_all for part in parts.earlier):
        return None
    ends = np.array([0, *sorted(own_part.end for own_part in parts.own)], np.int32)
    calls = [VarlenCall(None, None, ends, ends)]
    first_rows = tokens + np.concatenate(([0], np.cumsum(context_tokens, dtype=np.int64)))
    levels: list[list[EarlierPart]] = []
    merged = np.zeros(tokens, np.int64)  # for each token, the number of levels with one of its parts
    for earlier in parts.earlier:
        level = int(merged[earlier.start : earlier.end].max())
        merged[earlier.start : earlier.end] = level + 1
        if level == len(levels):
            levels.append([])
        levels[level].append(earlier)
    for level_parts in levels:
        key_rows = [
            np.arange(earlier.key_start, earlier.key_end) + (first_rows[earlier.context] if earlier.context >= 0 else 0)
            for earlier in level_parts
        ]
        calls.append(
            VarlenCall(
                np.concatenate([np.arange(earlier.start, earlier.end) for earlier in level_parts]),
                np.concatenate(key_rows),
                _ends([earlier.end - earlier.start for earlier in level_parts]),
                _ends([len(rows) for rows in key_rows]),
            )
        )
    return tuple(calls)


def _ends(lengths: Sequence[int]) -> Ends:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
