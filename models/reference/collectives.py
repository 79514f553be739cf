"""The collectives of expert parallelism along dimension 0, as operators that torch.compile captures.

They call `_c10d_functional` directly. Its Python wrappers return a lazy tensor subclass in eager mode, whose pointer is
null until something waits for it, and two of them were renamed between the supported versions of torch. Every function
waits for its result, so eager and compiled runs do the same. All ranks of the group must call each function, in the
same order, including ranks without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed._functional_collectives

# The import above registers the fake kernels of these operators.
_c10d = torch.ops._c10d_functional
_wait: Callable[[torch.Tensor], torch.Tensor] = _c10d.wait_tensor.default


def exchange_rows(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group_name: str) -> torch.Tensor:
    """Send `send[r]` of `rows` [sum(send), ...] to rank r by AllToAll, and return `receive[r]` rows of each rank r."""
    return _wait(_c10d.all_to_all_single(rows, list(receive), list(send), group_name))


def gather_rows(rows: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """Gather [n, ...], with the same n on every rank, to [ranks * n, ...] by AllGather."""
    return _wait(_c10d.all_gather_into_tensor(rows, ranks, group_name))


def scatter_sums(rows: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """Sum `rows` [ranks * n, ...] over ranks and return this rank's part [n, ...], by ReduceScatter."""
    return _wait(_c10d.reduce_scatter_tensor(rows, "sum", ranks, group_name))


def sum_over_ranks(values: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return the sum of `values` over ranks, equal on every rank, by AllReduce."""
    return _wait(_c10d.all_reduce(values, "sum", group_name))


def max_over_ranks(values: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return the elementwise maximum of `values` over ranks, equal on every rank, by AllReduce."""
    return _wait(_c10d.all_reduce(values, "max", group_name))
