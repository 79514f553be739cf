"""Detection: the record of every form of block, and a reason for each refusal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional as F

import moepass
from moepass.models.reference.expert_parallel import EP_FORMS
from moepass.passes.blocks import detect as detect_module
from moepass.passes.blocks.detect import find_blocks
from moepass.passes.blocks.expert_gemms import expert_gemms
from moepass.passes.graph.nodes import copy_graph_module
from moepass.passes.ir.protocol import PassContext, PassError
from moepass.passes.pipeline import PASSES, compile_graph
from tests.helpers.graphs import simulated_ranks
from tests.helpers.graphs.backend_helper import (
    BLOCKS,
    EXPERTS,
    HIDDEN,
    TOP_K,
    WIDTH,
    BatchedBlock,
    DenseBlock,
    Stack,
    capture,
    fingerprint,
    streamed,
    tokens,
    up_to,
)
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.moe_stack import StackConfig

FORMS = [
    ("grouped_mm", torch.bfloat16),
    ("grouped_mm", torch.float32),
    ("batched_mm", torch.float32),
    ("batched_mm", torch.bfloat16),
    ("dense_bmm", torch.float32),
]
KINDS: dict[str, dict[str, Any]] = {
    "fused": {},
    "split": {"split": True},
    "not gated": {"gated": False},
    "biases": {"bias": True},
    "transposed": {"transposed": True},
    "transposed with biases": {"transposed": True, "bias": True},
}


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_records_of_every_form(form: str, dtype: torch.dtype, kind: str, offloaded: bool) -> None:
    model = Stack(form, depth=2, dtype=dtype, **KINDS[kind])
    captured = (streamed if offloaded else capture)(model, tokens(dtype=dtype))
    plan = up_to("detect", captured.module).plan
    assert plan.refusals == ()
    assert len(plan.blocks) == 2
    gated = KINDS[kind].get("gated", True)
    for layer, block in enumerate(plan.blocks):
        assert (block.form, block.experts, block.hidden, block.intermediate) == (form, EXPERTS, HIDDEN, WIDTH)
        assert block.gated is gated
        assert block.top_k == (None if form == "dense_bmm" else TOP_K)
        assert block.dtype == str(dtype).removeprefix("torch.")
        assert block.weight_bytes == EXPERTS * HIDDEN * WIDTH * (3 if gated else 2) * dtype.itemsize
        assert block.bank == (layer if offloaded else None)
        assert len(block.gemms) == (3 if KINDS[kind].get("split") else 2)
        assert block.name.endswith(f"blocks.{layer}")


def test_banks_list_their_tensors_and_their_size() -> None:
    model = Stack("batched_mm", depth=2, bias=True)
    report = moepass.offload_experts(model)
    plan = up_to("detect", capture(model, tokens()).module).plan
    assert plan.banks == tuple(bank.spec for bank in report.store.banks)
    assert [spec.name for spec in plan.banks[0].tensors] == ["up", "down", "up_bias", "down_bias"]
    assert sum(spec.format.home_bytes for spec in plan.banks) == report.home_bytes


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("form", BLOCKS)
def test_a_layer_that_is_applied_twice_is_two_blocks_with_one_bank(form: str) -> None:
    model = Stack(form, depth=2)
    model.blocks[1] = model.blocks[0]
    plan = up_to("detect", streamed(model, tokens()).module).plan
    assert [block.bank for block in plan.blocks] == [0, 0]
    assert len(plan.banks) == 1
    assert plan.refusals == ()


def test_detection_changes_nothing() -> None:
    captured = streamed(Stack("batched_mm"), tokens())
    before = fingerprint(captured.module)
    result = up_to("detect", captured.module)
    assert result.module is captured.module
    assert fingerprint(captured.module) == before
    assert len(result.matches) == 3


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every search of a graph for blocks adds the number of nodes that it looks at."""
    counts: list[int] = []

    def counted(nodes: Iterable[Node], **settings: bool) -> Any:
        nodes = list(nodes)
        counts.append(len(nodes))
        return expert_gemms(nodes, **settings)

    monkeypatch.setattr(detect_module, "expert_gemms", counted)
    return counts


@pytest.mark.parametrize("chunk_tokens", [None, 2])
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("form", BLOCKS)
def test_a_compile_searches_for_blocks_once(
    form: str, offloaded: bool, chunk_tokens: int | None, searches: list[int]
) -> None:
    captured = (streamed if offloaded else capture)(Stack(form, depth=2), tokens(), dynamic=True)
    plan = compile_graph(captured.module, PassContext(chunk_tokens=chunk_tokens)).plan
    assert len(plan.blocks) == 2
    assert len(searches) == 1


