"""Expert parallelism of transformers: `ep_implementation="asyncep"`, and transformers' own under backend "asyncep"."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

import moepass
from moepass.runtime.execute.executor import Executor
from moepass.runtime.homes.adopted_banks import adopted_banks
from moepass.runtime.integrations.transformers_ep import NAME, UNEVEN_STYLE
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.tiny import tiny_model
from tests.helpers.processes.ranks import run_ranks

try:
    from transformers.distributed.expert_parallel import EPImplementationInterface
except ImportError:
    pytest.skip("transformers takes implementations of expert parallelism from 5.23 on", allow_module_level=True)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")

RANKS = 2
EXPERTS = "model.layers.*.mlp.experts"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _save(tmp_path_factory.mktemp("checkpoint"))


def _save(folder: Path, **overrides: Any) -> str:
    pytest.importorskip("accelerate", reason="transformers needs accelerate to load a model onto several ranks")
    tiny_model("qwen3_moe", num_hidden_layers=2, **overrides).save_pretrained(folder)
    return str(folder)


def _whole_dense_layers(path: str) -> dict[str, Any]:
    """The experts' group shares one batch, and every rank has complete dense layers.

    transformers 5.23 needs rules for dense layers, so each gets a style that does not change it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed.expert_parallel import ALL_PARALLEL_STYLES, ExpertParallelLayer

    class Whole(ExpertParallelLayer):  # type: ignore[misc]
        def install_forward(self, module: nn.Module, mesh: object) -> nn.Module:
            return module

    ALL_PARALLEL_STYLES.register("whole", Whole())
    with torch.device("meta"):
        rules = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).tp_plan
    return {"tp_size": RANKS, "tp_plan": dict.fromkeys(rules, "whole")}


def _load(path: str, implementation: str, dtype: torch.dtype = torch.float32, **distributed: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    moepass.register_transformers()
    config = DistributedConfig(ep_size=RANKS, ep_implementation=implementation, **distributed)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=config).eval()


