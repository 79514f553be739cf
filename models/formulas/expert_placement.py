"""The formula for which rank owns which experts."""

from __future__ import annotations

import dataclasses
import itertools

from moepass.models.errors import InputError


def shard_bounds(experts: int, ranks: int) -> tuple[int, ...]:
    """Return `ranks + 1` bounds: rank r owns the experts [bounds[r], bounds[r + 1]).

    Shards are contiguous and differ by at most one expert; if `experts < ranks`, some are empty. Raises InputError if
    either number is below 1.
    """
    if experts < 1 or ranks < 1:
        raise InputError(
            f"cannot spread {experts} experts over {ranks} ranks; both must be 1 or more",
            name="experts" if experts < 1 else "ranks",
            value=min(experts, ranks),
            expected="1 or more",
        )
    return tuple(rank * experts // ranks for rank in range(ranks + 1))


def largest_shard_bytes(bank_bytes: int, experts: int, ranks: int) -> int:
    """Return the bytes of the largest shard of a bank of `bank_bytes`."""
    return -(-bank_bytes * -(-experts // ranks) // experts)


def smallest_shard_bytes(bank_bytes: int, experts: int, ranks: int) -> int:
    """Return the bytes of the smallest shard of a bank of `bank_bytes`."""
    return bank_bytes * (experts // ranks) // experts


@dataclasses.dataclass(frozen=True)
class ExpertPlacement:
    """The experts of one layer on the ranks of one group, seen from `rank`. Raises InputError for an invalid rank."""

    experts: int
    ranks: int
    rank: int

    def __post_init__(self) -> None:
        shard_bounds(self.experts, self.ranks)
        if not 0 <= self.rank < self.ranks:
            text = f"rank {self.rank} is not one of {self.ranks} ranks; it must be in 0..{self.ranks - 1}"
            raise InputError(text, rank=self.rank, expected=range(self.ranks))

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Number of experts of each rank."""
        bounds = shard_bounds(self.experts, self.ranks)
        return tuple(stop - start for start, stop in itertools.pairwise(bounds))

    @property
    def owned(self) -> range:
        """Global ids of this rank's experts; may be empty."""
        bounds = shard_bounds(self.experts, self.ranks)
        return range(bounds[self.rank], bounds[self.rank + 1])