@pytest.mark.parametrize("form", EP_FORMS)
def test_with_expert_parallelism_the_graph_is_searched_before_and_after_its_exchanges_are_gone(
    form: str, searches: list[int]
) -> None:
    captured = simulated_ranks.capture(StackConfig(layers=1), form, 0, 2, 9)
    plan = compile_graph(captured.module, PassContext(groups=captured.groups)).plan
    assert [bool(block.parallel) for block in plan.blocks] == [True]
    assert len(searches) == 2


@pytest.mark.parametrize("name", ["rewrite", "sink_token_gather", "hoist_token_return", "partition"])
def test_a_gemm_that_a_pass_removed_without_updating_its_block_is_an_error(name: str) -> None:
    names = [function.__name__ for function in PASSES]
    before = names[names.index(name) - 1]
    result = up_to(before, capture(Stack("grouped_mm", depth=2), tokens()).module)
    changed = copy_graph_module(result.module)
    block = result.plan.blocks[1]
    (gemm,) = (node for node in changed.graph.nodes if node.name == block.gemms[0])
    with changed.graph.inserting_before(gemm):
        replacement = changed.graph.call_function(gemm.target, gemm.args, gemm.kwargs)
    replacement.meta = dict(gemm.meta)
    gemm.replace_all_uses_with(replacement)
    changed.graph.erase_node(gemm)
    with refused(PassError, name=block.name):
        PASSES[names.index(name)](changed, result.plan, PassContext())


def _reasons(model: nn.Module, *inputs: torch.Tensor, offloaded: bool = False) -> list[str]:
    captured = (streamed if offloaded else capture)(model, *inputs)
    result = find_blocks(captured.module.graph)
    assert {refusal.node for refusal in result.refusals} <= {node.name for node in captured.module.graph.nodes}
    return [refusal.reason for refusal in result.refusals]


class Dequantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH), requires_grad=False)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(EXPERTS, 1, 1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([1, 2, 3, 6], dtype=torch.int32)
        up = torch.ops.transformers.grouped_mm_fallback(x, self.up * self.scale, ends)
        down: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(up.relu(), self.down * self.scale, ends)
        return down


def test_weights_that_the_graph_computes_are_refused() -> None:
    reasons = _reasons(Dequantised(), tokens())
    assert len(reasons) == 2
    assert all("computed in the graph (by `aten.mul.Tensor` (test_detect.py:" in reason for reason in reasons)


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_single_gemm_is_refused(offloaded: bool) -> None:
    class OnlyUp(BatchedBlock):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x[:, None], self.matrix(self.up[ids[:, 0]]))[:, 0]

    reasons = _reasons(OnlyUp(), tokens(), torch.zeros(6, 2, dtype=torch.int64), offloaded=offloaded)
    assert "an expert GEMM without a partner" in reasons[0]
    if offloaded:
        assert any("`up` is read outside a recognised MoE block" in reason for reason in reasons)


def test_refused_dense_experts_get_advice() -> None:
    class Thresholds(nn.Module):
        """Scores above a threshold choose any number of experts."""

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH), requires_grad=False)
            self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.einsum("th,ehf->etf", x, self.up).relu()
            outputs = torch.einsum("etf,efh->eth", inner, self.down)
            return (outputs * torch.threshold(x[:, :EXPERTS], 0.5, 0.0).T.unsqueeze(-1)).sum(0)

    (reason,) = _reasons(Thresholds(), tokens())
    assert "every row by the weights of every expert" in reason
    assert "zeros.scatter(1, ids, weights)" in reason


def test_widths_that_fit_no_mlp_are_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 3 * WIDTH), requires_grad=False)
            self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = torch.bmm(x.repeat(EXPERTS, 1).view(EXPERTS, -1, HIDDEN), self.up)
            return torch.bmm(up[..., :WIDTH] + up[..., WIDTH : 2 * WIDTH], self.down)

    (reason,) = _reasons(Odd(), tokens())
    assert f"widths do not fit an MLP: up [({HIDDEN}, {3 * WIDTH})], down ({WIDTH}, {HIDDEN})" in reason


def test_weights_of_which_only_some_lie_in_a_bank_are_refused() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.banked = BatchedBlock(gated=False)
            self.down = nn.ParameterList([torch.randn(EXPERTS, WIDTH, HIDDEN)]).requires_grad_(False)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            flat = ids[:, 0]
            up = torch.bmm(x[:, None], self.banked.up[flat].transpose(1, 2)).relu()
            return torch.bmm(up, self.down[0][flat])[:, 0]

    reasons = _reasons(Mixed(), tokens(), torch.zeros(6, 2, dtype=torch.int64), offloaded=True)
    assert any("only some of them in a bank" in reason for reason in reasons)


