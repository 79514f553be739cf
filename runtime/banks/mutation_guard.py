"""A check before every run that this rank's tensors of a bank are unchanged since the ranks agreed on it.

runtime/homes/README.md lists the compared values and the writes that go unnoticed. A changed version counter leads to a
comparison of all bytes, except for a parameter that is the shard itself, as on a GPU: it has no second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# [Empirical] Numbers of each expert in a sample, along each dimension. Even a short training changes nearly all.
SAMPLES = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MutationGuard:
    """A check of this rank's tensors of one bank, each [own experts, ...], which was made from `parts`.

    `shard` has the current values of the first of `parts`, and `computed` the current results of `compute(parts)`, both
    in memory that is never written to. `are_shard` says which parameters are the shard itself; by default none.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        shard: Sequence[torch.Tensor],
        are_shard: Sequence[bool] | None = None,
        compute: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = lambda parts: (),
        computed: Sequence[torch.Tensor] = (),
    ) -> None:
        self._shard = list(shard)
        self._are_shard = [False] * len(self._shard) if are_shard is None else list(are_shard)
        self._compute, self._computed = compute, list(computed)
        self._samples = [
            sample_of(tensor) if is_shard else None for tensor, is_shard in zip(shard, self._are_shard, strict=True)
        ]
        self._versions = _versions(parts)

    def written(self) -> list[torch.Tensor]:
        """Return a bool tensor for each parameter that is the shard itself: whether its sample changed."""
        return [
            (_bits(_strided_sample(tensor)) != _bits(sample)).any()
            for tensor, sample in zip(self._shard, self._samples, strict=True)
            if sample is not None
        ]

    def are_unchanged(self, parts: Sequence[torch.Tensor], debug: bool = False) -> bool:
        """Return whether the guarded tensors, now `parts`, have their original bits, possibly at other addresses.

        Without `debug`, writes that bypass torch's version counters are not noticed.
        """
        versions = _versions(parts)
        if self._versions == versions and not debug:
            return True
        for index, (tensor, original) in enumerate(zip(parts, self._shard, strict=False)):
            if self._are_shard[index]:
                if versions[index] != self._versions[index]:
                    return False
            elif not _same_bits(tensor, original):
                return False
        computed = self._compute(parts) if self._computed else ()
        if not all(_same_bits(*pair) for pair in zip(computed, self._computed, strict=True)):
            return False
        self._versions = versions
        return True


def any_is_written(guards: Sequence[MutationGuard]) -> bool:
    """Return whether the sample of a parameter that is the shard itself changed. Waits for its device."""
    written = [flag for guard in guards for flag in guard.written()]
    return bool(written) and bool(torch.stack(written).any())


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of some numbers of every expert of `tensor` [experts, ...], along each dimension."""
    # contiguous() would leave dimensions of size 1 with any stride.
    return _strided_sample(tensor).clone(memory_format=torch.contiguous_format)


def _strided_sample(tensor: torch.Tensor) -> torch.Tensor:
    steps = [slice(None)] + [slice(None, None, max(1, size // SAMPLES)) for size in tensor.shape[1:]]
    return tensor.detach()[tuple(steps)]


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits as integers: as numbers, NaN differs from itself."""
    return tensor.detach().view(_BITS[tensor.dtype.itemsize])


def _versions(parts: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in parts)
