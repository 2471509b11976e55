"""Single questions to a server, beside what is measured: is it ready, what does it serve, how is it?"""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Final, NamedTuple

from roseinfer.bench.environment import public_text
from roseinfer.bench.http.address import Address, headers
from roseinfer.errors import InputError, RunError

PATIENCE_S: Final = 10.0
MOST_BYTES: Final = 4 * 1024 * 1024


class UnreachableError(Exception):
    """No answer came; its text says why."""


class Answer(NamedTuple):
    status: int
    body: bytes
    server: str | None  # what it calls itself


def ask(address: Address, path: str, api_key: str | None = None) -> Answer:
    """GET `path` there. Raises UnreachableError."""
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path or "/", headers=dict(headers(api_key)))
        response = connection.getresponse()
        return Answer(response.status, response.read(MOST_BYTES), response.getheader("Server"))
    except (OSError, http.client.HTTPException, ssl.SSLError) as error:
        raise UnreachableError(
            getattr(error, "strerror", None) or str(error) or type(error).__name__
        ) from error
    finally:
        connection.close()


class Served(NamedTuple):
    """A model as its server names it. `server` is what that calls itself, None where it does not."""

    model: str
    server: str | None


def find_model(address: Address, model: str | None, api_key: str | None) -> Served:
    """`model`, or the only one that the server lists. Of one that it names by a path, the last part will do.

    Raises InputError where it lists others or several, RunError where nobody answers.
    """
    try:
        answer = ask(address, f"{address.base}/models", api_key)
    except UnreachableError as error:
        raise RunError(f"--target: nothing answers at {address.host} port {address.port}: {error}") from error
    listed = _models(answer) if answer.status == 200 else None
    if model is not None:
        called = [name for name in listed or () if public_text(name) == model]
        if len(called) == 1:
            model = called[0]
        elif listed and model not in listed:  # where there is no list, the requests will show it
            raise InputError("--model", model, f"is not what the server lists: {', '.join(listed)}")
        return Served(model, answer.server)
    if listed is None:
        why = f"is not given, and the server does not list its models (status {answer.status})"
        raise InputError("--model", None, why)
    if len(listed) != 1:
        raise InputError("--model", None, f"is not given, and the server lists {', '.join(listed) or 'none'}")
    return Served(listed[0], answer.server)


def _models(answer: Answer) -> list[str] | None:
    """None where that is no list of models."""
    try:
        entries = json.loads(answer.body)["data"]
        return [str(entry["id"]) for entry in entries]
    except (ValueError, KeyError, TypeError):
        return None