def test_attention_over_graph_inputs_is_no_block() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)

    captured = capture(attention, *torch.randn(3, 4, 6, 8))
    assert find_blocks(captured.module.graph).matches == ()


def test_a_graph_without_blocks_has_nothing_to_report() -> None:
    result = find_blocks(
        capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False), torch.randn(2, 4)).module.graph
    )
    assert (result.matches, result.refusals) == ((), ())


def test_top_k_is_found_where_rows_are_repeated() -> None:
    """transformers' batched_mm repeats rows by an expand, not by an index."""

    class Repeats(BatchedBlock):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            flat = ids.reshape(-1)
            rows = x.repeat_interleave(ids.shape[1], dim=0)[:, None]
            up = self.activate(torch.bmm(rows, self.matrix(self.up[flat])), None)
            return torch.bmm(up, self.matrix(self.down[flat])).view(x.shape[0], ids.shape[1], -1).sum(1)

    captured = streamed(Repeats(), tokens(), torch.zeros(6, 3, dtype=torch.int64))
    assert [match.record.top_k for match in find_blocks(captured.module.graph).matches] == [3]


@pytest.mark.slow
def test_layers_that_share_a_routing_decision_are_blocks_of_their_own() -> None:
    class SharedRouting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(BatchedBlock(seed=layer, split=True) for layer in range(3))

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, ids)
            return x

    for offloaded in (False, True):
        captured = (streamed if offloaded else capture)(SharedRouting(), tokens(), torch.tensor([[0, 1]] * 6))
        result = find_blocks(captured.module.graph)
        assert [match.record.name for match in result.matches] == ["blocks.0", "blocks.1", "blocks.2"]
        assert result.refusals == ()


class Branches(nn.Module):
    """A model in which each layer after the first is in one of two branches, which both read its bank."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DenseBlock(seed=layer) for layer in range(3))
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.blocks[0](x, x)
        for block in self.blocks[1:]:

            def once(x: torch.Tensor, block: nn.Module = block) -> torch.Tensor:
                result: torch.Tensor = block(x, x)
                return result

            def half(x: torch.Tensor, block: nn.Module = block) -> torch.Tensor:
                result: torch.Tensor = block(x, x) * 0.5
                return result

            x = torch.cond(x.sum() > 0, once, half, (x,))
        return x


@pytest.mark.slow
@pytest.mark.parametrize(("first", "strategy"), [(True, "asyncep"), (False, "synchronous")])
def test_a_bank_that_is_read_in_a_branch_is_in_the_plan(first: bool, strategy: str) -> None:
    model = Branches(first)
    with torch.no_grad():
        expected = model(tokens())
        moepass.offload_experts(model)
        with moepass.record_compilations() as compilations:
            compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
            assert torch.equal(compiled(tokens()), expected)
    plan = compilations[0].plan
    assert plan.strategy == strategy
    assert [bank.name for bank in plan.banks] == [f"blocks.{layer}" for layer in range(0 if first else 1, 3)]
    assert [refusal.where for refusal in plan.refusals] == ["blocks.1", "blocks.2"]
    assert {refusal.reason for refusal in plan.refusals} == {
        "it is read inside a branch or loop of the graph, where no block is looked for: gathered synchronously"
    }
    assert ("synchronously" in plan.reason) != first


@pytest.mark.slow
def test_a_bank_in_files_cannot_be_read_in_a_branch(tmp_path: Path) -> None:
    model = Branches(True)
    with torch.no_grad():
        moepass.offload_experts(model, home=moepass.Disk(folder=tmp_path))
        with pytest.raises(
            moepass.MoepassError, match=r"bank blocks\.1 rests in files and is read inside a branch or loop"
        ):
            torch.compile(model, backend="asyncep", options={"lower": "eager"})(tokens())


class KeysAndValuesGiven(nn.Module):
    """Attention over keys and values that are arguments: two GEMMs with batched tensors, but no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = torch.bmm(self.query(x), keys).relu()
        return torch.bmm(scores, values)


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("are_parameters", [False, True])
def test_an_argument_of_the_model_is_no_expert_weight(are_parameters: bool) -> None:
    inputs = [torch.randn(4, 8, 16), torch.randn(4, 16, 8)]
    keys, values = [nn.Parameter(value) for value in inputs] if are_parameters else inputs
    with moepass.record_compilations() as compilations:
        compiled = torch.compile(
            KeysAndValuesGiven(), backend="asyncep", options={"lower": "eager"}, fullgraph=True, dynamic=False
        )
        compiled(torch.randn(4, 5, 8), keys, values)
    (compilation,) = compilations
    assert len(compilation.plan.blocks) == are_parameters
