"""Local models that pad the rows of each expert: their experts stream, and results are bit-identical."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import moepass
from tests.helpers.project_styles.padded_style import LocalPadded
from tests.helpers.project_styles.style_sizes import StyleSizes

SWITCHES = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


@pytest.mark.slow
@torch.no_grad()
def test_padded_rows_of_a_local_model() -> None:
    sizes = dataclasses.replace(StyleSizes(), skew=2.0)
    model = LocalPadded(sizes).eval()
    reference = copy.deepcopy(model)
    moepass.offload_experts(model)
    with torch._dynamo.config.patch(SWITCHES), moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", dynamic=True, fullgraph=True, options={"lower": "eager"})
        for number in (13, 5, 200):
            inputs = torch.randn(number, sizes.hidden, generator=torch.Generator().manual_seed(number))
            assert torch.equal(compiled(inputs), reference(inputs))
    plan = compilations[-1].plan
    assert [block.form for block in plan.blocks] == ["grouped_mm"]
    assert len(plan.banks) == 1
    assert plan.refusals == ()
