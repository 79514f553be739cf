"""A client that leaves the HTTP server frees all its requests at the ranks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from moepass.cli.serving import open_socket
from moepass.models.checkpoint.checkpoint_folders import load_prompt, load_tokenizer
from moepass.runtime.serving.http.draining_server import make_server
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.routes.server_settings import ServerSettings
from moepass.runtime.serving.routes.service import Service
from tests.helpers.serving.byte_checkpoint import save_byte_checkpoint
from tests.helpers.serving.sum_frontend import run, serving, slow


@pytest.mark.slow
def test_a_client_that_leaves_cancels_all_its_requests_before_the_next_step(tmp_path: Path) -> None:
    folder = save_byte_checkpoint(tmp_path / "tiny")
    writer = PromptWriter(load_tokenizer(folder), load_prompt(folder), 400)
    # Each prompt fills a step of 0.05 seconds.
    body = json.dumps({"prompt": [[5] * 30 + [number] * 10 for number in range(5, 65)], "max_tokens": 1}).encode()

    async def work() -> None:
        async with serving(tmp_path, ranks=1, options=slow) as frontend:
            server = make_server(Service(frontend, writer, ServerSettings(("tiny",))))
            with open_socket("127.0.0.1", 0) as listening:
                running = asyncio.create_task(server.serve([listening]))
                _, writing = await asyncio.open_connection(*listening.getsockname()[:2])
                writing.write(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )
                while frontend.counters.steps < 3:
                    await asyncio.sleep(0.01)
                assert frontend._router is not None
                assert len(frontend._router.requests) > 50
                writing.close()
                while not frontend.counters.given_up:
                    await asyncio.sleep(0.001)
                steps = frontend.counters.steps
                await asyncio.sleep(0.5)
                assert not frontend._router.requests
                assert frontend._router.loads == (0,)
                assert frontend._open_bytes == 0
                # The running step, and one that the rank may start before it receives the cancellation.
                assert frontend.counters.steps <= steps + 2
                server.should_exit = True
                await running

    run(work())
