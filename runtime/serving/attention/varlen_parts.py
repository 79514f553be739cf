"""A step's trie as calls of a kernel for sequences of many lengths: one for the tokens of all nodes among themselves,
then one for each level of the trie.

For devices on which starting a kernel is what parts cost. No two parts of a call have a query in common, so that their
results are merged at once.
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

    queries   rows of the stream; None: all of it
    keys      rows of the stream and, behind it, of all chains of cached blocks; None: the queries, causal
    """

    queries: Rows | None
    keys: Rows | None
    query_ends: Ends
    key_ends: Ends

    @property
    def most_queries(self) -> int:
        return int(np.diff(self.query_ends).max())

    @property
    def most_keys(self) -> int:
        return int(np.diff(self.key_ends).max())

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that see each other."""
        queries, keys = np.diff(self.query_ends).astype(np.int64), np.diff(self.key_ends).astype(np.int64)
        return int((queries * (queries + 1) // 2 if self.keys is None else queries * keys).sum())


def varlen_calls(parts: TrieParts, context_tokens: Sequence[int], tokens: int) -> tuple[VarlenCall, ...] | None:
    """The calls for `parts` of a stream of `tokens`; None where a part needs a mask.

    `context_tokens`: the length of each chain of cached blocks.
    """
    if not all(part.is_causal for part in parts.own) or not all(part.sees_all for part in parts.earlier):
        return None
    ends = np.array([0, *(part.end for part in sorted(parts.own, key=lambda part: part.start))], np.int32)
    calls = [VarlenCall(None, None, ends, ends)]
    first_rows = tokens + np.concatenate(([0], np.cumsum(context_tokens, dtype=np.int64)))
    rounds: list[list[EarlierPart]] = []
    merged = np.zeros(tokens, np.int64)  # of each token: rounds that it has a part in
    for part in parts.earlier:
        number = int(merged[part.start : part.end].max())
        merged[part.start : part.end] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(part)
    for together in rounds:
        key_rows = [
            np.arange(part.key_start, part.key_end) + (first_rows[part.context] if part.context >= 0 else 0)
            for part in together
        ]
        calls.append(
            VarlenCall(
                np.concatenate([np.arange(part.start, part.end) for part in together]),
                np.concatenate(key_rows),
                _ends([part.end - part.start for part in together]),
                _ends([len(rows) for rows in key_rows]),
            )
        )
    return tuple(calls)


def _ends(lengths: Sequence[int]) -> Ends:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
