"""A trie in parts: each visible pair of tokens is in exactly one part, and few other pairs are in any."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.runtime.serving.attention import trie_parts as parts_module
from moepass.runtime.serving.attention.trie_parts import EarlierPart, OwnPart, TrieParts, VisiblePast, trie_parts
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch, TrieNode
from tests.helpers.serving.naive_trie import naive_step

# FLOPs of a pair with 8 heads of 64 numbers.
PAIR_FLOPS = 2048
PASTS = st.one_of(
    st.just(VisiblePast()),
    st.builds(VisiblePast, window=st.integers(1, 70)),
    st.builds(VisiblePast, chunk=st.integers(1, 70)),
)


def _parts(step: StepBatch, past: VisiblePast) -> TrieParts:
    return trie_parts(step.nodes, step.depth, [BLOCK_TOKENS * len(chain) for chain in step.contexts], past, PAIR_FLOPS)


def _counts(step: StepBatch, parts: TrieParts, past: VisiblePast) -> tuple[np.ndarray, list[np.ndarray]]:
    """Count how often each token attends to each token, and to each token of each chain."""
    first = past.first_seen(step.depth)
    among = np.zeros((step.count, step.count), int)
    behind = [np.zeros((step.count, BLOCK_TOKENS * len(chain)), int) for chain in step.contexts]
    positions = np.arange(step.count)
    for own_part in parts.own:
        rows, keys = slice(own_part.start, own_part.end), slice(own_part.start - own_part.before, own_part.end)
        assert not (own_part.is_causal and own_part.before)
        sees = positions[keys] <= positions[rows, None]
        if not own_part.is_causal:
            sees &= (positions[rows, None] < step.subtree_end[keys]) & (step.depth[keys] >= first[rows, None])
        among[rows, keys] += sees
    for earlier in parts.earlier:
        table, depth = (among, step.depth) if earlier.context < 0 else (behind[earlier.context], None)
        rows, columns = slice(earlier.start, earlier.end), slice(earlier.key_start, earlier.key_end)
        depths = np.arange(earlier.key_start, earlier.key_end) if depth is None else depth[columns]
        sees = depths >= first[rows, None]
        assert not earlier.sees_all or sees.all()
        table[rows, columns] += sees
    return among, behind


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=50).map(tuple), min_size=1, max_size=8, unique=True),
    st.integers(0, 3),
    PASTS,
    st.sampled_from([0, 20_000, 2_000_000]),
)
def test_every_pair_is_in_exactly_one_part(
    sequences: list[tuple[int, ...]], cached_blocks: int, past: VisiblePast, call_flops: int
) -> None:
    longest = max(sequences, key=len)
    cached = {longest[: BLOCK_TOKENS * number]: number for number in range(1, cached_blocks + 1)}
    step, _ = naive_step(sequences, cached)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_module, "CALL_FLOPS", call_flops)
        patch.setattr(parts_module, "LEAST_PIECE", 8)
        patch.setattr(parts_module, "MASK_NUMBERS", 100)
        parts = _parts(step, past)
    among, behind = _counts(step, parts, past)
    first, positions = past.first_seen(step.depth), np.arange(step.count)
    sees = (positions <= positions[:, None]) & (positions[:, None] < step.subtree_end) & (step.depth >= first[:, None])
    assert np.array_equal(among, sees)
    for number, table in enumerate(behind):
        hangs_on = np.zeros(step.count, bool)
        for node in step.nodes:
            hangs_on[node.start : node.end] |= node.context == number
        assert np.array_equal(table, hangs_on[:, None] & (np.arange(table.shape[1]) >= first[:, None]))
    covered = np.concatenate([np.arange(own_part.start, own_part.end) for own_part in parts.own])
    assert np.array_equal(np.sort(covered), positions)


def _tree(spec: Sequence[tuple[int, list[tuple[int, list[tuple[int, list]]]]]]) -> StepBatch:  # type: ignore[type-arg]
    """Return a step of nodes (tokens, children)."""
    nodes: list[TrieNode] = []
    depth: list[int] = []

    def add(tokens: int, children: list, parent: int, before: int) -> None:  # type: ignore[type-arg]
        number, start = len(nodes), len(depth)
        nodes.append(TrieNode(start, start + tokens, parent, start))
        depth.extend(range(before, before + tokens))
        for child in children:
            add(*child, number, before + tokens)
        nodes[number] = TrieNode(start, start + tokens, parent, len(depth))

    for root in spec:
        add(*root, -1, 0)
    none = np.empty(0, np.int64)
    return StepBatch(np.zeros(len(depth), np.int64), np.asarray(depth), none, tuple(nodes), (), none, ())


def _pairs(parts: TrieParts) -> int:
    sizes = [
        (attention_part.end - attention_part.start, attention_part.before, attention_part.is_causal)
        for attention_part in parts.own
    ]
    own_pairs = sum(
        size * (size + 1) // 2 if is_causal else size * (before + size) for size, before, is_causal in sizes
    )
    return own_pairs + sum(
        (attention_part.end - attention_part.start) * (attention_part.key_end - attention_part.key_start)
        for attention_part in parts.earlier
    )


def _needed(step: StepBatch) -> int:
    return int((step.depth + 1).sum())


LEAF: list = []  # type: ignore[type-arg]


@pytest.mark.parametrize(
    ("spec", "most_parts", "most_waste"),
    [
        ([(512, LEAF)] * 64, 64, 1.0),
        # A causal part for each prefix and each branch, and one for all branches over their prefix.
        ([(512, [(64, LEAF)] * 64)] * 4, 4 * (1 + 64 + 1), 1.0),
        # A question with its labels is one part.
        ([(1000, [(30, [(2, LEAF)] * 3)] * 100)], 1 + 100 + 1, 1.03),
    ],
    ids=["nothing shared", "shared prefixes", "questions"],
)
def test_parts_are_few_and_waste_little(spec: list, most_parts: int, most_waste: float) -> None:  # type: ignore[type-arg]
    step = _tree(spec)
    parts = _parts(step, VisiblePast())
    assert len(parts.own) + len(parts.earlier) <= most_parts
    assert _needed(step) <= _pairs(parts) <= most_waste * _needed(step)


def test_a_window_bounds_what_is_computed() -> None:
    step = _tree([(10_000, [(100, LEAF)] * 3)])
    parts = _parts(step, VisiblePast(window=128))
    # 128 tokens before each token, and up to 128 more of the piece in which the window begins.
    assert _pairs(parts) <= 2 * 128 * step.count
    chunked = _parts(step, VisiblePast(chunk=256))
    assert _pairs(chunked) <= 256 * step.count
    # The last chunk has 16 tokens of the prompt, for each of the three branches.
    assert chunked.earlier == (EarlierPart(10_000, 10_300, 9_984, 10_000, -1, True),)


def test_a_short_request_is_one_part() -> None:
    step = _tree([(30, [(3, LEAF)] * 10)])
    assert _parts(step, VisiblePast()) == TrieParts((OwnPart(0, 60, False),), ())


def test_long_chains_of_nodes_are_no_recursion() -> None:
    nodes = tuple(TrieNode(start, start + 1, start - 1, 3000) for start in range(3000))
    parts = trie_parts(nodes, np.arange(3000), [], VisiblePast(), PAIR_FLOPS)
    among = sum(own_part.end - own_part.start for own_part in parts.own)
    assert among == 3000


def test_masks_are_bounded() -> None:
    """20,000 branches of one token, for which the predicted cost of a part is far above that of its pairs."""
    nodes = (TrieNode(0, 1, -1, 20_001), *(TrieNode(start, start + 1, 0, start + 1) for start in range(1, 20_001)))
    parts = trie_parts(nodes, np.asarray([0] + [1] * 20_000), [], VisiblePast(), 1)
    sizes = [
        (own_part.end - own_part.start) * (own_part.end - own_part.start + own_part.before) for own_part in parts.own
    ]
    assert max(sizes) <= parts_module.MASK_NUMBERS


@pytest.mark.parametrize("turns", [False, True], ids=["the branch first", "the sequence first"])
def test_thousands_of_branch_points_below_each_other_are_few_parts(turns: bool) -> None:
    """A token branches off after each token of a sequence. As a part, each token would be a key of all later ones."""
    points = 5000
    nodes, depth = [], np.empty(2 * points, np.int64)
    for point in range(points):
        node_start, branch = (point, 2 * points - 1 - point) if turns else (2 * point, 2 * point + 1)
        end = branch + 1 if turns else 2 * points
        nodes += [TrieNode(node_start, node_start + 1, -1, end), TrieNode(branch, branch + 1, -1, branch + 1)]
        depth[node_start], depth[branch] = point, point + 1
    parts = trie_parts(sorted(nodes, key=lambda node: node.start), depth, [], VisiblePast(), PAIR_FLOPS)
    assert len(parts.own) + len(parts.earlier) <= 50
    assert _pairs(parts) <= 2.2 * int((depth + 1).sum())
