"""The three forms of expert parallelism on real ranks, compared with all experts in one process."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import GraphModule

from moepass.models.errors import InputError
from moepass.models.formulas.expert_placement import ExpertPlacement, shard_bounds
from moepass.models.reference.expert_parallel import EP_FORMS, AllReduceExperts
from moepass.models.reference.grouped_experts import GroupedExperts
from tests.helpers.models.moe_stack import StackConfig, build_experts, build_stack
from tests.helpers.models.tiny import tiny_model
from tests.helpers.processes.ranks import RankError, run_ranks

FORMS = tuple(EP_FORMS)
DTYPES = (torch.float32, torch.bfloat16)
CONFIG = StackConfig()
# Sums over ranks add rounding errors; outputs are of the order of 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """Experts and routing of one layer. `tokens` are those of each rank; a shared batch has the last number."""

    tokens: tuple[int, ...] = (5, 7)
    experts: int = 8
    top_k: int = 2
    one_expert: bool = False

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    def config(self, dtype: torch.dtype) -> StackConfig:
        return dataclasses.replace(CONFIG, experts=self.experts, top_k=self.top_k, dtype=dtype)


CASES = {
    "even": Case(),
    "uneven shards": Case(tokens=(4, 6, 5), experts=8),
    "empty shard": Case(tokens=(4, 3, 5), experts=2),
    "no tokens on a rank": Case(tokens=(0, 6), top_k=8),
    "no tokens at all": Case(tokens=(0, 0)),
    "one expert": Case(tokens=(9, 4), experts=5, top_k=1, one_expert=True),
    "one expert first of eight": Case(tokens=(1, 6, 3), experts=9, top_k=8, one_expert=True),
    "four ranks": Case(tokens=(1, 2, 3, 4), experts=6),
}


def inputs(case: Case, dtype: torch.dtype, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, expert ids and weights of `tokens` tokens."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, CONFIG.hidden, generator=generator).to(dtype)
    scores = torch.rand(tokens, case.experts, generator=generator)
    if case.one_expert:
        scores[:, -1] += 1
    weights, index = scores.topk(case.top_k)
    return hidden, index, weights.to(dtype)


def rank_inputs(form: str, case: Case, dtype: torch.dtype, rank: int) -> tuple[torch.Tensor, ...]:
    if form == "all_reduce":
        rank = case.ranks - 1
    return inputs(case, dtype, case.tokens[rank], seed=rank)


def reference(form: str, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the expected result of every rank: all experts in this process, with all ranks' tokens in one batch."""
    experts = build_experts(case.config(dtype))
    if form == "all_reduce":
        return [experts(*rank_inputs(form, case, dtype, 0))] * case.ranks
    batches = [rank_inputs(form, case, dtype, rank) for rank in range(case.ranks)]
    together: torch.Tensor = experts(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    return list(together.split(case.tokens))


@torch.no_grad()
def run_eager(form: str, case: Case, dtype: torch.dtype) -> torch.Tensor:
    # With this setting torch fills uninitialised memory with NaN, such as rows of a grouped GEMM that belong to no
    # expert.
    torch.use_deterministic_algorithms(True)
    try:
        experts = build_experts(case.config(dtype), form)
        output: torch.Tensor = experts(*rank_inputs(form, case, dtype, dist.get_rank()))
        return output
    finally:
        torch.use_deterministic_algorithms(False)


Outcome = tuple[torch.Tensor, torch.Tensor, int]


@torch.no_grad()
def run_compiled(form: str, case: Case, dtype: torch.dtype, counts: Sequence[int]) -> list[Outcome]:
    """Return for each number of tokens the eager output, the compiled one, and the number of graphs so far."""
    experts = build_experts(case.config(dtype), form)
    compiled, graphs = compile_counting(experts)
    outcomes = []
    for count in counts:
        seed = count if form == "all_reduce" else 100 * dist.get_rank() + count
        batch = inputs(case, dtype, count, seed)
        outcomes.append((experts(*batch), compiled(*batch), len(graphs)))
    return outcomes


@torch.no_grad()
def run_stack(form: str, config: StackConfig, batches: Sequence[torch.Tensor]) -> list[Outcome]:
    """Run a complete model on rank r's part of each batch, `chunk` by rank, and return the same as `run_compiled`."""
    model = build_stack(config, form)
    compiled, graphs = compile_counting(model)
    outcomes = []
    for batch in batches:
        chunk = batch if form == "all_reduce" else batch.tensor_split(dist.get_world_size())[dist.get_rank()]
        outcomes.append((model(chunk), compiled(chunk), len(graphs)))
    return outcomes


def compile_counting(model: nn.Module) -> tuple[Callable[..., torch.Tensor], list[GraphModule]]:
    """Compile the model as one graph with a dynamic number of tokens, and count its graphs."""
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, fake_inputs: Sequence[torch.Tensor]) -> Any:
        graphs.append(module)
        return aot_eager(module, fake_inputs)

    compiled = torch.compile(model, backend=keep, fullgraph=True, dynamic=True)

    def run(*batch: torch.Tensor) -> torch.Tensor:
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            output: torch.Tensor = compiled(*batch)
            return output

    return run, graphs


