"""`moepass bench`: the generated requests have the requested form, and the report has the right figures."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from moepass.cli.main import app
from moepass.clients.bench_run import BenchReport, report_of, table_of
from moepass.clients.load import RequestOutcome, closed_loop, open_loop
from moepass.clients.server_address import HttpConnections, make_client, parse_server_url, retry_after
from moepass.clients.workloads import (
    PRESETS,
    ROUTES,
    BenchRequest,
    WorkloadShape,
    poisson_arrivals,
    requests_of,
)
from moepass.models.errors import OptionError
from tests.helpers.serving.stub_server import stub_server

# ---- Workloads -------------------------------------------------------------------------------------------------------


def bodies(shape: WorkloadShape) -> list[dict[str, Any]]:
    return [msgspec.json.decode(request.body) for request in requests_of(shape, "m")]


def sequences_of(shape: WorkloadShape, body: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the units of each sequence in a request, prefix first."""
    match shape.route:
        case "decisions":
            return [tuple(body["input"].split())]
        case "completions":
            prompts = [body["prompt"]] if shape.items == 1 else body["prompt"]
            return [tuple(prompt) for prompt in prompts]
        case "score":
            return [(*body["query"], *item) for item in body["items"]]
    query = body["query"].split()
    return [(*query, *document.split()) for document in body["documents"]]


@st.composite
def shapes(draw: st.DrawFn) -> WorkloadShape:
    low_prefix, low_own = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    return WorkloadShape(
        route=draw(st.sampled_from(sorted(ROUTES))),
        requests=draw(st.integers(1, 300)),
        prefixes=draw(st.integers(0, 90)),
        prefix_length=(low_prefix, low_prefix + draw(st.integers(0, 5))),
        own_length=(low_own, low_own + draw(st.integers(0, 5))),
        items=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 5)),
    )


@settings(max_examples=40)
@given(shape=shapes())
def test_requests_differ_and_share_prefixes(shape: WorkloadShape) -> None:
    requests = bodies(shape)
    assert len(requests) == shape.requests
    sequences = [sequence for body in requests for sequence in sequences_of(shape, body)]
    assert len(set(sequences)) == len(sequences)
    groups = [request.prefix for request in requests_of(shape, "m")]
    if not shape.prefixes:
        assert set(groups) == {-1}
        return
    counts = Counter(groups)
    assert len(counts) == min(shape.prefixes, shape.requests)
    assert max(counts.values()) - min(counts.values()) <= 1
    prefixes: dict[int, set[tuple[Any, ...]]] = {}
    for group, body in zip(groups, requests, strict=True):
        low = shape.prefix_length[0]
        prefixes.setdefault(group, set()).update(sequence[:low] for sequence in sequences_of(shape, body))
    assert all(len(starts) == 1 for starts in prefixes.values())
    assert len({next(iter(starts)) for starts in prefixes.values()}) == len(prefixes)


@pytest.mark.parametrize("route", sorted(ROUTES))
def test_lengths_are_within_their_ranges(route: str) -> None:
    shape = WorkloadShape(route, 50, prefixes=3, prefix_length=(7, 7), own_length=(3, 9), items=2)
    lengths = [len(sequence) for body in bodies(shape) for sequence in sequences_of(shape, body)]
    assert set(lengths) == set(range(10, 17))
    assert len(next(iter(bodies(shape))).get("questions", [1, 2])) == 2


def test_the_same_seed_makes_the_same_requests() -> None:
    shape = WorkloadShape("completions", 20, prefixes=2, prefix_length=(4, 8), own_length=(5, 9))
    assert list(requests_of(shape, "m")) == list(requests_of(shape, "m"))
    with_another_seed = WorkloadShape("completions", 20, prefixes=2, prefix_length=(4, 8), own_length=(5, 9), seed=1)
    assert list(requests_of(shape, "m")) != list(requests_of(with_another_seed, "m"))
    assert poisson_arrivals(5, 2.0, 3) == poisson_arrivals(5, 2.0, 3) != poisson_arrivals(5, 2.0, 4)


