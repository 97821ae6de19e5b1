"""Looks at a request before anything else does: its key, and the size of its body."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from .refusals import error_response
from .server_config import ServerConfig

Proceed = Callable[[Request], Awaitable[Response]]


def make_guard(config: ServerConfig) -> Callable[[Request, Proceed], Awaitable[Response]]:
    """The middleware for what a server allows."""

    async def guard(request: Request, proceed: Proceed) -> Response:
        if config.api_key is not None and request.url.path.startswith("/v1/"):
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            # A header's text is its bytes, whatever a client meant by them.
            is_right = hmac.compare_digest(given.encode("latin-1"), config.api_key.encode())
            if scheme.lower() != "bearer" or not is_right:
                text = "wrong or missing API key; send it as 'Authorization: Bearer …'"
                return error_response(401, text, "authentication_error", headers={"WWW-Authenticate": "Bearer"})
        if request.method == "POST":
            # A body in chunks is as long as its client likes, whatever a length beside them says.
            if "transfer-encoding" in request.headers or not request.headers.get("content-length", "").isdecimal():
                text = "the body's length is not told before it; send Content-Length, and no chunks"
                return error_response(411, text)
            size = int(request.headers["content-length"])
            if size > config.max_body_bytes:
                return error_response(413, f"the body has {size} bytes, {config.max_body_bytes} are allowed; send less")
        return await proceed(request)

    return guard
