"""Local models that pad the rows of each expert: their experts are recognised and streamed, and results are equal."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

import moepass
from tests.helpers.project_styles.padded_style import (
    JoinedWithZeros,
    LocalPadded,
    PaddedModules,
    ScatteredRows,
    ScatteredTable,
    SearchedTable,
    Unpadded,
)
from tests.helpers.project_styles.style_sizes import StyleSizes

SWITCHES = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
Make = Callable[[StyleSizes], nn.Module]
LAYERS: dict[str, Make] = {
    "search": lambda sizes: LocalPadded(sizes, SearchedTable()),
    "table": lambda sizes: LocalPadded(sizes, ScatteredTable()),
    "scatter": lambda sizes: LocalPadded(sizes, ScatteredRows()),
    "join": lambda sizes: LocalPadded(sizes, JoinedWithZeros()),
    "modules": lambda sizes: LocalPadded(sizes, Unpadded(), PaddedModules),
}


def tokens(sizes: StyleSizes, number: int) -> torch.Tensor:
    return torch.randn(number, sizes.hidden, generator=torch.Generator().manual_seed(number)).to(sizes.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lower", "dtype"),
    [
        *((name, "eager", torch.float32) for name in LAYERS),
        ("table", "inductor", torch.float32),
        ("join", "eager", torch.bfloat16),
        ("modules", "inductor", torch.bfloat16),
    ],
)
@torch.no_grad()
def test_padded_rows_of_a_local_model(name: str, lower: str, dtype: torch.dtype) -> None:
    sizes = dataclasses.replace(StyleSizes(), dtype=dtype, skew=2.0)
    model = LAYERS[name](sizes).eval()
    reference = copy.deepcopy(model)
    if name != "modules":  # whose weights are no parameters [experts, ., .]
        moepass.offload_experts(model)
    with torch._dynamo.config.patch(SWITCHES), moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", dynamic=True, fullgraph=True, options={"lower": lower})
        for number in (13, 5, 200):
            inputs = tokens(sizes, number)
            result, expected = compiled(inputs), reference(inputs)
            if lower == "eager" and name != "modules":
                assert torch.equal(result, expected)  # as it was written
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
            torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
        plan = compilations[-1].plan
        assert [block.form for block in plan.blocks] == ["grouped_mm"]
        assert len(plan.banks) == (name != "modules")
        assert plan.refusals == ()
