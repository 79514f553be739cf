"""Run layers of other projects on real ranks, and compare them with themselves compiled with asyncep."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from moepass.compilations import Compilation, record_compilations
from moepass.passes.graph.nodes import graphs_within
from tests.helpers.packages.megatron_layer import stand_in_for_cuda
from tests.helpers.packages.package_layers import EXPERTS, HIDDEN, fill
from tests.helpers.processes.ranks import run_ranks

SCALARS = "torch._dynamo.config.capture_scalar_outputs = True"
SHAPES = "torch._dynamo.config.capture_dynamic_output_shape_ops = True"
WARNINGS = "torch._dynamo.config.ignore_logging_functions.add(warnings.warn)"
STATIC = "torch.compile(dynamic=False)"
IN_CODE = (
    "sizes and orders converted to lists, and the dispatcher's per-run state cleared after each run "
    "(tests/helpers/packages/megatron_layer.py)"
)
OWN_MEMORY = "gathered tokens not in Megatron-Core's global memory buffer (same file)"
# Needs that are settings of Dynamo. The code that builds or compiles the layer fulfils the others.
_SWITCHES: dict[str, tuple[str, Any]] = {
    SCALARS: ("capture_scalar_outputs", True),
    SHAPES: ("capture_dynamic_output_shape_ops", True),
    WARNINGS: ("ignore_logging_functions", {warnings.warn}),
}
_WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")


@dataclasses.dataclass(frozen=True)
class PackageCase:
    """A layer of `package`, built by `module.builder(**options)`.

    Attributes:
        package: Name of the distribution.
        dispatcher: The variant of the layer, as the table shows it.
        builder: Module and class.
        options: Arguments of the class.
        needs: The settings that capturing it needs, as the table shows them.
        is_even: Whether the layer requires the same number of tokens on every rank.
        dtypes: The types to run it in.
    """

    package: str
    dispatcher: str
    builder: str
    options: dict[str, Any]
    needs: tuple[str, ...] = ()
    is_even: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    @property
    def name(self) -> str:
        return f"{self.package}: {self.dispatcher}"


DEEPSPEED, FAIRSCALE, MEGATRON, TORCHTITAN = "deepspeed", "fairscale", "megatron-core", "torchtitan"
CASES = (
    PackageCase(DEEPSPEED, "top-1", "package_layers.DeepSpeedLayer", {"k": 1}, (SCALARS, STATIC), True),
    PackageCase(DEEPSPEED, "top-2", "package_layers.DeepSpeedLayer", {"k": 2}, (SCALARS, STATIC), True),
    PackageCase(
        *(DEEPSPEED, "top-4, no token dropped", "package_layers.DeepSpeedLayer"),
        *({"k": 4, "drop_tokens": False}, (SCALARS,), True),
    ),
    PackageCase(FAIRSCALE, "`Top2Gate`", "package_layers.FairscaleLayer", {"own_gate": True}, (), True, ("float32",)),
    # Its einsum with a float32 mask requires float32 rows.
    PackageCase(
        *(FAIRSCALE, "a gate without random numbers", "package_layers.FairscaleLayer"),
        *({"own_gate": False}, (), True, ("float32",)),
    ),
    PackageCase(
        *(MEGATRON, "AllToAll, unmodified", "megatron_layer.MegatronLayer"),
        *({"dispatcher": "alltoall", "for_capture": False}, (), False, ("float32",)),
    ),
    PackageCase(
        *(MEGATRON, "AllToAll", "megatron_layer.MegatronLayer"),
        *({"dispatcher": "alltoall", "for_capture": True}, (SCALARS, SHAPES, WARNINGS, IN_CODE)),
    ),
    PackageCase(
        *(MEGATRON, "AllGather", "megatron_layer.MegatronLayer"),
        *({"dispatcher": "allgather", "for_capture": True}, (SCALARS, SHAPES, WARNINGS, IN_CODE, OWN_MEMORY), True),
    ),
    PackageCase(TORCHTITAN, "AllToAll", "package_layers.TorchtitanLayer", {}, (SCALARS,)),
)


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The number of ranks, the backend's option `lower`, and the type of all parameters and tokens."""

    ranks: int
    lower: str
    dtype: str


def settings_of(case: PackageCase) -> Iterator[RunSettings]:
    """Yield the settings of a case, the most informative first."""
    for ranks, lower in ((2, "eager"), (2, "inductor"), (4, "eager"), (4, "inductor")):
        for dtype in case.dtypes:
            yield RunSettings(ranks, lower, dtype)


