"""/metrics is valid Prometheus text, with the names of vLLM for metrics of the same meaning."""

from __future__ import annotations

import re

import pytest

from moepass.runtime.serving.http.metrics_text import metrics_text
from moepass.runtime.serving.requests.backend import BackendStatus
from moepass.runtime.serving.requests.view import BackendView, EngineView, Histogram, RankView
from moepass.runtime.serving.workers.serving_counters import RequestTimes, ServingCounters
from tests.helpers.serving.example_view import VIEW

# The text format of https://prometheus.io/docs/instrumenting/exposition_formats.
_LABEL = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (-?[\d.e+-]+|\+Inf)")
_HEAD = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][\w:]*) (.+)")


def parsed(text: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return the samples by name and labels, and the types by family. The lines of a family must follow its type."""
    samples: dict[str, float] = {}
    kinds: dict[str, str] = {}
    family = ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("#"):
            match = _HEAD.fullmatch(line)
            assert match, line
            if match[1] == "TYPE":
                assert match[2] not in kinds
                family = match[2]
                kinds[family] = match[3]
            continue
        sample = _SAMPLE.fullmatch(line)
        assert sample, line
        endings = ("_bucket", "_count", "_sum") if kinds[family] == "histogram" else ("",)
        assert sample[1] in {family + ending for ending in endings}
        name = sample[1] + (f"{{{sample[2]}}}" if sample[2] else "")
        assert name not in samples
        samples[name] = float(sample[3])
    return samples, kinds


def rank(number: int, engine: EngineView = EngineView()) -> RankView:  # noqa: B008
    return RankView(number, "ready", 30, 50, 120.0, 3, 1e6, "trie", "tries", engine)


def text_of(counters: dict[str, float], view: BackendView, model: str = "tiny") -> str:
    return metrics_text(model, BackendStatus("ready", 8, 8, metrics=counters), view)


def test_every_counter_of_the_server_has_a_name() -> None:
    counters = {name: float(value) for value, name in enumerate(vars(ServingCounters()), 1)}
    view = BackendView((rank(0),), 4, 2, RequestTimes().histograms)
    text = text_of(counters | {"compilations_after_ready": 0.0}, view)
    samples, kinds = parsed(text)
    assert sorted(re.findall(r"^# HELP (\S+) \S", text, re.M)) == sorted(kinds), "a metric has no help text"
    label = 'model_name="tiny"'
    for name, source in (
        (f"vllm:prompt_tokens_total{{{label}}}", "request_tokens"),
        (f"vllm:prefix_cache_queries_total{{{label}}}", "request_tokens"),
        (f"vllm:prefix_cache_hits_total{{{label}}}", "cached_tokens"),
        (f"vllm:admission_rejections_total{{{label}}}", "turned_away"),
        (f'vllm:request_success_total{{{label},finished_reason="stop"}}', "answered"),
        (f'vllm:request_success_total{{{label},finished_reason="abort"}}', "given_up"),
        (f'vllm:request_success_total{{{label},finished_reason="error"}}', "failed"),
        ("moepass_flops_total", "flops"),
        ("moepass_exposed_seconds_total", "exposed_seconds"),
    ):
        assert samples[name] == counters[source], name
    assert set(counters.values()) <= set(samples.values())
    assert samples["moepass_compilations_after_ready"] == 0
    assert samples[f"vllm:num_requests_running{{{label}}}"] == 2
    assert samples[f"vllm:num_requests_waiting{{{label}}}"] == 4
    for family, kind in kinds.items():
        assert (kind == "counter") == (family.endswith("_total") and kind != "histogram"), family
    histograms = {family for family, kind in kinds.items() if kind == "histogram"}
    assert histograms == {
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_inference_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:iteration_tokens_total",
    }


def test_ranks_have_their_own_numbers() -> None:
    view = BackendView((rank(0), rank(1, EngineView(None, 8, 6, 2, 64))))
    samples, _ = parsed(text_of({}, view))
    assert [samples[f'moepass_load_flops{{rank="{number}"}}'] for number in (0, 1)] == [30, 30]
    assert samples['moepass_saturation{rank="1"}'] == 0.25
    assert samples['moepass_cached_blocks{rank="1"}'] == 6
    assert not any(name.startswith("moepass_memory_bytes") for name in samples), "these ranks report no memory"
    usage = [samples[f'vllm:kv_cache_usage_perc{{model_name="tiny",engine="{number}"}}'] for number in (0, 1)]
    assert usage == [0, 0.25]


def test_the_memory_of_a_rank_is_shown_part_by_part() -> None:
    samples, _ = parsed(text_of({}, VIEW))
    parts = {"weights": 3e9, "slots": 0, "step": 2e9, "cache": 1e9}
    assert {part: samples[f'moepass_memory_bytes{{rank="0",part="{part}"}}'] for part in parts} == parts
    assert samples['moepass_memory_limit_bytes{rank="0"}'] == 8e9


def test_histograms_count_up_to_their_bounds() -> None:
    histogram = Histogram((0.5, 1))
    for value in (0.25, 0.5, 7):
        histogram.observe(value)
    samples, _ = parsed(text_of({}, BackendView(histograms={"request_queue_time_seconds": histogram})))
    name = "vllm:request_queue_time_seconds"
    buckets = [samples[f'{name}_bucket{{model_name="tiny",le="{bound}"}}'] for bound in ("0.5", "1.0", "+Inf")]
    assert buckets == [2, 2, 3]
    assert samples[f'{name}_sum{{model_name="tiny"}}'] == 7.75
    assert samples[f'{name}_count{{model_name="tiny"}}'] == 3


def test_names_are_escaped() -> None:
    samples, _ = parsed(text_of({"a_new_sum": 3.0}, BackendView(), model='a"b\\c\nd'))
    assert samples["moepass_a_new_sum_total"] == 3
    assert 'vllm:num_requests_running{model_name="a\\"b\\\\c\\nd"}' in samples


@pytest.mark.parametrize(("state", "value"), [("ready", 1), ("starting", 0)])
def test_whether_the_server_is_ready(state: str, value: float) -> None:
    text = metrics_text("tiny", BackendStatus(state, 8, 8), BackendView())  # type: ignore[arg-type]
    assert parsed(text)[0]["moepass_ready"] == value
