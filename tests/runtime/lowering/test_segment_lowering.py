"""After compilation the plan says how each segment runs; if it is not as requested, with the reason and the line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import moepass
from moepass.passes.ir.plan import Plan
from tests.helpers.graphs.backend_helper import TOP_K, GroupedBlock, Stack, tokens


class MeanOfRows(GroupedBlock):
    """An activation function that reads all rows, so that no expert can be computed alone."""

    def activate(self, up: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        return (up - up.mean(0)).relu()


class OneBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block(x, ids)
        return result


def _compiled_plan(model: nn.Module, lower: str, *inputs: torch.Tensor, dump: Path | None = None) -> Plan:
    moepass.offload_experts(model)
    options = {"lower": lower} | ({"dump": str(dump)} if dump else {})
    with torch.no_grad(), moepass.record_compilations() as compilations:
        torch.compile(model, backend="asyncep", options=options)(*inputs)
    (compilation,) = compilations
    return compilation.plan


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return tokens(), torch.arange(6 * TOP_K).view(6, TOP_K) % 4


def test_a_segment_of_experts_that_is_compiled_as_a_whole(tmp_path: Path) -> None:
    plan = _compiled_plan(OneBlock(MeanOfRows(gated=False)), "inductor", *_inputs(), dump=tmp_path)
    (experts,) = (segment for segment in plan.segments if segment.role == "experts")
    assert experts.lowering is not None
    assert experts.lowering.how == "inductor"
    refusal = experts.lowering.refusal
    assert refusal is not None
    assert refusal.wanted == "expert_loop"
    assert refusal.reason == "rows may depend on each other in `aten.mean.dim`"
    assert refusal.source_line.startswith("test_segment_lowering.py:")
    assert "up - up.mean(0)" in refusal.source_line
    # The dump and JSON have it too.
    assert Plan.from_json((tmp_path / "graph-0" / "plan.json").read_text()) == plan
    lowerings = [segment.lowering for segment in plan.segments if segment is not experts]
    assert all(
        lowering is not None and (lowering.how, lowering.refusal) == ("inductor", None) for lowering in lowerings
    )


def test_experts_that_are_no_grouped_gemm() -> None:
    plan = _compiled_plan(Stack("batched_mm", depth=1), "inductor", tokens())
    for segment in plan.segments:
        assert segment.lowering is not None
        refusal = segment.lowering.refusal
        assert (refusal is not None) == ("experts" in segment.parts)
        if refusal is not None:
            assert refusal.node.startswith("bmm")
            assert refusal.source_line.startswith("backend_helper.py:")


def test_what_is_lowered_as_wanted_has_no_reason() -> None:
    plan = _compiled_plan(OneBlock(GroupedBlock()), "inductor", *_inputs())
    by_role = {segment.role: segment.lowering for segment in plan.segments}
    assert by_role["experts"] is not None
    assert by_role["experts"].how == "expert_loop"
    assert all(lowering is not None and lowering.refusal is None for lowering in by_role.values())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm", "dense_bmm"])
def test_operators_one_by_one_are_wanted_in_eager(form: str) -> None:
    depth = 3
    plan = _compiled_plan(Stack(form, depth=depth), "eager", tokens())
    assert {segment.lowering and segment.lowering.how for segment in plan.segments} == {"eager"}
    assert all(segment.lowering is not None and segment.lowering.refusal is None for segment in plan.segments)
    of_blocks = [use.blocks for segment in plan.segments if "experts" in segment.parts for use in segment.uses]
    assert {block for blocks in of_blocks for block in blocks} == {block.name for block in plan.blocks}
    assert len(plan.blocks) == depth
