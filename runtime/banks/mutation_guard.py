"""Check before every run that this rank's part of a bank is unchanged since the ranks agreed on it.

By default compare torch's version counters, which is free. They do not count writes through `.data` or numpy, by
`dist.recv` or `dist.broadcast` into a parameter, nor any to an inference tensor. Under `debug` compare all bytes with
the shard in every run. Compare them also if a counter changed: the same bits written again are no change.

A parameter that is the shard itself, as on a GPU, has no second copy to compare with: any change of its counter is a
change. Under `debug` some numbers of every expert are compared with their earlier values (`any_is_written`), for all
parameters at once, since the host waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

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
        are_shard: Sequence[bool] | None = None,
        compute: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = lambda parts: (),
        computed: Sequence[torch.Tensor] = (),
    ) -> None:
        """`shard` is what the first of `parts` are now, in memory that nobody writes to; `are_shard` tells which of
        them are that memory themselves. `computed` is what `compute` makes of `parts` now, in such memory too.
        """
        self._shard = list(shard)
        self._are_shard = [False] * len(self._shard) if are_shard is None else list(are_shard)
        self._compute, self._computed = compute, list(computed)
        self._samples = [
            sample_of(kept) if is_shard else None for kept, is_shard in zip(shard, self._are_shard, strict=True)
        ]
        self._versions = _versions(parts)

    def written(self) -> list[torch.Tensor]:
        """Whether somebody wrote into each part that is the shard itself, as its sample shows: bools on its device."""
        return [
            (_bits(_strided_sample(kept)) != _bits(sample)).any()
            for kept, sample in zip(self._shard, self._samples, strict=True)
            if sample is not None
        ]

    def are_unchanged(self, parts: Sequence[torch.Tensor], debug: bool = False) -> bool:
        """Whether `parts`, the same tensors in the same order, hold the same bits, wherever they lie by now.

        Without `debug`, writes that torch does not count are not noticed.
        """
        versions = _versions(parts)
        if self._versions == versions and not debug:
            return True
        for place, (part, kept) in enumerate(zip(parts, self._shard, strict=False)):
            if self._are_shard[place]:
                if versions[place] != self._versions[place]:
                    return False
            elif not _same_bits(part, kept):
                return False
        for made, kept in zip(self._compute(parts) if self._computed else (), self._computed, strict=True):
            if not _same_bits(made, kept):
                return False
        self._versions = versions
        return True


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
    """The bits as integers: as numbers, NaN differs from itself."""
    return tensor.detach().view(_BITS[tensor.dtype.itemsize])


def _versions(parts: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((part.data_ptr(), 0 if part.is_inference() else part._version) for part in parts)
