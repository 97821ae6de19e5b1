"""Reads what a worker prints, keeps its head and tail, and counts the rest."""

from __future__ import annotations

import threading
from typing import IO

_KEEP = 32 << 10


class Drain:
    """Empties a pipe in a thread of its own, so that a chatty process neither blocks nor fills our memory.

    Args:
        pipe: the read end; closed when the other end is.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self.total_bytes = 0
        self._head = bytearray()
        self._tail = bytearray()
        self._thread = threading.Thread(target=self._run, args=(pipe,), daemon=True)
        self._thread.start()

    def _run(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := pipe.read1(1 << 16):  # type: ignore[attr-defined]
                self.total_bytes += len(data)
                room = _KEEP - len(self._head)
                self._head += data[:room]
                self._tail = (self._tail + data[room:])[-_KEEP:]

    @property
    def text(self) -> str:
        """Head and tail of what was printed, with a note on what is left out between them."""
        left_out = self.total_bytes - len(self._head) - len(self._tail)
        gap = f"\n… {left_out} bytes left out …\n".encode() if left_out > 0 else b""
        return (bytes(self._head) + gap + bytes(self._tail)).decode("utf-8", "replace")
