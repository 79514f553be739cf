"""Part `kernels`: a grouped GEMM, and a whole expert layer, with moepass's generated kernels and with others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.nn import functional as F
from transformers import PreTrainedConfig

import moepass
from benchmarks.on_gpu.expert_layers import (
    ExpertLayer,
    Routed,
    dense_layer,
    relative_error,
    sorted_pairs,
)
from benchmarks.on_gpu.tables import ResultTable
from benchmarks.on_gpu.target import (
    Deadline,
    Failures,
    Target,
    Timing,
    WrongResultError,
    conditions,
    is_out_of_memory,
)
from moepass.models.formulas.gemms import gemm_flops
from moepass.passes.ir.segment import EXPERTS
from moepass.passes.segments.expert_kernels import read_kernels
from moepass.passes.segments.expert_program import read_program
from moepass.runtime.kernels.grouped_gemm.launch import GeneratedGemm

GEMM, LAYER = "grouped GEMM", "expert layer"
_CHECKED_TOKENS = 8
_OURS, _GROUPED, _DENSE = "moepass", "grouped_mm", "dense"


@dataclasses.dataclass(frozen=True)
class KernelResult:
    """One row of the table: `timings` by contender. Without timings it was not measured, because of `reason`."""

    model: str
    what: str
    tokens: int
    routing: str
    flops: int
    timings: Mapping[str, Timing] = dataclasses.field(default_factory=dict)
    error: float | None = None
    lowered: str = ""
    reason: str = ""

    def ratio_to(self, other: str) -> float | None:
        """Return the speed of moepass relative to `other`."""
        if _OURS not in self.timings or other not in self.timings:
            return None
        return self.timings[other].seconds / self.timings[_OURS].seconds

    @property
    def share_of_dense(self) -> float | None:
        """Return the speed relative to a dense GEMM of the same FLOPs, or None if it was not measured."""
        return self.ratio_to(_DENSE)

    @property
    def against_grouped_mm(self) -> float | None:
        """Return the speed relative to torch's grouped GEMM, or None if it was not measured."""
        return self.ratio_to(_GROUPED)


def measure_kernels(
    target: Target,
    configs: Mapping[str, PreTrainedConfig],
    cases: Sequence[tuple[int, str]],
    rounds: int,
    deadline: Deadline,
    failures: Failures,
    folder: Path | None = None,
) -> list[KernelResult]:
    """Print one table of the layers of `configs`, by name, for `cases` of tokens and routing."""
    table = ResultTable(
        "kernels",
        f"Expert kernels, {str(target.dtype).removeprefix('torch.')}",
        ["model", "what", "tokens", "routing", "moepass ms", "grouped_mm ms", "dense ms", "TFLOP/s", "of dense",
         "of peak", "x grouped_mm", "error", "by"],
        conditions(target),
        folder,
    )  # fmt: skip
    results: list[KernelResult] = []
    for name, config in configs.items():
        torch._dynamo.reset()
        target.free_memory()
        runs, reason = None, f"the part's {deadline.seconds:.0f} s were over"
        if not deadline.is_over:
            try:
                runs = _LayerRuns(name, config, target)
            except Exception as error:
                reason = failures.add(error)
        for (tokens, routing), what in itertools.product(cases, (GEMM, LAYER)):
            result = KernelResult(name, what, tokens, routing, 0)
            if runs is None or deadline.is_over:
                result = dataclasses.replace(result, reason=reason)
            else:
                try:
                    result = runs.measure(what, tokens, routing, rounds)
                except Exception as error:
                    result = dataclasses.replace(result, reason=failures.add(error))
            results.append(result)
            table.add(*_cells(result, target))
    table.finish(
        f"Medians of {rounds} runs in turns, ± half of the range; device time alone. of dense: moepass's rate as a "
        "part of that of dense GEMMs of the same FLOPs; of peak: of the stated peak rate; x grouped_mm: how many "
        "times as fast as F.grouped_mm (expert layer: with its permutes, compiled by Inductor). error: the largest of "
        f"{_CHECKED_TOKENS} tokens against float64, by norm. skewed: the n-th most popular expert has a share of "
        "1 / n, a quarter have none. by: how moepass lowered the experts."
    )
    return results


