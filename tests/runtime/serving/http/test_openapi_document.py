"""The server keeps to its own OpenAPI document, whatever fits it or does not: no 5xx, no answer of another shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import CHAT_TEMPLATE, Served, served

from moepass.runtime.serving.http.app import ROUTES
from moepass.runtime.serving.http.service import Route

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
# For each route and mode; 5,760 in all.
EXAMPLES = 120
POSITIVE = [pytest.param(route, GenerationMode.POSITIVE, id=f"{route.method} {route.path}") for route in ROUTES]
# Without a body nothing can be wrong.
NEGATIVE = [pytest.param(one, GenerationMode.NEGATIVE, id=f"wrong {one.path}") for one in ROUTES if one.bodies]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    with served(checkpoint, chat_template=CHAT_TEMPLATE) as running:
        yield running


@pytest.mark.parametrize(("route", "mode"), POSITIVE + NEGATIVE)
def test_answers_fit_the_document(server: Served, route: Route, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = schema[route.path][route.method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        database=None,
    )
    def check(case: schemathesis.Case) -> None:
        response = case.call()
        case.validate_response(response, checks=CHECKS)

    check()
