"""Checksums differ for different tensors, wherever the difference is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.runtime.ranks.replicas import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.complex64]


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 40), st.integers(1, 7), st.integers(0, 2**32), st.booleans())
def test_any_single_difference_changes_a_checksum(
    dtype: torch.dtype, rows: int, columns: int, seed: int, is_transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (rows, columns * dtype.itemsize), generator=generator)
    values = raw.to(torch.uint8).view(dtype)
    shown = values.t() if is_transposed else values
    assert checksum(shown) == checksum(shown.clone())
    position = int(torch.randint(0, raw.numel(), (1,), generator=generator))
    changed = raw.to(torch.uint8).clone()
    changed.view(-1)[position] ^= 1
    changed_view = changed.view(dtype)
    assert checksum(changed_view.t() if is_transposed else changed_view) != checksum(shown)


def test_a_checksum_sees_every_part_of_large_tensors_and_their_order() -> None:
    values = torch.zeros(3 * 2**20 + 5, dtype=torch.int64)
    checksums = {checksum(values)}
    for position in (0, 2**20, 2**21 + 1, values.numel() - 1):
        values[position] = 1
        checksums.add(checksum(values))
        values[position] = 0
    assert len(checksums) == 5


def _octets(dtype: torch.dtype, words: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype is torch.bool else 256
    return torch.randint(0, limit, (8 * words,), generator=generator).to(torch.uint8)


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 4), st.integers(0, 9), st.data())
def test_any_set_of_flipped_bits_changes_a_checksum(
    dtype: torch.dtype, words: int, seed: int, data: st.DataObject
) -> None:
    octets = _octets(dtype, words, seed)
    bits = 1 if dtype is torch.bool else 8
    flipped = data.draw(st.sets(st.integers(0, octets.numel() * bits - 1), min_size=1))
    changed = octets.clone()
    for bit in flipped:
        changed[bit // bits] ^= 1 << bit % bits
    assert checksum(changed.view(dtype)) != checksum(octets.view(dtype))


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(0, 9), st.randoms(use_true_random=False), st.sampled_from([1, 2, 8]))
def test_another_order_of_elements_or_words_changes_a_checksum(
    length: int, seed: int, random: object, columns: int
) -> None:
    values = torch.randperm(length * columns, generator=torch.Generator().manual_seed(seed)).view(length, columns)
    order = list(range(length))
    random.shuffle(order)  # type: ignore[attr-defined]
    for dtype in (torch.int64, torch.float32):
        typed = values.to(dtype)
        assert (checksum(typed[order]) == checksum(typed)) == (order == sorted(order))


WORDS = {torch.float64: 1, torch.float32: 2, torch.bfloat16: 4, torch.complex64: 1}


@settings(deadline=None)
@given(st.sampled_from(list(WORDS)), st.integers(1, 9), st.integers(0, 9), st.data())
def test_other_signs_change_a_checksum(dtype: torch.dtype, rows: int, seed: int, data: st.DataObject) -> None:
    """Flip two signs at the first bits of words, which cancel out in any weighted sum."""
    columns = 8
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    negated = data.draw(st.sets(st.integers(0, columns - 1), min_size=1))
    flipped = values.clone()
    flipped[:, list(negated)] *= -1
    assert checksum(flipped) != checksum(values)
    assert checksum(-values) != checksum(values)


@pytest.mark.parametrize("view", [torch.conj, lambda values: values.imag, lambda values: torch.conj(values).imag])
def test_lazy_conjugates_and_negatives_count_by_their_values(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    values = torch.randn(3, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert checksum(view(values)) == checksum(view(values).resolve_conj().resolve_neg().clone())
    assert checksum(view(values)) != checksum(view(values + 1j))


def test_zeros_of_different_lengths_have_different_checksums() -> None:
    assert len({checksum(torch.zeros(length, dtype=torch.uint8)) for length in range(40)}) == 40


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**20])
def test_how_much_is_mixed_at_a_time_does_not_matter(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the chunk sizes of a device and of a CPU, which must give equal checksums for equal tensors."""
    values = torch.randn(333, generator=torch.Generator().manual_seed(0))
    expected = checksum(values)
    monkeypatch.setattr("moepass.runtime.ranks.replicas._CHUNK_WORDS_CPU", chunk)
    assert checksum(values) == expected
