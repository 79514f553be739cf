"""Whether this rank's part of a bank is still what the ranks met with, told before every run without reading it all.

versions  torch counts writes in place; not those through `.data` or numpy, nor any to an inference tensor
pages     of a parameter that lies in its shard: whatever writes there gets a page of its own, so this is exact
sample    of any other: some numbers of every expert, along each dimension
shard     all bytes are compared with it where one of these shows something: what did not change is no error

A parameter that is the shard itself, as on a GPU, has nothing to be compared with: its versions alone tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moepass.runtime.page_mapping import has_written_pages

# [Empirical] Numbers of each expert in a sample, along each of its dimensions. Any training, however short, changes
# nearly all of them.
SAMPLES = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PartWatch:
    """Watches this rank's tensors of one bank, each [own experts, ...]."""

    def __init__(
        self, parts: Sequence[torch.Tensor], shard: Sequence[torch.Tensor | None], moved: Sequence[bool] | None = None
    ) -> None:
        """`shard` is what `parts` are now, in memory that nobody writes to; None for one that is there itself. `moved`
        tells which of the others lie in private pages of it.
        """
        self._shard = list(shard)
        self._remember(parts, [False] * len(parts) if moved is None else moved)

    def are_unchanged(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether `parts`, the same tensors in the same order, hold the same bits, wherever they lie by now.

        What leaves the version of a tensor and the sample of it alone is not noticed where it is watched by these.
        """
        versions = _versions(parts)
        if self._versions == versions and not any(map(self._is_touched, range(len(parts)), parts)):
            return True
        for part, kept, version, before in zip(parts, self._shard, versions, self._versions, strict=True):
            if version != before if kept is None else not _same_bits(part, kept):
                return False
        addresses = [address for address, _ in self._versions]
        self._remember(
            parts,
            [
                kept is None and part.data_ptr() == address
                for part, kept, address in zip(parts, self._samples, addresses, strict=True)
            ],
        )
        return True

    def _remember(self, parts: Sequence[torch.Tensor], moved: Sequence[bool]) -> None:
        self._versions = _versions(parts)
        # Pages that were written already tell nothing of the next write.
        self._samples = [
            None if shard is None or (lies_in_shard and _has_written_pages(part) is False) else sample_of(part)
            for part, shard, lies_in_shard in zip(parts, self._shard, moved, strict=True)
        ]

    def _is_touched(self, place: int, part: torch.Tensor) -> bool:
        if self._shard[place] is None:
            return False
        kept = self._samples[place]
        if kept is not None:
            return not _same_bits(_strided_sample(part), kept)
        return _has_written_pages(part) is not False


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Some numbers of every expert of `tensor` [experts, ...], along each dimension, in memory of their own."""
    # Not contiguous(), which leaves dimensions of size 1 with any stride.
    return _strided_sample(tensor).clone(memory_format=torch.contiguous_format)


def _strided_sample(tensor: torch.Tensor) -> torch.Tensor:
    steps = [slice(None)] + [slice(None, None, max(1, size // SAMPLES)) for size in tensor.shape[1:]]
    return tensor.detach()[tuple(steps)]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    # Not numbers, among which NaN differs from itself.
    bits = _BITS[one.dtype.itemsize]
    return torch.equal(one.detach().view(bits), other.detach().view(bits))


def _has_written_pages(part: torch.Tensor) -> bool | None:
    return has_written_pages(part.data_ptr(), part.nbytes)


def _versions(parts: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((part.data_ptr(), 0 if part.is_inference() else part._version) for part in parts)
