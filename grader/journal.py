"""A record of a grading run that survives its interruption: one line of JSON each, on the disk before work goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any


class Journal:
    """Appends records to a file and never changes what stands in it; a context manager.

    Args:
        path: created if it is absent; a later run goes on at its end.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """Adds a record and waits until the disk has it.

        Args:
            kind: what happened, e.g. "case".
            fields: whatever JSON can say.
        """
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The records of a journal; a last line that was cut off by an interruption is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
