"""An OpenAI-compatible server: chats, completions and models over HTTP, streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from ..engine import Engine
from .guard import make_guard
from .openai_protocol import ChatBody, CompletionBody
from .prometheus import EngineCollector, Latencies
from .refusals import answer_errors
from .server_config import ServerConfig
from .service import Service


def make_app(engine: Engine, config: ServerConfig | None = None) -> FastAPI:
    """The server's application.

    Args:
        engine: the server's own from now on.
        config: what it allows.
    """
    config = config or ServerConfig()
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    service = Service(engine, config, Latencies(registry))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.serving.shut_down(config.patience)

    app = FastAPI(title="Inference workbook", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.serving = service.serving
    app.middleware("http")(make_guard(config))
    answer_errors(app)

    @app.get("/health")
    async def health() -> Response:
        failure = service.serving.error
        if failure is not None:
            return JSONResponse({"status": "failed", "reason": str(failure)}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": service.model_cards()}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.adapter_of(name)
        return next(card for card in service.model_cards() if card["id"] == name)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await service.chat(body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await service.complete(body, request)

    return app
