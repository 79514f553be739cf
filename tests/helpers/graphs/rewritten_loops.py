"""Rewrite loops over experts as grouped GEMMs, and compare the outputs of the graph with those of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.fx import GraphModule

from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.ir.plan import Refusal
from moepass.passes.ir.protocol import Pass
from moepass.passes.loops.write_grouped_gemms import write_grouped_gemms
from moepass.passes.masks.sort_masks import sort_masks
from tests.helpers.graphs.compared_models import compare_with_model
from tests.helpers.project_styles.local_loops import HIDDEN


def rewrite_loop(
    model: nn.Module,
    *,
    passes: Sequence[Pass] = (sort_masks, write_grouped_gemms),
    counts: Sequence[int] = (11, 29, 2),
    lower: str = "eager",
) -> tuple[GraphModule, list[Refusal]]:
    """Return the graph of `model` after `passes` and its refusals, compared with `model` for each number of tokens."""
    inputs = [(torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)),) for count in counts]
    result = compare_with_model(model.eval(), passes, inputs, rtol=1e-5, atol=1e-6, lower=lower)
    return result.module, list(result.refusals)


def count_gemms_and_selections(module: GraphModule) -> tuple[int, int]:
    """Return the number of grouped GEMMs, and of selections whose size depends on data."""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    selections = sum(node.target is torch.ops.aten.nonzero.default for node in calls)
    return sum(map(is_grouped_gemm, calls)), selections
