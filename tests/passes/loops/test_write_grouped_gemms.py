"""Loops over experts become grouped GEMMs that compute the same."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.source_lines import ARGUMENT_KEY
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, run_passes
from moepass.passes.loops.write_grouped_gemms import write_grouped_gemms
from moepass.runtime.lowering.lower_segments import decompositions
from tests.helpers.graphs.rewritten_loops import rewrite_loop
from tests.helpers.project_styles.local_loops import EXPERTS, HIDDEN, WIDTH
from tests.helpers.project_styles.slice_loops import (
    Mlp,
    Routed,
    SlicesByCounts,
    SlicesWithBiases,
    UncheckedSlices,
    random_weight,
    read_counts,
)

aten = torch.ops.aten
_rewrite = functools.partial(rewrite_loop, passes=(write_grouped_gemms,))


class SlicesAsRefusalsAsk(SlicesByCounts):
    """A loop over counts about which only the checks are known; the host reads them with negative indices."""

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs, start = [], 0
        counts = counts.roll(1)
        for number, expert in enumerate(self.experts):
            end = start + int(counts[number - EXPERTS].item())
            torch._check(end >= start)
            torch._check(end <= rows.shape[0])
            outputs.append(expert(rows[start:end]))
            start = end
        return torch.cat(outputs)


class SplitStacked(Routed):
    """Stacked weights are transposed in the loop; routing weights are applied between the GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = random_weight(EXPERTS, 2 * WIDTH, HIDDEN), random_weight(EXPERTS, HIDDEN, WIDTH)

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sizes = read_counts(counts)
        torch._check(sum(sizes) == rows.shape[0])
        outputs = []
        parts = zip(torch.split(rows, sizes), torch.split(weights, sizes), strict=True)
        for number, (rows_of_expert, of_part) in enumerate(parts):
            gate, up = (rows_of_expert @ self.gate_up[number].transpose(-2, -1)).chunk(2, dim=-1)
            inner = F.gelu(gate, approximate="tanh") * up * of_part.unsqueeze(-1)
            outputs.append(inner @ self.down[number].t())
        return torch.cat(outputs)


