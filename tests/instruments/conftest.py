"""A lab of small kernels, in process and in the sandbox, with the interpreter on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from grader.isolation.proxy import Limits, SubmissionWorker, Tier
from grader.isolation.sandbox import bwrap_fault
from labkit.client import LabClient, local_lab
from labkit.launch import VARIABLE, triton_fault
from labkit.manifest import Interface, Manifest

FOLDER = Path(__file__).parent / "lab"
FUNCTIONS = [
    "softmax", "decorative_softmax", "bare_softmax", "copy", "read_view", "unmasked_copy", "total", "gram",
    "first_of_rows", "double_in_bf16", "histogram", "nibbles", "stub", "attention_by_another_name",
    "composed_attention", "row_sums", "interleave",
]  # fmt: skip
MANIFEST = Manifest(
    id="97",
    title="kernels",
    folder=FOLDER,
    solutions=FOLDER,
    modules=("kernels",),
    banned=(),
    tasks=(),
    interface=Interface(dict.fromkeys(FUNCTIONS, "kernels"), {}),
    interpreter=True,
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches the interpreter on."""
    monkeypatch.setenv(VARIABLE, "1")
    if fault := triton_fault():
        pytest.skip(f"not verified here: {fault}")


@pytest.fixture(scope="session")
def held() -> Iterator[SubmissionWorker]:
    """The lab in its sandbox."""
    if fault := bwrap_fault():
        pytest.skip(f"not verified here: {fault}")
    with SubmissionWorker(MANIFEST, FOLDER, Tier.BWRAP, Limits()) as worker:
        yield worker


@pytest.fixture
def local() -> Iterator[LabClient]:
    """The lab in this process."""
    with local_lab(MANIFEST, FOLDER) as client:
        yield client


@pytest.fixture
def sandboxed(held: SubmissionWorker) -> Iterator[LabClient]:
    """The lab in a process of its own."""
    with held.test() as client:
        yield client
