"""Run passes over the graph of a layer of dense experts, and compare the outputs of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from moepass.passes.blocks.detect import find_blocks
from moepass.passes.dense.compute_chosen_pairs import compute_chosen_pairs
from moepass.passes.ir.protocol import Pass, PassResult
from tests.helpers.graphs.compared_models import compare_with_model
from tests.helpers.project_styles.dense_experts import HIDDEN


def random_tokens(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return `count` random hidden states [count, HIDDEN], the same for the same count."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


def compare_layer(
    layer: nn.Module,
    *,
    passes: Sequence[Pass] = (compute_chosen_pairs,),
    lower: str = "eager",
    dtype: torch.dtype = torch.float32,
    counts: Sequence[int] = (11, 29, 3),
    dynamic: bool = True,
    tolerance: float = 1e-5,
) -> PassResult:
    """Return the result of `passes` for the graph of `layer`, compared with `layer` for each number of tokens."""
    return compare_with_model(
        layer.eval().to(dtype),
        passes,
        [(random_tokens(count, dtype),) for count in counts],
        rtol=tolerance,
        lower=lower,
        dynamic=dynamic,
        allow_nan=True,
    )


def expert_forms(result: PassResult) -> list[str]:
    """Return the form of each block of experts in the graph."""
    return [match.record.form for match in find_blocks(result.module.graph).matches]
