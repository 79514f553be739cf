"""A measurement, from its first request to its report, which is for people and for programs."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from moepass.clients.batch_lines import BadBatchLine, read_batch
from moepass.clients.load import RequestOutcome, closed_loop, open_loop
from moepass.clients.server_address import make_client, reason_of
from moepass.clients.workloads import BenchOptions, BenchRequest, WorkloadShape, poisson_arrivals, requests_of
from moepass.models.errors import InputError, MoepassError
from moepass.models.limits import decode_json

_WARMUP_CONCURRENCY = 4
FORMAT = "moepass.bench/1"
NOT_REPORTED = "not reported by this server"
_REASONS = 5
_REFUSED = 429
_SAMPLE = re.compile(r"^(\w+)(?:\{.*\})? (\S+)", re.M)
FLOPS_METRIC, UNSHARED_METRIC = "moepass_flops_total", "moepass_unshared_flops_total"


class BenchError(MoepassError, RuntimeError):
    """The server cannot be measured: it does not respond, or it answers no request of the workload."""


class Percentiles(msgspec.Struct, frozen=True):
    """A distribution of times in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Goodput(msgspec.Struct, frozen=True):
    """Requests that were answered within `within_ms`: their rate, and their share of all requests."""

    within_ms: float
    requests_per_second: float
    share: float


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run. Figures that the server does not report are None.

    `requests`, without the warm-up, are the sum of answered, refused (429) and errors; `reasons` are the most frequent
    errors and how often they occurred. `seconds` last from when the first request was due to the last response,
    `latency` from when an answered request was due to its response, `send_lag` from when a request was due until it was
    sent. If the lag is not far below the latencies, these say more about the client than about the server. `hit_rate`
    is cached tokens divided by input tokens, from `usage`. `flops` are those that the server computed during the run,
    for all clients; `unshared_flops` those that these requests would have needed without sharing and cache.
    """

    format: str = FORMAT
    url: str
    workload: str
    settings: dict[str, Any]
    requests: int
    answered: int
    refused: int
    errors: int
    reasons: dict[str, int]
    seconds: float
    requests_per_second: float
    latency: Percentiles | None
    send_lag: Percentiles | None
    goodput: Goodput | None
    input_tokens: int | None
    input_tokens_per_second: float | None
    hit_rate: float | None
    flops: float | None
    unshared_flops: float | None


class _ModelName(msgspec.Struct):
    id: str


class _ModelNames(msgspec.Struct):
    data: list[_ModelName]


async def measure(
    url: str, options: BenchOptions, shape: WorkloadShape, on_done: Callable[[], None] = lambda: None
) -> BenchReport:
    """Send the workload to a server and return the report. `on_done` is called after each measured request.

    Raises BenchError if the server does not respond or answers no request of the warm-up, and InputError for a file
    without requests.
    """
    async with make_client(url, options.api_key, timeout_seconds=options.timeout) as client:
        warmup, requests = await _workload(client, options, shape)
        warmed_up = await closed_loop(client, warmup, _WARMUP_CONCURRENCY)
        if warmed_up and all(outcome.problem for outcome in warmed_up):
            problem = warmed_up[0].problem
            # A decision is refused if the model cannot answer with one of the choices.
            hint = "; set other choices with --labels" if problem.startswith("refusal: ") else ""
            raise BenchError(f"the server answers no request of this workload: {problem}{hint}", name="url")
        before = await _metrics(client)
        if options.rate is None:
            outcomes = await closed_loop(client, requests, options.concurrency, on_done)
        else:
            arrivals = poisson_arrivals(len(requests), options.rate, shape.seed)
            outcomes = await open_loop(client, requests, arrivals, on_done)
        after = await _metrics(client)
    return report_of(
        outcomes,
        url=url,
        workload=options.name,
        settings={
            **({"concurrency": options.concurrency} if options.rate is None else {"rate": options.rate}),
            **{"warmup": options.warmup, "timeout_seconds": options.timeout},
            **(dataclasses.asdict(shape) if options.file is None else {"file": options.file}),
        },
        goodput_ms=options.goodput,
        is_open_loop=options.rate is not None,
        metrics_before=before,
        metrics_after=after,
    )


async def _workload(
    client: httpx.AsyncClient, options: BenchOptions, shape: WorkloadShape
) -> tuple[list[BenchRequest], list[BenchRequest]]:
    """Return the requests of the warm-up, and those to measure."""
    if options.file is not None:
        wanted = options.warmup + shape.requests
        requests = list(itertools.islice(_requests_of_file(options.file), wanted))
        if len(requests) <= options.warmup:
            text = (
                f"{options.file!r} has {len(requests)} requests, but the first {options.warmup} are the warm-up; lower "
                "--warmup, or add requests"
            )
            raise InputError(text, name="file", value=len(requests), path=options.file)
        return requests[: options.warmup], requests[options.warmup :]
    model = options.model or await _model_of(client)
    # Another seed, so that the warm-up shares no prefix with the measured requests.
    warmup_shape = dataclasses.replace(shape, requests=max(1, options.warmup), seed=shape.seed + 1)
    return list(requests_of(warmup_shape, model))[: options.warmup], list(requests_of(shape, model))


def _requests_of_file(file: str) -> Iterator[BenchRequest]:
    try:
        with open(file, "rb") as source:
            for line in read_batch(source):
                if isinstance(line, BadBatchLine):
                    raise InputError(f"line {line.number} of {file!r}: {line.problem}", name="file", path=file)
                yield BenchRequest(line.route, line.body)
    except OSError as error:
        raise InputError(f"{file!r} cannot be read: {error.strerror}", name="file", path=file) from error


async def _model_of(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        if response.status_code != 200:
            text = f"the server's /v1/models answers {reason_of(response)}; name a model with --model"
            raise BenchError(text, name="url")
        names: _ModelNames = decode_json(response.content, _ModelNames)
    except httpx.HTTPError as error:
        text = f"no server answers at {client.base_url}: {type(error).__name__} {error}"
        raise BenchError(text, name="url") from error
    except InputError as error:
        text = f"the server's /v1/models is not a list of models: {error}; name a model with --model"
        raise BenchError(text, name="url") from error
    if not names.data:
        raise BenchError("the server lists no model; name one with --model", name="url")
    return names.data[0].id


async def _metrics(client: httpx.AsyncClient) -> str:
    """Return the text of /metrics, or an empty one if the server has none."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return ""
    return response.text if response.status_code == 200 else ""


