"""Whether this rank's part of a bank is still what the ranks met with, told before every run without reading it all.

versions  torch counts writes in place; not those through `.data` or numpy, nor any to an inference tensor
pages     of a parameter that lies in its shard: whatever writes there gets a page of its own, so this is exact
sample    of any other: some numbers of every expert, along each dimension
shard     all bytes are compared with it where one of these shows something: what did not change is no error

A parameter that is the shard itself, as on a GPU, has nothing to be compared with: whatever its version or its sample
shows is a change. Its sample is compared once for each run (`any_is_written`), for all parameters at once, as the host
waits for a GPU to tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moepass.runtime.system.page_mapping import has_written_pages

# [Empirical] Numbers of each expert in a sample, along each of its dimensions. Any training, however short, changes
# nearly all of them.
SAMPLES = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MutationGuard:
    """Watches this rank's tensors of one bank, each [own experts, ...]."""

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        shard: Sequence[torch.Tensor],
        moved: Sequence[bool] | None = None,
        are_shard: Sequence[bool] | None = None,
    ) -> None:
        """`shard` is what `parts` are now, in memory that nobody writes to. `moved` tells which of them lie in private
        pages of it, `are_shard` which are that memory themselves.
        """
        self._shard = list(shard)
        self._are_shard = [False] * len(parts) if are_shard is None else list(are_shard)
        self._shard_samples = [
            sample_of(kept) if is_shard else None for kept, is_shard in zip(shard, self._are_shard, strict=True)
        ]
        self._remember(parts, [False] * len(parts) if moved is None else moved)

    def written(self) -> list[torch.Tensor]:
        """Whether somebody wrote into each part that is the shard itself, as its sample shows: bools on its device."""
        return [
            (_bits(_strided_sample(kept)) != _bits(sample)).any()
            for kept, sample in zip(self._shard, self._shard_samples, strict=True)
            if sample is not None
        ]

    def are_unchanged(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether `parts`, the same tensors in the same order, hold the same bits, wherever they lie by now.

        What leaves the version of a tensor and the sample of it alone is not noticed where it is watched by these.
        """
        versions = _versions(parts)
        if self._versions == versions and not any(map(self._is_touched, range(len(parts)), parts)):
            return True
        for place, (part, kept) in enumerate(zip(parts, self._shard, strict=True)):
            if self._are_shard[place]:
                if versions[place] != self._versions[place]:
                    return False
            elif not _same_bits(part, kept):
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
            None if is_shard or (lies_in_shard and _has_written_pages(part) is False) else sample_of(part)
            for part, is_shard, lies_in_shard in zip(parts, self._are_shard, moved, strict=True)
        ]

    def _is_touched(self, place: int, part: torch.Tensor) -> bool:
        if self._are_shard[place]:
            return False
        kept = self._samples[place]
        if kept is not None:
            return not _same_bits(_strided_sample(part), kept)
        return _has_written_pages(part) is not False


def any_is_written(watches: Sequence[MutationGuard]) -> bool:
    """Whether somebody wrote into a part that is the shard itself; waits for its device, if there is one."""
    written = [flag for watch in watches for flag in watch.written()]
    return bool(written) and bool(torch.stack(written).any())


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
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Not numbers, among which NaN differs from itself."""
    return tensor.detach().view(_BITS[tensor.dtype.itemsize])


def _has_written_pages(part: torch.Tensor) -> bool | None:
    return has_written_pages(part.data_ptr(), part.nbytes)


def _versions(parts: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((part.data_ptr(), 0 if part.is_inference() else part._version) for part in parts)
