"""A batch answers every line once, despite bad lines, failing servers and interruptions."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from moepass.cli.main import app
from moepass.clients import batch_lines, batch_run
from moepass.clients.batch_asker import AdaptiveLimit, ForeignServerError, KeyRefusedError, ServerGoneError
from moepass.clients.batch_lines import BadBatchLine, BatchAnswer, read_batch
from moepass.clients.batch_run import Batch
from moepass.models.errors import InputError, OptionError
from tests.helpers.serving.stub_server import echo, stub_server

ROUTE = "/v1/decisions"


def line(name: str, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": ROUTE, "body": {"name": name, **body}}) + "\n"


def write_batch(path: Path, names: list[str]) -> Path:
    path.write_text("".join(line(name) for name in names))
    return path


def answered(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(text_line) for text_line in text.split("\n")[:-1]]


def run(
    batch: Batch, handler: Callable[[httpx.Request], httpx.Response], most_open: int = 4, patience: float = 60.0
) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(base_url="http://stub", transport=httpx.MockTransport(handler)) as client:
            await batch.run(client, most_open=most_open, patience_seconds=patience)

    with batch:
        asyncio.run(asyncio.wait_for(ask(), 30))


def echoed(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json=json.loads(request.content), headers={"x-request-id": "r"})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_every_line_gets_its_own_answer(files: tuple[Path, Path]) -> None:
    source, target = files
    names = [f"line {number}" for number in range(30)]
    write_batch(source, names)
    run(Batch(str(source), str(target)), echoed)
    answers = {answer["custom_id"]: answer for answer in answered(target)}
    assert sorted(answers) == sorted(names)
    for number, name in enumerate(names, 1):
        assert answers[name] == {
            "id": f"batch_req_{number}",
            "custom_id": name,
            "response": {"status_code": 200, "request_id": "r", "body": {"name": name}},
            "error": None,
        }


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("nonsense", None, "line 1: JSON is malformed"),
        ('{"method": "POST", "url": "/v1/score", "body": {}}', None, "custom_id"),
        ('{"custom_id": 7, "method": "POST", "url": "/v1/score", "body": {}}', None, "custom_id"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/models", "body": {}}', "a", "GET"),
        ('{"custom_id": "a", "method": "POST", "url": "http://elsewhere/v1/score", "body": {}}', "a", "elsewhere"),
        ('{"custom_id": "a", "method": "POST", "url": "//elsewhere/v1", "body": {}}', "a", "elsewhere"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/../x", "body": {}}', "a", "/v1/../x"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/score"}', "a", "body"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/score", "body": [1]}', "a", "not a JSON object"),
        ('{"custom_id": "a", "body": ' + "[" * 100_000, None, "nested deeper"),
    ],
)
def test_a_bad_line_gets_an_error(files: tuple[Path, Path], text: str, name: str | None, words: str) -> None:
    source, target = files
    source.write_text(f"{text}\n\n{line('good')}")
    for _ in range(2):  # the second run answers neither line again
        run(Batch(str(source), str(target)), echoed)
    bad, good = sorted(answered(target), key=lambda answer: answer["id"])
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == (name, None, "invalid_line")
    assert words in bad["error"]["message"]
    assert good["custom_id"] == "good"
    assert good["error"] is None


def test_the_line_after_one_beyond_the_limit_is_read(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MOST_BATCH_LINE_BYTES", 200)
    source, _ = files
    source.write_text(line("long", text="x" * 5000) + line("short"))
    with source.open("rb") as file:
        bad, good = read_batch(file)
    assert isinstance(bad, BadBatchLine)
    assert "limit" in bad.problem
    assert (good.number, good.custom_id) == (2, "short")


def test_two_lines_with_one_custom_id_are_an_error_that_names_both(files: tuple[Path, Path]) -> None:
    source, target = files
    write_batch(source, ["a", "b", "c", "b"])
    with pytest.raises(InputError, match=r"lines 2 and 4 .* 'b'"):
        Batch(str(source), str(target))
    assert not target.exists()


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_line_is_answered_once_after_the_output_was_cut_anywhere(tmp_path: Path, data: st.DataObject) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = data.draw(st.lists(st.text(max_size=8), min_size=1, max_size=12, unique=True))
    write_batch(source, names)
    target.unlink(missing_ok=True)
    run(Batch(str(source), str(target)), echoed)
    complete = target.read_bytes()
    beginning = complete[: data.draw(st.integers(0, len(complete)))]
    target.write_bytes(beginning)
    asked = []

    def ask(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["name"])
        return echoed(request)

    run(Batch(str(source), str(target)), ask)
    assert Counter(answer["custom_id"] for answer in answered(target)) == Counter(names)
    assert target.read_bytes().startswith(beginning[: beginning.rfind(b"\n") + 1])
    assert len(asked) == len(names) - beginning.count(b"\n")


@pytest.mark.parametrize(
    "text", ["important notes", "important\nnotes\n", '{"id": "batch_req_1"}', '{"text": "half', "7\n"]
)
def test_a_file_that_is_not_an_output_is_refused_and_unchanged(files: tuple[Path, Path], text: str) -> None:
    source, target = files
    write_batch(source, ["a"])
    target.write_text(text)
    with pytest.raises(InputError, match="is not an answer of moepass batch"):
        Batch(str(source), str(target))
    assert target.read_text() == text


def test_files_that_cannot_be_used_are_refused(files: tuple[Path, Path]) -> None:
    source, target = files
    with pytest.raises(OptionError, match="is not a file"):
        Batch(str(source), str(target))
    source.write_text("\n")
    with pytest.raises(InputError, match="is empty"):
        Batch(str(source), str(target))
    write_batch(source, ["a"])
    with pytest.raises(OptionError, match="is also the input"):
        Batch(str(source), str(source))
    with pytest.raises(OptionError, match="is not a file"):
        Batch(str(source), str(source.parent))
    with Batch(str(source), str(target)), pytest.raises(InputError, match="another batch"):
        Batch(str(source), str(target))
    run(Batch(str(source), str(target)), echoed)
    write_batch(source, ["b"])
    with pytest.raises(InputError, match="custom_id 'a', but"):
        Batch(str(source), str(target))


@pytest.mark.parametrize("answer_number", [2, 4], ids=["before more answers", "after the last"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), "deleted or replaced"),
        (lambda path: path.rename(path.with_suffix(".old")), "deleted or replaced"),
        (lambda path: path.write_text(""), "has 0 bytes although"),
        (lambda path: path.open("a").write("{}\n"), "another program changed it"),
    ],
    ids=["deleted", "moved", "emptied", "added to"],
)
def test_an_output_that_another_program_changes_is_an_error(
    files: tuple[Path, Path], answer_number: int, change: Callable[[Path], object], words: str
) -> None:
    source, target = files
    write_batch(source, ["a", "b", "c", "d"])
    batch = Batch(str(source), str(target))
    original = batch._output.write

    def write(answer: BatchAnswer) -> None:
        original(answer)
        if batch.counts.answered + 1 == answer_number:
            change(target)

    batch._output.write = write  # type: ignore[method-assign]
    with pytest.raises(InputError, match=words):
        run(batch, echoed)


def test_errors_are_asked_again_with_retry_errors(files: tuple[Path, Path]) -> None:
    source, target = files
    write_batch(source, ["a", "b", "c"])
    bad = {"b"}

    def ask(request: httpx.Request) -> httpx.Response:
        name = json.loads(request.content)["name"]
        return httpx.Response(500, json={"error": "sorry"}) if name in bad else echoed(request)

    batch = Batch(str(source), str(target))
    run(batch, ask)
    assert batch.counts.errors == 1
    (wrong,) = (answer for answer in answered(target) if answer["custom_id"] == "b")
    assert wrong["response"]["body"] == {"error": "sorry"}
    batch = Batch(str(source), str(target))
    run(batch, ask)
    assert (batch.counts.answered, batch.counts.errors) == (0, 1)
    bad.clear()
    batch = Batch(str(source), str(target), retry_errors=True)
    run(batch, ask)
    assert (batch.counts.answered, batch.counts.errors) == (1, 0)
    assert sorted(answer["custom_id"] for answer in answered(target)) == ["a", "b", "c"]
    assert sorted(path.name for path in target.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_full_queue_delays_requests(files: tuple[Path, Path]) -> None:
    """The server accepts three requests at a time and refuses more."""
    source, target = files
    names = [str(number) for number in range(40)]
    write_batch(source, names)
    open_now = refused = 0

    async def ask(request: httpx.Request) -> httpx.Response:
        nonlocal open_now, refused
        if open_now == 3:
            refused += 1
            return httpx.Response(429, headers={"retry-after": "0"})
        open_now += 1
        await asyncio.sleep(0.001)
        open_now -= 1
        return echoed(request)

    batch = Batch(str(source), str(target))
    run(batch, ask, most_open=20)  # type: ignore[arg-type]
    assert refused
    assert batch.counts.errors == 0
    assert sorted(answer["custom_id"] for answer in answered(target)) == sorted(names)


@pytest.mark.parametrize(("status", "patience"), [(429, 0.0), (503, 0.01)])
def test_a_request_that_is_always_refused_gets_the_refusal_as_its_answer(
    files: tuple[Path, Path], status: int, patience: float
) -> None:
    source, target = files
    write_batch(source, ["too much", *"abcdefgh"])

    async def ask(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.001)
        if json.loads(request.content)["name"] == "too much":
            return httpx.Response(status, json={"error": {"message": "queue"}}, headers={"retry-after": "0"})
        return echoed(request)

    batch = Batch(str(source), str(target))
    run(batch, ask, most_open=2, patience=patience)  # type: ignore[arg-type]
    responses = {answer["custom_id"]: answer["response"] for answer in answered(target)}
    assert responses.pop("too much") == {
        "status_code": status,
        "request_id": "",
        "body": {"error": {"message": "queue"}},
    }
    assert {response["status_code"] for response in responses.values()} == {200}


def test_a_server_that_stops_answering_ends_the_batch(files: tuple[Path, Path]) -> None:
    source, target = files
    write_batch(source, list("abcdef"))

    def ask(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["name"] > "c":
            raise httpx.ConnectError("refused")
        return echoed(request)

    with pytest.raises(ServerGoneError, match=r"0 seconds; .* no connection \(ConnectError: refused\)"):
        run(Batch(str(source), str(target)), ask, most_open=1, patience=0.0)
    assert [answer["custom_id"] for answer in answered(target)] == list("abc")
    run(Batch(str(source), str(target)), echoed)
    assert sorted(answer["custom_id"] for answer in answered(target)) == list("abcdef")


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_ends_the_batch_without_answers(files: tuple[Path, Path], status: int) -> None:
    source, target = files
    write_batch(source, list("abcdef"))
    with pytest.raises(KeyRefusedError, match=f"{status}: who are you; set --api-key to the server's key"):
        run(Batch(str(source), str(target)), lambda request: httpx.Response(status, json={"detail": "who are you"}))
    assert answered(target) == []


PAGE = "<!doctype html><html>Not here</html>"


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (200, {"text": PAGE}, "200: not JSON: '<!doctype"),
        (404, {"text": PAGE}, "404: not JSON"),
        (301, {"text": PAGE}, "301: not JSON"),
        (404, {"json": {"detail": "Not Found"}}, "404: Not Found"),
        (200, {"json": "hello"}, "200: hello"),
        (200, {"content": b"\xff\x00garbage"}, "200: not JSON"),
        (200, {"content": b""}, "200: not JSON: ''"),
    ],
)
def test_a_server_without_the_routes_ends_the_batch_without_answers(
    files: tuple[Path, Path], status: int, content: dict[str, Any], words: str
) -> None:
    source, target = files
    write_batch(source, list("abcdef"))
    with pytest.raises(
        ForeignServerError, match=f"answers POST {ROUTE} with {words}.*; set --url to a server that has them"
    ):
        run(Batch(str(source), str(target)), lambda request: httpx.Response(status, **content))
    assert answered(target) == []


def test_a_page_after_the_first_answer_is_an_error_for_its_line(files: tuple[Path, Path]) -> None:
    source, target = files
    write_batch(source, ["first", "page", "events", "no such route"])

    def ask(request: httpx.Request) -> httpx.Response:
        match json.loads(request.content)["name"]:
            case "page":
                return httpx.Response(504, text=PAGE)
            case "events":
                return httpx.Response(200, text="data: {}", headers={"content-type": "text/event-stream"})
            case "no such route":
                return httpx.Response(404, json={"detail": "Not Found"})
        return echoed(request)

    run(Batch(str(source), str(target)), ask, most_open=1)
    answers = {answer["custom_id"]: answer for answer in answered(target)}
    assert answers["page"]["response"] is None
    assert answers["page"]["error"]["code"] == "no_json"
    assert answers["events"]["response"]["body"] == "data: {}"
    assert answers["no such route"]["response"]["status_code"] == 404


def test_an_adaptive_limit_is_never_exceeded() -> None:
    async def check() -> None:
        limit, most = AdaptiveLimit(100), 0

        async def use(count: int) -> None:
            nonlocal most
            async with limit.acquire(count):
                most = max(most, limit.used if limit.used != 500 else 0)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(use(count)) for count in (10, 90, 90, 500, 1, 1, 0, 1, 20, 99, 100) * 3]
        await asyncio.sleep(0)
        for task in tasks[::5]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (most, limit.used) == (100, 0)
        async with limit.acquire(), limit.acquire(), limit.acquire():
            limit.refused()
            assert limit.allowed == 2
        for _ in range(100):
            limit.answered()
        assert 10 < limit.allowed < 20

    asyncio.run(check())


def test_lines_that_wait_for_a_full_queue_take_bounded_memory(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = files
    source.write_text("".join(line(str(number), text="x" * 100) for number in range(30)))
    monkeypatch.setattr(batch_run, "_MOST_HELD_BYTES", 500)
    seen: set[str] = set()

    def ask(request: httpx.Request) -> httpx.Response:
        name = json.loads(request.content)["name"]
        seen.add(name)
        held = len(seen) - len(answered(target))
        assert held <= 4
        if name not in refused:
            refused.add(name)
            return httpx.Response(429, headers={"retry-after": "0"})
        return echoed(request)

    refused: set[str] = set()
    batch = Batch(str(source), str(target))
    run(batch, ask, most_open=20)
    assert (batch.counts.answered, batch.counts.errors) == (30, 0)


def test_lines_that_are_added_during_a_batch_wait_for_the_next_start(files: tuple[Path, Path]) -> None:
    source, target = files
    write_batch(source, ["a", "b"])
    batch = Batch(str(source), str(target))
    source.write_text(source.read_text() + line("a") + line("c"))
    run(batch, echoed)
    assert [answer["custom_id"] for answer in answered(target)] == ["a", "b"]
    with pytest.raises(InputError, match="lines 1 and 3"):
        Batch(str(source), str(target))


# ---- The command -----------------------------------------------------------------------------------------------------


def command(*arguments: str | Path, **environment: str) -> Any:
    return CliRunner().invoke(app, ["batch", *map(str, arguments)], env=environment)


@pytest.mark.parametrize("wrong", [["--home", "moon"], ["--kv-cache", "lots"], ["--memory-budget", "-1"]])
def test_wrong_rank_options_have_exit_status_2(files: tuple[Path, Path], wrong: list[str]) -> None:
    source, target = files
    write_batch(source, ["a"])
    assert command("demo", "-i", source, "-o", target, *wrong).exit_code == 2
    assert not target.exists()


def test_requests_carry_the_key(files: tuple[Path, Path]) -> None:
    source, target = files
    write_batch(source, ["a", "b"])
    with stub_server() as stub:
        result = command("-i", source, "-o", target, "--url", f"{stub.url}/v1", "--api-key", "secret")
        assert (result.exit_code, stub.keys) == (0, {"Bearer secret"})
        assert "2 lines answered now; 0 of 2 answers are errors" in result.stderr
        source.write_text(source.read_text() + "{}\n")
        result = command("-i", source, "-o", target, MOEPASS_URL=stub.url, MOEPASS_HOME="peer")
        assert result.exit_code == 1
        assert "MOEPASS_HOME is ignored: it only applies to a MODEL" in result.stderr
        assert result.stderr.count("MOEPASS_") == 1
        assert "3 lines, 2 of them already answered" in result.stderr
        assert "--retry-errors" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either a MODEL, to run it here, or --url"),
        (["demo", "--url", "http://127.0.0.1:1"], "give either a MODEL, to run it here, or --url"),
        (["--url", "ftp://127.0.0.1"], "such as http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:1", "--ranks", "2"], "--ranks only applies to a MODEL"),
        (["demo", "--home", "moon"], "home"),
        (["demo", "--timeout", "inf"], "timeout"),
    ],
)
def test_wrong_or_contradictory_options_are_refused(files: tuple[Path, Path], arguments: list[str], words: str) -> None:
    write_batch(files[0], ["a"])
    result = command("-i", files[0], "-o", files[1], *arguments)
    assert result.exit_code in (1, 2)
    assert words in result.stderr
    assert issubclass(OptionError, ValueError)


def start(source: Path, target: Path, url: str) -> subprocess.Popen[str]:
    program = [
        sys.executable,
        "-m",
        "moepass.cli",
        "batch",
        "-i",
        source,
        "-o",
        target,
        "--url",
        url,
        "--in-flight",
        "9",
    ]
    return subprocess.Popen([str(word) for word in program], stderr=subprocess.PIPE, text=True)


def wait_for_answers(target: Path, process: subprocess.Popen[str], count: int) -> None:
    end = time.monotonic() + 60
    while not target.exists() or target.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.slow
def test_every_line_is_answered_once_after_several_kills(files: tuple[Path, Path]) -> None:
    source, target = files
    names = [f"line {number}" for number in range(2000)]
    write_batch(source, names)
    with stub_server(echo, seconds=0.01) as stub:
        for killed_after in (0, 1, 120, 333, 700, 1200, 1700):
            process = start(source, target, stub.url)
            wait_for_answers(target, process, killed_after)
            process.kill()
            process.communicate()
            with target.open("ab") as torn:  # a line that a kill interrupted
                torn.write(b'{"id":"batch_req_5","custom_id":"li'[: killed_after % 37])
        process = start(source, target, stub.url)
        _, messages = process.communicate(timeout=120)
        assert process.returncode == 0, messages
        asked = Counter(value["name"] for _, value in stub.asked)
    assert Counter(answer["custom_id"] for answer in answered(target)) == Counter(names)
    assert all(answer["response"]["body"]["echo"]["name"] == answer["custom_id"] for answer in answered(target))
    # Only the requests that were open at a kill are asked twice.
    assert asked.total() <= len(names) + 7 * 9


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_batch_that_a_signal_stops_says_how_to_continue(files: tuple[Path, Path], number: signal.Signals) -> None:
    source, target = files
    write_batch(source, [f"line {number}" for number in range(2000)])
    with stub_server(echo, seconds=0.01) as stub:
        process = start(source, target, stub.url)
        wait_for_answers(target, process, 5)
        os.kill(process.pid, number)
        _, messages = process.communicate(timeout=60)
    done = len(answered(target))
    assert process.returncode == 128 + number
    assert f"stopped: {2000 - done} lines are left; run the same command again to continue" in messages
    assert f"{done} lines answered now" in messages


@pytest.mark.slow
def test_a_batch_with_a_model_continues_after_a_kill(files: tuple[Path, Path]) -> None:
    source, target = files
    names = [f"line {number}" for number in range(120)]
    question = {"type": "choice", "instructions": "?", "choices": [{"value": "German"}, {"value": "Danish"}]}
    source.write_text("".join(line(name, model="demo", input=name, questions=[question]) for name in names))
    program = [sys.executable, "-m", "moepass.cli", "batch", "demo", "--eager", "--in-flight", "4", "--threads", "1"]
    program += ["-i", str(source), "-o", str(target)]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
        wait_for_answers(target, process, 3)
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    done = len(target.read_text().split("\n")) - 1
    assert 3 <= done < 120
    finished = subprocess.run(program, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stderr
    assert f"120 lines, {done} of them already answered" in finished.stderr
    answers = answered(target)
    assert Counter(answer["custom_id"] for answer in answers) == Counter(names)
    assert {answer["response"]["body"]["answers"][0]["type"] for answer in answers} == {"choice"}
