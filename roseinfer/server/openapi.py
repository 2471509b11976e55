"""What `/openapi.json` says of the routes that are not FastAPI's own."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from roseinfer.server.bodies import ChatBody, CompletionBody, GenerateBody


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetails


ERRORS: Final[dict[int | str, dict[str, Any]]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}

_ROUTES: Final = (
    ("/v1/completions", CompletionBody, "text/event-stream"),
    ("/v1/chat/completions", ChatBody, "text/event-stream"),
    ("/generate", GenerateBody, "text/plain"),
)
"""Path, body, and content type of a stream."""


def describe_generation(app: FastAPI) -> None:
    """Makes `app.openapi` describe them beside the others."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = describe()
            models = [(body, "validation") for _, body, _ in _ROUTES]
            _, found = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            schema["components"]["schemas"].update(found["$defs"])
            schema["paths"].update({path: _post(body, stream) for path, body, stream in _ROUTES})
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _post(body: type[BaseModel], stream_type: str) -> dict[str, Any]:
    def content(schema: str) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}

    failed = {"description": "Error", "content": content("ErrorBody")}
    done = {"description": "The answer", "content": {"application/json": {}, stream_type: {}}}
    return {
        "post": {
            "summary": body.__doc__,
            "requestBody": {"required": True, "content": content(body.__name__)},
            "responses": {"200": done, "4XX": failed, "5XX": failed},
        }
    }
