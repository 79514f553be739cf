"""Dense experts compute only the pairs that a router chooses; unsupported layers are unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings
from torch.nn import functional as F

import moepass
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.dense.dense_gemms import dense_gemm
from moepass.passes.graph.nodes import fake_value, graph_inputs
from tests.helpers.graphs.captured_layers import compare_layer, expert_forms, random_tokens
from tests.helpers.project_styles.dense_experts import (
    EXPERTS,
    TAKEN,
    TOP_K,
    BaddbmmDense,
    DenseExperts,
    EinsumDense,
    GptOssDense,
    Llama4Dense,
    MatmulDense,
    OneHotDense,
)

aten = torch.ops.aten
WRITINGS = [pytest.param(kind, id=kind.__name__) for kind in TAKEN]


def layer(kind: type[DenseExperts], **sizes: int) -> DenseExperts:
    torch.manual_seed(0)
    return kind(**sizes)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("kind", WRITINGS)
def test_only_the_chosen_pairs_are_computed(kind: type[DenseExperts]) -> None:
    result = compare_layer(layer(kind))
    assert expert_forms(result) == ["grouped_mm"]
    assert result.refusals == ()
    nodes = list(result.module.graph.nodes)
    assert not any(dense_gemm(node) for node in nodes)
    top_k = 1 if kind is BaddbmmDense else TOP_K
    batch = 2 if kind.__name__ == "BatchDense" else 1
    (size,) = [
        value for node in graph_inputs(result.module.graph) if isinstance(value := fake_value(node), torch.SymInt)
    ]
    for gemm in filter(is_grouped_gemm, nodes):
        assert fake_value(gemm).shape[0].node.expr == top_k * batch * size.node.expr


@pytest.mark.sampled(every=16)
@pytest.mark.covering(2)
@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WRITINGS)
def test_static_sizes_types_and_decompositions(kind: type[DenseExperts], dtype: torch.dtype, lower: str) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    result = compare_layer(layer(kind), lower=lower, dtype=dtype, counts=(EXPERTS,), dynamic=False, tolerance=tolerance)
    assert expert_forms(result) == ["grouped_mm"]
    if lower == "inductor":
        taken_apart = {node.target for node in result.module.graph.nodes if node.target in select_decomp_table()}
        assert {target for target in taken_apart if target not in lowerings} == set()


class AllExperts(EinsumDense):
    """Every expert has a non-zero weight for every token."""

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.router(hidden), dim=-1)


class AboveThreshold(EinsumDense):
    """Every expert above or equal to a threshold is chosen, so the number of experts depends on values."""

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.router(hidden)
        least = logits.topk(self.top_k, dim=-1)[0][:, -1:]
        return logits.masked_fill(logits < least, float("-inf")).softmax(dim=-1)


class SmallNotZero(EinsumDense):
    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choose(hidden)
        return torch.full((hidden.shape[0], self.experts), 1e-3).scatter(1, ids, weights)


class OtherIds(EinsumDense):
    """Weights are written for the experts after the chosen ones, some of them twice."""

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choose(hidden)
        return torch.zeros(hidden.shape[0], self.experts).scatter(1, (ids + 1) // 2, weights)


class FewTokens(EinsumDense):
    """The router chooses for all tokens except the last."""

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choose(hidden)
        return torch.zeros(hidden.shape[0], self.experts).scatter(1, ids[:-1], weights[:-1])


class ChosenByTokens(EinsumDense):
    """Experts choose tokens."""

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = F.softmax(self.router(hidden), dim=-1)
        weights, ids = scores.topk(2, dim=0)
        return torch.zeros_like(scores).scatter(0, ids, weights)


class TwoChoices(EinsumDense):
    """The weights are the sum of those of two routers."""

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().weights(hidden) + super().weights(hidden.flip(1))


class NumberedFeatures(EinsumDense):
    """Ids are compared with numbers of the features of all experts, of which those of expert 0 equal ids."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        up = torch.einsum("th,ehf->tef", hidden, self.up)
        results = torch.einsum("tef,efh->teh", self.activate(up), self.down)
        _, ids = self.choose(hidden)
        numbers = torch.arange(self.experts * self.hidden).view(self.experts, self.hidden)
        return (results * (ids[:, :, None, None] == numbers).any(1)).sum(1)


class BiasedLlama4(Llama4Dense):
    """An expert returns non-zero values for a row of zeros."""

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        return super().activate(up) + 0.5


