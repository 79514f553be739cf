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
    contexts: list[tuple[int, ...]] = []
    prefixes: dict[Sequence_, int] = {}  # prefix -> its context, in the order of the stream
    for sequence in sorted(sequences):
        chain: list[int] = []
        while len(sequence) > (end := BLOCK_TOKENS * (len(chain) + 1)) and sequence[:end] in cached:
            chain.append(cached[sequence[:end]])
        if chain and tuple(chain) not in contexts:
            contexts.append(tuple(chain))
        context = contexts.index(tuple(chain)) if chain else -1
        for end in range(len(chain) * BLOCK_TOKENS + 1, len(sequence) + 1):
            prefixes.setdefault(sequence[:end], context)
    stream = list(prefixes)
    # Sorted sequences put their new prefixes in depth-first order already; with a prefix cached for one sequence and
    # not for another they would not.
    children: dict[Sequence_, list[Sequence_]] = {}
    for prefix in stream:
        children.setdefault(prefix[:-1], []).append(prefix)
    place = {prefix: number for number, prefix in enumerate(stream)}
    ends = [1 + max(place[other] for other in stream if other[: len(one)] == one) for one in stream]
    nodes: list[TrieNode] = []
    node_of: dict[Sequence_, int] = {}
    for prefix in stream:
        parent = prefix[:-1]
        if parent in place and len(children[parent]) == 1:
            node_of[prefix] = node_of[parent]
            last = nodes[node_of[prefix]]
            nodes[node_of[prefix]] = TrieNode(
                last.start, place[prefix] + 1, last.parent, last.subtree_end, last.context
            )
        else:
            node_of[prefix] = len(nodes)
            nodes.append(
                TrieNode(
                    place[prefix], place[prefix] + 1, node_of.get(parent, -1), ends[place[prefix]], prefixes[prefix]
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
                block, np.asarray([place[prefix[:end]] for end in range(len(prefix) - BLOCK_TOKENS + 1, len(prefix) + 1)])
            )
            for prefix, block in stored.items()
        ),
    )
    return step, [place[tuple(one)] for one in sequences]
