"""`moepass serve` as a process: it starts, answers over HTTP, and ends."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moepass.cli.main import app
from moepass.cli.serve_options import served_names
from moepass.cli.serving import possible_connections
from moepass.models.checkpoint.checkpoint_folders import load_tokenizer, resolve_model
from moepass.models.checkpoint.load_model import load_model
from moepass.models.limits import MOST_CONNECTIONS
from tests.helpers.serving.server_process import START_SECONDS, ServerProcess, serving


@torch.no_grad()
def expected(text: str, labels: list[str]) -> list[float]:
    folder = resolve_model("demo")
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    ids = tokenizer(f"{text}<sep>", return_tensors="pt")["input_ids"]
    logits = model(input_ids=ids, use_cache=False).logits[0, -1].double()
    tokens = tokenizer(labels, add_special_tokens=False)["input_ids"]
    probabilities: list[float] = logits[[token for (token,) in tokens]].softmax(0).tolist()
    return probabilities


@pytest.mark.slow
def test_decisions_of_the_demo(tmp_path: Path) -> None:
    text, labels = "Bitte geben Sie eine gültige Adresse ein", ["<de>", "<en>", "<fr>"]
    choices = [{"value": label} for label in labels]
    question = {"type": "choice", "instructions": "Which language is this?", "choices": choices}
    with serving("demo", "--eager", "--ranks", "2", "--step-tokens", "256", cache=tmp_path) as server:
        body = {"model": "demo", "input": text, "questions": [question, question]}
        response = server.client.post("/v1/decisions", json=body)
        assert response.status_code == 200, response.text
        for answer in response.json()["answers"]:
            probabilities = [choice["probability"] for choice in answer["probabilities"]]
            assert probabilities == pytest.approx(expected(text, labels), abs=1e-4)
            assert answer["choice"] == "<de>"
        assert "moepass_compilations_after_ready 0.0" in server.client.get("/metrics").text
        check_status_pages(server)
        assert server.end() == 0


def check_status_pages(server: ServerProcess) -> None:
    """Check the page and the state of a server with two ranks after one decision."""
    assert "<title>moepass</title>" in server.client.get("/").text
    assert server.client.get("/ready").json()["details"]["steps"].startswith("tries: ")
    state = server.client.get("/v1/state").json()
    assert [(rank["state"], rank["form"], rank["load_flops"]) for rank in state["ranks"]] == [("ready", "trie", 0)] * 2
    assert "German" in state["labels"]
    (step,) = [rank["engine"]["step"] for rank in state["ranks"] if rank["engine"]["step"] is not None]
    assert (step["number"], step["requests"]) == (1, 1)
    # Both questions are equal, so the trie has one position to read.
    assert [node["reads"] for node in step["nodes"]] == [1]
    assert step["tokens"] == step["nodes"][0]["tokens"] == state["sums"]["request_tokens"]


@pytest.mark.parametrize("module", ["cli.serving", "runtime.serving.workers.rank_loop"])
def test_what_starts_ranks_and_the_loop_of_a_rank_import_quickly(module: str) -> None:
    heavy = ("torch", "transformers", "sympy", "fastapi", "uvicorn", "httpx", "rich")
    program = f"import sys, moepass.{module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-folder"], "does not exist"),
        (["demo", "--home", "moon"], "home"),
        (["demo", "--kv-cache", "-5"], "kv cache '-5'"),
        (["demo", "--queue-bytes", "abc"], "queue bytes 'abc'"),
        (["demo", "--memory-budget", "plenty"], "memory budget 'plenty'"),
        (["demo", "--link", "wet"], "link is 'wet'"),
        (["demo", "--hardware", "big"], "hardware 'big' is unknown"),
        (["demo", "--device", "tpu"], "device"),
        (["demo", "--host", "256.1.1.1"], "the server cannot listen on"),
    ],
)
def test_wrong_options_are_errors_of_one_line(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["serve", *arguments, "--port", "0"])
    assert done.exit_code in (1, 2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("moepass: error")
    assert words in line


def test_an_empty_api_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """MOEPASS_API_KEY=$KEY with an unset KEY must not open the server to everyone."""
    monkeypatch.setenv("MOEPASS_API_KEY", "")
    # If the key were accepted, the wrong device would end the command.
    done = CliRunner().invoke(app, ["serve", "demo", "--port", "0", "--device", "tpu"])
    assert done.exit_code == 2
    assert "the API key is empty" in done.stderr


def test_the_name_of_a_model_is_that_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "qwen"
    (folder / "below").mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert [served_names(name, ()) for name in (".", "below/..", "./below/")] == [("qwen",), ("qwen",), ("below",)]
    assert served_names("demo", ()) == ("demo",)


@pytest.mark.parametrize("option", ["--drain", "--timeout", "--queue-seconds"])
@pytest.mark.parametrize("value", ["inf", "nan", "-1"])
def test_invalid_times_are_refused_by_the_name_of_the_option(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["serve", "demo", option, value])
    assert done.exit_code == 2
    assert option in done.stderr


@pytest.mark.parametrize(
    ("hard_limit", "expected", "warns"),
    [(1 << 16, 4096, False), (resource.RLIM_INFINITY, 4096, False), (1024, 768, True), (100, 1, True)],
)
def test_connections_are_limited_by_the_open_files_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hard_limit: int, expected: int, warns: bool
) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, hard_limit))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    assert possible_connections(MOST_CONNECTIONS) == expected
    assert limits == [(hard_limit, hard_limit)]
    assert (f"at most {expected} connections, not 4096" in capsys.readouterr().err) is warns


def test_a_dense_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 512}))
    done = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", "0"])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert "cannot be served: its model_type 'qwen3' is not a mixture-of-experts family" in line
    assert "A dense model has no experts to stream" in line


@pytest.fixture
def copied_demo(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("demo"), tmp_path / "copied"))


def test_a_wrong_template_is_an_error_at_once(copied_demo: Path) -> None:
    (copied_demo / "chat_template.jinja").write_text("{{ messages[0].role }}:")
    done = CliRunner().invoke(app, ["serve", str(copied_demo), "--port", "0"])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert "omits the text" in line


@pytest.mark.slow
def test_a_model_that_fails_its_probe_is_not_served(copied_demo: Path, tmp_path: Path) -> None:
    prompt = copied_demo / "prompt.json"
    prompt.write_text(prompt.read_text().replace('"expected": "German"', '"expected": "Dutch"'))
    program = [sys.executable, "-m", "moepass.cli", "serve", str(copied_demo), "--eager", "--port", "0"]
    environment = {**os.environ, "MOEPASS_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=START_SECONDS)
    assert done.returncode == 1
    assert "rank 0: the model fails the probe in its prompt.json: its best answer is 'German'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MOEPASS_RANKS", "0", "--ranks"),
        ("MOEPASS_KV_CACHE", "plenty", "plenty"),
        ("MOEPASS_HOME", "elsewhere", "elsewhere"),
    ],
)
def test_options_can_be_set_in_the_environment(name: str, value: str, words: str) -> None:
    result = CliRunner().invoke(app, ["serve", "demo"], env={name: value})
    assert result.exit_code != 0
    assert words in result.stderr


@pytest.mark.slow
def test_nothing_compiles_after_ready(tmp_path: Path) -> None:
    with serving("demo", "--step-tokens", "256", cache=tmp_path) as server:
        for size in (1, 2, 3, 7, 30, 100, 400):
            prompts = [[5 + position % 90 for position in range(size)], [7] * size]
            body = {"model": "demo", "prompt": prompts, "max_tokens": 1, "logprobs": 2, "echo": True}
            response = server.client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
        metrics = server.client.get("/metrics").text
        assert re.search(r"^moepass_compilations_after_ready 0\.0$", metrics, re.M), metrics
        assert server.end() == 0


def snippets(page: str, start: str) -> list[str]:
    """Return the code blocks of a page that begin with `start`."""
    text = (Path(__file__).resolve().parents[3] / page).read_text(encoding="utf-8")
    return [block for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S) if block.startswith(start)]


def rounded(value: Any) -> Any:
    """Return `value` with its numbers rounded as in the pages."""
    if isinstance(value, dict):
        return {name: rounded(field) for name, field in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.slow
def test_examples_of_the_pages_are_true(tmp_path: Path) -> None:
    with serving("demo", "--eager", cache=tmp_path) as server:

        def run(*program: str) -> str:
            here = [re.sub(r"(http://)?(127\.0\.0\.1|localhost):8000", server.url, word) for word in program]
            return subprocess.run(here, capture_output=True, text=True, timeout=60, check=True).stdout

        for page in ("README.md", "docs/serving.md"):
            (asked,), (answer,) = snippets(page, "curl "), snippets(page, '{"model": "demo"')
            assert rounded(json.loads(run("bash", "-c", f"set -e; {asked}"))) == rounded(json.loads(answer)), page
        (asked,), (answer,) = snippets("README.md", "import openai"), snippets("README.md", "German 0.")
        assert run(sys.executable, "-c", asked) == answer
        (asked,) = snippets("docs/api.md", "import openai")
        assert run(sys.executable, "-c", asked).startswith("German 0.9")
        assert server.end() == 0
