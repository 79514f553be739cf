"""A server on a real socket, in a thread, to test its routes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedModel

from moepass.cli.serving import open_socket
from moepass.models.checkpoint.checkpoint_folders import Prompt, load_prompt, load_tokenizer
from moepass.models.checkpoint.load_model import load_model
from moepass.runtime.serving.http.draining_server import make_server
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.routes.server_settings import ServerSettings
from moepass.runtime.serving.routes.service import Service
from tests.helpers.serving.engine_backend import EngineBackend

# A typical chat template, which ends prompts with an open turn of the assistant.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Served:
    """A running server: its `url`, a plain HTTP `client`, and the service and backend behind it."""

    def __init__(self, url: str, service: Service, backend: EngineBackend, api_key: str | None) -> None:
        self.url = url
        self.service = service
        self.backend = backend
        self.writer = service.writer
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}".encode()}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=60)

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        response = self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """Return the error of a request that the server refuses with `status`."""
        error: dict[str, Any] = self.post(path, body, status)["error"]
        return error


@contextlib.contextmanager
def served(
    folder: Path,
    *,
    model: PreTrainedModel | None = None,
    class_names: tuple[str, ...] = (),
    chat_template: str | None = None,
    prompt: Prompt | None = None,
    api_key: str | None = None,
) -> Iterator[Served]:
    """Serve the checkpoint in `folder`, with an engine in this process."""
    model = model or load_model(folder)
    tokenizer = load_tokenizer(folder)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    backend = EngineBackend(model, class_names)
    writer = PromptWriter(tokenizer, prompt or load_prompt(folder), backend.status().max_sequence_tokens)
    service = Service(backend, writer, ServerSettings(("tiny", "alias"), api_key, timeout_seconds=30))
    with open_socket("127.0.0.1", 0) as listening:
        server = make_server(service)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        running = Served(url, service, backend, api_key)
        running.client.get("/health")  # the socket listens before the server does
        try:
            yield running
        finally:
            running.client.close()
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server has not stopped"
