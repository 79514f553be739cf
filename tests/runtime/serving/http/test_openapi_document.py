"""The server keeps to its own OpenAPI document, whatever fits it or does not: no 5xx, no answer of another shape."""

from __future__ import annotations

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

from moepass.runtime.serving.http.app import ROUTES
from moepass.runtime.serving.routes.service import Route
from tests.helpers.serving.served import Served

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
# For each server, route and mode; 5,760 in all.
EXAMPLES = 40
POSITIVE = [pytest.param(route, GenerationMode.POSITIVE, id=f"{route.method} {route.path}") for route in ROUTES]
# Without a body nothing can be wrong.
NEGATIVE = [pytest.param(one, GenerationMode.NEGATIVE, id=f"wrong {one.path}") for one in ROUTES if one.bodies]
pytestmark = pytest.mark.slow


@pytest.fixture(params=["chat", "demo", "classes"])
def server(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


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
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            case.body["model"] = "tiny"  # no random name is served
        response = case.call()
        case.validate_response(response, checks=CHECKS)

    check()
