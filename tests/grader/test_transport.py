"""The grader's end of the wire, against a made-up worker: what counts as whose time and whose memory."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from grader.isolation import wire
from grader.isolation.proxy import Limits, Outcome, PipeTransport, WorkerFailed
from labkit.codec import Message
from labkit.errors import ProtocolFault

Answer = Callable[[socket.socket], None]


class MadeUpWorker:
    """Stands in for a submission's worker: its process ends well, whatever happens."""

    limits = Limits(wall_seconds=1.0, cpu_seconds=20)

    def __init__(self, ended: dict[str, Any]) -> None:
        self._ended = ended

    def reap(self, grace: float) -> dict[str, Any]:
        """How the process ended."""
        return self._ended

    def check_tree(self) -> None:
        """Nothing is too large."""


@pytest.fixture
def transport() -> Any:
    """Starts a transport whose other side is run by a function, in a thread."""
    sockets: list[socket.socket] = []

    def begin(answer: Answer, **ended: Any) -> PipeTransport:
        ours, theirs = socket.socketpair()
        sockets.extend((ours, theirs))

        def run() -> None:
            with contextlib.suppress(OSError, wire.Closed):  # the test has ended and closed the sockets
                answer(theirs)

        threading.Thread(target=run, daemon=True).start()
        return PipeTransport(MadeUpWorker({"status": 0, "killed": True, "cpu": 0.0, **ended}), ours)  # type: ignore[arg-type]

    yield begin
    for sock in sockets:
        sock.close()


def no_callback(message: Message) -> Message:
    """For requests that expect none."""
    raise AssertionError(f"an unexpected callback: {message.header}")


def reply(*headers: dict[str, Any]) -> Answer:
    """A side that answers each request by the next header."""

    def answer(sock: socket.socket) -> None:
        for header in headers:
            wire.receive(sock)
            wire.send(sock, Message(header))

    return answer


def test_the_tests_own_time_is_not_the_submissions(transport: Callable[[Answer], PipeTransport]) -> None:
    pipe = transport(reply({"ok": 1}, {"callback": 0, "args": [], "kwargs": {}}, {"ok": 2}))
    assert pipe.request(Message({}), no_callback).header == {"ok": 1}
    time.sleep(1.2)  # the test computes its reference

    def slow(message: Message) -> Message:
        time.sleep(1.2)
        return Message({"ok": None})

    assert pipe.request(Message({}), slow).header == {"ok": 2}


def test_the_submissions_time_is_counted_over_all_calls_of_a_test(
    transport: Callable[[Answer], PipeTransport],
) -> None:
    def sluggish(sock: socket.socket) -> None:
        while True:
            wire.receive(sock)
            time.sleep(0.4)
            wire.send(sock, Message({"ok": 1}))

    pipe = transport(sluggish)
    with pytest.raises(WorkerFailed) as caught:
        for _ in range(4):
            pipe.request(Message({}), no_callback)
    assert caught.value.outcome is Outcome.WALL_TIMEOUT


@pytest.mark.parametrize(
    ("name", "message", "is_memory"),
    [
        ("MemoryError", "", True),
        ("_ArrayMemoryError", "Unable to allocate 8 TiB", True),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate", True),
        ("OSError", "[Errno 12] Cannot allocate memory", True),
        ("ValueError", "there is not enough memory for 5 tokens", False),
        ("RuntimeError", "shapes do not match", False),
    ],
)
def test_running_out_of_memory_is_told_from_a_refusal_that_speaks_of_it(
    transport: Callable[[Answer], PipeTransport], name: str, message: str, is_memory: bool
) -> None:
    header = {"error": {"type": "StudentError", "name": name, "message": message, "traceback": ""}}
    pipe = transport(reply(header))
    if not is_memory:
        assert pipe.request(Message({}), no_callback).header == header
        return
    with pytest.raises(WorkerFailed) as caught:
        pipe.request(Message({}), no_callback)
    assert caught.value.outcome is Outcome.MEMORY


@pytest.mark.parametrize(
    ("status", "killed", "cpu", "outcome"),
    [
        (0, False, 0.1, Outcome.EXITED),
        (7 << 8, False, 0.1, Outcome.EXITED),
        (signal.SIGKILL, False, 0.1, Outcome.KILLED),
        (signal.SIGSEGV, False, 0.1, Outcome.KILLED),
        (signal.SIGKILL, True, 0.1, Outcome.PROTOCOL_FAULT),
        (signal.SIGXCPU, False, 19.6, Outcome.CPU_TIMEOUT),
        # The kernel's own limit, by clock ticks that ran ahead of the time it reports.
        (signal.SIGKILL, False, 19.6, Outcome.CPU_TIMEOUT),
        (signal.SIGKILL, True, 20.1, Outcome.CPU_TIMEOUT),
    ],
)
def test_how_a_process_ended_says_why_it_hung_up(
    transport: Callable[..., PipeTransport], status: int, killed: bool, cpu: float, outcome: Outcome
) -> None:
    pipe = transport(lambda sock: sock.close(), status=status, killed=killed, cpu=cpu)
    with pytest.raises(WorkerFailed) as caught:
        pipe.request(Message({}), no_callback)
    assert caught.value.outcome is outcome


def test_after_a_failure_every_call_of_the_test_fails_alike(transport: Callable[[Answer], PipeTransport]) -> None:
    def hang_up(sock: socket.socket) -> None:
        wire.receive(sock)
        sock.close()

    pipe = transport(hang_up)
    for _ in range(2):
        with pytest.raises(WorkerFailed):
            pipe.request(Message({}), no_callback)


@pytest.mark.parametrize("one_byte_at_a_time", [False, True])
def test_a_frame_that_never_ends_is_given_up(
    transport: Callable[[Answer], PipeTransport], one_byte_at_a_time: bool
) -> None:
    def drip(sock: socket.socket) -> None:
        wire.receive(sock)
        sock.sendall(b"\0\0\0")
        while one_byte_at_a_time:
            time.sleep(0.3)
            sock.send(b"\0")

    with pytest.raises(WorkerFailed) as caught:
        transport(drip).request(Message({}), no_callback)
    assert caught.value.outcome in (Outcome.WALL_TIMEOUT, Outcome.PROTOCOL_FAULT)


def test_frames_cross_whole_with_their_buffers() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = Message({"text": "ü\n", "list": [1, None, {}]}, [b"", bytes(1000), b"\xff" * 100_000])
        thread = threading.Thread(target=wire.send, args=(ours, sent))
        thread.start()
        got = wire.receive(theirs, time.monotonic() + 10)
        thread.join()
    assert got.header == sent.header
    assert [bytes(buffer) for buffer in got.buffers] == sent.buffers


def test_a_message_that_is_too_large_is_not_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ProtocolFault):
        wire.send(ours, Message({"text": "x" * (wire.MAX_HEADER_BYTES + 1)}))
