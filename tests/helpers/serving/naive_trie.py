"""A step from sequences of token ids, made the slow and obvious way: one dictionary of prefixes. O(n^2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch, StoredBlock, TrieNode

Sequence_ = tuple[int, ...]


def naive_step(
    sequences: Sequence[Sequence_],
    cached: dict[Sequence_, int] | None = None,
    stored: dict[Sequence_, int] | None = None,
) -> tuple[StepBatch, list[int]]:
    """The step, and for each sequence the place of its last token in the stream.

    `cached` and `stored`: the number of the block for each prefix that ends with a block, of BLOCK_TOKENS · i tokens.
    Of the blocks of a sequence those are used from the front that are cached, but for its last token.
    """
    cached, stored = cached or {}, stored or {}
    chains = [_cached_chain(sequence, cached) for sequence in sequences]
    contexts = sorted({chain for chain in chains if chain})
    # Tokens behind the same chain stand together, and among themselves sorted, which is depth-first.
    prefixes: dict[Sequence_, int] = {}
    for chain, sequence in sorted(zip(chains, sequences, strict=True)):
        for end in range(len(chain) * BLOCK_TOKENS + 1, len(sequence) + 1):
            prefixes.setdefault(sequence[:end], contexts.index(chain) if chain else -1)
    stream = list(prefixes)
    place = {prefix: number for number, prefix in enumerate(stream)}
    # A prefix that hangs on another chain is in the same sequences and not in the same tree.
    trees = {number: [prefix for prefix in stream if prefixes[prefix] == number] for number in {*prefixes.values()}}
    ends = [1 + max(place[two] for two in trees[prefixes[one]] if two[: len(one)] == one) for one in stream]
    parents = {one: one[:-1] if prefixes.get(one[:-1]) == prefixes[one] else None for one in stream}
    nodes: list[TrieNode] = []
    node_of: dict[Sequence_, int] = {}
    for prefix in stream:
        parent = parents[prefix]
        if parent is not None and list(parents.values()).count(parent) == 1:
            node_of[prefix] = node_of[parent]
            last = nodes[node_of[prefix]]
            nodes[node_of[prefix]] = TrieNode(
                last.start, place[prefix] + 1, last.parent, last.subtree_end, last.context
            )
        else:
            node_of[prefix] = len(nodes)
            nodes.append(
                TrieNode(
                    place[prefix],
                    place[prefix] + 1,
                    -1 if parent is None else node_of[parent],
                    ends[place[prefix]],
                    prefixes[prefix],
                )
            )
    step = StepBatch(
        tokens=np.asarray([prefix[-1] for prefix in stream], np.int64),
        depth=np.asarray([len(prefix) - 1 for prefix in stream], np.int64),
        subtree_end=np.asarray(ends, np.int64),
        nodes=tuple(nodes),
        contexts=tuple(contexts),
        places=np.asarray(sorted({place[tuple(one)] for one in sequences}), np.int64),
        stored=tuple(
            StoredBlock(
                block,
                np.asarray([place[prefix[:end]] for end in range(len(prefix) - BLOCK_TOKENS + 1, len(prefix) + 1)]),
            )
            for prefix, block in stored.items()
        ),
    )
    return step, [place[tuple(one)] for one in sequences]


def _cached_chain(sequence: Sequence_, cached: dict[Sequence_, int]) -> tuple[int, ...]:
    chain: list[int] = []
    while len(sequence) > (end := BLOCK_TOKENS * (len(chain) + 1)) and sequence[:end] in cached:
        chain.append(cached[sequence[:end]])
    return tuple(chain)
