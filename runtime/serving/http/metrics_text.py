"""The text of /metrics, in Prometheus' text format.

A metric has the name that vLLM 0.32 uses for the same thing, so that vLLM's dashboards and routers work. All other
names begin with `moepass_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from moepass.runtime.serving.requests.backend import BackendStatus
from moepass.runtime.serving.requests.view import BackendView, Histogram, RankView

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Kind = Literal["counter", "gauge", "histogram"]
_Labels = dict[str, str]

# Sum that a backend reports and help text of each metric; vLLM has names for some. Other sums have no help text.
_SUMS = {
    "moepass_requests_total": ("requests", "Requests that were accepted."),
    "moepass_requests_refused_total": ("refused", "Requests that no rank can answer."),
    "moepass_requests_rerun_total": ("rerun", "Requests that ran again because their rank was lost."),
    "moepass_ranks_lost_total": ("ranks_lost", "Ranks that ended."),
    "moepass_ranks_hung_total": ("ranks_hung", "Ranks that were ended because they hung."),
    "moepass_steps_total": ("steps", "Steps of all ranks."),
    "moepass_steps_split_total": ("split_steps", "Steps that were split because they ran out of memory."),
    "moepass_computed_tokens_total": ("tokens", "Tokens that were computed; tokens shared in a step count once."),
    "moepass_flops_total": ("flops", "FLOPs of the computed tokens."),
    "moepass_unshared_flops_total": ("unshared_flops", "FLOPs without shared prefixes and without the cache."),
    "moepass_step_seconds_total": ("step_seconds", "Seconds of all steps of all ranks."),
    "moepass_exposed_seconds_total": ("exposed_seconds", "Seconds in which computation waited for expert transfers."),
    "vllm:prompt_tokens_total": (
        "request_tokens",
        "Tokens of answered requests, cached ones included; a shared prefix counts once.",
    ),
    "vllm:prefix_cache_queries_total": ("request_tokens", "Tokens that were looked up in the cache."),
    "vllm:prompt_tokens_cached_total": ("cached_tokens", "Tokens of answered requests that came from the cache."),
    "vllm:prefix_cache_hits_total": ("cached_tokens", "Tokens that were found in the cache."),
    "vllm:admission_rejections_total": ("turned_away", "Requests that were refused because the queue was full."),
}
_FINISHED = {"answered": "stop", "given_up": "abort", "failed": "error"}
_HISTOGRAMS = {
    "e2e_request_latency_seconds": "Seconds from a request to its answer.",
    "request_queue_time_seconds": "Seconds until a rank started the request.",
    "request_inference_time_seconds": "Seconds from that start to the answer.",
    "request_prompt_tokens": "Tokens of a request; a shared prefix counts once.",
    "iteration_tokens_total": "Tokens that a step computed.",
}
# Help text and value of the gauges of each rank.
_RANK_GAUGES: dict[str, tuple[str, Callable[[RankView], float]]] = {
    "moepass_rank_ready": ("1 if the rank takes requests, otherwise 0.", lambda rank: rank.state == "ready"),
    "moepass_load_flops": ("FLOPs of the rank's open requests.", lambda rank: rank.load_flops),
    "moepass_saturation": (
        "Load of the rank; at 1 it takes no more requests.",
        lambda rank: rank.load_flops / rank.most_load_flops if rank.most_load_flops else 0.0,
    ),
    "moepass_full_step_flops": ("FLOPs of a step that hides all expert transfers.", lambda rank: rank.saturation_flops),
    "moepass_flops_per_second": (
        "FLOPs per second that full steps of the rank reach.",
        lambda rank: rank.flops_per_second,
    ),
    "moepass_open_requests": ("Open requests of the rank, or parts of requests.", lambda rank: rank.open_requests),
    "moepass_memory_limit_bytes": (
        "Device memory that the rank may take.",
        lambda rank: rank.memory_limit_bytes,
    ),
    "moepass_cache_blocks": ("Blocks of the rank's cache.", lambda rank: rank.engine.cache_blocks),
    "moepass_cached_blocks": ("Cache blocks that hold a prefix.", lambda rank: rank.engine.cached_blocks),
}


def metrics_text(model: str, status: BackendStatus, view: BackendView) -> str:
    """Return all metrics of a server; `model` is the value of the label `model_name`."""
    return "".join(f"{line}\n" for line in _lines({"model_name": model}, status, view))


def _lines(model: _Labels, status: BackendStatus, view: BackendView) -> Iterator[str]:
    sums = dict(status.metrics)
    yield from _family(
        "vllm:num_requests_running", "gauge", "Requests that ranks compute now.", [(model, view.running)]
    )
    yield from _family("vllm:num_requests_waiting", "gauge", "Requests that wait for a rank.", [(model, view.waiting)])
    finished = [
        (model | {"finished_reason": reason}, sums.pop(name)) for name, reason in _FINISHED.items() if name in sums
    ]
    yield from _family("vllm:request_success_total", "counter", "Finished requests, by reason.", finished)
    for name, (source, help_text) in _SUMS.items():
        samples = [(model if name.startswith("vllm:") else {}, sums[source])] if source in sums else []
        yield from _family(name, "counter", help_text, samples)
    for name, histogram in view.histograms.items():
        yield from _histogram(f"vllm:{name}", _HISTOGRAMS.get(name, ""), model, histogram)
    is_ready = float(status.state == "ready")
    yield from _family("moepass_ready", "gauge", "1 if the server answers requests, otherwise 0.", [({}, is_ready)])
    compilations = sums.pop("compilations_after_ready", 0.0)
    help_text = "Graphs compiled since the ranks were ready; it should stay 0."
    yield from _family("moepass_compilations_after_ready", "gauge", help_text, [({}, compilations)])
    for source, value in sums.items():
        if source not in {known for known, _ in _SUMS.values()}:
            yield from _family(f"moepass_{source}_total", "counter", "", [({}, value)])
    for name, (help_text, value_of) in _RANK_GAUGES.items():
        samples = [({"rank": str(rank.rank)}, float(value_of(rank))) for rank in view.ranks]
        yield from _family(name, "gauge", help_text, samples)
    parts = [
        ({"rank": str(rank.rank), "part": part}, nbytes)
        for rank in view.ranks
        for part, nbytes in rank.memory_bytes.items()
    ]
    yield from _family("moepass_memory_bytes", "gauge", "Device memory during a full step of the rank.", parts)
    used = [
        (model | {"engine": str(rank.rank)}, rank.engine.used_blocks / max(1, rank.engine.cache_blocks))
        for rank in view.ranks
    ]
    yield from _family("vllm:kv_cache_usage_perc", "gauge", "Share of the cache that running requests use.", used)


def _family(name: str, kind: _Kind, help_text: str, samples: Iterable[tuple[_Labels, float]]) -> Iterator[str]:
    lines = [f"{name}{_format_labels(labels)} {float(value)!r}" for labels, value in samples]
    if lines:
        yield from _head(name, kind, help_text)
        yield from lines


def _histogram(name: str, help_text: str, labels: _Labels, histogram: Histogram) -> Iterator[str]:
    yield from _head(name, "histogram", help_text)
    *counts, total = histogram.cumulative
    for bound, count in zip(histogram.bounds, counts, strict=True):
        yield f"{name}_bucket{_format_labels(labels | {'le': repr(float(bound))})} {float(count)!r}"
    yield f"{name}_bucket{_format_labels(labels | {'le': '+Inf'})} {float(total)!r}"
    yield f"{name}_count{_format_labels(labels)} {float(total)!r}"
    yield f"{name}_sum{_format_labels(labels)} {histogram.sum!r}"


def _head(name: str, kind: _Kind, help_text: str) -> Iterator[str]:
    if help_text:
        yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"


def _format_labels(labels: _Labels) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
