"""A server on a real socket, in a thread of this process, so that a test sees its engine too."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

from solutions.engine import Engine
from solutions.engine.server.app import make_app
from solutions.engine.server.server_config import ServerConfig

KEY = "a key"


@dataclass
class Running:
    """A server in a thread of its own."""

    engine: Engine
    url: str
    server: uvicorn.Server
    thread: threading.Thread

    def client(self, **settings: Any) -> openai.OpenAI:
        """The official client, which tries once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": KEY, "max_retries": 0, **settings})

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """A plain request."""
        headers = {"Authorization": f"Bearer {KEY}", **headers}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=60)

    def wait_until_idle(self) -> None:
        """Until no request is left, whoever ended it."""
        until = time.monotonic() + 20
        while self.engine.num_running or self.engine.num_waiting:
            assert time.monotonic() < until, "a request went on after its client had gone"
            time.sleep(0.02)

    def stop(self) -> None:
        """Shuts it down, and waits until it has."""
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


def start(engine: Engine, config: ServerConfig) -> Running:
    """Serves an engine on a free port."""
    settings = uvicorn.Config(make_app(engine, config), port=0, log_level="error", timeout_graceful_shutdown=15)
    server = uvicorn.Server(settings)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < until, "the server did not start"
        time.sleep(0.02)
    return Running(engine, f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread)
