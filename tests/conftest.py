"""What all tests share: how Triton starts, and where long proofs say what they have seen.

Triton's own library is set up when it is first imported: here interpreted, so that any test may interpret kernels.

Which way a launcher goes is still asked at each call: a test that wants the interpreter sets the variable.
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from labkit.launch import VARIABLE

if VARIABLE not in os.environ and not torch.cuda.is_available():
    os.environ[VARIABLE] = "1"
    with contextlib.suppress(ImportError):
        import triton.language  # noqa: F401
    del os.environ[VARIABLE]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the proofs that passed have printed, seeds first; pytest itself shows that of failures only.

    It stands here, since the process that reports for several workers collects no tests and reads no other conftest.
    """
    proofs = [one for one in terminalreporter.getreports("passed") if "evidence" in one.keywords and one.capstdout]
    if proofs:
        terminalreporter.section("what the proofs say")
    for proof in proofs:
        terminalreporter.line(proof.head_line)
        for line in proof.capstdout.splitlines():
            terminalreporter.line(f"    {line}")
