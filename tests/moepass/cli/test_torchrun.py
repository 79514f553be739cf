"""`moepass serve` under torchrun: its processes become the ranks of one server, and restart together."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moepass.cli.torchrun import LaunchedProcess, MeetingFolderError, check_own_folder, checked_ranks, launched_process
from moepass.models.errors import OptionError

ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}
BODY = {
    "model": "demo",
    "input": "Bitte geben Sie eine gültige Adresse ein",
    "questions": [{"type": "choice", "instructions": "?", "choices": [{"value": "<de>"}, {"value": "<en>"}]}],
}
SECONDS = 120


def test_the_process_is_read_from_the_environment() -> None:
    assert launched_process({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}) is None
    launched = launched_process(ENVIRONMENT)
    assert launched == LaunchedProcess(rank=1, ranks=2, restarts=1)
    assert checked_ranks(launched, 1) == checked_ranks(launched, 2) == 2


def test_unsupported_starts_are_refused() -> None:
    with pytest.raises(OptionError, match="--nnodes 1"):
        launched_process({**ENVIRONMENT, "WORLD_SIZE": "4"})
    with pytest.raises(OptionError, match="rdzv-backend"):
        launched_process({**ENVIRONMENT, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    with pytest.raises(OptionError, match="leave out --ranks"):
        checked_ranks(LaunchedProcess(0, 2, 0), 3)


def test_ranks_refuse_folders_that_other_users_can_enter(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    check_own_folder(private)
    link = tmp_path / "link"
    link.symlink_to(private)
    for folder in (link, tmp_path / "missing"):
        with pytest.raises(MeetingFolderError):
            check_own_folder(folder)
    private.chmod(0o750)
    with pytest.raises(MeetingFolderError, match="750") as raised:
        check_own_folder(private)
    assert raised.value.expected == 0o700


@contextlib.contextmanager
def torchrun(*arguments: str, cache: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    serve = ["-m", "moepass.cli", "serve", "demo", "--eager", "--step-tokens", "256", "--port", "0", *arguments]
    environment = {**os.environ, "MOEPASS_CACHE_DIR": str(cache)}
    with open(log, "wb") as output:
        process = subprocess.Popen([*program, *serve], stderr=output, env=environment)
        try:
            yield process
        finally:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def ready_client(process: subprocess.Popen[bytes], log: Path, starts: int) -> httpx.Client:
    """Wait until the server is ready after `starts` starts, and return a client for it."""
    end = time.monotonic() + SECONDS
    while True:
        text = log.read_text(encoding="utf-8")
        urls = re.findall(r"http://127\.0\.0\.1:\d+", text)
        if len(urls) >= starts and len(re.findall(r"^ready$", text, re.M)) >= starts:
            return httpx.Client(base_url=urls[starts - 1], timeout=60)
        assert process.poll() is None, text
        assert time.monotonic() < end, text
        time.sleep(0.1)


def decision(client: httpx.Client) -> list[dict[str, Any]]:
    response = client.post("/v1/decisions", json=BODY)
    assert response.status_code == 200, response.text
    answers: list[dict[str, Any]] = response.json()["answers"]
    return answers


@pytest.mark.slow
def test_a_lost_rank_ends_the_server_and_torchrun_starts_it_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with torchrun("--home", "peer", cache=tmp_path / "cache", log=log) as process:
        client = ready_client(process, log, 1)
        assert len(re.findall(r"^moepass_rank_ready\{.*\} 1\.0$", client.get("/metrics").text, re.M)) == 2
        answers = decision(client)
        assert answers[0]["choice"] == "<de>"
        workers = psutil.Process(process.pid).children()
        workers[1].kill()
        again = ready_client(process, log, 2)
        assert "rank 1 has ended" in log.read_text(encoding="utf-8")
        assert decision(again) == answers
        processes = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert "ending: answering the open requests" in log.read_text(encoding="utf-8")
        _, alive = psutil.wait_procs(processes, 10)
        assert alive == []
