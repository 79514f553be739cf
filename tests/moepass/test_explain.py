"""Reports of `moepass explain`: the schema, every preset, advice, and models that are passed from Python."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys

import msgspec
import pytest
import torch

import moepass
from moepass.explaining.arguments import explained_model
from moepass.explaining.capture_model import capture_plans
from moepass.explaining.compiler_part import cut_config, explained_blocks, telling_prefix
from moepass.explaining.compiler_view import Explanation, tensorrt_text
from moepass.explaining.forecasts import advice
from moepass.explaining.report import Report
from moepass.explaining.report_parts import CompilerPart, ServingPart
from moepass.models.checkpoint.checkpoint_folders import meta_model, resolve_model
from moepass.models.errors import InputError, MoepassError
from moepass.models.formulas.layers import flops_per_token
from moepass.models.sizes.families import from_config
from moepass.models.sizes.presets import preset, preset_config, preset_names
from moepass.passes.ir.plan import MoEBlock, Plan, Refusal
from moepass.passes.ir.segment import Segment, SegmentUse, TensorrtChoice
from moepass.passes.machine.layer_times import Sequences
from moepass.passes.planner.forecast import Forecast, forecast
from moepass.passes.planner.strategies import Setting
from moepass.runtime.profiles.hardware_profiles import load_hardware
from tests.helpers.graphs.error_fields import refused
from tests.helpers.graphs.report_helper import small_report
from tests.helpers.graphs.tiny_checkpoint import original_model
from tests.helpers.graphs.tiny_configs import tiny_config
from tests.helpers.models.tiny import TINY_FAMILIES, tiny_model

# The keys that the schema guarantees, by part of the report.
PROMISED = {
    "model": {"name", "layers", "moe_layers", "hidden", "experts", "top_k", "moe_intermediate", "dtype"},
    "hardware": {"name", "ranks", "flops", "peer_bytes_per_s", "host_bytes_per_s", "hbm_bytes", "source"},
    "strategy": {"chosen", "reason", "runner_up"},
    "saturation": {
        "gather_bytes", "gather_seconds", "flops_per_token", "tokens_per_rank", "tokens_per_rank_at_peak", "gamma",
        "formula",
    },
    "schedule": {"slots", "distance", "step_seconds", "exposed_seconds", "timeline"},
    "memory": {"resident_bytes", "slot_bytes", "activation_bytes", "kv_bytes", "peak_bytes", "fits"},
}  # fmt: skip
STRATEGIES = {"dp_ep", "dp_tp", "tp_ep", "tp_tp", "pp_pp", "sp_tp", "sp_ep", "asyncep"}


@pytest.fixture(scope="module")
def olmoe() -> Report:
    return small_report()


def test_the_json_has_the_keys_of_the_schema(olmoe: Report) -> None:
    raw = json.loads(olmoe.to_json())
    assert raw["schema"] == "moepass.explain/1"
    for name, keys in PROMISED.items():
        assert keys <= raw[name].keys(), name
    assert {row["strategy"] for row in raw["comparison"]} == STRATEGIES | {"resident"}
    for row in raw["comparison"]:
        assert {"strategy", "step_seconds", "comm_bytes_per_layer", "memory_bytes", "fits"} <= row.keys()
    assert {"op", "layer", "stream", "start_seconds", "end_seconds"} == raw["schedule"]["timeline"][0].keys()
    assert {"name", "form", "rewritten", "refusal", "bank_bytes"} <= raw["blocks"][0].keys()
    assert isinstance(raw["refusals"], list)
    assert isinstance(raw["sources"], dict)
    assert "NaN" not in olmoe.to_json()
    assert "Infinity" not in olmoe.to_json()


def test_only_json_of_this_schema_is_read(olmoe: Report) -> None:
    assert Report.from_json(olmoe.to_json()) == olmoe
    raw = json.loads(olmoe.to_json())
    with pytest.raises(msgspec.ValidationError, match=r"this version reads 'moepass\.explain/1'"):
        Report.from_json(json.dumps({**raw, "schema": "moepass.explain/2"}))
    with pytest.raises(msgspec.ValidationError, match="unknown field `more`"):
        Report.from_json(json.dumps({**raw, "more": 1}))
    with pytest.raises(msgspec.ValidationError, match=r"saturation"):
        Report.from_json(json.dumps({**raw, "saturation": {**raw["saturation"], "gamma": "much"}}))


def test_numbers_agree_with_each_other(olmoe: Report) -> None:
    assert olmoe.schedule is not None
    assert olmoe.memory is not None
    assert olmoe.saturation is not None
    memory, architecture = olmoe.memory, preset("olmoe-1b-7b")
    assert memory.peak_bytes == (memory.resident_bytes + memory.slot_bytes + memory.activation_bytes + memory.kv_bytes)
    assert memory.fits == (memory.peak_bytes <= memory.budget_bytes)
    assert olmoe.saturation.flops_per_token == flops_per_token(architecture.typical_moe_layer, architecture.hidden)
    assert {block.bank_bytes for block in olmoe.blocks} == {olmoe.saturation.gather_bytes}
    waits = sum(event.end_seconds - event.start_seconds for event in olmoe.schedule.timeline if event.op == "wait")
    assert waits == pytest.approx(olmoe.schedule.exposed_seconds)
    asyncep = next(row for row in olmoe.comparison if row.strategy == "asyncep")
    assert asyncep.step_seconds == olmoe.schedule.step_seconds
    planned = next(point for point in olmoe.curve if point.tokens_per_rank == olmoe.workload.tokens)
    assert planned.step_seconds == pytest.approx(olmoe.schedule.step_seconds)
    assert any("no peer link" in attempt.note for attempt in olmoe.strategy.homes_tried)


def test_the_error_for_a_machine_without_links_has_a_reason_for_every_home() -> None:
    machine = dataclasses.replace(load_hardware("8xh100-80g"), peer=None, host=None)
    with pytest.raises(moepass.InputError) as failed:
        moepass.explain("olmoe-1b-7b", hardware=machine)
    reasons = str(failed.value)
    assert all(words in reasons for words in ("peer: profile", "hybrid: profile", "host: profile", "no host link"))


def test_the_trace_has_the_timeline(olmoe: Report) -> None:
    assert olmoe.schedule is not None
    slices = [event for event in json.loads(olmoe.trace())["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(olmoe.schedule.timeline)


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_fits_its_width_and_names_its_sources(olmoe: Report, width: int) -> None:
    lines = olmoe.text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 75
    text = " ".join(" ".join(lines).split())
    for word in ("datasheet:", "empirical:", "derived:", "tokens per rank and step", "compute", "copy", "pp_pp"):
        assert word in text


def test_a_report_says_how_a_server_computes_steps(olmoe: Report) -> None:
    assert olmoe.serving == ServingPart("trie", None)
    for serving, words in (
        (olmoe.serving, "serving    tries: every shared prefix is computed once"),
        (ServingPart("rows", "<conv1d> mixes neighbours"), "padded rows, because <conv1d> mixes neighbours"),
        (ServingPart(None, "the sizes are not known"), "cannot be served: the sizes are not known"),
    ):
        report = msgspec.structs.replace(olmoe, serving=serving)
        assert words in report.text(120)
        assert words.removeprefix("serving    ").replace("<", "&lt;").replace(">", "&gt;") in report.html()


@pytest.mark.slow
def test_a_model_with_recurrent_layers_is_served_as_padded_rows() -> None:
    serving = moepass.explain(tiny_model("qwen3_next").config).serving
    assert serving.form == "rows"
    assert "convolution over tokens" in str(serving.reason)


@pytest.mark.slow
@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_explained(name: str) -> None:
    report = moepass.explain(name)
    architecture = preset(name)
    assert [block.rewritten for block in report.blocks] == [True] * len(architecture.moe_layers)
    names = [block.name for block in report.blocks]
    assert names == [f"model.layers.{layer}.mlp.experts" for layer in architecture.moe_layers]
    assert report.compiler.is_cut
    assert any("inferred from equal ones" in text for text in report.assumptions)
    assert report.refusals == ()
    asyncep = next(row for row in report.comparison if row.strategy == "asyncep")
    assert asyncep.fits or report.advice[0].startswith("asyncep fits with")


def _forecast(name: str, home: str, batch: int, sequence: int, dtype: str = "bf16") -> Forecast:
    return forecast(Setting(preset(name), load_hardware("8xh100"), Sequences(batch, sequence), dtype, 72e9), home)


def test_advice_if_nothing_fits() -> None:
    made = _forecast("deepseek-v3", "host", 16, 4096)
    assert not made.cost("asyncep").fits
    fewer, fp8 = advice(made, None, ())[:2]
    assert "tokens per rank and step (--home" in fewer
    assert "--dtype fp8 (--home" in fp8
    # The advice is true.
    tokens, home = int(fewer.split("with ")[1].split()[0]), fewer.split("--home ")[1].rstrip(")")
    assert _forecast("deepseek-v3", home, tokens // 4096, 4096).cost("asyncep").fits
    assert not _forecast("deepseek-v3", home, 2 * tokens // 4096, 4096).cost("asyncep").fits
    assert _forecast("deepseek-v3", fp8.split("--home ")[1].rstrip(")"), 16, 4096, "fp8").cost("asyncep").fits


def test_advice_suggests_another_home() -> None:
    made = _forecast("qwen3-235b-a22b", "peer", 16, 4096)
    assert advice(made, None, ())[0] == "asyncep fits with --home hybrid"


@pytest.mark.slow
def test_advice_below_the_threshold() -> None:
    made = _forecast("qwen3-235b-a22b", "hybrid", 1, 512)
    assert made.chosen not in ("asyncep", "resident")
    first, second, third = advice(made, 9000, ("model.layers.0: shared",))
    assert first.startswith(f"with {made.saturation.tokens} or more tokens per rank and step")
    assert second == "asyncep is faster than AllToAll (dp_ep) with 9000 or more tokens per rank and step"
    assert third == "the figures assume that all blocks are rewritten, but 1 were refused and run unchanged"


def test_options_change_the_report() -> None:
    report = moepass.explain(
        "olmoe-1b-7b", hardware=load_hardware("8xh100"), ranks=2, home="host", dtype="fp8", tokens=300, slots=1,
        memory_budget_bytes=2e9,
    )  # fmt: skip
    assert (report.hardware.name, report.hardware.ranks, report.hardware.flops) == ("2xh100-80g", 2, 1979e12)
    assert (report.workload.batch, report.workload.seq, report.model.dtype) == (1, 300, "fp8")
    assert report.strategy.home == "host"
    assert report.schedule is not None
    assert report.schedule.slots == 1
    assert any("fp8 is only a forecast" in text for text in report.assumptions)
    for options, message in (
        ({"batch": 0}, "batch is 0"), ({"home": "moon"}, "home is 'moon'"), ({"slots": 0}, "slots is 0"),
        ({"dtype": "int3"}, "int3"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            moepass.explain("olmoe-1b-7b", **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_segments_for_tensorrt_are_listed() -> None:
    choices = {"head": "", "attention": "it has attention, which stays with Inductor"}
    uses = (SegmentUse(), SegmentUse())
    segments = [Segment(role, role, (role,), uses, tensorrt=TensorrtChoice(stays)) for role, stays in choices.items()]
    assert tensorrt_text(Plan(segments=tuple(segments))) == (
        "1 of 2 distinct segments would become TensorRT engines: head (head, called 2 times)\n"
        "whether TensorRT supports all their operators is only known to torch-tensorrt; Inductor compiles the segments "
        "that it refuses, and the plan lists them\n"
        "attention (attention, called 2 times) stays with Inductor: it has attention, which stays with Inductor"
    )
    assert tensorrt_text(Plan(segments=(segments[1],))).startswith("0 of 1 distinct segment would become")
    assert tensorrt_text(Plan(segments=(Segment("head"),))) == ""


@pytest.mark.slow
def test_tensorrt_is_explained_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    report = moepass.explain(tiny_model("olmoe").config, tokens=64, lower="tensorrt")
    (plan,) = report.compiler.explanation.plans
    stays = {segment.role: segment.tensorrt.stays for segment in plan.segments if segment.tensorrt}
    assert stays == {
        "attention": "it has attention, which stays with Inductor",
        "experts": "it has expert GEMMs, and TensorRT has no grouped GEMM",
        "head": "",
    }
    text = " ".join(report.text(width=200).split())
    assert "tensorrt 1 of 3 distinct segments would become TensorRT engines: segment_2 (head) whether TensorRT" in text
    assert "segment_1 (experts) stays with Inductor: it has expert GEMMs" in text
    assert "TensorRT" not in moepass.explain("olmoe-1b-7b").text()


@pytest.mark.slow
def test_any_number_of_reports_in_one_process() -> None:
    """All models of a family share their code, and Dynamo gives up on code that was compiled too often."""
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        torch._dynamo.reset()
        captures = [capture_plans(_meta_demo(), 2, seq)[0] for seq in (8, 16, 24)]
        assert [len(plans) for plans in captures] == [1, 1, 1]
        # The captures do not count as compilations of a model that runs.
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
            with torch.no_grad():
                torch.compile(original_model(), backend="eager")(torch.zeros(1, 8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size of olmoe is 0; it must be 1 or more"),
        ({"num_hidden_layers": -1}, "num_hidden_layers of olmoe is -1"),
        ({"num_attention_heads": 0}, "num_attention_heads of olmoe is 0"),
        ({"num_experts_per_tok": 100}, "num_experts_per_tok is 100, but num_experts is 64; a token can use"),
        ({"num_key_value_heads": 3}, "olmoe cannot be captured; perhaps the numbers of its config do not match"),
    ],
)
def test_configs_with_impossible_numbers_are_refused(changes: dict[str, int], message: str) -> None:
    config = preset_config("olmoe-1b-7b")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(MoepassError, match=message):
        moepass.explain(config, tokens=64)


def _meta_demo() -> torch.nn.Module:
    return meta_model(resolve_model("demo", config_alone=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "dtype", "short"),
    [(None, torch.bfloat16, "bf16"), (torch.bfloat16, torch.float32, "fp32"), (torch.float32, torch.bfloat16, "bf16")],
)
def test_a_model_is_explained_in_the_dtype_of_its_weights(
    named: torch.dtype | None, dtype: torch.dtype, short: str
) -> None:
    model = original_model().to(dtype)
    nbytes = sum(value.nbytes for value in model.parameters())
    model.config.dtype = named  # the dtype of a saved checkpoint
    report = moepass.explain(model)
    assert report.model.dtype == short
    assert report.model.expert_bytes + report.model.other_bytes == nbytes
    assert dtype is getattr(torch, report.compiler.explanation.plans[0].blocks[0].dtype)
    assert model.config.dtype is named
    moepass.offload_experts(model)
    assert explained_model(model).architecture == explained_model(original_model().to(dtype)).architecture
    assert moepass.explain(model, dtype="fp8").model.dtype == "fp8"


@pytest.mark.slow
def test_a_configuration_without_a_dtype_is_explained_as_bf16() -> None:
    config = original_model().config
    config.dtype = None
    report = moepass.explain(config)
    assert report.model.dtype == "bf16"
    assert report.compiler.explanation.plans[0].blocks[0].dtype == "bfloat16"


def test_models_and_configurations_are_explained_too() -> None:
    model = original_model()
    for form in (torch.compile(model, backend="asyncep"), model, model.config):
        assert explained_model(form).config is model.config
    report = moepass.explain(model)
    assert [block.name for block in report.blocks] == [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
    with refused(InputError, name="model", value="Linear"):
        moepass.explain(torch.nn.Linear(2, 2))


def test_no_module_hides_the_function_explain() -> None:
    assert callable(moepass.explain)
    assert not any(name == "moepass.explain" for name in sys.modules)


def test_refusals_include_layers_that_were_not_captured() -> None:
    config = preset_config("olmoe-1b-7b", layers=4)
    architecture = from_config(config)
    refused = Refusal(node="mm", reason="its weights are shared", where="model.layers.0.mlp.experts")
    near_miss = Refusal(node="bmm_7", reason="no routing weights")
    moe_block = MoEBlock("model.layers.0.mlp.experts", "grouped_mm", 64, 8, 2048, 1024, True, "bfloat16", 1, (), None)
    plan = Plan(blocks=(moe_block,), refusals=(refused, near_miss))
    explanation = Explanation("Olmoe", "olmoe", 2, 16, 2, 1, 0, 0, (plan,), "it looks at values")
    blocks, refusals = explained_blocks(CompilerPart(1, True, explanation, None), architecture, "fp8")
    assert [block.name for block in blocks] == [*[f"model.layers.{n}.mlp.experts" for n in range(4)], "bmm_7"]
    assert [block.by_analogy for block in blocks] == [False, True, True, True, False]
    assert {block.refusal for block in blocks[:4]} == {"its weights are shared"}
    assert len(refusals) == 6
    assert refusals[-1] == "capture ended early: it looks at values"


# ---- Cutting ---------------------------------------------------------------------------------------------------------


def test_the_telling_prefix_is_the_shortest_with_every_kind() -> None:
    assert telling_prefix("aaaa") == 1
    assert telling_prefix("dddeee") == 4
    assert telling_prefix("abab") == 2
    assert telling_prefix("") == 0


@pytest.mark.parametrize("name", preset_names())
def test_a_cut_preset_has_the_first_layers_of_the_preset(name: str) -> None:
    config, architecture = preset_config(name), preset(name)
    cut = cut_config(config, architecture)
    assert cut is not None
    layers = from_config(cut).layers
    assert set(layers) == set(architecture.layers)
    assert layers == architecture.layers[: len(layers)]
    assert from_config(config).layers == architecture.layers  # the original is unchanged


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_cut_config_has_the_first_layers_of_its_family(family: str) -> None:
    config = tiny_config(family)
    architecture = from_config(config)
    cut = cut_config(config, architecture)
    if cut is None:
        return
    layers = from_config(cut).layers
    assert layers == architecture.layers[: len(layers)]
    assert set(layers) == set(architecture.layers)


def test_a_configuration_whose_prefix_differs_is_not_cut() -> None:
    config = preset_config("olmoe-1b-7b", layers=4)
    mismatched = dataclasses.replace(from_config(preset_config("mixtral-8x7b", layers=4)), name="other")
    assert cut_config(config, mismatched) is None
