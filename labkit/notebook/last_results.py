"""What the last check of each task found, kept in the cache so that progress is there at once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.paths import cache_dir


@dataclass(frozen=True)
class LastResult:
    """The last check of a task.

    Args:
        passed: test functions that passed.
        total: test functions of the task.
        points: earned by them.
        digest: of the task's files as they were checked.
        failures: failed checks since the last success, each on code that had changed since the one before.
    """

    passed: int
    total: int
    points: float
    digest: str
    failures: int = 0


def digest_of(files: Iterable[Path]) -> str:
    """A digest of files; one that is missing counts as empty."""
    digest = hashlib.sha256()
    for file in files:
        text = file.read_bytes() if file.is_file() else b""
        digest.update(f"{file.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def read_results(impl: str) -> dict[str, LastResult]:
    """Results by the names of tasks, such as "07.4".

    Args:
        impl: whose; results of the student's code and of the reference are kept apart.
    """
    found = {}
    for name, kept in _read().get(impl, {}).items():
        # What another version of the workbook has written, or half a disk, is no result.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            counts = int(kept["passed"]), int(kept["total"])
            found[name] = LastResult(*counts, float(kept["points"]), str(kept["digest"]), int(kept["failures"]))
    return found


def keep_result(impl: str, name: str, result: LastResult) -> None:
    """Replaces a task's result in one step; where the cache can't be written, it is only not remembered."""
    everything = _read()
    everything[impl] = {**everything.get(impl, {}), name: dataclasses.asdict(result)}
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(everything, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return


def _path() -> Path:
    return cache_dir() / "checks.json"


def _read() -> dict[str, dict[str, Any]]:
    try:
        kept = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {impl: tasks for impl, tasks in kept.items() if isinstance(tasks, dict)} if isinstance(kept, dict) else {}
