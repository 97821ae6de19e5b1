"""Triton's own library is set up when it is first imported: here interpreted, so that any test may interpret kernels.

Which way a launcher goes is still asked at each call: a test that wants the interpreter sets the variable.
"""

from __future__ import annotations

import contextlib
import os

import torch

from labkit.launch import VARIABLE

if VARIABLE not in os.environ and not torch.cuda.is_available():
    os.environ[VARIABLE] = "1"
    with contextlib.suppress(ImportError):
        import triton.language  # noqa: F401
    del os.environ[VARIABLE]
