"""A lab of one module whose code is whatever a test wants to try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grader.isolation.proxy import Limits, SubmissionWorker, Tier
from grader.isolation.sandbox import bwrap_fault
from labkit.manifest import Interface, Manifest

Start = Callable[[str], SubmissionWorker]

LIMITS = Limits(
    cpu_seconds=2,
    wall_seconds=120.0,
    total_cpu_seconds=60.0,
    memory_bytes=1 << 30,
    file_bytes=8 << 20,
    output_bytes=1 << 20,
)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, SubmissionWorker]]:
    """A folder and the worker that holds it; what the folder's module says is read anew by every test."""
    if fault := bwrap_fault():
        pytest.skip(f"not verified here: {fault}")
    folder = tmp_path_factory.mktemp("submission")
    manifest = Manifest(
        id="98",
        title="hostile",
        folder=folder,
        solutions=folder,
        modules=("code",),
        banned=(),
        tasks=(),
        interface=Interface({"f": "code", "g": "code"}, {}),
    )
    with SubmissionWorker(manifest, folder, Tier.BWRAP, LIMITS) as worker:
        yield folder, worker


@pytest.fixture
def start(held: tuple[Path, SubmissionWorker]) -> Start:
    """Puts source text into the sandbox; the functions under test are `f` and `g`."""
    folder, worker = held

    def begin(source: str) -> SubmissionWorker:
        (folder / "code.py").write_text(source)
        worker.cpu_seconds = 0.0
        return worker

    return begin
