"""create_app: the routes."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from roseinfer.errors import InputError
from roseinfer.executor import Engine
from roseinfer.manager import SchedulerManager
from roseinfer.server.answers import OpenAIAnswer, PlainAnswer
from roseinfer.server.bodies import (
    BodyLimits,
    ChatBody,
    CompletionBody,
    GenerateBody,
    OpenAISampling,
    Wanted,
    refuse_doubled_names,
)
from roseinfer.server.gate import Gate
from roseinfer.server.openapi import ERRORS, describe_generation
from roseinfer.server.refusals import Refusal, refusal_of, refusal_of_body
from roseinfer.server.response import GenerationResponse
from roseinfer.server.service import Service

Body = TypeVar("Body", bound=BaseModel)


def create_app(
    engine: Engine,
    *,
    max_inflight_requests: int | None = None,
    model_name: str | None = None,
    api_key: str | None = None,
    limits: BodyLimits = BodyLimits(),  # noqa: B008 (immutable)
    write_timeout_s: float = 30.0,
    log_requests: bool = False,
    tokenize_workers: int = 1,
    **manager_options: Any,
) -> FastAPI:
    """An OpenAI-compatible app in front of a SchedulerManager of its own, which `app.state.service` holds.

    max_inflight_requests: over it, requests are answered 429; None is no limit. `admission` says it in full.
    model_name: what clients call the model; None takes the engine's own name for it.
    api_key: asked of every request but /health and /ready; None asks for none.
    write_timeout_s: how long a client may take nothing of its stream before its request ends.
    log_requests: prompts go to the log of `roseinfer.server`.
    tokenize_workers: at least 1, since with 0 a long prompt would hold up all streams.
    manager_options: whatever else SchedulerManager takes, but for `unread_timeout_s`.

    An engine that has a `chat_template` (a ChatTemplate) formats chats with it, else they are joined line by line.
    Raises InputError (a ValueError) for values that cannot work.
    """
    if tokenize_workers < 1:
        raise InputError("tokenize_workers", tokenize_workers, "must be a whole number >= 1 in a server")
    if not 0 < write_timeout_s < math.inf:
        raise InputError("write_timeout_s", write_timeout_s, "must be a positive number")
    if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable()):
        raise InputError("api_key", None, "must be printable ASCII, and not empty")
    manager = SchedulerManager(
        engine,
        max_inflight_requests=max_inflight_requests,
        tokenize_workers=tokenize_workers,
        unread_timeout_s=math.inf,  # slow readers are this app's matter: `write_timeout_s`
        **manager_options,
    )
    description = getattr(engine, "description", None)
    service = Service(
        manager,
        model=model_name or str(getattr(description, "model", "roseinfer")),
        max_model_len=engine.max_model_len,
        chat_template=getattr(engine, "chat_template", None),
        limits=limits,
        write_timeout_s=write_timeout_s,
        log_requests=log_requests,
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(
        title="roseinfer",
        lifespan=lifespan,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    app.add_middleware(Gate, api_key=api_key, max_body_bytes=limits.body_bytes)
    _add_error_shapes(app)
    _add_generation(app, service)
    _add_information(app, service)
    describe_generation(app)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    """Routes of Starlette's kind: FastAPI's would take half as long again as all else before a slot is asked for."""

    def openai(request: Request, body: OpenAISampling, wanted: Wanted, *, chat: bool) -> Response:
        if body.model not in (None, service.model):
            why = f"there is no model {body.model!r} here"
            return Refusal(404, why, "model_not_found", "model").response()
        request_id, now_s = request.state.request_id, int(time.time())
        answer = OpenAIAnswer(request_id, now_s, service.model, chat=chat, include_usage=wanted.include_usage)
        return GenerationResponse(service, wanted, answer)

    async def completions(request: Request) -> Response:
        body = await _parsed(request, CompletionBody)
        return openai(request, body, body.wanted(service.limits), chat=False)

    async def chat_completions(request: Request) -> Response:
        body = await _parsed(request, ChatBody)
        prompt = service.chat_prompt(body.plain_messages())
        return openai(request, body, body.wanted(prompt, service.limits), chat=True)

    async def generate(request: Request) -> Response:
        body = await _parsed(request, GenerateBody)
        return GenerationResponse(service, body.wanted(service.limits), PlainAnswer())

    app.add_route("/v1/completions", completions, methods=["POST"])
    app.add_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_route("/generate", generate, methods=["POST"])


async def _parsed(request: Request, kind: type[Body]) -> Body:
    # Other content types a page of another site may send from a browser without asking.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be JSON, sent with Content-Type: application/json")
    content = await request.body()
    body = kind.model_validate_json(content)
    refuse_doubled_names(content)
    return body


def _add_information(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses=ERRORS)
    async def models() -> Response:
        about = {"object": "model", "created": service.started_s, "owned_by": "roseinfer"}
        about["max_model_len"] = service.max_model_len
        return JSONResponse({"object": "list", "data": [{"id": service.model, **about}]})

    @app.get("/health", responses=ERRORS)
    async def health() -> Response:
        if service.is_alive:
            return JSONResponse({"status": "ok"})
        return Refusal(503, "the engine does not run", "engine_dead", reason="engine_dead").response()

    @app.get("/ready", responses=ERRORS)
    async def ready() -> Response:
        if service.draining:
            return Refusal(503, "this server is about to end", "draining", reason="draining").response()
        return await health()

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}, **ERRORS})
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_error_shapes(app: FastAPI) -> None:
    @app.exception_handler(ValidationError)
    async def on_bad_body(_request: Request, error: ValidationError) -> Response:
        return refusal_of_body(error.errors(include_url=False, include_input=False)).response()

    @app.exception_handler(InputError)
    async def on_bad_value(_request: Request, error: InputError) -> Response:
        return refusal_of(error).response()

    @app.exception_handler(HTTPException)
    async def on_http(_request: Request, error: HTTPException) -> Response:
        codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "no_json"}
        code = codes.get(error.status_code, "invalid_body")
        return Refusal(error.status_code, str(error.detail), code).response(error.headers)