# ---- The report ------------------------------------------------------------------------------------------------------


def report_of(
    outcomes: Sequence[RequestOutcome],
    *,
    url: str,
    workload: str,
    settings: dict[str, Any],
    goodput_ms: float | None,
    is_open_loop: bool,
    metrics_before: str,
    metrics_after: str,
) -> BenchReport:
    """Return the report on a run, which needs at least one outcome.

    The metrics are texts of `/metrics`. In an open loop, requests were sent at scheduled times.
    """
    answered = [outcome for outcome in outcomes if not outcome.problem]
    refused = sum(outcome.status == _REFUSED for outcome in outcomes)
    seconds = max(outcome.done for outcome in outcomes) - min(outcome.due for outcome in outcomes)
    reasons = collections.Counter(
        outcome.problem for outcome in outcomes if outcome.problem and outcome.status != _REFUSED
    )
    tokens = _sum([outcome.input_tokens for outcome in answered])
    cached = _sum([outcome.cached_tokens for outcome in answered])
    goodput = None
    if goodput_ms is not None:
        good = sum(outcome.done - outcome.due <= goodput_ms / 1000 for outcome in answered)
        goodput = Goodput(goodput_ms, good / seconds, good / len(outcomes))
    return BenchReport(
        url=url,
        workload=workload,
        settings=settings,
        requests=len(outcomes),
        answered=len(answered),
        refused=refused,
        errors=len(outcomes) - len(answered) - refused,
        reasons=dict(reasons.most_common(_REASONS)),
        seconds=seconds,
        requests_per_second=len(answered) / seconds,
        latency=_percentiles([outcome.done - outcome.due for outcome in answered]),
        send_lag=_percentiles([outcome.sent - outcome.due for outcome in outcomes]) if is_open_loop else None,
        goodput=goodput,
        input_tokens=tokens,
        input_tokens_per_second=None if tokens is None else tokens / seconds,
        hit_rate=None if not tokens or cached is None else cached / tokens,
        flops=_difference(metrics_before, metrics_after, FLOPS_METRIC),
        unshared_flops=_difference(metrics_before, metrics_after, UNSHARED_METRIC),
    )


def table_of(report: BenchReport) -> Table:
    """Return the report as a table of two columns."""
    table = Table("", report.workload, box=SIMPLE_HEAD, pad_edge=False)
    for name, value in _rows(report):
        table.add_row(name, value)
    return table


def _rows(report: BenchReport) -> Iterator[tuple[str, str]]:
    counts = f"{report.answered} answered, {report.refused} refused, {report.errors} errors"
    yield "requests", f"{report.requests}: {counts}"
    yield "time", f"{report.seconds:.2f} s"
    yield "requests/s", f"{report.requests_per_second:.2f}"
    yield "input tokens/s", _reported(report.input_tokens_per_second, "{:.0f}")
    yield "latency", _line(report.latency)
    if report.send_lag is not None:
        yield "send delay", _line(report.send_lag)
    if report.goodput is not None:
        good = report.goodput
        rate = f"{good.requests_per_second:.2f} requests/s within {good.within_ms:g} ms"
        yield "goodput", f"{rate}, {good.share:.1%} of all"
    yield "hit rate", _reported(report.hit_rate, "{:.1%} of input tokens were cached")
    yield "FLOPs", _reported(report.flops, "{:.4g}")
    if report.flops and report.unshared_flops:
        saved = report.unshared_flops / report.flops
        yield "", f"{report.unshared_flops:.4g} without sharing and cache, {saved:.2f} times as many"
    yield from ((f"{count} times", reason) for reason, count in report.reasons.items())


def _percentiles(seconds: list[float]) -> Percentiles | None:
    if not seconds:
        return None
    values = np.array(seconds) * 1000
    p50, p90, p99 = (float(value) for value in np.percentile(values, [50, 90, 99]))
    return Percentiles(float(values.mean()), p50, p90, p99, float(values.max()))


def _sum(counts: list[int | None]) -> int | None:
    reported = [count for count in counts if count is not None]
    return sum(reported) if reported and len(reported) == len(counts) else None


def _difference(before: str, after: str, name: str) -> float | None:
    """Return the growth of a counter, summed over all its labels."""
    first, last = (
        [float(value) for metric, value in _SAMPLE.findall(text) if metric == name] for text in (before, after)
    )
    return sum(last) - sum(first) if last else None


def _line(times: Percentiles | None) -> str:
    if times is None:
        return "no request was answered"
    return (
        f"mean {times.mean:.1f}, p50 {times.p50:.1f}, p90 {times.p90:.1f}, p99 {times.p99:.1f}, max {times.max:.1f} ms"
    )


def _reported(value: float | None, form: str) -> str:
    return NOT_REPORTED if value is None else form.format(value)
