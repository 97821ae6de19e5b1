"""What goes wrong, as OpenAI's clients read it: a status, a message that leads on, the field."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from .openai_answers import error_body


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: what was given, what is allowed, what to do.
        kind: the API's word for it.
        param: the field.
    """

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param


def answer_errors(app: FastAPI) -> None:
    """Has an application answer in this form whatever is raised."""
    app.exception_handler(Refused)(_refused)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_no_such_thing)
    app.exception_handler(Exception)(_failed)


def error_response(
    status: int, message: str, kind: str = "invalid_request_error", param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:  # fmt: skip
    """An error as an answer; arguments as for `Refused`."""
    return JSONResponse(error_body(message, kind, param), status_code=status, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return error_response(error.status, error.message, error.kind, error.param, headers)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # Of what a field might have been, that which it came nearest to.
    nearest = max(error.errors(), key=lambda one: len(one["loc"]))
    kind, told = nearest["type"], nearest["msg"].removeprefix("Value error, ")
    places = [str(part) for part in nearest["loc"][1:]]
    if kind == "json_invalid":
        return error_response(400, f"the body is no JSON: {nearest['ctx']['error']}, at character {places[0]}")
    if kind == "extra_forbidden":
        param = ".".join(places)
        return error_response(400, f"{param}: this server has no such field; leave it out", param=param)
    if isinstance(nearest.get("input"), bytes):
        return error_response(400, "the body is not told to be JSON; send Content-Type: application/json")
    # pydantic names the types that it has tried, too.
    param = ".".join(part for part in places if part != "str" and "[" not in part)
    if kind not in ("missing", "value_error"):
        told += f", got {reprlib.repr(nearest['input'])}"
    return error_response(400, f"{param or 'the body'}: {told}", param=param or None)


async def _no_such_thing(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: a path, a method, a body that can't be read."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.scope['path']}"
    told = {
        400: "the body can't be read; send a JSON object in UTF-8",
        404: f"there is no {asked}; there are /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics",
        405: f"there is no {asked}; allowed is {(error.headers or {}).get('Allow', 'another method')}",
    }.get(error.status_code, str(error.detail))
    return error_response(error.status_code, told, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(500, f"the server has failed: {type(error).__name__}; its log says more", "server_error")
