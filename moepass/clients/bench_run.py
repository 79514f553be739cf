"""A measurement from its first request to its report."""

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
    """The server cannot be measured: it is not there, or answers nothing of the workload."""


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """How a server is measured.

    shape        of the requests; `file`, where it is given, has them as batch lines instead, at most `shape.requests`
    rate         requests of a second, arriving at random; None: `concurrency` are open at all times
    goodput_ms   a request answered within it is a good one
    warmup       requests before, which are of the same form and not counted
    model        what to ask for, None: what the server has
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
    """Send the workload. Raises BenchError, and InputError for a file without requests."""
    async with make_client(options.url, options.api_key, timeout_seconds=options.timeout_seconds) as client:
        warmup, requests = await _workload(client, options)
        found = await closed_loop(client, warmup, _WARMUP_CONCURRENCY)
        if found and all(one.problem for one in found):
            problem = found[0].problem
            # A decision is refused where the model cannot say one of the choices.
            hint = "; --labels gives other choices" if problem.startswith("refusal: ") else ""
            raise BenchError(f"the server answers nothing of this workload: {problem}{hint}", name="url")
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
    """What has to be known to measure the same again, but for the key."""
    load = {"concurrency": options.concurrency} if options.rate is None else {"rate": options.rate}
    further = {"file": options.file} if options.file is not None else dataclasses.asdict(options.shape)
    return {**load, "warmup": options.warmup, "timeout_seconds": options.timeout_seconds, **further}


async def _workload(client: httpx.AsyncClient, options: BenchOptions) -> tuple[list[BenchRequest], list[BenchRequest]]:
    """The requests to warm up with, and those to measure."""
    shape = options.shape
    if options.file is not None:
        wanted = options.warmup + shape.requests
        found = list(itertools.islice(_requests_of_file(options.file), wanted))
        if len(found) <= options.warmup:
            raise InputError(
                f"{options.file!r} has {len(found)} requests, and the first {options.warmup} are not counted",
                name="file",
                value=len(found),
                path=options.file,
            )
        return found[: options.warmup], found[options.warmup :]
    model = options.model or await _model_of(client)
    # Of another seed, so that nothing of it is shared with what is measured.
    before = dataclasses.replace(shape, requests=max(1, options.warmup), seed=shape.seed + 1)
    return list(requests_of(before, model))[: options.warmup], list(requests_of(shape, model))


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
            raise BenchError(f"/v1/models of the server says {reason_of(response)}; --model names one", name="url")
        names: _ModelNames = decode_json(response.content, _ModelNames)
    except httpx.HTTPError as error:
        raise BenchError(
            f"no server answers at {client.base_url}: {type(error).__name__} {error}", name="url"
        ) from error
    except InputError as error:
        raise BenchError(f"/v1/models of the server is none: {error}; --model names one", name="url") from error
    if not names.data:
        raise BenchError("the server has no model; --model names one", name="url")
    return names.data[0].id


async def _metrics(client: httpx.AsyncClient) -> str:
    """What /metrics says, nothing where the server has none."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return ""
    return response.text if response.status_code == 200 else ""
