"""Demands of a contract: what a block gives in a mock run must equal what its form says."""

from __future__ import annotations

import torch

from moepass.passes.parallel.mock.mock_run import ContractBroken

TOLERANCE = 1e-9


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    left, right = left.double(), right.double()
    # To the bit is the rule, and faster to tell.
    return torch.equal(left, right) or torch.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE)


def demand(holds: bool, otherwise: str) -> None:
    """Raises ContractBroken with the reason `otherwise`."""
    if not holds:
        raise ContractBroken(otherwise)
