"""`moepass demo` as a process: it ends with a decision over HTTP, and leaves no process running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from moepass.demo.comparison import REQUEST, readable

# The server of the demo then computes with one thread, as the test workers do.
ENVIRONMENT = {**os.environ, "MOEPASS_THREADS": "1"}
PROGRAM = [sys.executable, "-m", "moepass.cli", "demo", "--texts", "40", "--lower", "eager"]

pytestmark = pytest.mark.slow


def test_the_demo_ends_with_a_decision_over_http() -> None:
    finished = subprocess.run(PROGRAM, capture_output=True, text=True, timeout=280, env=ENVIRONMENT)
    assert finished.returncode == 0, finished.stderr
    assert "equal: 0 of 40 predictions differ" in finished.stdout
    request, answer = (json.loads(text) for text in re.findall(r"^\{$.*?^\}$", finished.stdout, re.M | re.S))
    assert request == REQUEST
    assert [question["choice"] for question in answer["answers"]] == ["German", "German"]
    address = re.search(r"POST (http://127\.0\.0\.1:\d+)/v1/decisions", finished.stdout)
    assert address
    assert address[1] in finished.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_with_its_server(number: signal.Signals) -> None:
    with subprocess.Popen(
        PROGRAM, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stderr is not None
        shown = ""
        while "starting" not in shown:
            shown = process.stderr.readline()
            assert shown, "the demo has ended"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(60) in (130, 128 + number)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def test_the_printed_request_is_json() -> None:
    assert json.loads(readable(REQUEST)) == REQUEST
    assert "gültige" in readable(REQUEST)