def test_arrivals_are_independent_and_have_the_requested_rate() -> None:
    times = poisson_arrivals(4000, 50.0, 0)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    # The standard deviation of an exponential distribution equals its mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_requests_of_presets_have_their_lengths(name: str) -> None:
    shape = PRESETS[name]
    first = next(requests_of(shape, "m"))
    low, high = shape.prefix_length[0] + shape.own_length[0], shape.prefix_length[1] + shape.own_length[1]
    assert low <= len(msgspec.json.decode(first.body)["input"].split()) <= high


def test_the_page_has_the_presets() -> None:
    def shown(low: int, high: int) -> str:
        return "" if not high else f"{low}" if low == high else f"{low}-{high}"

    page = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    for name, shape in PRESETS.items():
        cells = (str(shape.requests), str(shape.prefixes or ""), shown(*shape.prefix_length), shown(*shape.own_length))
        row = "".join(f" {cell} |" if cell else " |" for cell in cells)
        assert f"| `{name}` |{row}\n" in page


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"route": "images"}, "one of completions, decisions, rerank, score"),
        ({"requests": 0}, "requests is 0"),
        ({"prefixes": 100, "prefix_length": (1, 4)}, "prefix_length is 1-4; .* LOW at least 2, so that 100 prefixes"),
        ({"route": "score"}, "prefix_length is 0-0"),
        ({"requests": 100, "own_length": (1, 9)}, "own_length is 1-9; .* at least 2"),
        ({"own_length": (9, 5)}, "own_length is 9-5"),
    ],
)
def test_impossible_workloads_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        WorkloadShape(**wrong)


# ---- Load ------------------------------------------------------------------------------------------------------------

REQUESTS = [BenchRequest("/v1/decisions", b'{"n": %d}' % number) for number in range(12)]


def client_of(handler: Any) -> httpx.AsyncClient:
    return make_client("http://stub", None, timeout_seconds=5, transport=httpx.MockTransport(handler))


def test_an_open_loop_does_not_wait_for_answers() -> None:
    async def check() -> None:
        everything = asyncio.Event()
        sent = []

        async def answer(request: httpx.Request) -> httpx.Response:
            sent.append(request)
            if len(sent) == len(REQUESTS):
                everything.set()
            await everything.wait()  # no request is answered before all are sent
            return httpx.Response(200, json={})

        arrivals = poisson_arrivals(len(REQUESTS), 2000.0, 0)
        async with client_of(answer) as client:
            outcomes = await asyncio.wait_for(open_loop(client, REQUESTS, arrivals), 30)
        assert sorted(outcome.due for outcome in outcomes) == arrivals
        assert all(outcome.due <= outcome.sent <= outcome.done for outcome in outcomes)

    asyncio.run(check())


def test_a_closed_loop_keeps_its_number_of_requests_open() -> None:
    async def check() -> None:
        count, most = 0, 0

        async def answer(request: httpx.Request) -> httpx.Response:
            nonlocal count, most
            count += 1
            most = max(most, count)
            await asyncio.sleep(0.001)
            count -= 1
            return httpx.Response(200, json={})

        async with client_of(answer) as client:
            outcomes = await closed_loop(client, REQUESTS, 3)
        assert (most, len(outcomes)) == (3, len(REQUESTS))

    asyncio.run(check())