@dataclasses.dataclass(frozen=True)
class PackageRun:
    """The result of one case on the first rank. Other ranks may have more or fewer graphs if Dynamo breaks them.

    Attributes:
        settings: The settings of the run.
        graphs: Number of compiled graphs.
        forms: The forms of the blocks that became local.
        refusals: The full refusals of the plans.
        exchanges: Number of collectives left in the graphs, by kind.
        waits: Number of host reads of tensors left in the graphs.
        difference: Largest difference over all runs and ranks, relative to the largest value of a run.
        error: The reason why nothing could be compiled, or "".
    """

    settings: RunSettings
    graphs: int = 0
    forms: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    exchanges: dict[str, int] = dataclasses.field(default_factory=dict)
    waits: int = 0
    difference: float = 0.0
    error: str = ""

    @property
    def is_taken(self) -> bool:
        return bool(self.forms) and not self.refusals and not self.error


def run_case(case: PackageCase, settings: RunSettings) -> PackageRun:
    """Run `case` on real ranks. Raises AssertionError if results differ, or if ranks took different blocks."""
    runs = run_ranks(settings.ranks, run_here, case, settings, timeout=500.0)
    assert len({(run.is_taken, run.forms) for run in runs}) == 1, runs
    worst = max(run.difference for run in runs)
    # torchtitan's experts compute in bfloat16 for inputs of every type.
    is_exact = settings.dtype == "float32" and case.package != TORCHTITAN
    assert worst < (1e-5 if is_exact else 2e-2), worst
    return dataclasses.replace(runs[0], difference=worst)


def run_here(case: PackageCase, settings: RunSettings) -> PackageRun:
    """Run the case on this rank."""
    with stand_in_for_cuda() if case.package == MEGATRON else contextlib.nullcontext():
        return _compared(case, settings)


def _compared(case: PackageCase, settings: RunSettings) -> PackageRun:
    """Compare the compiled layer with itself. The number of tokens changes; their offset skews routing."""
    module, name = case.builder.split(".")
    layer = getattr(importlib.import_module(f"tests.helpers.packages.{module}"), name)(**case.options).eval()
    fill(layer)
    dtype = getattr(torch, settings.dtype)
    layer.to(dtype)
    differences = []
    switches = dict(_SWITCHES[need] for need in case.needs if need in _SWITCHES)
    rank = dist.get_rank()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._dynamo.config.patch(switches))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        compilations = stack.enter_context(record_compilations())
        dynamic = False if STATIC in case.needs else None
        compiled = torch.compile(layer, backend="asyncep", options={"lower": settings.lower}, dynamic=dynamic)
        for number, each in enumerate((2, 5, 2) if STATIC in case.needs else (2, 5, 3)):
            tokens = each * EXPERTS + (0 if case.is_even else 3 * rank)
            generator = torch.Generator().manual_seed(10 * number + rank)
            hidden = (torch.randn(tokens, HIDDEN, generator=generator) + number * 0.5).to(dtype)
            expected = layer(hidden).float()
            try:
                result = compiled(hidden).float()
            except Exception as error:
                return PackageRun(settings, error=_reason(error))
            differences.append(float((result - expected).abs().max() / expected.abs().max()))
    return _described(settings, compilations, max(differences))


def _reason(error: Exception) -> str:
    """Return the text of the error without the advice that torch appends."""
    text = str(error).split("\n\n")[0].split("raised:\n")[-1]
    return " ".join(text.split())


def _described(settings: RunSettings, compilations: list[Compilation], difference: float) -> PackageRun:
    graphs = [graph for compilation in compilations for graph in graphs_within(compilation.executor.graph_module)]
    # Lowered segments no longer show their collectives; the plan has counted them.
    exchanges: collections.Counter[str] = collections.Counter()
    for compilation in compilations:
        for listed in re.findall(r"collectives? stays? in the graph \(([^)]*)\)", compilation.plan.reason):
            for entry in listed.split(", "):
                number, kind = entry.split(" ")
                exchanges[kind] += int(number)
    waits = sum(str(node.target).startswith(_WAITS) for graph in graphs for node in graph.nodes)
    forms = dict.fromkeys(block.form for compilation in compilations for block in compilation.plan.local_blocks)
    refusals = dict.fromkeys(str(refusal) for compilation in compilations for refusal in compilation.plan.refusals)
    return PackageRun(
        settings, len(compilations), tuple(forms), tuple(refusals), dict(sorted(exchanges.items())), waits, difference
    )
