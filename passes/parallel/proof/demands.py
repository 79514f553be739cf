"""Comparison of values in a mock run with those that the contract of a form demands."""

from __future__ import annotations

import torch

from moepass.passes.parallel.mock.mock_run import ContractBroken

TOLERANCE = 1e-9


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    left, right = left.double(), right.double()
    # Most are bit-identical, and that is faster to check.
    return torch.equal(left, right) or torch.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE)


def demand(condition: bool, reason: str) -> None:
    """Raise ContractBroken with `reason` unless `condition` is True."""
    if not condition:
        raise ContractBroken(reason)
