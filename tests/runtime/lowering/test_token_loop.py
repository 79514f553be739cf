"""Chunks cover every token once, `take` and `put` agree with slicing by hand, and loops return equal results."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moepass.passes.ir.token_chunks import chunks_of, largest_chunk
from moepass.passes.segments.token_program import Factor, TokenDims, TokenFactor
from moepass.runtime.lowering.lower_token_loop import put, take

SEQUENCES, TOKENS, ALL_TOKENS = TokenFactor.SEQUENCES, TokenFactor.TOKENS, TokenFactor.ALL_TOKENS
SIZES = st.integers(0, 9)


@given(SIZES, SIZES, st.integers(1, 12))
def test_chunks_hold_every_token_once_and_no_more_than_fit(sequences: int, length: int, most: int) -> None:
    chunks = list(chunks_of(sequences, length, most))
    tokens = [
        (sequence, token)
        for chunk in chunks
        for sequence in range(chunk.sequence, chunk.sequence + chunk.sequences)
        for token in range(chunk.first, chunk.first + chunk.tokens)
    ]
    assert tokens == list(itertools.product(range(sequences), range(length)))
    assert all(1 <= chunk.count <= most for chunk in chunks)
    assert largest_chunk(sequences, length, most) == max((chunk.count for chunk in chunks), default=0)
    assert all(chunk.sequences == 1 or (chunk.first, chunk.tokens) == (0, length) for chunk in chunks)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12))
def test_chunks_are_as_few_and_as_equal_as_they_can_be(sequences: int, length: int, most: int) -> None:
    chunks = list(chunks_of(sequences, length, most))
    parts = [chunk.tokens if length > most else chunk.sequences for chunk in chunks]
    assert max(parts) - min(parts) <= 1
    all_at_once = most // length
    assert len(chunks) == (sequences * -(-length // most) if all_at_once == 0 else -(-sequences // all_at_once))


@st.composite
def _places(draw: st.DrawFn) -> tuple[TokenDims, tuple[int, int], torch.Tensor]:
    """Return indices of tokens, [sequences, length], and a tensor whose numbers all differ."""
    sequences, length = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    kind: tuple[Factor, ...] = draw(st.sampled_from(((ALL_TOKENS,), (SEQUENCES, TOKENS), (TOKENS,))))
    numbers = draw(st.lists(st.integers(1, 3), max_size=3))
    order = draw(st.permutations([*kind, *numbers]))
    sizes = {SEQUENCES: sequences, TOKENS: length, ALL_TOKENS: sequences * length}
    # Neighbours lie in one dimension, or in two.
    ends = sorted({*draw(st.sets(st.integers(1, len(order) - 1) if len(order) > 1 else st.nothing())), len(order)})
    dims = TokenDims(tuple(tuple(order[start:end]) for start, end in itertools.pairwise([0, *ends])))
    shape = [math.prod(_size(factor, sizes) for factor in factors) for factors in dims.factors]
    return dims, (sequences, length), torch.arange(math.prod(shape)).reshape(shape)


def _size(factor: Factor, sizes: dict[TokenFactor, int]) -> int:
    return factor if isinstance(factor, int) else sizes[factor]


def _by_token(whole: torch.Tensor, dims: TokenDims, sequences: int, length: int) -> torch.Tensor:
    """Return the numbers by token, [tokens of all sequences, numbers of each]."""
    sizes = {SEQUENCES: sequences, TOKENS: length, ALL_TOKENS: sequences * length}
    order = dims.in_order
    apart = whole.reshape([_size(factor, sizes) for factor in order])
    if ALL_TOKENS in order:
        return apart.movedim(order.index(ALL_TOKENS), 0).reshape(sequences * length, -1)
    if SEQUENCES not in order:
        return apart.movedim(order.index(TOKENS), 0).reshape(length, -1).repeat(sequences, 1)
    return apart.movedim((order.index(SEQUENCES), order.index(TOKENS)), (0, 1)).reshape(sequences * length, -1)


@given(_places(), st.integers(1, 8))
def test_what_is_taken_is_what_slicing_by_hand_finds(
    places: tuple[TokenDims, tuple[int, int], torch.Tensor], most: int
) -> None:
    dims, (sequences, length), numbers = places
    rows = _by_token(numbers, dims, sequences, length)
    for chunk in chunks_of(sequences, length, most):
        taken = take(numbers, dims, chunk)
        assert taken.dim() == numbers.dim()
        start = chunk.sequence * length + chunk.first
        assert torch.equal(_by_token(taken, dims, 1, chunk.count), rows[start : start + chunk.count])


@given(_places(), st.integers(1, 8))
def test_what_was_taken_is_put_back_in_its_place(
    places: tuple[TokenDims, tuple[int, int], torch.Tensor], most: int
) -> None:
    dims, (sequences, length), numbers = places
    if not {ALL_TOKENS, SEQUENCES} & set(dims.in_order) and sequences > 1:
        return  # no output is the same for all sequences: test_token_program.py
    written = torch.full_like(numbers, -1)
    for chunk in chunks_of(sequences, length, most):
        put(take(numbers, dims, chunk), written, dims, chunk)
    assert torch.equal(written, numbers)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_several_sequences_come_one_behind_another(order: tuple[int, ...]) -> None:
    """The dimension of sequences may come before or after that of tokens, or with others between them."""
    numbers = torch.arange(24).reshape(2, 4, 3)  # sequences, tokens, features
    permuted = numbers.permute(order)
    dims = TokenDims(tuple(((SEQUENCES,), (TOKENS,), (3,))[dim] for dim in order))
    (chunk,) = chunks_of(2, 4, 8)
    taken = take(permuted, dims, chunk)
    assert torch.equal(taken.permute([order.index(dim) for dim in range(3)]), numbers.reshape(1, 8, 3))


def test_sequences_may_lie_beside_other_numbers_in_one_dimension() -> None:
    """Attention has such tensors if it multiplies one matrix for each sequence and head."""
    numbers = torch.arange(120).reshape(2, 3, 4, 5)  # sequences, heads, tokens, features
    dims = TokenDims(((SEQUENCES, 3), (TOKENS,), (5,)))
    (chunk,) = chunks_of(2, 4, 8)
    taken = take(numbers.flatten(0, 1), dims, chunk)
    assert torch.equal(taken, numbers.transpose(0, 1).reshape(3, 8, 5))