def _reference(path: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def _tokens(seed: int, length: int = 12, *, shared: bool = True) -> torch.Tensor:
    """Return two prompts: equal on all ranks, or different on each."""
    generator = torch.Generator().manual_seed(seed if shared else 100 * seed + dist.get_rank())
    return torch.randint(3, 64, (2, length), generator=generator)


def _logits(model: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


def _compile(model: nn.Module, *, fullgraph: bool, **options: Any) -> Callable[..., Any]:
    torch._dynamo.config.capture_scalar_outputs = True
    chosen = {"lower": "eager", "debug": True, "timeout_s": 50, **options}
    compiled: Callable[..., Any] = torch.compile(model, backend="asyncep", fullgraph=fullgraph, options=chosen)
    return compiled


def _operators(executor: Executor) -> Iterator[str]:
    for module in executor.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (str(node.target) for node in module.graph.nodes)


def _holds_its_own_experts_only(model: Any, experts: int) -> None:
    for layer in model.model.layers:
        module = layer.mlp.experts
        assert module.num_experts * RANKS == experts
        for parameter in module.parameters():
            assert parameter.shape[0] == experts
            assert parameter._local_tensor.shape[0] * RANKS == experts


# ---------------------------------------------------------------------------------------------- implementation asyncep


def _eager_is_exact(path: str, dtype: torch.dtype) -> None:
    model, reference = _load(path, NAME, dtype, **_whole_dense_layers(path)), _reference(path, dtype)
    with torch.no_grad():
        for seed, length in ((1, 12), (2, 5), (3, 1)):
            # Ranks share no batch as far as the experts are concerned.
            tokens = _tokens(seed, length, shared=False)
            assert torch.equal(_logits(model, tokens), _logits(reference, tokens))
        _holds_its_own_experts_only(model, experts=8)
        # Other compilers see one operator, which breaks no graph.
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            assert torch.equal(_logits(compiled, tokens), _logits(reference, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_uncompiled_it_gathers_and_is_exact(checkpoint: str, dtype: torch.dtype) -> None:
    run_ranks(RANKS, _eager_is_exact, checkpoint, dtype)


def _is_prefetched(path: str, implementation: str, lower: str, dtype: torch.dtype, lengths: list[int]) -> None:
    model, reference = _load(path, implementation, dtype, **_whole_dense_layers(path)), _reference(path, dtype)
    tolerance = 0 if lower == "eager" else 1e-4
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = _compile(model, fullgraph=True, lower=lower)
        for seed, length in enumerate(lengths):  # the order of banks is learned in the second run
            tokens = _tokens(seed, length)
            expected = _logits(reference, tokens)
            torch.testing.assert_close(_logits(compiled, tokens), expected, rtol=tolerance, atol=tolerance)
    # The second length is captured with symbolic sizes, and serves those after it too.
    assert len(compilations) == min(2, len(set(lengths)))
    for compilation in compilations:
        plan = compilation.plan
        assert plan.strategy == "asyncep"
        assert plan.refusals == ()
        assert [block.name for block in plan.blocks] == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
        assert {block.parallel for block in plan.blocks} == {implementation}
        assert [bank.expert_bounds for bank in plan.banks] == [(0, 4, 8)] * 2
        operators = list(_operators(compilation.executor))
        assert not any("c10d" in name or "complete_experts" in name for name in operators)
        ring = compilation.executor.ring
        assert ring is not None
        assert ring.statistics.ahead_used > 0
        # Where GEMMs read banks in parts, this rank's own half is not copied.
        copies_own_half = not any(bank.in_parts for bank in plan.banks)
        assert copies_own_half == (lower == "eager")
        assert ring.statistics.link_bytes * (2 if copies_own_half else 1) == ring.statistics.copied_bytes
    _holds_its_own_experts_only(model, experts=8)


@pytest.mark.parametrize(
    ("implementation", "lower", "dtype", "lengths"),
    [
        (NAME, "eager", torch.float32, [12, 12, 12]),
        pytest.param(NAME, "eager", torch.bfloat16, [12, 12, 9, 10], marks=pytest.mark.slow),
        # A model that was not made for moepass: the sum over ranks leaves the graph.
        pytest.param("all_reduce", "eager", torch.float32, [12, 12, 9, 10], marks=pytest.mark.slow),
        pytest.param("all_reduce", "eager", torch.bfloat16, [12, 12, 12], marks=pytest.mark.slow),
        pytest.param(NAME, "inductor", torch.float32, [12, 12, 12], marks=pytest.mark.slow),
        pytest.param("all_reduce", "inductor", torch.float32, [12, 12, 12], marks=pytest.mark.slow),
    ],
)
def test_compiled_it_is_one_graph_whose_banks_are_prefetched(
    checkpoint: str, implementation: str, lower: str, dtype: torch.dtype, lengths: list[int]
) -> None:
    run_ranks(RANKS, _is_prefetched, checkpoint, implementation, lower, dtype, lengths, timeout=150)


def _exchanges_few_tokens(path: str, implementation: str) -> list[tuple[int, int] | str]:
    """Return the runs by form for each graph, or the reason why it has only one form."""
    model, reference = _load(path, implementation, **_whole_dense_layers(path)), _reference(path)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = _compile(model, fullgraph=True, all_to_all_below=20)
        for seed, length in enumerate((12, 7, 6, 12, 7)):  # twice as many tokens
            tokens = _tokens(seed, length)
            torch.testing.assert_close(_logits(compiled, tokens), _logits(reference, tokens))
    outcomes: list[tuple[int, int] | str] = []
    for compilation in compilations:
        forms = compilation.executor.forms
        if forms is None:
            outcomes += [refusal.reason for refusal in compilation.plan.refusals]
        else:
            outcomes.append((forms.gathered_runs, forms.exchanged_runs))
    return outcomes


@pytest.mark.slow
def test_few_tokens_are_exchanged_where_the_model_has_an_exchange(checkpoint: str) -> None:
    assert run_ranks(RANKS, _exchanges_few_tokens, checkpoint, "all_reduce", timeout=150) == [[(1, 0), (1, 3)]] * RANKS
    for reasons in run_ranks(RANKS, _exchanges_few_tokens, checkpoint, NAME, timeout=150):
        reason = "the model itself gathers all experts of block model.layers.0.mlp.experts"
        assert reasons == [f"20 has no effect: {reason}, so both forms would gather weights"] * 2


def _stands_beside_tensor_parallelism(path: str, implementation: str) -> None:
    """Dense layers have their own collectives, from transformers' tensor parallelism."""
    model = _load(path, implementation, tp_size=RANKS)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = _compile(model, fullgraph=True)
        for seed in (1, 2):
            tokens = _tokens(seed)
            assert torch.equal(_logits(compiled, tokens), _logits(model, tokens))
    (compilation,) = compilations
    assert compilation.plan.refusals == ()
    assert [block.parallel for block in compilation.plan.blocks] == [implementation] * 2
    # One sum behind each attention and one behind the embedding; those behind the experts are gone.
    sums = [name for name in _operators(compilation.executor) if "c10d_functional.all_reduce" in name]
    assert len(sums) == 3, sums


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [NAME, "all_reduce"])
def test_collectives_of_dense_layers_stay(checkpoint: str, implementation: str) -> None:
    run_ranks(RANKS, _stands_beside_tensor_parallelism, checkpoint, implementation, timeout=150)


def _is_right_under_fsdp(path: str) -> None:
    model, reference = _load(path, NAME, fsdp_size=RANKS), _reference(path)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        tokens = _tokens(1, shared=False)
        for _ in range(2):
            assert torch.equal(_logits(model, tokens), _logits(reference, tokens))
        compiled = _compile(model, fullgraph=False)
        for seed in (1, 1, 2):
            tokens = _tokens(seed, shared=False)
            assert torch.equal(_logits(compiled, tokens), _logits(reference, tokens))
    # FSDP's hooks break the graph, and one graph of experts serves all layers.
    (experts,) = [
        compilation
        for compilation in compilations
        if "moepass.complete_experts.default" in _operators(compilation.executor)
    ]
    (refusal, *_) = experts.plan.refusals
    assert "this rank's experts lie elsewhere in every run, as under FSDP" in refusal.reason


@pytest.mark.slow
def test_dense_layers_may_lie_in_shards_of_fsdp(checkpoint: str) -> None:
    run_ranks(RANKS, _is_right_under_fsdp, checkpoint, timeout=120)


def _takes_an_uneven_number_of_experts(path: str) -> None:
    plan = dict.fromkeys([f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"], UNEVEN_STYLE)
    model, reference = _load(path, NAME, ep_plan=plan, **_whole_dense_layers(path)), _reference(path)
    counts = [len(parameter._local_tensor) for parameter in model.model.layers[0].mlp.experts.parameters()]
    assert counts == [[4, 4], [3, 3]][dist.get_rank()]
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = _compile(model, fullgraph=True)
        for seed in (1, 2):
            tokens = _tokens(seed)
            expected = _logits(reference, tokens)
            assert torch.equal(_logits(model, tokens), expected)
            assert torch.equal(_logits(compiled, tokens), expected)
    (compilation,) = compilations
    assert [bank.expert_bounds for bank in compilation.plan.banks] == [(0, 4, 7)] * 2
    assert compilation.plan.refusals == ()


@pytest.mark.slow
def test_ranks_need_not_hold_equally_many_experts(tmp_path: Path) -> None:
    run_ranks(RANKS, _takes_an_uneven_number_of_experts, _save(tmp_path, num_experts=7))


def _wrong_uses_are_errors(path: str) -> None:
    model, reference = _load(path, NAME, **_whole_dense_layers(path)), _reference(path)
    with pytest.raises(moepass.InputError, match=r"training mode with gradients on; call model\.eval\(\)"):
        _logits(model.train(), _tokens(1))
    model.eval()
    changed = model.model.layers[1].mlp.experts.down_proj._local_tensor
    with torch.no_grad():
        expected = _logits(reference, _tokens(1))
        assert torch.equal(_logits(model, _tokens(1)), expected)
        changed.mul_(2)
        with pytest.raises(moepass.InputError, match="experts 1 were changed after their first run"):
            _logits(model, _tokens(1))
        # Compiled code reads the same banks.
        compiled = _compile(model, fullgraph=True)
        with refused(moepass.InputError, name="experts 1"):
            _logits(compiled, _tokens(1))
        # As the error advises: other memory, for which the ranks meet again.
        model.model.layers[1].mlp.experts.down_proj._local_tensor = changed / 2
        for _ in range(2):
            assert torch.equal(_logits(model, _tokens(1)), expected)
            assert torch.equal(_logits(compiled, _tokens(1)), expected)


def _are_met_for_once(path: str) -> None:
    model = _load(path, NAME, **_whole_dense_layers(path))
    (group,) = {layer.mlp.experts.down_proj.device_mesh.get_group() for layer in model.model.layers}
    home = adopted_banks(group, torch.device("cpu")).home
    with torch.no_grad():
        compiled = _compile(model, fullgraph=True, slots=3)
        expected = _logits(model, _tokens(1))
        banks = dict(home.banks)
        assert len(banks) == 2
        assert torch.equal(_logits(compiled, _tokens(1)), expected)
        assert torch.equal(_logits(model, _tokens(1)), expected)
        assert adopted_banks(group, torch.device("cpu")).home.banks == banks


@pytest.mark.slow
def test_eager_and_compiled_code_read_the_same_banks(checkpoint: str) -> None:
    run_ranks(RANKS, _are_met_for_once, checkpoint)


@pytest.mark.slow
def test_changed_weights_and_training_are_errors(checkpoint: str) -> None:
    run_ranks(RANKS, _wrong_uses_are_errors, checkpoint)


# --------------------------------------------------------------------------------------------- all_to_all, registration


def _all_to_all_stays(path: str, distributed: dict[str, Any], shared: bool) -> None:
    model, reference = _load(path, "all_to_all", **distributed or _whole_dense_layers(path)), _reference(path)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = _compile(model, fullgraph=False)
        for seed in (1, 2):
            tokens = _tokens(seed, shared=shared)
            torch.testing.assert_close(_logits(compiled, tokens), _logits(reference, tokens), rtol=1e-5, atol=1e-5)
    assert len(compilations) > 1
    assert {compilation.plan.strategy for compilation in compilations} == {"resident"}
    refusals = [refusal for compilation in compilations for refusal in compilation.plan.refusals]
    assert refusals
    # Dispatch, products and combine land in graphs of their own, so that no graph holds a whole block.
    for refusal in refusals:
        assert refusal.crosses_ranks
        assert "expert_parallel.py:" in refusal.source_line
    assert any("Dynamo broke it at expert_parallel.py:" in refusal.reason for refusal in refusals)
    for compilation in compilations:
        exchanges = [target for target in _operators(compilation.executor) if "all_to_all" in target]
        assert bool(exchanges) == bool(compilation.plan.refusals)
        assert bool(exchanges) == ("in the graph (" in compilation.plan.reason)


def _operators(executor: Executor) -> list[str]:
    graphs = [module.graph for module in executor.graph_module.modules() if isinstance(module, GraphModule)]
    return [str(node.target) for graph in graphs for node in graph.nodes]


@pytest.mark.parametrize(
    ("distributed", "shared"),
    [({"fsdp_size": RANKS}, False), ({}, True)],
    ids=["batches of their own", "a shared batch"],
)
@pytest.mark.slow
def test_its_own_all_to_all_runs_as_it_came(checkpoint: str, distributed: dict[str, Any], shared: bool) -> None:
    run_ranks(RANKS, _all_to_all_stays, checkpoint, distributed, shared, timeout=150)


@pytest.mark.slow
def test_whoever_imports_transformers_first_need_not_register() -> None:
    code = (
        "from transformers.distributed import expert_parallel as theirs\n"
        "import moepass\n"
        "assert 'asyncep' in theirs.EPImplementationInterface()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_registering_again_does_no_harm() -> None:
    assert moepass.register_transformers()
    assert moepass.register_transformers()
    assert NAME in EPImplementationInterface()


@pytest.mark.parametrize("found", [None, types.ModuleType("an older version")], ids=["absent", "older"])
def test_older_versions_are_left_alone(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", found)
    assert importlib.import_module("moepass.runtime.integrations.transformers_ep").register_transformers() is False
