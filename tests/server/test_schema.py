"""`/openapi.json`, and requests made up from it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

from roseinfer.server.bodies import BodyLimits
from tests.server.serving import an_app, ask, manager_of

ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/generate"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]


def test_the_schema_has_every_route() -> None:
    with an_app() as app:
        schema = ask(app, "GET", "/openapi.json").json()
    assert {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods} == set(
        ROUTES
    )


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *((method, path, GenerationMode.POSITIVE) for method, path in ROUTES),
        *((method, path, GenerationMode.NEGATIVE) for method, path in ROUTES if method == "POST"),
    ],
)
def test_answers_are_as_the_schema_says_whatever_is_sent(
    method: str, path: str, mode: GenerationMode
) -> None:
    with an_app(limits=BodyLimits(output_tokens=8)) as app:
        schema = schemathesis.openapi.from_asgi("/openapi.json", app)
        schema.config.checks.update(excluded_check_names=["positive_data_acceptance", "unsupported_method"])
        operation = schema[path][method]

        statuses: list[int] = []

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=30, suppress_health_check=list(HealthCheck))
        def sent(case: schemathesis.Case[Any]) -> None:
            statuses.append(case.call_and_validate().status_code)

        sent()
        if mode is GenerationMode.POSITIVE:
            assert 200 in statuses, "all that the schema allows is refused"
        assert manager_of(app).inflight == 0
