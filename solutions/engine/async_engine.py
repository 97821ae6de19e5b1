"""The engine in a thread of its own, and its requests as asynchronous streams."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from .engine import Engine, Progress, Prompt
from .grammar import Constraint
from .sampling_params import SamplingParams

T = TypeVar("T")
Tell = Callable[[Progress | Exception], None]
"""Takes what a step has brought one request, or why there will be no more."""


def made_apart(make: Callable[[], T]) -> T:
    """What a function makes, in a thread that ends with it: the way to load what an `AsyncEngine` steps.

    torch has threads of its own for every thread that has computed. Those of a thread that only loads would idle on;
    and as soon as there are more of all than cores, OpenMP's threads sleep between two operations in place of spinning,
    and a step takes twice as long.
    """
    with ThreadPoolExecutor(1) as passing:
        return passing.submit(make).result()


class EngineFailed(RuntimeError):
    """A step raised an exception. Every stream ends with this, and no request is taken in any more."""


class AsyncEngine:
    """Steps an engine as long as there is work, and sleeps when there is none.

    The thread alone touches the engine. What others want of it is a function that the thread calls between two steps;
    what a step brings goes to the queue of the request's stream.

    Args:
        engine: not to be used from elsewhere afterwards; best come from `made_apart`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wishes: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._streams: dict[str, Tell] = {}
        self._closing = self._has_ended = False
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_streams(self) -> int:
        """Requests that are served or wait."""
        return len(self._streams)

    async def stream(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0,
        salt: str | None = None, constraint: Constraint | None = None, adapter: str | None = None,
    ) -> AsyncIterator[Progress]:  # fmt: skip
        """What the steps bring, until every sample has ended.

        Whoever stops listening, cancelled or not, ends the request: its blocks are free before the next step.

        Raises:
            ValueError: as `Engine.add_request`.
            EngineFailed: a step has failed.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Progress | Exception] = asyncio.Queue()

        def tell(item: Progress | Exception) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        def add() -> str:
            name = self._engine.add_request(
                prompt, params, request_id=request_id, priority=priority, salt=salt, constraint=constraint,
                adapter=adapter,
            )  # fmt: skip
            self._streams[name] = tell
            return name

        adding = self._ask(add)
        try:
            name = await asyncio.wrap_future(adding)
        except (asyncio.CancelledError, GeneratorExit):
            # The thread may be about to take it in: then it has to be let go of again.
            adding.add_done_callback(partial(self._let_go_if_added, tell))
            raise
        left = params.n
        try:
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                left -= item.completion is not None
                yield item
        finally:
            self._let_go(tell, name)

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """Calls a function with the engine between two steps."""
        return await asyncio.wrap_future(self._ask(lambda: question(self._engine)))

    async def shut_down(self, patience: float) -> None:
        """Takes nothing in any more, waits for what is served, and ends what is left.

        Args:
            patience: seconds to wait.
        """
        self._closing = True
        loop = asyncio.get_running_loop()
        until = loop.time() + patience
        while self._streams and self.error is None and loop.time() < until:
            await asyncio.sleep(0.02)
        self._ask(self._end_all)
        self._thread.join(timeout=10.0)

    def _ask(self, wish: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def grant() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(wish())
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            if self.error is not None or self._has_ended:
                future.set_exception(self.error or EngineFailed("the engine has shut down"))
            else:
                self._wishes.append(grant)
                self._wake.notify()
        return future

    def _let_go(self, tell: Tell, name: str) -> None:
        def end() -> None:
            # Once a request has ended another may have got its name.
            if self._streams.get(name) is tell:
                del self._streams[name]
                self._engine.abort(name)

        self._ask(end)

    def _let_go_if_added(self, tell: Tell, adding: Future[str]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            self._let_go(tell, adding.result())

    def _end_all(self) -> None:
        for name in list(self._streams):
            for completion in self._engine.abort(name):
                self._tell(name, Progress(name, completion.index, "", (), (), completion))
            self._streams.pop(name, None)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._wishes and not self._engine.has_work:
                    if self._closing:
                        self._has_ended = True
                        return
                    self._wake.wait(timeout=0.5)
                wishes = list(self._wishes)
                self._wishes.clear()
            for grant in wishes:
                grant()
            try:
                for progress in self._engine.step():
                    self._tell(progress.request_id, progress)
            except Exception as error:
                self._fail(error)
                return

    def _tell(self, name: str, item: Any) -> None:
        if name not in self._streams:
            return
        try:
            self._streams[name](item)
        except RuntimeError:  # its event loop was closed, and nobody else will let go of it
            del self._streams[name]
            if self.error is None:
                self._engine.abort(name)

    def _fail(self, error: Exception) -> None:
        failure = EngineFailed(f"a step failed: {type(error).__name__} {error}")
        failure.__cause__ = error
        with self._wake:
            self.error = failure
            wishes = list(self._wishes)
            self._wishes.clear()
        for grant in wishes:
            grant()
        for name in list(self._streams):  # those included that have been taken in just now
            self._tell(name, failure)
