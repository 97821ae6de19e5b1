"""Three that serve the bundled model: the engine's server, llama.cpp's, and transformers' continuous batching.

The servers are processes of their own, asked over HTTP by one and the same client. transformers runs in the process of
the client: its own server needs `accelerate`, which the workbook has no other use for, so it is spared the HTTP.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from benchmarks.decode_beside_transformers import load_transformers
from benchmarks.serving_load import WrongAnswer, check_length
from labkit.checkpoints import bundled_gguf
from solutions.engine.load import Arrival

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0
"""Seconds for a server to load its model."""
BLOCK_SIZE, NUM_BLOCKS = 16, 1024
"""Of the KV pools of the engine and of transformers."""


class Server:
    """A server of the OpenAI API.

    Args:
        name: for the tables.
        url: of the server.
        client: with no limit on connections or time.
    """

    def __init__(self, name: str, url: str, client: httpx.AsyncClient) -> None:
        self.name, self._url, self._client = name, url, client

    async def answer(self, arrival: Arrival) -> AsyncIterator[None]:
        """As `Contender.answer`."""
        body = {
            "model": "smollm2", "prompt": list(arrival.prompt), "max_tokens": arrival.params.max_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        usage: dict[str, Any] = {}
        async with self._client.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise WrongAnswer(f"{self.name} answered {response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                if event.get("choices"):
                    yield
        check_length(self.name, arrival, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))


class ContinuousBatching:
    """transformers' continuous batching, its thread in this process.

    Args:
        manager: of a model, started.
    """

    name = "transformers"

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._names = (f"request-{number}" for number in itertools.count())

    async def answer(self, arrival: Arrival) -> AsyncIterator[None]:
        """As `Contender.answer`."""
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        name = next(self._names)
        self._manager.register_result_handler(name, pieces.put_nowait)
        self._manager.add_request(
            list(arrival.prompt), request_id=name, max_new_tokens=arrival.params.max_tokens, streaming=True,
            eos_token_id=-1,
        )  # fmt: skip
        finished = False
        while not finished:
            piece = await pieces.get()
            if piece.error is not None:
                raise WrongAnswer(f"transformers failed: {piece.error}")
            finished = piece.is_finished()
            yield
        check_length(self.name, arrival, len(piece.prompt_ids), len(piece.generated_tokens))


def missing() -> list[str]:
    """What can't take part here, and why."""
    if importlib.util.find_spec("xllamacpp") is None:
        return ["llama.cpp's server: *not verified here*, xllamacpp is not installed"]
    return []


@contextmanager
def engine_server(client: httpx.AsyncClient, threads: int, compile: bool = False) -> Iterator[Server]:
    """The engine's server on the codes of the bundled GGUF file, until the context ends.

    Args:
        client: to ask it with.
        threads: to compute with.
        compile: whether torch compiles its decode steps.
    """
    port = _free_port()
    command = ["solutions.engine", "serve", "--weights", "stored", "--port", str(port), "--blocks", str(NUM_BLOCKS)]
    command += ["--compile"] if compile else []
    with _process(command, port, threads):
        yield Server("the engine", f"http://127.0.0.1:{port}", client)


@contextmanager
def llama_cpp_server(client: httpx.AsyncClient, threads: int, slots: int, context: int) -> Iterator[Server]:
    """llama.cpp's server on the same file, until the context ends.

    Args:
        client: to ask it with.
        threads: to compute with.
        slots: requests at once.
        context: tokens of each.
    """
    port = _free_port()
    command = ["benchmarks.llama_cpp_server", str(bundled_gguf()), "--port", str(port), "--threads", str(threads),
               "--slots", str(slots), "--context", str(context)]  # fmt: skip
    with _process(command, port, threads):
        yield Server("llama.cpp", f"http://127.0.0.1:{port}", client)


@contextmanager
def continuous_batching(threads: int) -> Iterator[ContinuousBatching]:
    """transformers on the same numbers in float32, until the context ends."""
    torch.set_num_threads(threads)
    model = load_transformers()
    # Pages of 256 tokens, the default, are many times too large for this model's pool.
    config = transformers.ContinuousBatchingConfig(
        page_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_batch_tokens=512, auto_switch_to_flash=False
    )
    settings = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config, warmup=False, timeout=10
    ) as manager:
        yield ContinuousBatching(manager)


@contextmanager
def _process(command: list[str], port: int, threads: int) -> Iterator[None]:
    """A Python module as a process that listens on a port; what it says is shown only if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            until = time.monotonic() + PATIENCE
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    raise RuntimeError(f"{command[0]} does not serve: {said.read()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
