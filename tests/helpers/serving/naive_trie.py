"""A step built from sequences of token ids with one dictionary of prefixes: slow, O(n^2), and obviously right."""

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
    """Return the step, and the index of each sequence's last token in the stream.

    `cached` and `stored` map each prefix of a multiple of BLOCK_TOKENS tokens to its block. A sequence reads its
    leading cached blocks, except a block that contains its last token.
    """
    cached, stored = cached or {}, stored or {}
    chains = [_cached_chain(sequence, cached) for sequence in sequences]
    contexts = sorted({chain for chain in chains if chain})
    # Tokens after the same chain are adjacent and sorted, which is depth-first order.
    prefixes: dict[Sequence_, int] = {}
    for chain, sequence in sorted(zip(chains, sequences, strict=True)):
        for end in range(len(chain) * BLOCK_TOKENS + 1, len(sequence) + 1):
            prefixes.setdefault(sequence[:end], contexts.index(chain) if chain else -1)
    stream = list(prefixes)
    index_of = {prefix: number for number, prefix in enumerate(stream)}
    # A prefix after another chain is in the same sequences, but not in the same tree.
    trees = {number: [prefix for prefix in stream if prefixes[prefix] == number] for number in {*prefixes.values()}}
    ends = [
        1 + max(index_of[two] for two in trees[prefixes[prefix]] if two[: len(prefix)] == prefix) for prefix in stream
    ]
    parents = {prefix: prefix[:-1] if prefixes.get(prefix[:-1]) == prefixes[prefix] else None for prefix in stream}
    nodes: list[TrieNode] = []
    node_of: dict[Sequence_, int] = {}
    for prefix in stream:
        parent = parents[prefix]
        if parent is not None and list(parents.values()).count(parent) == 1:
            node_of[prefix] = node_of[parent]
            last = nodes[node_of[prefix]]
            nodes[node_of[prefix]] = TrieNode(
                last.start, index_of[prefix] + 1, last.parent, last.subtree_end, last.context
            )
        else:
            node_of[prefix] = len(nodes)
            nodes.append(
                TrieNode(
                    index_of[prefix],
                    index_of[prefix] + 1,
                    -1 if parent is None else node_of[parent],
                    ends[index_of[prefix]],
                    prefixes[prefix],
                )
            )
    step = StepBatch(
        tokens=np.asarray([prefix[-1] for prefix in stream], np.int64),
        depth=np.asarray([len(prefix) - 1 for prefix in stream], np.int64),
        subtree_end=np.asarray(ends, np.int64),
        nodes=tuple(nodes),
        contexts=tuple(contexts),
        output_positions=np.asarray(sorted({index_of[tuple(sequence)] for sequence in sequences}), np.int64),
        stored=tuple(
            StoredBlock(
                block,
                np.asarray([index_of[prefix[:end]] for end in range(len(prefix) - BLOCK_TOKENS + 1, len(prefix) + 1)]),
            )
            for prefix, block in stored.items()
        ),
    )
    return step, [index_of[tuple(sequence)] for sequence in sequences]


def _cached_chain(sequence: Sequence_, cached: dict[Sequence_, int]) -> tuple[int, ...]:
    chain: list[int] = []
    while len(sequence) > (end := BLOCK_TOKENS * (len(chain) + 1)) and sequence[:end] in cached:
        chain.append(cached[sequence[:end]])
    return tuple(chain)
