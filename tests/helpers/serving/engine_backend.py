"""A backend with an engine in this process, for the tests of routes."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from moepass.runtime.serving.engine.load_engine import EngineOptions, make_engine
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request
from tests.helpers.serving.reference_backend import ReferenceBackend

CACHE_BYTES = 1 << 20


class EngineBackend(ReferenceBackend):
    """A backend that computes each request in a separate step, with a prefix cache. `model` is left unchanged."""

    def __init__(self, model: PreTrainedModel, class_names: tuple[str, ...] = ()) -> None:
        super().__init__(model, class_names)
        options = EngineOptions(None, torch.device("cpu"), cache_bytes=CACHE_BYTES, step_tokens=64)
        self.engine = make_engine(copy.deepcopy(model), options, None, key=bytes(32))

    def _computed(self, request: Request) -> Answer:
        self.engine.check(request)
        (answer,) = self.engine.step([request]).answers
        return answer