class CastStacked(Routed):
    """Weights are cast in the loop, and rows are cast back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = random_weight(EXPERTS, HIDDEN, WIDTH), random_weight(EXPERTS, WIDTH, HIDDEN)

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs = []
        for number, rows_of_expert in enumerate(torch.split(rows, read_counts(counts))):
            inner = torch.relu(rows_of_expert.double() @ self.up[number].double())
            outputs.append((inner @ self.down[number].double()).to(rows.dtype))
        return torch.cat(outputs)


class Slots(nn.Module):
    """Every expert has the same number of slots, each a mixture of all tokens."""

    shape: tuple[int, ...]

    def __init__(self) -> None:
        super().__init__()
        self.mix = random_weight(72, HIDDEN)
        self.experts = nn.ModuleList(Mlp(bias=True) for _ in range(EXPERTS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = (hidden @ self.mix.T).softmax(0)
        outputs = self.run((scores.T @ hidden).view(*self.shape, HIDDEN))
        return scores @ outputs.reshape(-1, HIDDEN)

    def run(self, slots: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class SlotsSelected(Slots):
    shape = (EXPERTS, 18)

    def run(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.stack([expert(slots[number]) for number, expert in enumerate(self.experts)])


class SlotsInChunks(Slots):
    """Slots [ranks, experts, slots] are chunked along experts, as DeepSpeed does after its exchange."""

    shape = (3, EXPERTS, 6)

    def run(self, slots: torch.Tensor) -> torch.Tensor:
        chunks = slots.chunk(EXPERTS, dim=1)
        return torch.cat([expert(chunk) for expert, chunk in zip(self.experts, chunks, strict=True)], dim=1)


class SlotsUnbound(Slots):
    """Slots [slots, experts] are unbound along experts, as are stacked weights."""

    shape = (18, EXPERTS)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = random_weight(EXPERTS, HIDDEN, WIDTH), random_weight(EXPERTS, WIDTH, HIDDEN)

    def run(self, slots: torch.Tensor) -> torch.Tensor:
        parts = zip(slots.unbind(1), self.up.unbind(), self.down.unbind(), strict=True)
        return torch.stack([(slots_of_expert @ up).tanh() @ down for slots_of_expert, up, down in parts], dim=1)


class SlotsNarrowed(Slots):
    """Slots [experts · slots] are narrowed, as are weights in one tensor."""

    shape = (72,)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = random_weight(EXPERTS * HIDDEN, WIDTH), random_weight(EXPERTS * WIDTH, HIDDEN)

    def run(self, slots: torch.Tensor) -> torch.Tensor:
        outputs = []
        for number in range(EXPERTS):
            slots_of_expert = slots.narrow(0, 18 * number, 18)
            inner = F.hardtanh(slots_of_expert @ self.up.narrow(0, HIDDEN * number, HIDDEN), -0.5, 0.5)
            outputs.append(inner @ self.down.narrow(0, WIDTH * number, WIDTH))
        return torch.cat(outputs)


TAKEN: list[type[nn.Module]] = [
    SlicesByCounts, UncheckedSlices, SlicesAsRefusalsAsk, SlicesWithBiases, SplitStacked, CastStacked, SlotsSelected,
    SlotsInChunks, SlotsUnbound, SlotsNarrowed,
]  # fmt: skip


def _gemms(module: GraphModule) -> tuple[int, int]:
    """Return the number of grouped GEMMs, and of all other GEMMs."""
    grouped = sum(is_grouped_gemm(node) for node in module.graph.nodes)
    plain = sum(node.target in (aten.mm.default, aten.addmm.default) for node in module.graph.nodes)
    return grouped, plain


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("model", TAKEN, ids=lambda model: model.__name__)
def test_a_loop_becomes_grouped_gemms(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, refusals = _rewrite(model())
    grouped, plain = _gemms(module)
    assert grouped in (2, 3)
    assert plain <= 3  # the router, and the products that mix tokens into slots and back
    assert refusals == []


@pytest.mark.slow
@pytest.mark.parametrize("model", TAKEN, ids=lambda model: model.__name__)
def test_inductor_lowers_every_operator(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, _ = _rewrite(model(), counts=(11,), lower="inductor")
    taken_apart = {node.target for node in module.graph.nodes if node.target in select_decomp_table()}
    assert {target for target in taken_apart if target not in lowerings} == set()


class TwoActivations(SlicesByCounts):
    """One expert has another activation function."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[2].forward = lambda rows: self.experts[2].down(F.relu(self.experts[2].gate(rows)))


class NormOverRows(SlicesByCounts):
    """The result of a row depends on other rows of its expert."""

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs = []
        for expert, rows_of_expert in zip(self.experts, torch.split(rows, read_counts(counts)), strict=True):
            inner = expert.gate(rows_of_expert)
            outputs.append(expert.down(inner - inner.mean(dim=0, keepdim=True)))
        return torch.cat(outputs)


class OtherScales(SlicesByCounts):
    """Each branch multiplies by another constant."""

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = zip(self.experts, torch.split(rows, read_counts(counts)), strict=True)
        return torch.cat(
            [
                expert.down(expert.gate(rows_of_expert) * (1 + number))
                for number, (expert, rows_of_expert) in enumerate(parts)
            ]
        )


class OverlappingSlices(Slots):
    """Each expert also reads a row of the next slice."""

    shape = (72,)

    def run(self, slots: torch.Tensor) -> torch.Tensor:
        parts = [slots[18 * number : min(72, 18 * number + 19)][:18] for number in range(EXPERTS)]
        return torch.cat([expert(rows_of_expert) for expert, rows_of_expert in zip(self.experts, parts, strict=True)])


