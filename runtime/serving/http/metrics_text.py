"""What /metrics says, in the text format of Prometheus.

Names are those of vLLM 0.32 where the meaning is the same, so that its dashboards and the routers that read them work.
All others begin with `moepass_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from moepass.runtime.serving.requests.backend import BackendStatus
from moepass.runtime.serving.requests.histogram import Histogram
from moepass.runtime.serving.requests.view import BackendView

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Kind = Literal["counter", "gauge", "histogram"]
_Labels = dict[str, str]

# Sums of a backend by its own names: our name of each, and what it counts. Others are shown, too, without a word.
_SUMS = {
    "requests": ("moepass_requests_total", "Requests that were taken."),
    "refused": ("moepass_requests_refused_total", "Requests that no rank can answer."),
    "rerun": ("moepass_requests_rerun_total", "Requests that ran once more because their rank was lost."),
    "ranks_lost": ("moepass_ranks_lost_total", "Ranks that ended."),
    "ranks_hung": ("moepass_ranks_hung_total", "Ranks that were ended because they hung."),
    "steps": ("moepass_steps_total", "Steps of all ranks."),
    "split_steps": ("moepass_steps_split_total", "Times that a step was split because memory did not suffice."),
    "tokens": ("moepass_computed_tokens_total", "Tokens that were computed, what a step shares once."),
    "flops": ("moepass_flops_total", "FLOPs of the computed tokens."),
    "unshared_flops": ("moepass_unshared_flops_total", "FLOPs of each request alone, without sharing and cache."),
    "step_seconds": ("moepass_step_seconds_total", "Seconds of steps, of all ranks."),
    "exposed_seconds": ("moepass_exposed_seconds_total", "Seconds in which computation waited for experts."),
}
# Sums whose meaning vLLM has a name for.
_VLLM_SUMS = {
    "request_tokens": (
        ("vllm:prompt_tokens_total", "Tokens of answered requests, cached ones included; a shared prefix once."),
        ("vllm:prefix_cache_queries_total", "Tokens that were looked up in the cache."),
    ),
    "cached_tokens": (
        ("vllm:prompt_tokens_cached_total", "Of the tokens of answered requests those that came from the cache."),
        ("vllm:prefix_cache_hits_total", "Tokens that were found in the cache."),
    ),
    "turned_away": (("vllm:admission_rejections_total", "Requests that were refused because the queue was full."),),
}
_FINISHED = {"answered": "stop", "given_up": "abort", "failed": "error"}
_HISTOGRAMS = {
    "e2e_request_latency_seconds": "Seconds from a request to its answer.",
    "request_queue_time_seconds": "Seconds until a rank began a request.",
    "request_inference_time_seconds": "Seconds from then to the answer.",
    "request_prompt_tokens": "Tokens of a request, a shared prefix once.",
    "iteration_tokens_total": "Tokens that a step computed.",
}


def metrics_text(model: str, status: BackendStatus, view: BackendView) -> str:
    """All metrics of a server whose model is called `model`."""
    return "".join(f"{line}\n" for line in _lines({"model_name": model}, status, view))


def _lines(model: _Labels, status: BackendStatus, view: BackendView) -> Iterator[str]:
    sums = dict(status.metrics)
    yield from _family(
        "vllm:num_requests_running", "gauge", "Requests that ranks compute.", [(model, float(view.running))]
    )
    yield from _family("vllm:num_requests_waiting", "gauge", "Requests that wait.", [(model, float(view.waiting))])
    finished = [(model | {"finished_reason": why}, sums.pop(name)) for name, why in _FINISHED.items() if name in sums]
    yield from _family("vllm:request_success_total", "counter", "Requests that are over, by how they ended.", finished)
    for source, families in _VLLM_SUMS.items():
        if source in sums:
            value = sums.pop(source)
            for name, help_text in families:
                yield from _family(name, "counter", help_text, [(model, value)])
    for name, histogram in view.histograms.items():
        yield from _histogram(f"vllm:{name}", _HISTOGRAMS.get(name, ""), model, histogram)
    is_ready = float(status.state == "ready")
    yield from _family("moepass_ready", "gauge", "1 where requests are answered.", [({}, is_ready)])
    compilations = sums.pop("compilations_after_ready", 0.0)
    help_text = "Graphs compiled since the ranks were ready, which should stay 0."
    yield from _family("moepass_compilations_after_ready", "gauge", help_text, [({}, compilations)])
    for source, value in sums.items():
        name, help_text = _SUMS.get(source, (f"moepass_{source}_total", ""))
        yield from _family(name, "counter", help_text, [({}, value)])
    yield from _rank_lines(model, view)


def _rank_lines(model: _Labels, view: BackendView) -> Iterator[str]:
    def of_each(name: str, help_text: str, values: Iterable[float]) -> Iterator[str]:
        pairs = zip(view.ranks, values, strict=True)
        return _family(name, "gauge", help_text, [({"rank": str(rank.rank)}, value) for rank, value in pairs])

    ranks, engines = view.ranks, [rank.engine for rank in view.ranks]
    yield from of_each("moepass_rank_ready", "1 where the rank takes requests.", [r.state == "ready" for r in ranks])
    yield from of_each("moepass_load_flops", "True FLOPs that the rank has to compute.", [r.load_flops for r in ranks])
    saturation = [rank.load_flops / rank.most_load_flops if rank.most_load_flops else 0.0 for rank in ranks]
    yield from of_each("moepass_saturation", "Its load; at 1 it takes no more.", saturation)
    full = [rank.saturation_flops for rank in ranks]
    yield from of_each("moepass_full_step_flops", "A step with so many hides all transfers of experts.", full)
    rates = [rank.flops_per_second for rank in ranks]
    yield from of_each("moepass_flops_per_second", "What full steps of the rank reach.", rates)
    yield from of_each(
        "moepass_open_requests", "Requests, or parts of them, that it has.", [r.open_requests for r in ranks]
    )
    yield from of_each("moepass_cache_blocks", "Blocks of its cache.", [engine.cache_blocks for engine in engines])
    yield from of_each("moepass_cached_blocks", "Blocks that hold a prefix.", [e.cached_blocks for e in engines])
    used = [
        (model | {"engine": str(rank.rank)}, rank.engine.used_blocks / max(1, rank.engine.cache_blocks))
        for rank in ranks
    ]
    yield from _family("vllm:kv_cache_usage_perc", "gauge", "Part of the cache that running requests hold.", used)


def _family(name: str, kind: _Kind, help_text: str, samples: Iterable[tuple[_Labels, float]]) -> Iterator[str]:
    found = [f"{name}{_written(labels)} {float(value)!r}" for labels, value in samples]
    if found:
        yield from _head(name, kind, help_text)
        yield from found


def _histogram(name: str, help_text: str, labels: _Labels, histogram: Histogram) -> Iterator[str]:
    yield from _head(name, "histogram", help_text)
    *counts, total = histogram.cumulative
    for bound, count in zip(histogram.bounds, counts, strict=True):
        yield f"{name}_bucket{_written(labels | {'le': repr(float(bound))})} {float(count)!r}"
    yield f"{name}_bucket{_written(labels | {'le': '+Inf'})} {float(total)!r}"
    yield f"{name}_count{_written(labels)} {float(total)!r}"
    yield f"{name}_sum{_written(labels)} {histogram.sum!r}"


def _head(name: str, kind: _Kind, help_text: str) -> Iterator[str]:
    if help_text:
        yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"


def _written(labels: _Labels) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
