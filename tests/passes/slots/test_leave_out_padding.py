"""Rows of padding that an expert of a loop adds and cuts off are removed if rows are computed independently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moepass.passes.graph.nodes import is_call
from moepass.passes.loops.write_grouped_gemms import write_grouped_gemms
from moepass.passes.slots.leave_out_padding import leave_out_padding
from tests.helpers.graphs.compared_models import compare_with_dynamic_rows
from tests.helpers.project_styles.local_loops import EXPERTS, HIDDEN, WIDTH, GatedMlp

aten = torch.ops.aten
PASSES = (leave_out_padding, write_grouped_gemms)


class Loop(nn.Module):
    """A loop over rows [n, HIDDEN] sorted by their experts [n]; `padded` computes the rows of an expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(GatedMlp(HIDDEN, WIDTH) for _ in range(EXPERTS))

    def forward(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        sizes = F.one_hot(ids, EXPERTS).sum(dim=0).tolist()
        for size in sizes:
            torch._check(size >= 0)
        torch._check(sum(sizes) == rows.shape[0])
        parts = zip(self.experts, torch.split(rows, sizes), strict=True)
        return torch.cat(
            [self.padded(expert, rows_of_expert, rows_of_expert.shape[0]) for expert, rows_of_expert in parts]
        )

    def padded(self, expert: nn.Module, expert_rows: torch.Tensor, size: int) -> torch.Tensor:
        raise NotImplementedError

    def joined(self, expert_rows: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat([expert_rows, expert_rows.new_zeros(-size % 16, expert_rows.shape[1])])


class Joined(Loop):
    def padded(self, expert: nn.Module, expert_rows: torch.Tensor, size: int) -> torch.Tensor:
        return expert(self.joined(expert_rows, size))[:size]


class PaddedWithWeights(Loop):
    """The weights of rows are padded as well, and applied by the expert."""

    def padded(self, expert: Any, expert_rows: torch.Tensor, size: int) -> torch.Tensor:
        rows, weights = self.joined(expert_rows, size), F.pad(expert_rows[:, 0], (0, -size % 16))
        inner = F.silu(expert.w1(rows)) * expert.w3(rows) * weights.unsqueeze(-1)
        return torch.narrow(expert.w2(inner), 0, 0, size)


class PaddedOutputs(Loop):
    """Results are padded with rows of ones."""

    def padded(self, expert: nn.Module, expert_rows: torch.Tensor, size: int) -> torch.Tensor:
        return (
            expert(torch.cat([expert_rows, expert_rows.new_ones((size + 7) // 8 * 8 - size, expert_rows.shape[1])]))[
                :size
            ]
            * 2
        )


class Mixed(Loop):
    """The result of an expert depends on all of its rows, including padding."""

    def padded(self, expert: nn.Module, expert_rows: torch.Tensor, size: int) -> torch.Tensor:
        outputs = expert(self.joined(expert_rows, size) + 1)
        return (outputs - outputs.mean(dim=0))[:size]


class InFront(Loop):
    def padded(self, expert: nn.Module, expert_rows: torch.Tensor, size: int) -> torch.Tensor:
        return expert(torch.cat([expert_rows.new_ones(-size % 16, expert_rows.shape[1]), expert_rows]))[:size]


class MaybeFewer(Loop):
    """For some numbers of rows the padding is negative, which removes rows."""

    def padded(self, expert: nn.Module, expert_rows: torch.Tensor, size: int) -> torch.Tensor:
        return expert(F.pad(expert_rows, (0, 0, 0, size // 8 * 8 - size)))[:size]


class Moved(Loop):
    def padded(self, expert: nn.Module, expert_rows: torch.Tensor, size: int) -> torch.Tensor:
        return expert(self.joined(expert_rows, size).flip(0))[:size]


INPUTS = [
    (
        torch.randn(sum(counts), HIDDEN, generator=torch.Generator().manual_seed(1)),
        torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts)),
    )
    for counts in ([3, 0, 17, 5], [1, 1, 0, 30])
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("loop", [Joined, PaddedWithWeights, PaddedOutputs])
def test_padding_that_is_cut_off_is_left_out(loop: type[Loop]) -> None:
    result = compare_with_dynamic_rows(loop(), PASSES, INPUTS, tolerance=1e-5)
    assert not result.refusals
    assert len(result.matches) == EXPERTS + 1
    text = result.module.print_readable(print_output=False)
    assert "aten.mm" not in text
    assert "PythonMod" not in text
    assert not any(
        is_call(node, aten.new_zeros.default, aten.constant_pad_nd.default) for node in result.module.graph.nodes
    )


@pytest.mark.slow
@pytest.mark.parametrize("loop", [Mixed, InFront, MaybeFewer, Moved])
def test_padding_that_affects_results_is_unchanged(loop: type[Loop]) -> None:
    result = compare_with_dynamic_rows(loop(), PASSES, INPUTS, tolerance=1e-5)
    assert not any(match.startswith("slice") for match in result.matches)


def test_padding_without_experts_is_unchanged() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = GatedMlp(HIDDEN, WIDTH)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            padded: torch.Tensor = self.inner(F.pad(rows, (0, 0, 0, -rows.shape[0] % 8)))
            return padded[: rows.shape[0]]

    result = compare_with_dynamic_rows(Dense(), PASSES, [(rows,) for rows, _ in INPUTS], tolerance=1e-5)
    assert result.matches == ()