class SharedWeights(SlicesByCounts):
    """All branches use the same expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([self.experts[0]] * EXPERTS)


class ShuffledOutputs(SlicesByCounts):
    """Results are joined in another order than rows are split."""

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = list(zip(self.experts, torch.split(rows, read_counts(counts)), strict=True))
        return torch.cat([expert(rows_of_expert) for expert, rows_of_expert in reversed(parts)])


class WideScales(SlicesByCounts):
    """Each expert multiplies by its element of a float64 tensor, which as a scalar keeps the type of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(EXPERTS, dtype=torch.float64), requires_grad=False)

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = zip(self.experts, torch.split(rows, read_counts(counts)), strict=True)
        return torch.cat(
            [
                expert.down(expert.gate(rows_of_expert) * self.scale[number])
                for number, (expert, rows_of_expert) in enumerate(parts)
            ]
        )


class OtherCounts(UncheckedSlices):
    """The slices may have more or fewer rows than the input."""

    def fit(self, outputs: torch.Tensor, rows: int) -> torch.Tensor:
        return F.pad(outputs, (0, 0, 0, rows))[:rows]


class DoubledCounts(OtherCounts):
    """The first slices contain rows of other experts, and the last ones end with the rows."""

    def counts_of(self, counts: torch.Tensor) -> torch.Tensor:
        return counts * 2


class CountsOfOtherIds(OtherCounts):
    """The counts add up to the number of rows, but some are negative."""

    def counts_of(self, counts: torch.Tensor) -> torch.Tensor:
        return counts + torch.tensor([3, -3, 3, -3])


class NarrowCounts(OtherCounts):
    """The type of the counts cannot represent every number of rows."""

    def counts_of(self, counts: torch.Tensor) -> torch.Tensor:
        return counts.to(torch.int8)


class CountsOfAnyLength(OtherCounts):
    """The number of counts depends on data."""

    def counts_of(self, counts: torch.Tensor) -> torch.Tensor:
        return counts[counts >= 0]

    def sizes_of(self, counts: torch.Tensor) -> list[int]:
        return [int(counts[number].item()) for number in range(EXPERTS)]


