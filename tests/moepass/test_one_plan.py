"""One plan: `explain` prints, placement follows and the compiled graph carries the same decisions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moepass
from moepass.compilations import Compilation
from moepass.models.errors import InputError
from moepass.models.formulas.memory import bank_bytes
from moepass.models.sizes.families import from_config
from moepass.passes.ir.planner_decisions import STRUCTURAL, Decisions
from moepass.passes.machine.hardware import Figure, Hardware, TransferLink
from moepass.passes.machine.layer_times import Sequences
from moepass.passes.planner.model_problem import least_memory_bytes
from moepass.passes.planner.strategies import Setting
from moepass.runtime.profiles.hardware_profiles import load_hardware
from tests.helpers.processes.halved_format import halve, resting_halved

BATCH, SEQUENCE = 2, 32


def _config(layers: int = 6) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=layers,
        mlp_only_layers=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        use_cache=False,
    )


CONFIG = _config()


def made_up_machine(host_bytes_per_s: float = 2e7) -> Hardware:
    """Return a machine so slow that a tiny model waits for its experts."""
    h100 = load_hardware("h100-80g")
    link = TransferLink(Figure(host_bytes_per_s, "user"), Figure(1e-6, "user"))
    return dataclasses.replace(
        h100, name="made up", flops={"fp32": Figure(1e10, "user")}, processors=None, host=link, ranks=1
    )


def tiny_model(layers: int = 6) -> PreTrainedModel:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM._from_config(_config(layers), dtype=torch.float32).eval()
    model.set_experts_implementation("grouped_mm")
    return model


def budget(banks: float, hardware: Hardware) -> int:
    """Return a memory budget that leaves space for this many banks."""
    architecture = from_config(CONFIG, dtype="fp32")
    setting = Setting(architecture, hardware, Sequences(BATCH, SEQUENCE), "fp32", float("inf"))
    bank = bank_bytes(architecture.typical_moe_layer.experts, CONFIG.hidden_size, "fp32")  # type: ignore[arg-type]
    return round(least_memory_bytes(setting, "host") + (banks - 1) * bank)


def compiled(model: PreTrainedModel, batch: int = BATCH, sequence: int = SEQUENCE) -> Compilation:
    torch._dynamo.reset()  # models of one class share their code, and the next one has another plan
    ids = torch.zeros((batch, sequence), dtype=torch.int64)
    with moepass.record_compilations() as compilations, torch.no_grad():
        torch.compile(model, backend="asyncep", options={"lower": "eager"})(ids, logits_to_keep=1)
    (compilation,) = compilations
    return compilation


@pytest.mark.slow
@pytest.mark.parametrize("banks", [3.5, 4.5])
def test_the_report_and_the_compiled_plan_agree(banks: float) -> None:
    machine = made_up_machine()
    memory = budget(banks, machine)
    report = moepass.explain(
        CONFIG, hardware=machine, home="host", dtype="fp32", batch=BATCH, seq=SEQUENCE, memory_budget_bytes=memory
    )
    printed = msgspec.json.decode(report.to_json())
    model = tiny_model()
    moepass.offload_experts(model, memory_budget=memory, hardware=machine, tokens=(BATCH, SEQUENCE))
    plan = compiled(model).plan
    ran = plan.decisions
    assert ran is not None
    assert list(ran.resident_layers) == printed["schedule"]["resident_layers"] == printed["plan"]["resident_layers"]
    assert len(ran.resident_layers) == int(banks) - ran.slots
    assert ran.slots == plan.slots == printed["schedule"]["slots"]
    assert ran.threshold_tokens == printed["saturation"]["tokens_per_rank"]
    # Exact: both are one function of the same sizes. Only the memory differs: by buffers that no formula counts, and by
    # activations, which are counted in the graph where there is one.
    assert ran.step_seconds == printed["schedule"]["step_seconds"]
    assert ran.exposed_seconds == printed["schedule"]["exposed_seconds"]
    assert ran.memory is not None
    assert ran.memory.resident_bytes == pytest.approx(printed["memory"]["resident_bytes"], rel=0.01)
    assert ran.memory.slot_bytes == printed["memory"]["slot_bytes"]
    assert plan.activations is not None
    assert ran.memory.activation_bytes == plan.largest_activations({})[0]
    assert ran.memory.activation_bytes == pytest.approx(printed["memory"]["activation_bytes"], rel=0.2)
    same = ("home", "profile", "batch", "sequence", "forms", "streamed_layers", "slot_bytes", "compute_seconds")
    stated = msgspec.json.decode(msgspec.json.encode(ran))
    assert {name: stated[name] for name in same} == {name: printed["plan"][name] for name in same}
    assert ran.exposed_seconds > 0, "a machine on which nothing waits would tell nothing"


def test_experts_that_are_decoded_into_slots_are_planned_alike_for_the_model_and_its_graph() -> None:
    machine, models = made_up_machine(), [tiny_model(layers=3), tiny_model(layers=3)]
    halve(models[0])
    with resting_halved():
        encoded = moepass.offload_experts(models[0], slots=2, hardware=machine, tokens=(BATCH, SEQUENCE))
        ran = compiled(models[0]).plan.decisions
    plain = moepass.offload_experts(models[1], slots=2, hardware=machine, tokens=(BATCH, SEQUENCE))
    placed, of_plain = (report.store.placed.decisions for report in (encoded, plain))  # type: ignore[union-attr]
    assert ran is not None
    assert placed.memory is not None
    assert ran.memory is not None
    assert of_plain.memory is not None
    assert (ran.step_seconds, ran.threshold_tokens) == (placed.step_seconds, placed.threshold_tokens)
    assert ran.memory.slot_bytes == placed.memory.slot_bytes == of_plain.memory.slot_bytes * 6 / 4
    # On this machine the link takes nearly all of the time, and attention makes longer steps slower per token.
    assert placed.threshold_tokens == pytest.approx(of_plain.threshold_tokens / 2, rel=0.1)


class Wrapped(torch.nn.Module):
    """A model that takes positions before token ids, and has a table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.arange(15).reshape(3, 5))
        self.inner = tiny_model()

    def forward(self, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(ids, position_ids=positions + self.offsets[0, 0], logits_to_keep=1).logits
        return hidden


@pytest.mark.slow
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sequences_are_counted_by_the_arguments_that_have_all_of_them(batch: int) -> None:
    torch._dynamo.reset()
    ids, positions = torch.zeros((batch, 8), dtype=torch.int64), torch.arange(8)[None]
    with moepass.record_compilations() as compilations, torch.no_grad():
        torch.compile(Wrapped(), backend="asyncep", options={"lower": "eager"})(positions, ids)
    (compilation,) = compilations
    assert compilation.plan.sequences == (str(batch), "8")


@pytest.mark.slow
@pytest.mark.parametrize("loads", [False, True])
def test_a_model_whose_experts_all_fit_is_predicted_too(loads: bool, tmp_path: Path) -> None:
    machine = made_up_machine()
    model = tiny_model()
    if loads:
        model.save_pretrained(tmp_path)
        model = moepass.load_pretrained(
            tmp_path, memory_budget="1GB", hardware=machine, tokens=(BATCH, SEQUENCE), dtype=torch.float32
        )
    else:
        moepass.offload_experts(model, memory_budget="1GB", hardware=machine, tokens=(BATCH, SEQUENCE))
    report = moepass.offload_report(model)
    assert (report.layers, report.home, len(report.resident_layers)) == ((), "host", 5)
    compilation = compiled(model)
    decisions = compilation.plan.decisions
    assert decisions is not None
    assert (decisions.profile, decisions.resident_layers) == ("made up", (0, 2, 3, 4, 5))
    assert decisions.step_seconds == decisions.compute_seconds is not None
    assert "machine: made up" in str(compilation.report())
    with pytest.raises(InputError, match="has no offloaded experts"):
        moepass.offload_report(tiny_model())


@pytest.mark.slow
def test_a_plan_with_decisions_is_read_back_as_it_was_written() -> None:
    model = tiny_model()
    machine = made_up_machine()
    moepass.offload_experts(model, memory_budget=budget(3.5, machine), hardware=machine, tokens=(BATCH, SEQUENCE))
    plan = compiled(model).plan
    assert moepass.Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_what_is_predicted_follows_the_size_of_the_graph() -> None:
    machine = made_up_machine()
    model = tiny_model()
    moepass.offload_experts(model, memory_budget=budget(3.5, machine), hardware=machine, tokens=(BATCH, SEQUENCE))
    more = compiled(model, batch=16).plan.decisions
    assert more is not None
    assert (more.batch, more.sequence) == (16, SEQUENCE)
    report = moepass.explain(CONFIG, hardware=machine, home="host", dtype="fp32", batch=16, seq=SEQUENCE)
    assert report.schedule is not None
    assert more.compute_seconds == report.schedule.compute_seconds


@pytest.mark.slow
def test_without_a_profile_the_plan_says_so() -> None:
    model = tiny_model()
    moepass.offload_experts(model)
    decisions = compiled(model).plan.decisions
    assert decisions is not None
    assert (decisions.resident_layers, decisions.slots, decisions.profile) == ((), 2, "")
    assert decisions.streamed_layers == (0, 2, 3, 4, 5)
    assert (decisions.step_seconds, decisions.threshold_tokens) == (None, None)
    assert decisions.source("step_seconds").startswith(f"{STRUCTURAL}: no hardware profile; moepass calibrate")
    assert decisions.source("resident_layers") == f"{STRUCTURAL}: no memory budget"


@pytest.mark.slow
def test_a_graph_of_unknown_sizes_is_predicted_from_its_costs() -> None:
    """There is no formula for this family, so the FLOPs and bytes of segments are used."""
    machine = made_up_machine()
    qwen, renamed = tiny_model(), tiny_model()
    moepass.offload_experts(qwen, hardware=machine)
    renamed.config.model_type = "nobody_knows"
    moepass.offload_experts(renamed, hardware=machine)
    by_sizes, by_costs = (compiled(model).plan.decisions for model in (qwen, renamed))
    assert isinstance(by_sizes, Decisions)
    assert isinstance(by_costs, Decisions)
    assert by_costs.step_seconds is not None
    assert by_sizes.step_seconds is not None
    # Transfers take most of this step, and these are the same.
    assert by_costs.step_seconds == pytest.approx(by_sizes.step_seconds, rel=0.05)
    assert by_costs.threshold_tokens is None
