"""Replicas on a local Ray answer like one server, also while a replica is killed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from moepass.models.errors import InputError, OptionError
from moepass.ray_serve import app, build_app
from moepass.ray_serve.ray_options import parse_options
from tests.helpers.serving.server_process import serving

DRIVER = Path(__file__).parents[2] / "helpers" / "serving" / "ray_driver.py"
SECONDS = 240
LABELS = ("<de>", "<en>", "<fr>", "<da>")


def test_options_are_values_or_text() -> None:
    options = parse_options({"model": "demo", "replicas": "2", "eager": "true", "timeout": "2.5", "kv_cache": "off"})
    assert options == parse_options({"model": "demo", "replicas": 2, "eager": True, "timeout": 2.5, "kv_cache": "off"})
    setup = options.rank_setup(bytes(16))
    assert (setup.options.eager, setup.options.cache_bytes, setup.key) == (True, 0, "00" * 16)
    assert options.names == ("demo",)
    assert parse_options({"model": "m", "ranks": 2, "threads": 3}).actor_resources == {"num_cpus": 6, "num_gpus": 0}
    assert parse_options({"model": "m", "ranks": 2, "device": "cuda"}).actor_resources == {"num_cpus": 2, "num_gpus": 2}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replica": 2}, "option 'replica' is unknown; did you mean replicas"),
        ({"replicas": "two"}, "option replicas is 'two'; it must be a whole number from 1 to 512"),
        ({"replicas": 0}, "option replicas is 0"),
        ({"lower": "other"}, "option lower is 'other'; it must be one of eager, inductor"),
        ({"timeout": float("nan")}, "option timeout is nan; it must be a number from 0.001"),
        ({"kv_cache": "lots"}, "^kv cache 'lots'"),
        ({"home": "moon"}, "home is 'moon'; it must be one of device"),
        ({"chunk_tokens": "auto"}, "there is no memory budget"),
        ({"tune_kernels": True}, "experts have no Triton kernels"),
    ],
)
def test_wrong_options_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_options({"model": "demo", **values})


def test_a_queue_that_is_no_number_of_bytes_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match=r"^queue bytes 'lots'"):
        parse_options({"model": "demo", "queue_bytes": "lots"})


def test_a_model_is_required() -> None:
    with pytest.raises(OptionError, match="option model is missing; it must be a checkpoint folder"):
        parse_options({})


def test_chunks_and_tuned_kernels_are_options_of_the_ranks() -> None:
    values = {"model": "demo", "chunk_tokens": "auto", "memory_budget": "1GB"}
    assert parse_options(values).rank.chunk_tokens == "auto"
    assert parse_options({"chunk_tokens": "64", "model": "demo"}).rank.chunk_tokens == 64
    assert parse_options({"tune_kernels": True, "device": "cuda", "model": "demo"}).rank.tune_kernels


def test_the_error_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(OptionError, match=r"pip install 'moepass\[ray\]'"):
        build_app("demo")
    with pytest.raises(OptionError, match="model="):
        app({})


@contextlib.contextmanager
def running_on_ray(folder: Path, *options: str) -> Iterator[httpx.Client]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The driver runs in an empty folder, because Ray's workers can import from the folder of their driver.
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "MOEPASS_CACHE_DIR": ""}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(DRIVER), str(port), *options],
            **{"cwd": folder, "env": environment, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"running\n", (folder / "log").read_text()
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
            wait_ready(client)
            yield client
            process.stdin.close()
            assert process.wait(90) == 0
        finally:
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait()
            process.stdout.close()


def wait_ready(client: httpx.Client, words: str = "") -> None:
    end = time.monotonic() + SECONDS
    while (response := client.get("/ready")).status_code != 200 or words not in response.text:
        assert time.monotonic() < end, response.text
        time.sleep(0.2)


def decision(client: httpx.Client, number: int) -> httpx.Response:
    choices = [{"value": label} for label in LABELS]
    body = {
        "model": "demo",
        "input": f"Bitte geben Sie eine Adresse ein {number} " * (1 + number % 5),
        "questions": [{"type": "choice", "instructions": "?", "choices": choices[: 2 + number % 3]}] * 2,
    }
    return client.post("/v1/decisions", json=body)


def probabilities(response: httpx.Response) -> list[float]:
    assert response.status_code == 200, response.text
    return [choice["probability"] for answer in response.json()["answers"] for choice in answer["probabilities"]]


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Return prompts without shared prefixes."""
    return np.random.default_rng(0).integers(5, 500, (count, tokens)).tolist()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_is_lost_with_a_replica(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="Ray Serve is in the extra moepass[ray]")
    with serving("demo", "--eager", "--step-tokens", "256", cache=tmp_path / "cache") as server:
        expected = [probabilities(decision(server.client, number)) for number in range(20)]
    options = ("model=demo", "replicas=2", "eager=true", "step_tokens=256", "api_key=secret", "threads=1")
    with running_on_ray(tmp_path, *options) as client:
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        # All routes exist, and errors have the same format as without Ray.
        served = set(client.get("/openapi.json").json()["paths"])
        assert {"/v1/score", "/rerank", "/v1/embeddings", "/v1/completions", "/invocations"} <= served
        refused = client.post("/v1/decisions", json={"model": "demo", "input": "a", "questions": []})
        assert refused.status_code == 400
        too_long = client.post("/v1/completions", json={"model": "demo", "prompt": [5] * 9000, "max_tokens": 1})
        assert too_long.status_code == 400, too_long.text
        body = {"model": "demo", "prompt": [[5, 6, 7], [5, 6], [5]], "max_tokens": 1, "logprobs": 1}
        assert len(client.post("/v1/completions", json=body).json()["choices"]) == 3

        # A client that disconnects frees the capacity of the replica.
        long = {"model": "demo", "max_tokens": 0, "echo": True, "logprobs": 1, "prompt": prompts(100, 500)}
        end = time.monotonic() + SECONDS
        while not re.search(r'finished_reason="abort"\} [1-9]', client.get("/metrics").text):
            assert time.monotonic() < end
            # On a busy machine, a request may not have reached its replica when the client disconnects.
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=long, timeout=0.3)
            time.sleep(0.2)

        processes = psutil.Process().children(recursive=True)
        replicas = [process for process in processes if "ServeReplica:default:Replica" in "".join(process.cmdline())]
        assert len(replicas) == 2
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(decision, client, number % 20) for number in range(240)]
            while sum(future.done() for future in futures) < 40:
                time.sleep(0.01)
            replicas[0].kill()
            assert not all(future.done() for future in futures)
            answers = [probabilities(future.result()) for future in futures]
        for number, answer in enumerate(answers):
            assert answer == pytest.approx(expected[number % 20], abs=1e-5)
        # Ray starts a new replica, and both answer again.
        wait_ready(client, "2 of 2 replicas")
        assert probabilities(decision(client, 3)) == pytest.approx(expected[3], abs=1e-5)
        metrics = client.get("/metrics").text
        assert 'moepass_rank_ready{rank="1"} 1.0' in metrics
        assert "moepass_compilations_after_ready 0.0" in metrics
