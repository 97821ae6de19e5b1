"""A lab of one module whose code is whatever a test wants to try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from grader.isolation.proxy import Limits, SubmissionWorker, Tier
from grader.isolation.sandbox import bwrap_fault
from labkit.manifest import Interface, Manifest

Start = Callable[[str], SubmissionWorker]

LIMITS = Limits(
    cpu_seconds=2,
    wall_seconds=5.0,
    total_cpu_seconds=60.0,
    memory_bytes=1 << 30,
    file_bytes=8 << 20,
    output_bytes=1 << 20,
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a sandboxed worker over source text; the function under test is `f`."""
    if fault := bwrap_fault():
        pytest.skip(f"not verified here: {fault}")
    manifest = Manifest(
        id="98",
        title="hostile",
        folder=tmp_path,
        solutions=tmp_path,
        modules=("code",),
        banned=(),
        tasks=(),
        interface=Interface({"f": "code", "g": "code"}, {}),
    )
    with ExitStack() as stack:

        def begin(source: str) -> SubmissionWorker:
            (tmp_path / "code.py").write_text(source)
            return stack.enter_context(SubmissionWorker(manifest, tmp_path, Tier.BWRAP, LIMITS))

        yield begin