REFUSED: list[tuple[type[nn.Module], str]] = [
    (TwoActivations, "in the first branch"),
    (NormOverRows, "works along the rows"),
    (OtherScales, "other arguments"),
    (WideScales, "float64 for all experts together"),
    (DoubledCounts, "not known to be consecutive slices of all rows"),
    (CountsOfOtherIds, "not known to be consecutive slices of all rows"),
    (NarrowCounts, "not known to be consecutive slices of all rows"),
    (CountsOfAnyLength, "not known to be consecutive slices of all rows"),
    (ShuffledOutputs, "in another order"),
]


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize(("model", "why"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_loop_that_cannot_be_taken_stays_and_says_why(model: type[nn.Module], why: str) -> None:
    torch.manual_seed(0)
    module, refusals = _rewrite(model())
    assert _gemms(module)[0] == 0
    (refusal,) = refusals
    assert re.search(why, refusal.reason)


@pytest.mark.slow
@pytest.mark.parametrize("model", [OverlappingSlices, SharedWeights], ids=lambda model: model.__name__)
def test_code_similar_to_a_loop_is_unchanged(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    _rewrite(model())


class Projections(nn.Module):
    """Projections of the same rows to queries, keys and values, which are not experts and get no refusal."""

    def __init__(self, put_together: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        self.put_together = put_together
        self.projections = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.put_together([projection(hidden) for projection in self.projections])


@pytest.mark.parametrize("put_together", [torch.cat, torch.stack, torch.hstack], ids=lambda function: function.__name__)
def test_projections_of_the_same_rows_are_no_loop(
    put_together: Callable[[Sequence[torch.Tensor]], torch.Tensor],
) -> None:
    module, refusals = _rewrite(Projections(put_together))
    assert _gemms(module)[0] == 0
    assert refusals == []


class TiedLoops(SlicesByCounts):
    """A second loop reads the experts of the first in another order."""

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sizes = read_counts(counts)
        for experts in (self.experts, [self.experts[number] for number in (1, 0, 2, 3)]):
            rows = torch.cat(
                [expert(rows_of_expert) for expert, rows_of_expert in zip(experts, rows.split(sizes), strict=True)]
            )
        return rows


class TransposedParameters(SlicesByCounts):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.gate.weight.data = expert.gate.weight.data.t().contiguous().t()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "grouped", "why"),
    [(TiedLoops, 3, "is a weight of two loops over experts"), (TransposedParameters, 0, "does not lie contiguously")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_parameters_that_cannot_lie_together(model: type[nn.Module], grouped: int, why: str) -> None:
    torch.manual_seed(0)
    module, refusals = _rewrite(model())
    assert _gemms(module)[0] == grouped
    assert [why in refusal.reason for refusal in refusals] == [True]


ROW_WORK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "clamp": lambda rows: rows.clamp(-0.3, 0.4),
    "norm": lambda rows: rows * (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt(),
    "softmax": lambda rows: rows.softmax(-1),
    "halves": lambda rows: torch.cat([rows[..., 12:], rows[..., :12]], -1),
    "pairs": lambda rows: rows.unflatten(-1, (12, 2)).flip(-1).flatten(-2),
    "turned": lambda rows: rows.unflatten(-1, (4, 6)).transpose(-1, -2).flatten(-2),
    "maximum": lambda rows: rows - rows.amax(-1, keepdim=True),
    "where": lambda rows: torch.where(rows > 0, rows, rows.exp()),
    "cast": lambda rows: rows.to(torch.float64).square().to(rows.dtype),
}


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    work=st.lists(st.sampled_from(sorted(ROW_WORK)), max_size=4, unique=True),
    shape=st.sampled_from([(4, 18), (3, 4, 6), (18, 4), (2, 4, 3, 3)]),
    joins_in_place=st.booleans(),
    bias=st.booleans(),
)
def test_any_row_work_in_any_shape_of_slots(
    work: list[str], shape: tuple[int, ...], joins_in_place: bool, bias: bool
) -> None:
    """Slots have random shapes with the dimension of experts anywhere, and random work on rows between the GEMMs."""
    dim = shape.index(EXPERTS)
    torch.manual_seed(0)
    weights = [torch.randn(*size) / 4 for size in [(WIDTH, HIDDEN), (WIDTH,), (HIDDEN, WIDTH), (HIDDEN,)] * EXPERTS]

    def model(slots: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        outputs = []
        slots = slots * 1
        for number, chunk in enumerate(slots.chunk(EXPERTS, dim)):
            up, up_bias, down, down_bias = weights[4 * number : 4 * number + 4]
            rows_of_expert = F.linear(chunk if joins_in_place else chunk.squeeze(dim), up, up_bias if bias else None)
            for name in work:
                rows_of_expert = ROW_WORK[name](rows_of_expert)
            outputs.append(F.linear(rows_of_expert, down, down_bias if bias else None))
        return torch.cat(outputs, dim) if joins_in_place else torch.stack(outputs, dim)

    slots = torch.randn(*shape, HIDDEN)
    module = make_fx(model, decompositions("eager"), tracing_mode="fake")(slots, *weights)
    next(iter(module.graph.nodes)).meta[ARGUMENT_KEY] = True
    result = run_passes((write_grouped_gemms,), module, Plan(), PassContext())
    expected = module(slots, *weights)
    largest = float(expected.abs().max())
    torch.testing.assert_close(result.module(slots, *weights), expected, rtol=0.0, atol=1e-5 * largest)
    assert _gemms(result.module) == (2, 0), result.refusals
