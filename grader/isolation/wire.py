"""Frames on a stream socket: a JSON header and raw buffers, every length announced, checked and capped.

u32 header bytes · u32 number of buffers · u64 bytes of each buffer · header · buffers
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NoReturn

from labkit.codec import Message
from labkit.errors import ProtocolFault

MAX_HEADER_BYTES = 8 << 20
MAX_BUFFERS = 4096
MAX_TOTAL_BYTES = 512 << 20
_TICK_SECONDS = 0.2


class Closed(Exception):
    """The other side closed the connection, at a frame's boundary or within one."""


class DeadlinePassed(Exception):
    """The other side did not finish a frame in time."""


def send(sock: socket.socket, message: Message, deadline: float | None = None) -> None:
    """Writes one frame.

    Args:
        sock: a connected stream socket.
        message: what to send.
        deadline: `time.monotonic()` at which to give up, for an other side that does not read.

    Raises:
        ProtocolFault: if the message is larger than a frame may be.
        Closed: if the other side is gone.
        DeadlinePassed: if it does not read.
    """
    header = json.dumps(message.header, allow_nan=False, separators=(",", ":")).encode()
    sizes = [len(buffer) for buffer in message.buffers]
    _check_sizes(len(header), sizes)
    frame = struct.pack(f"!II{len(sizes)}Q", len(header), len(sizes), *sizes) + header
    try:
        for part in (frame, *message.buffers):
            view = memoryview(part)
            while view:
                _wait(sock, deadline, None, writing=True)
                view = view[sock.send(view, 0 if deadline is None else socket.MSG_DONTWAIT) :]
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(sock: socket.socket, deadline: float | None = None, on_tick: Callable[[], None] | None = None) -> Message:
    """Reads one frame.

    Args:
        sock: a connected stream socket.
        deadline: `time.monotonic()` at which to give up.
        on_tick: called now and then while waiting; may raise to stop.

    Raises:
        ProtocolFault: if the frame is malformed or too large.
        Closed: if the other side is gone.
        DeadlinePassed: if the frame is not complete in time.
    """

    def exactly(count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            _wait(sock, deadline, on_tick, writing=False)
            try:
                received = sock.recv_into(view)
            except ConnectionResetError as error:
                raise Closed from error
            if received == 0:
                raise Closed
            view = view[received:]
        return data

    header_size, num_buffers = struct.unpack("!II", exactly(8))
    _check_sizes(header_size, [0] * min(num_buffers, MAX_BUFFERS + 1))
    sizes = list(struct.unpack(f"!{num_buffers}Q", exactly(8 * num_buffers)))
    _check_sizes(header_size, sizes)
    header = parse_header(exactly(header_size))
    return Message(header, [exactly(size) for size in sizes])


def parse_header(data: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in a header.

    Raises:
        ProtocolFault: if it is no JSON object.
    """
    try:
        header = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolFault(f"a header that is no JSON: {type(error).__name__}") from error
    if not isinstance(header, dict):
        raise ProtocolFault("a header that is no object")
    return header


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _check_sizes(header_size: int, sizes: list[int]) -> None:
    if header_size > MAX_HEADER_BYTES or len(sizes) > MAX_BUFFERS or header_size + sum(sizes) > MAX_TOTAL_BYTES:
        raise ProtocolFault("a frame that is too large")


def _wait(sock: socket.socket, deadline: float | None, on_tick: Callable[[], None] | None, *, writing: bool) -> None:
    """Returns when the socket is ready, so that the deadline holds even against one byte at a time."""
    if deadline is None and on_tick is None:
        return
    while True:
        left = _TICK_SECONDS if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed
        readers, writers = ([], [sock]) if writing else ([sock], [])
        if any(select.select(readers, writers, [], min(left, _TICK_SECONDS))):
            return
        if on_tick is not None:
            on_tick()
