"""Layers in the styles of other projects on real ranks: the compiled results equal the uncompiled ones."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from moepass.compilations import record_compilations
from moepass.passes.graph.collectives import communications_of
from tests.helpers.processes.ranks import run_ranks
from tests.helpers.project_styles.style_sizes import StyleSizes

STYLES = {
    "gshard": "slots_style.EinsumSlots",
    "deepspeed": "slots_style.IndexedSlots",
    "deepseek": "exact_style.SlicesOfModules",
    "torchtitan loop": "exact_style.SplitOfStacks",
    "megatron": "megatron_style.MaskedDispatch",
    "megatron gathered": "gathered_style.GatheredMasks",
    "gathered order": "gathered_style.GatheredOrder",
    "gathered with drops": "gathered_style.DroppingMasks",
    "master weights": "converted_style.MasterWeights",
    "flat weights": "converted_style.FlatWeights",
    "scaled modules": "converted_style.ScaledModules",
    "overlapped halves": "overlap_style.OverlappedHalves",
    "overlapped modules": "overlap_style.OverlappedModules",
}
# Other parallelism around experts, and its collectives, which stay.
AROUND = {
    "mesh": ("mesh_style.OneAxisOfMesh", ["all_reduce"] * 2),
    "mesh, masks": ("mesh_style.OneAxisOfMeshWithMasks", ["all_reduce"] * 2),
    "sequence parallel": ("mesh_style.SequenceParallel", ["all_gather", "reduce_scatter"] * 2),
    "sequence parallel, bare": ("mesh_style.SequenceParallelBare", ["all_gather", "reduce_scatter"] * 2),
}
# Layers that are refused, with the number of their AllToAlls.
REFUSED = {
    "two hops": ("mesh_style.SlotsInTwoHops", 4),
    "cut by width": ("mesh_style.ExpertsCutByWidth", 3),
    "padded rows": ("padded_style.PaddedRows", 3),
}
# The number of slots depends on a rank's tokens, and a gather needs equally many rows from each rank.
EVEN = (
    "gshard", "deepspeed", "megatron gathered", "gathered order", "gathered with drops", "sequence parallel",
    "sequence parallel, bare", "two hops", "cut by width",
)  # fmt: skip
# Styles that exchange and gather tokens, for the fast tests.
QUICK = ("deepseek", "gathered order")
# The other styles run with Inductor, or differ from these only in what the passes take out, which simulated ranks test.
ON_RANKS = ("deepspeed", "deepseek", "megatron gathered", "gathered order", "master weights", "overlapped modules")
# One style for each kind of segments that Inductor gets.
WITH_INDUCTOR = {
    "gshard": torch.float32, "torchtitan loop": torch.bfloat16, "megatron": torch.float32,
    "gathered with drops": torch.bfloat16, "overlapped halves": torch.bfloat16,
}  # fmt: skip
# Runs for which a layer is compiled once.
ONCE: dict[str, Any] = {"runs": (12, 40, 7), "dynamic": True}
AROUND_WITH_INDUCTOR = ("sequence parallel",)


def compare(style: str, sizes: StyleSizes, lower: str, runs: tuple[int, ...], dynamic: bool | None) -> list[Any]:
    """Return the largest relative difference of each run, the texts of the plans, and the remaining collectives."""
    module, name = (STYLES | {other: layer for other, (layer, _) in (AROUND | REFUSED).items()})[style].split(".")
    style_module = importlib.import_module(f"tests.helpers.project_styles.{module}")
    model, reference = (getattr(style_module, name)(sizes, dist.group.WORLD).eval() for _ in range(2))
    rank = dist.get_rank()
    differences = []
    switches = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(switches),
        # Else Inductor leaves out a cast to a narrower type and back, as of rows that travel in bfloat16.
        torch._inductor.config.patch(emulate_precision_casts=True),
        record_compilations() as compilations,
    ):
        compiled = torch.compile(model, backend="asyncep", dynamic=dynamic, options={"lower": lower})
        for number, tokens in enumerate(runs):
            rank_tokens = tokens if style in EVEN else tokens + 5 * rank
            generator = torch.Generator().manual_seed(10 * number + rank)
            hidden = torch.randn(rank_tokens, sizes.hidden, generator=generator).to(sizes.dtype)
            expected = reference(hidden).float()
            differences.append(float((compiled(hidden).float() - expected).abs().max() / expected.abs().max()))
    blocks = [[block.form for block in compilation.plan.local_blocks] for compilation in compilations]
    refusals = [str(refusal) for compilation in compilations for refusal in compilation.plan.refusals]
    left = [
        communication.kind
        for compilation in compilations
        for submodule in compilation.executor.graph_module.modules()
        if isinstance(submodule, GraphModule)
        for communication in communications_of(submodule.graph)
    ]
    return [differences, blocks, refusals, left]


def check(
    style: str,
    ranks: int,
    sizes: StyleSizes,
    lower: str,
    runs: tuple[int, ...] = (12, 12, 40, 7, 33),
    dynamic: bool | None = None,
) -> None:
    arguments = (style, sizes, lower, runs, dynamic)
    for differences, blocks, refusals, left in run_ranks(ranks, compare, *arguments, timeout=300.0):
        assert max(differences) < (1e-5 if sizes.dtype == torch.float32 else 2e-2), differences
        assert blocks
        assert all(len(set(forms)) == 1 for forms in blocks), refusals
        assert refusals == []
        # What Inductor made of a segment is no graph any more.
        assert left == (AROUND[style][1] * len(blocks) if style in AROUND and lower == "eager" else [])


@pytest.mark.parametrize("style", QUICK)
def test_a_layer_of_each_exchange(style: str) -> None:
    check(style, 2, StyleSizes(), "eager", **ONCE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("style", ON_RANKS)
def test_layers_of_other_projects(style: str) -> None:
    ranks = 4 if style == "deepseek" else 2
    first_for_one_number = style == "megatron gathered"
    sizes = dataclasses.replace(StyleSizes(), skew=2.0)
    check(style, ranks, sizes, "eager", **({} if first_for_one_number else ONCE))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("style", WITH_INDUCTOR)
def test_layers_of_other_projects_with_inductor(style: str) -> None:
    check(style, 2, dataclasses.replace(StyleSizes(), skew=2.0, dtype=WITH_INDUCTOR[style]), "inductor", **ONCE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("style", "lower"),
    [*((style, "eager") for style in AROUND), *((style, "inductor") for style in AROUND_WITH_INDUCTOR)],
)
def test_other_parallelism_around_experts(style: str, lower: str) -> None:
    first_for_one_number = lower == "eager" and style in AROUND_WITH_INDUCTOR
    sizes = dataclasses.replace(StyleSizes(), skew=2.0)
    check(style, 4, sizes, lower, **({} if first_for_one_number else ONCE))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("style", REFUSED)
def test_refused_layers_run_as_they_are_written(style: str) -> None:
    for differences, blocks, refusals, left in run_ranks(
        4, compare, style, StyleSizes(), "eager", ONCE["runs"], ONCE["dynamic"], timeout=300.0
    ):
        assert max(differences) < 1e-5
        assert blocks == [[]]
        assert len(refusals) == 1
        assert left.count("all_to_all") == REFUSED[style][1]
