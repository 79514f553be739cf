"""All responses conform to the server's OpenAPI document, for valid and invalid requests; none is a 5xx."""

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
from starlette.routing import compile_path

from moepass.runtime.serving.http.app import ROUTES
from moepass.runtime.serving.routes.service import Route
from tests.helpers.mutants.random_cases import times
from tests.helpers.serving.served import Served

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
# Number of examples for each server, route and mode: 1,440 in total. They are the same in every run.
EXAMPLES = times(10)
POSITIVE = [pytest.param(route, GenerationMode.POSITIVE, id=f"{route.method} {route.path}") for route in ROUTES]
# Only requests with a body can be invalid.
NEGATIVE = [pytest.param(route, GenerationMode.NEGATIVE, id=f"wrong {route.path}") for route in ROUTES if route.bodies]
pytestmark = pytest.mark.slow


@pytest.fixture(params=["chat", "demo", "classes"])
def server(request: pytest.FixtureRequest) -> Served:
    server: Served = request.getfixturevalue(request.param)
    return server


@pytest.mark.parametrize(("route", "mode"), POSITIVE + NEGATIVE)
def test_answers_fit_the_document(server: Served, route: Route, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    _, path_in_document, _ = compile_path(route.path)
    operation = schema[path_in_document][route.method]

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
            case.body["model"] = "tiny"  # a random model name would be an error 404
        response = case.call()
        case.validate_response(response, checks=CHECKS)

    check()
