"""A server that ends in order: on a signal what runs may end by itself, for as long as patience lasts."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

from ..async_engine import AsyncEngine


def run(app: FastAPI, listener: socket.socket, patience: float) -> None:
    """Serves until a signal ends it.

    Args:
        app: of `make_app`.
        listener: a bound socket.
        patience: seconds from the signal on in which answers may end by themselves.
    """
    # The second is for those that were told of the end to read it.
    settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(patience) + 2)
    _Server(settings, app.state.serving, patience).run(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's ends the application when all connections are closed: too late to end what they wait for."""

    def __init__(self, config: uvicorn.Config, serving: AsyncEngine, patience: float) -> None:
        super().__init__(config)
        self._serving, self._patience = serving, patience

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections as their answers end, which is at once when patience does, or a second Ctrl-C comes."""
        ending = asyncio.ensure_future(self._serving.shut_down(self._patience))
        await super().shutdown(sockets)
        if self.force_exit:
            ending.cancel()
            await self._serving.shut_down(0.0)
            await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0)), *self.server_state.tasks], timeout=1.0)
            await self.lifespan.shutdown()
        else:
            await ending