@pytest.mark.parametrize(
    ("answer", "status", "problem", "tokens"),
    [
        ({"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}}, 200, "", (9, 4)),
        ({"usage": {"prompt_tokens": 9, "total_tokens": 10, "prompt_tokens_details": None}}, 200, "", (9, None)),
        ({"usage": {"total_tokens": 5}}, 200, "", (5, None)),
        ({"usage": "much"}, 200, "", (None, None)),
        ([1], 200, "", (None, None)),
        ({"answers": [{"type": "choice"}, {"type": "refusal", "reason": "no"}]}, 200, "refusal: no", (None, None)),
        ({"error": {"message": "full"}}, 429, "429: full", (None, None)),
        ({"detail": "lost"}, 404, "404: lost", (None, None)),
        (httpx.ReadError("gone"), 0, "ReadError: gone", (None, None)),
    ],
)
def test_responses_are_read(answer: Any, status: int, problem: str, tokens: Any) -> None:
    def answered(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(status, json=answer)

    async def ask() -> list[RequestOutcome]:
        async with client_of(answered) as client:
            return await closed_loop(client, REQUESTS[:1], 1)

    (outcome,) = asyncio.run(ask())
    assert (outcome.status, outcome.problem) == (status, problem)
    assert (outcome.input_tokens, outcome.cached_tokens) == tokens


def test_connections_are_reused_and_not_shared() -> None:
    async def ask(url: str) -> int:
        transport = HttpConnections()
        async with make_client(url, "key", timeout_seconds=5, transport=transport) as client:
            await closed_loop(client, REQUESTS, 4)
            return len(transport._free)

    with stub_server(seconds=0.005) as stub:
        assert asyncio.run(ask(stub.url)) == 4
        assert stub.most_open == 4
        assert len(stub.asked) == len(REQUESTS)


# ---- Report ----------------------------------------------------------------------------------------------------------


def _report(outcomes: list[RequestOutcome], **changes: Any) -> BenchReport:
    arguments: dict[str, Any] = {
        "url": "u", "workload": "w", "settings": {}, "goodput_ms": None, "is_open_loop": True,
        "metrics_before": "", "metrics_after": "",
    }  # fmt: skip
    return report_of(outcomes, **arguments | changes)


def test_a_report_has_the_figures_of_its_outcomes() -> None:
    answered = [RequestOutcome(n / 10, n / 10 + 0.001, n / 10 + 0.01 * (n + 1), 200, "", 100, 25) for n in range(10)]
    outcomes = [
        RequestOutcome(0.5, 0.5, 0.6, 429, "429: full"),
        RequestOutcome(0.5, 0.5, 2.0, 0, "ReadError: "),
        *answered,
    ]
    before = 'a{x="1"} 5\nmoepass_flops_total{rank="0"} 10\nmoepass_flops_total{rank="1"} 1e3\n'
    after = "moepass_flops_total 2.01e3\nmoepass_unshared_flops_total 4000\n"
    report = _report(outcomes, goodput_ms=50.5, metrics_before=before, metrics_after=after)
    assert (report.requests, report.answered, report.refused, report.errors) == (12, 10, 1, 1)
    assert report.reasons == {"ReadError: ": 1}
    assert report.seconds == 2.0
    assert report.requests_per_second == 5.0
    assert report.latency is not None
    assert report.latency.mean == pytest.approx(55)
    assert report.latency.p50 == pytest.approx(55)
    assert report.latency.p90 == pytest.approx(91)
    assert report.latency.max == pytest.approx(100)
    assert report.send_lag is not None
    assert report.send_lag.max == pytest.approx(1)
    assert report.goodput is not None
    assert report.goodput.share == pytest.approx(5 / 12)
    assert report.goodput.requests_per_second == pytest.approx(2.5)
    assert (report.input_tokens, report.input_tokens_per_second, report.hit_rate) == (1000, 500, 0.25)
    assert (report.flops, report.unshared_flops) == (1000, 4000)


def test_figures_that_a_server_does_not_report_are_left_out() -> None:
    report = _report([RequestOutcome(0, 0, 1, 200), RequestOutcome(0, 0, 1, 200, "", 5)], is_open_loop=False)
    assert (report.input_tokens, report.hit_rate, report.flops, report.send_lag) == (None, None, None, None)
    cells = [str(cell) for column in table_of(report).columns for cell in column.cells]
    assert cells.count("not reported by this server") == 3
    failed = _report([RequestOutcome(0, 0, 1, 500, "500: x")])
    assert failed.latency is None
    assert table_of(failed).row_count


# ---- The command -----------------------------------------------------------------------------------------------------


def reply(route: str, value: Any) -> tuple[int, dict[str, str], Any]:
    if route == "/v1/models":
        return 200, {}, {"data": [{"id": "theirs"}]}
    if route == "/metrics":
        return 200, {}, "moepass_flops_total 5\n"
    return 200, {}, {"usage": {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 5}}}


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_bench_measures_a_server(tmp_path: Path) -> None:
    with stub_server(reply) as stub:
        result = bench(stub.url, "--requests", "20", "--rate", "5000", "--goodput", "60000", "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert (report["format"], report["answered"], report["hit_rate"], report["flops"]) == (
            "moepass.bench/1", 20, 0.5, 0,
        )  # fmt: skip
        assert report["goodput"]["share"] == 1
        assert (report["settings"]["rate"], report["settings"]["own_length"]) == (5000, [64, 64])
        asked = [value for route, value in stub.asked if route == "/v1/decisions"]
        assert len(asked) == 28
        assert {value["model"] for value in asked} == {"theirs"}
        warm, measured = ({value["input"] for value in values} for values in (asked[:8], asked[8:]))
        assert not warm & measured

        file = tmp_path / "lines.jsonl"
        lines = [{"custom_id": str(n), "method": "POST", "url": "/predict", "body": {"n": n}} for n in range(9)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = bench(f"{stub.url}/v1", "--file", str(file), "--warmup", "2", "--requests", "5")
        assert result.exit_code == 0, result.output
        assert "5 answered" in result.stdout
        assert "7 answered" in bench(stub.url, "--file", str(file), "--warmup", "2").stdout
        asked_of_file = [value["n"] for route, value in stub.asked if route == "/predict"][:7]
        assert sorted(asked_of_file[:2]) == [0, 1]
        assert sorted(asked_of_file) == list(range(7))


def test_bench_reports_why_no_request_is_answered() -> None:
    with stub_server(lambda route, value: (400, {}, {"error": {"message": "no such model"}})) as stub:
        result = bench(stub.url, "--model", "mine")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "answers no request of this workload: 400: no such model" in result.stderr
        result = bench(stub.url)
        assert "name a model with --model" in result.stderr
        result = bench(stub.url, "--model", "mine", "--warmup", "0", "--requests", "3")
        assert result.exit_code == 1
        assert "3 errors" in result.stdout
    assert "no server answers" in bench(stub.url).stderr


def test_bench_suggests_labels_for_refused_choices() -> None:
    refusal = {"type": "refusal", "reason": "'yes' is no label of this model"}
    with stub_server(lambda route, value: (200, {}, {"answers": [refusal]})) as stub:
        result = bench(stub.url, "--model", "mine")
        assert "'yes' is no label of this model; set other choices with --labels" in result.stderr


def test_bench_refuses_a_server_without_the_routes() -> None:
    with stub_server(lambda route, value: (200, {}, "<html>Welcome</html>")) as stub:
        result = bench(stub.url)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "/v1/models is not a list of models" in result.stderr
        result = bench(stub.url, "--model", "mine")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "answers no request of this workload: 200: not JSON: '<html>" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "none"], "shared-profiles"),
        (["--own-length", "5-x"], "range"),
        (["--file", "x", "--workload", "mmlu"], "--file already contains the requests"),
        (["--file", "/no/such/file", "--model", "m"], "cannot be read"),
    ],
)
def test_bench_refuses_wrong_options(arguments: list[str], words: str) -> None:
    result = bench("http://127.0.0.1:1", *arguments)
    assert result.exit_code in (1, 2)
    assert words in result.stderr


# ---- Addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("https://host/proxy/v1/", "https://host/proxy"),
    ],
)
def test_the_end_of_an_address_is_normalised(given_url: str, expected: str) -> None:
    assert parse_server_url(given_url) == expected


@pytest.mark.parametrize(
    "wrong", ["", "host:8000", "ftp://host", "http://", "http://h?key=1", "http://[::1", "file:///x"]
)
def test_invalid_addresses_are_refused(wrong: str) -> None:
    with pytest.raises(OptionError, match=r"http://127\.0\.0\.1:8000"):
        parse_server_url(wrong)


@pytest.mark.parametrize(("text", "seconds"), [("3", 3), ("-1", 0), ("1e9", 60), ("nan", 1), ("Mon, 23 Nov", 1)])
def test_the_header_retry_after_is_read(text: str, seconds: float) -> None:
    assert retry_after(httpx.Response(429, headers={"retry-after": text}), 60) == seconds