def assert_equal(outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for rank, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert output.dtype == wanted.dtype
        assert torch.equal(output, wanted), f"rank {rank}: off by up to {(output - wanted).abs().max()}"


def assert_close(outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        tolerance = TOLERANCE[wanted.dtype]
        torch.testing.assert_close(output, wanted, rtol=tolerance, atol=tolerance)


# The case `even` is fast, so each form has a fast test.
FAST_CASE = "even"
CASES_BY_TIME = [
    pytest.param(case, id=name, marks=[] if name == FAST_CASE else pytest.mark.slow) for name, case in CASES.items()
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES_BY_TIME)
@pytest.mark.parametrize("form", FORMS)
def test_eager_equals_all_experts_in_one_process(form: str, case: Case, dtype: torch.dtype) -> None:
    outputs, expected = run_ranks(case.ranks, run_eager, form, case, dtype), reference(form, case, dtype)
    if form.startswith("all_to_all") or case.top_k <= 2:
        assert_equal(outputs, expected)
    else:
        assert_close(outputs, expected)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("form", FORMS)
def test_compiled_as_one_graph_equals_eager(form: str, case: Case, dtype: torch.dtype) -> None:
    for outcomes in run_ranks(case.ranks, run_compiled, form, case, dtype, (6, 11, 0)):
        assert_equal([compiled for _, compiled, _ in outcomes], [eager for eager, _, _ in outcomes])
        # All numbers of tokens share a graph except 0 and 1, on which torch specialises.
        assert [graphs for _, _, graphs in outcomes] == [1, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_several_layers(form: str) -> None:
    # Bfloat16 and uneven shards, which the test above does not cover. With top-1 no form rounds a sum.
    config = StackConfig(experts=5, top_k=1, normalise=False, skew=0.5, dtype=torch.bfloat16)
    batches = [torch.randn(count, config.hidden).to(config.dtype) for count in (7, 13)]
    outcomes = run_ranks(2, run_stack, form, config, batches)
    with torch.no_grad():
        expected = [build_stack(config)(batch) for batch in batches]
    for rank, of_rank in enumerate(outcomes):
        wanted = expected if form == "all_reduce" else [batch.tensor_split(2)[rank] for batch in expected]
        assert_equal([compiled for _, compiled, _ in of_rank], [eager for eager, _, _ in of_rank])
        assert_close([eager for eager, _, _ in of_rank], wanted)
        assert [graphs for _, _, graphs in of_rank] == [1, 1]


@torch.no_grad()
def messages_of_wrong_uses(config: StackConfig) -> list[str]:
    """Return the messages for wrong arguments, which every rank raises before it communicates."""
    weights = build_experts(config)
    uses: list[Callable[[], object]] = [
        lambda: AllReduceExperts(weights.gate_up_proj, weights.down_proj, config.experts),
        lambda: build_experts(config, "all_to_none"),
    ]
    messages = []
    for use in uses:
        with pytest.raises(InputError) as caught:
            use()
        messages.append(str(caught.value))
    return messages


def test_errors_name_the_value_and_what_would_be_right() -> None:
    shard, form = run_ranks(2, messages_of_wrong_uses, CONFIG)[0]
    assert "owns 4 of 8 experts" in shard
    assert "all_to_none" in form
    assert "all_gather, all_reduce, all_to_all, local" in form


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_computes_what_transformers_does(dtype: torch.dtype) -> None:
    theirs: Any = tiny_model("qwen3_moe", dtype=dtype).model.layers[0].mlp.experts
    ours = GroupedExperts(theirs.gate_up_proj, theirs.down_proj)
    batch = inputs(Case(experts=8, top_k=3), dtype, 11, seed=0)
    with torch.no_grad():
        assert_equal([ours(*batch)], [theirs(*batch)])


@given(st.integers(1, 300), st.integers(1, 40))
def test_shards_cover_every_expert_once_and_differ_by_one_at_most(experts: int, ranks: int) -> None:
    bounds = shard_bounds(experts, ranks)
    placements = [ExpertPlacement(experts, ranks, rank) for rank in range(ranks)]
    assert bounds[0] == 0
    assert bounds[-1] == experts
    assert [expert for placement in placements for expert in placement.owned] == list(range(experts))
    sizes = placements[0].shard_sizes
    assert sizes == tuple(len(placement.owned) for placement in placements)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("experts", "ranks", "rank"), [(0, 2, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_impossible_placements_are_refused(experts: int, ranks: int, rank: int) -> None:
    with pytest.raises(InputError) as raised:
        ExpertPlacement(experts, ranks, rank)
    error = raised.value
    assert error.rank == rank if experts and ranks else (error.value, error.expected) == (0, "1 or more")


def fail_on_rank(rank: int, how: str) -> int:
    """Fail on one rank while the others wait for it."""
    if dist.get_rank() == rank:
        if how == "raises":
            raise ValueError("wrong on purpose")
        if how == "dies":
            os._exit(7)
        time.sleep(60)
    dist.barrier()
    return dist.get_rank()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1 raised\n(.|\n)*ValueError: wrong on purpose"),
        ("dies", "rank 1 died with exit code 7"),
        ("sleeps", r"ranks \[0, 1\] did not finish within 1 s"),
    ],
    ids=["raises", "dies", "sleeps"],
)
def test_a_failing_rank_fails_the_run_and_no_later_one(how: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(2, fail_on_rank, 1, how, timeout=1.0 if how == "sleeps" else 30.0)
    assert run_ranks(2, fail_on_rank, 2, how) == [0, 1]
