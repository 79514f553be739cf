"""A radix tree of token sequences stores every distinct prefix once, in the order of insertion."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moepass.runtime.serving.requests.token_trie import TokenTrie

SEQUENCES = st.lists(st.lists(st.integers(-1, 1), min_size=1, max_size=8), min_size=1, max_size=10)


@given(SEQUENCES)
def test_nodes_hold_every_prefix_once_in_the_order_of_insertion(sequences: list[list[int]]) -> None:
    trie = TokenTrie(np.array([token for sequence in sequences for token in sequence], np.int32))
    root = trie.add_root()
    stops = itertools.accumulate(map(len, sequences), initial=0)
    ends = [trie.insert(root, start, stop) for start, stop in itertools.pairwise(stops)]

    def path(node: int) -> tuple[int, ...]:
        return path(trie.parents[node]) + tuple(trie.node_tokens(node).tolist()) if node >= 0 else ()

    assert [path(node) for node in ends] == [tuple(sequence) for sequence in sequences]
    prefixes = [
        path(node)[:end] for node in range(len(trie)) for end in range(trie.depths[node] + 1, trie.ends[node] + 1)
    ]
    expected = [tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)]
    assert sorted(prefixes) == sorted(set(expected))
    order = [path(node)[: trie.depths[node] + 1] for node in trie.depth_first() if node != root]
    first_seen = {prefix: number for number, prefix in reversed(list(enumerate(expected)))}
    assert order == sorted(order, key=lambda prefix: [first_seen[prefix[:end]] for end in range(1, len(prefix) + 1)])


def test_a_split_node_still_ends_with_the_same_token() -> None:
    trie = TokenTrie(np.array([1, 2, 3, 1, 4], np.int32))
    root = trie.add_root()
    first = trie.insert(root, 0, 3)
    trie.insert(root, 3, 5)
    assert (trie.depths[first], trie.ends[first]) == (1, 3)
    assert trie.children()[trie.parents[first]] == [first, 3]
