"""The report on a measured workload, for people and for programs."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from moepass.clients.load import RequestOutcome

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "moepass.bench/1"
NOT_REPORTED = "not reported by this server"
_REASONS = 5
_REFUSED = 429
_SAMPLE = re.compile(r"^(\w+)(?:\{.*\})? (\S+)", re.M)
FLOPS_METRIC, UNSHARED_METRIC = "moepass_flops_total", "moepass_unshared_flops_total"


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

    Attributes:
        settings: the options of the run.
        requests: the number of requests without the warm-up: the sum of answered, refused (429) and errors.
        reasons: the most frequent errors and how often they occurred.
        seconds: the time from when the first request was due to the last response.
        latency: the time from when an answered request was due to its response.
        send_lag: the delay between when a request was due and when it was sent. If it is not far below the latencies,
            these say more about the client than about the server.
        hit_rate: cached tokens divided by input tokens, from `usage`.
        flops: the FLOPs that the server computed during the run, for all clients.
        unshared_flops: the FLOPs that these requests would have needed without sharing and cache.
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
    """Return the report on at least one outcome.

    Args:
        outcomes: the outcome of each request.
        url: the server.
        workload: the name of the workload.
        settings: the options of the run.
        goodput_ms: the limit on the latency of good answers, None to report no goodput.
        is_open_loop: whether requests were sent at scheduled times.
        metrics_before: the text of `/metrics` before the run.
        metrics_after: the text of `/metrics` after the run.
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
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("", report.workload, box=SIMPLE_HEAD, pad_edge=False)
    rows = [
        (
            "requests",
            f"{report.requests}: {report.answered} answered, {report.refused} refused, {report.errors} errors",
        ),
        ("time", f"{report.seconds:.2f} s"),
        ("requests/s", f"{report.requests_per_second:.2f}"),
        ("input tokens/s", _reported(report.input_tokens_per_second, "{:.0f}")),
        ("latency", _line(report.latency)),
    ]
    if report.send_lag is not None:
        rows.append(("send delay", _line(report.send_lag)))
    if report.goodput is not None:
        good = report.goodput
        rows.append(
            (
                "goodput",
                f"{good.requests_per_second:.2f} requests/s within {good.within_ms:g} ms, {good.share:.1%} of all",
            )
        )
    rows.append(("hit rate", _reported(report.hit_rate, "{:.1%} of input tokens were cached")))
    rows.append(("FLOPs", _reported(report.flops, "{:.4g}")))
    if report.flops and report.unshared_flops:
        saved = report.unshared_flops / report.flops
        rows.append(("", f"{report.unshared_flops:.4g} without sharing and cache, {saved:.2f} times as many"))
    rows += [(f"{count} times", reason) for reason, count in report.reasons.items()]
    for name, value in rows:
        table.add_row(name, value)
    return table


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
