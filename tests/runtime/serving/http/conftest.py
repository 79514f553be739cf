"""Servers on real sockets, one of each kind per module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from moepass.models.checkpoint.checkpoint_folders import resolve_model
from tests.helpers.serving.byte_checkpoint import classifier, save_byte_checkpoint
from tests.helpers.serving.served import CHAT_TEMPLATE, Served, served

CLASS_NAMES = ("bad", "good", "neither")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_checkpoint(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def chat(checkpoint: Path) -> Iterator[Served]:
    """A chat model."""
    with served(checkpoint, chat_template=CHAT_TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> Iterator[Served]:
    """The same model without a chat template."""
    with served(checkpoint) as running:
        yield running


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    """The embedded demo model, which only answers with its own labels."""
    with served(resolve_model("demo")) as running:
        yield running


@pytest.fixture(scope="module")
def classes(checkpoint: Path) -> Iterator[Served]:
    """A classifier with three classes."""
    with served(checkpoint, model=classifier(len(CLASS_NAMES)), class_names=CLASS_NAMES) as running:
        yield running


@pytest.fixture(scope="module")
def reward(checkpoint: Path) -> Iterator[Served]:
    """A model with one output, as in rerankers and reward models."""
    with served(checkpoint, model=classifier(1), class_names=("relevance",)) as running:
        yield running


@pytest.fixture(scope="module")
def client(chat: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chat.url}/v1", api_key="any", max_retries=0) as openai_client:
        yield openai_client
