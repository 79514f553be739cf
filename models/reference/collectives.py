"""The collectives of expert parallelism, along dimension 0, as operators that torch.compile captures.

They call `_c10d_functional` itself: its Python wrappers return a lazy tensor subclass in eager mode, the pointer of
which is null until something waits for it, and two of them were renamed between the versions of torch that we support.
Every function waits for its result, so eager and compiled runs do the same. Each must be called by every rank of
the group, in the same order, also by ranks that have no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed._functional_collectives

# The import above registers the fake kernels of these operators.
_c10d = torch.ops._c10d_functional


def exchange_rows(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group_name: str) -> torch.Tensor:
    """AllToAll: `send[r]` of `rows` [sum(send), ...] go to rank r, `receive[r]` come from it: [sum(receive), ...]."""
    result: torch.Tensor = _c10d.wait_tensor(_c10d.all_to_all_single(rows, list(receive), list(send), group_name))
    return result


def gather_rows(rows: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """AllGather: [n, ...] with the same n on every rank to [ranks * n, ...], rank by rank."""
    result: torch.Tensor = _c10d.wait_tensor(_c10d.all_gather_into_tensor(rows, ranks, group_name))
    return result


def scatter_sums(rows: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """ReduceScatter: the sum over ranks of `rows` [ranks * n, ...], of which this rank gets its part [n, ...]."""
    result: torch.Tensor = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(rows, "sum", ranks, group_name))
    return result


def sum_over_ranks(values: torch.Tensor, group_name: str) -> torch.Tensor:
    """AllReduce: the sum over ranks, shaped as `values`; the same on every rank."""
    result: torch.Tensor = _c10d.wait_tensor(_c10d.all_reduce(values, "sum", group_name))
    return result


def max_over_ranks(values: torch.Tensor, group_name: str) -> torch.Tensor:
    """AllReduce: the elementwise maximum over ranks, shaped as `values`; the same on every rank."""
    result: torch.Tensor = _c10d.wait_tensor(_c10d.all_reduce(values, "max", group_name))
    return result
