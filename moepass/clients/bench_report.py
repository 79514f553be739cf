"""What a measured workload comes to, for people and for programs."""

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
NOT_TOLD = "not told by this server"
_REASONS = 5
_REFUSED = 429
_SAMPLE = re.compile(r"^(\w+)(?:\{.*\})? (\S+)", re.M)
FLOPS_METRIC, UNSHARED_METRIC = "moepass_flops_total", "moepass_unshared_flops_total"


class Percentiles(msgspec.Struct, frozen=True):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Goodput(msgspec.Struct, frozen=True):
    """Requests that were answered within `within_ms`, in a second, and as a part of all that were sent."""

    within_ms: float
    requests_per_second: float
    share: float


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one run. What the server does not tell is None.

    settings          what was sent, and how
    requests          that were sent, warm-up aside: the sum of answered, refused (429) and errors
    seconds           from the first that was due to the last that was done
    latency           of those answered, from when they were due
    send_lag          how late requests were sent: latencies are of little worth where this is not far below them
    hit_rate          cached tokens of input tokens, as `usage` says
    flops             that the server computed meanwhile, for whomever; unshared_flops: of each request alone
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
    """Everything that can be said of `outcomes`, of which there is one or more."""
    answered = [one for one in outcomes if not one.problem]
    refused = sum(one.status == _REFUSED for one in outcomes)
    seconds = max(one.done for one in outcomes) - min(one.due for one in outcomes)
    reasons = collections.Counter(one.problem for one in outcomes if one.problem and one.status != _REFUSED)
    tokens, cached = (
        _sum([one.input_tokens for one in answered]),
        _sum([one.cached_tokens for one in answered]),
    )
    goodput = None
    if goodput_ms is not None:
        good = sum(one.done - one.due <= goodput_ms / 1000 for one in answered)
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
        latency=_percentiles([one.done - one.due for one in answered]),
        send_lag=_percentiles([one.sent - one.due for one in outcomes]) if is_open_loop else None,
        goodput=goodput,
        input_tokens=tokens,
        input_tokens_per_second=None if tokens is None else tokens / seconds,
        hit_rate=None if not tokens or cached is None else cached / tokens,
        flops=_difference(metrics_before, metrics_after, FLOPS_METRIC),
        unshared_flops=_difference(metrics_before, metrics_after, UNSHARED_METRIC),
    )


def table_of(report: BenchReport) -> Table:
    """As a table of two columns."""
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
        ("input tokens/s", _told(report.input_tokens_per_second, "{:.0f}")),
        ("latency", _line(report.latency)),
    ]
    if report.send_lag is not None:
        rows.append(("sent too late by", _line(report.send_lag)))
    if report.goodput is not None:
        good = report.goodput
        rows.append(
            (
                "goodput",
                f"{good.requests_per_second:.2f} requests/s within {good.within_ms:g} ms, {good.share:.1%} of all",
            )
        )
    rows.append(("hit rate", _told(report.hit_rate, "{:.1%} of input tokens were cached")))
    rows.append(("FLOPs", _told(report.flops, "{:.4g}")))
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
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _difference(before: str, after: str, name: str) -> float | None:
    """How much a counter grew; all its labels together."""
    first, last = (
        [float(value) for found, value in _SAMPLE.findall(text) if found == name] for text in (before, after)
    )
    return sum(last) - sum(first) if last else None


def _line(found: Percentiles | None) -> str:
    if found is None:
        return "nothing was answered"
    return (
        f"mean {found.mean:.1f}, p50 {found.p50:.1f}, p90 {found.p90:.1f}, p99 {found.p99:.1f}, max {found.max:.1f} ms"
    )


def _told(value: float | None, form: str) -> str:
    return NOT_TOLD if value is None else form.format(value)
