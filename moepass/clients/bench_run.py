"""A measurement, from its first request to its report."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec

from moepass.clients.batch_lines import BadBatchLine, read_batch
from moepass.clients.bench_report import BenchReport, report_of
from moepass.clients.load import closed_loop, open_loop
from moepass.clients.server_address import make_client, reason_of
from moepass.clients.workloads import BenchRequest, WorkloadShape, poisson_arrivals, requests_of
from moepass.models.errors import InputError, MoepassError
from moepass.models.limits import decode_json

_WARMUP_CONCURRENCY = 4


class BenchError(MoepassError, RuntimeError):
    """The server cannot be measured: it does not respond, or it answers no request of the workload."""


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Settings of a measurement.

    Attributes:
        name: the name of the workload in the report.
        shape: the requests to generate.
        file: a file of requests in the format of a batch, of which at most `shape.requests` are sent instead.
        rate: requests per second, which arrive at random; None keeps `concurrency` requests open.
        goodput_ms: the limit on the latency of good answers.
        warmup: the number of requests of the same form that are sent first and not counted.
        model: the model to ask for; None asks for the one that the server has.
    """

    url: str
    name: str
    shape: WorkloadShape
    file: str | None = None
    rate: float | None = None
    concurrency: int = 32
    goodput_ms: float | None = None
    warmup: int = 8
    model: str | None = None
    api_key: str | None = None
    timeout_seconds: float = 600.0


class _ModelName(msgspec.Struct):
    id: str


class _ModelNames(msgspec.Struct):
    data: list[_ModelName]


async def measure(options: BenchOptions, on_done: Callable[[], None] = lambda: None) -> BenchReport:
    """Send the workload and return the report.

    Args:
        options: the server and the workload.
        on_done: called after each measured request.

    Raises:
        BenchError: if the server does not respond, or answers no request of the warm-up.
        InputError: for a file without requests.
    """
    async with make_client(options.url, options.api_key, timeout_seconds=options.timeout_seconds) as client:
        warmup, requests = await _workload(client, options)
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
            arrivals = poisson_arrivals(len(requests), options.rate, options.shape.seed)
            outcomes = await open_loop(client, requests, arrivals, on_done)
        after = await _metrics(client)
    return report_of(
        outcomes,
        url=options.url,
        workload=options.name,
        settings=_settings(options),
        goodput_ms=options.goodput_ms,
        is_open_loop=options.rate is not None,
        metrics_before=before,
        metrics_after=after,
    )


def _settings(options: BenchOptions) -> dict[str, Any]:
    """Return the settings from which the measurement can be repeated, except the key."""
    load = {"concurrency": options.concurrency} if options.rate is None else {"rate": options.rate}
    requests = {"file": options.file} if options.file is not None else dataclasses.asdict(options.shape)
    return {**load, "warmup": options.warmup, "timeout_seconds": options.timeout_seconds, **requests}


async def _workload(client: httpx.AsyncClient, options: BenchOptions) -> tuple[list[BenchRequest], list[BenchRequest]]:
    """Return the requests of the warm-up, and those to measure."""
    shape = options.shape
    if options.file is not None:
        wanted = options.warmup + shape.requests
        requests = list(itertools.islice(_requests_of_file(options.file), wanted))
        if len(requests) <= options.warmup:
            raise InputError(
                f"{options.file!r} has {len(requests)} requests, but the first {options.warmup} are the warm-up; lower "
                "--warmup, or add requests",
                name="file",
                value=len(requests),
                path=options.file,
            )
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
            raise BenchError(
                f"the server's /v1/models answers {reason_of(response)}; name a model with --model", name="url"
            )
        names: _ModelNames = decode_json(response.content, _ModelNames)
    except httpx.HTTPError as error:
        raise BenchError(
            f"no server answers at {client.base_url}: {type(error).__name__} {error}", name="url"
        ) from error
    except InputError as error:
        raise BenchError(
            f"the server's /v1/models is not a list of models: {error}; name a model with --model", name="url"
        ) from error
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