def _cells(result: KernelResult, target: Target) -> list[str]:
    def ms(name: str) -> str:
        return str(result.timings[name]) if name in result.timings else "-"

    start = [result.model, result.what, str(result.tokens), result.routing]
    if _OURS not in result.timings:
        return [*start, f"not measured: {result.reason}", *["-"] * 8]
    rate = result.flops / result.timings[_OURS].seconds
    peak = target.peak_flops
    return [
        *(*start, ms(_OURS), ms(_GROUPED), ms(_DENSE), f"{rate / 1e12:.3g}"),
        *(_percent(result.share_of_dense), _percent(None if peak is None else rate / peak)),
        "-" if result.against_grouped_mm is None else f"{result.against_grouped_mm:.2f}",
        "-" if result.error is None else f"{result.error:.1e}",
        result.lowered + (f"; {result.reason}" if result.reason else ""),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


class _LayerRuns:
    """The runs of one layer, compiled once for all numbers of tokens."""

    def __init__(self, name: str, config: PreTrainedConfig, target: Target) -> None:
        self.target = target
        self.layer = ExpertLayer.of(name, config, target.device, target.dtype)
        self._compiled = torch.compile(self.layer.module, backend="asyncep")
        self._inductor = torch.compile(self.layer.module, backend="inductor")
        self._lowered = ""

    @torch.no_grad()
    def measure(self, what: str, tokens: int, routing: str, rounds: int) -> KernelResult:
        layer, pairs = self.layer, tokens * self.layer.experts.top_k
        width, hidden = layer.experts.width, layer.hidden
        flops = int(gemm_flops(pairs, hidden, layer.up.shape[2]))
        if what == LAYER:
            flops += int(gemm_flops(pairs, width, hidden))
        result = KernelResult(layer.name, what, tokens, routing, flops)
        try:
            routed = layer.routed(tokens, routing)
            runs, error, lowered = self._gemm(routed) if what == GEMM else self._layer(routed)
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
            return dataclasses.replace(result, reason="out of memory")
        if not error <= self.target.most_error:
            description = f"{layer.name}, {what}, {tokens} tokens, {routing}: error {error:.2e} against float64"
            raise WrongResultError(description)
        runs, reason = self._that_fit(runs)
        timings = self.target.interleaved(runs, rounds)
        return dataclasses.replace(result, timings=timings, error=error, lowered=lowered, reason=reason)

    def _that_fit(self, runs: Mapping[str, Callable[[], object]]) -> tuple[dict[str, Callable[[], object]], str]:
        """Return the runs that fit into memory, and a message about the others."""
        available, missing = {}, []
        for name, run in runs.items():
            try:
                run()
                self.target.synchronize()
                available[name] = run
            except Exception as failure:
                if not is_out_of_memory(failure):
                    raise
                missing.append(name)
            self.target.free_memory()
        return available, f"out of memory: {', '.join(missing)}" if missing else ""

    def _gemm(self, routed: Routed) -> tuple[dict[str, Callable[[], object]], float, str]:
        layer = self.layer
        token, ends = sorted_pairs(routed, layer.experts.count)
        rows = routed.hidden[token]
        kernel = generated_gemm(rows, layer.up, ends)
        (products,) = kernel([rows], [layer.up], ends, len(rows))
        checked = torch.linspace(0, len(rows) - 1, _CHECKED_TOKENS, device=rows.device).long()
        expert = torch.bucketize(checked, ends.long(), right=True)
        exact = torch.cat([rows[at : at + 1].double() @ layer.up[by].double() for at, by in zip(
            checked.tolist(), expert.tolist(), strict=True)])  # fmt: skip
        dense = torch.empty_like(layer.up[0]).normal_()
        runs: dict[str, Callable[[], object]] = {
            _OURS: lambda: kernel([rows], [layer.up], ends, len(rows)),
            _GROUPED: lambda: F.grouped_mm(rows, layer.up, offs=ends),
            _DENSE: lambda: rows @ dense,
        }
        error = relative_error(products[checked], exact)
        return runs, error, "triton"

    def _layer(self, routed: Routed) -> tuple[dict[str, Callable[[], object]], float, str]:
        inputs = routed.inputs()
        for value in inputs:
            torch._dynamo.mark_dynamic(value, 0)
        checked = torch.linspace(0, len(routed.hidden) - 1, _CHECKED_TOKENS, device=routed.hidden.device).long()
        with moepass.record_compilations() as compilations:
            outputs = self._compiled(*inputs)
        if compilations:
            self._lowered = how_experts_run(compilations)
        error = relative_error(outputs[checked], self.layer.exact(routed, checked))
        del outputs
        pairs = routed.index.numel()
        runs: dict[str, Callable[[], object]] = {
            _OURS: lambda: self._compiled(*inputs),
            _GROUPED: lambda: self._inductor(*inputs),
            _DENSE: dense_layer(self.layer, pairs),
        }
        return runs, error, self._lowered


def how_experts_run(compilations: Sequence[moepass.Compilation]) -> str:
    """Return how the segments with experts were lowered, with the reasons for fallbacks."""
    names: dict[str, None] = {}
    for compilation in compilations:
        for segment in compilation.plan.segments:
            if EXPERTS in segment.parts and segment.lowering is not None:
                refusal = segment.lowering.refusal
                names[segment.lowering.how + (f" ({refusal})" if refusal else "")] = None
    return ", ".join(names) or "no segment of experts"


def generated_gemm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> GeneratedGemm:
    """Return the kernel of a single grouped GEMM of rows [n, in] and weights [E, in, out]."""
    graph = Graph()
    inputs: list[Any] = []
    for name, value in (("rows", rows), ("weights", weights), ("ends", ends)):
        inputs.append(graph.placeholder(name))
        inputs[-1].meta["val"] = value.to("meta")
    gemm = graph.call_function(torch.ops.aten._grouped_mm.default, tuple(inputs))
    gemm.meta["val"] = torch.empty(len(rows), weights.shape[2], dtype=rows.dtype, device="meta")
    graph.output((gemm,))
    (kernel,) = read_kernels(read_program(GraphModule({}, graph))).kernels
    return GeneratedGemm(kernel)