class NormOfZeros(Llama4Dense):
    """Rows that were not chosen are 0 times infinity, so all results are NaN."""

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        rows = super().activate(up)
        return rows * torch.rsqrt(rows.pow(2).mean(dim=-1, keepdim=True))


class SoftmaxOfExperts(GptOssDense):
    """The results of all experts are combined before they are weighted."""

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        return super().activate(up).softmax(dim=0)


class MeanOverTokens(GptOssDense):
    def activate(self, up: torch.Tensor) -> torch.Tensor:
        return super().activate(up - up.mean(dim=1, keepdim=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        AllExperts,
        AboveThreshold,
        SmallNotZero,
        OtherIds,
        FewTokens,
        ChosenByTokens,
        TwoChoices,
        NumberedFeatures,
        BiasedLlama4,
        NormOfZeros,
    ],
    ids=lambda kind: kind.__name__,
)
def test_weights_that_may_be_non_zero_stay_dense(kind: type[DenseExperts]) -> None:
    result = compare_layer(layer(kind))
    assert not any(map(is_grouped_gemm, result.module.graph.nodes))
    assert result.refusals == ()


class RoundedNumbers(OneHotDense):
    """Expert numbers in bfloat16, which cannot represent 257: its mask equals that of 256."""

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choose(hidden)
        mask = ids.unsqueeze(-1) == torch.arange(self.experts, dtype=torch.bfloat16)
        return (mask.to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1)


@pytest.mark.slow
def test_masks_of_rounded_expert_numbers_are_unchanged() -> None:
    model = layer(RoundedNumbers, experts=258, width=2)
    model.router.weight.data[256:] += torch.randn(2, 1)  # so that the last two experts are chosen
    assert not any(map(is_grouped_gemm, compare_layer(model, counts=(40, 3)).module.graph.nodes))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", [SoftmaxOfExperts, MeanOverTokens], ids=lambda kind: kind.__name__)
def test_experts_that_depend_on_other_experts_are_refused(kind: type[DenseExperts]) -> None:
    result = compare_layer(layer(kind))
    assert not any(map(is_grouped_gemm, result.module.graph.nodes))
    (refusal,) = result.refusals
    assert "every expert computes every token" in refusal.reason
    assert "(test_compute_chosen_pairs.py" in refusal.reason


class ReadTwice(GptOssDense):
    """The results of all experts for all tokens have another reader."""

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        self.largest = up.amax()
        return super().activate(up)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + self.largest


@pytest.mark.slow
def test_results_with_another_reader_are_refused() -> None:
    result = compare_layer(layer(ReadTwice))
    assert not any(map(is_grouped_gemm, result.module.graph.nodes))
    (refusal,) = result.refusals
    assert "read by something else too" in refusal.reason


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", [GptOssDense, MatmulDense])
def test_a_token_that_is_not_finite_stays_one(kind: type[DenseExperts]) -> None:
    """The results of that token are not finite, as before; those of all other tokens are unchanged."""
    model = layer(kind).eval()
    inputs = random_tokens(7)
    inputs[2, 3] = float("inf")
    torch._dynamo.reset()
    with torch.no_grad():
        outputs = torch.compile(model, backend="asyncep", options={"lower": "eager"})(inputs)
        expected = model(inputs)
    assert not torch.isfinite(outputs[2]).all()
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.slow
def test_all_experts_chosen_stay_dense() -> None:
    result = compare_layer(layer(EinsumDense, top_k=EXPERTS))
    assert not any(map(is_grouped_gemm, result.module.graph.nodes))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", [GptOssDense, OneHotDense, Llama4Dense])
def test_offloaded_experts_stream(kind: type[DenseExperts]) -> None:
    """Einsums are included, whose GEMMs are not recognised as those of experts before the pass."""
    model = nn.Sequential(layer(kind), layer(kind)).eval().requires_grad_(False)
    inputs = random_tokens(9)
    torch._dynamo.reset()
    with torch.no_grad(), moepass.record_compilations() as compilations:
        expected = model(inputs)
        moepass.offload_experts(model)
        outputs = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})(inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    (compilation,) = compilations
    assert [(block.form, block.top_k) for block in compilation.plan.blocks] == [("grouped_mm", TOP_K)] * 2
    assert len(compilation.plan.slot_stays) == 2
    assert compilation.plan.refusals == ()


def test_no_tokens() -> None:
    for count in (5, 0):
        compare_layer(layer(GptOssDense), counts=(count,), dynamic=False)
