"""In which precision float32 products are computed, set for a while and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def float32_products(mode: str) -> Iterator[None]:
    """Float32 products of GPU and CPU in a mode, for as long as the context lasts.

    Only torch's flags are touched, by their newer names alone: torch refuses to answer once they are mixed with the
    older ones.

    Args:
        mode: `"ieee"` for full float32, `"tf32"` for the 10-bit mantissa of tensor cores.
    """
    owners: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [owner.fp32_precision for owner in owners]
    try:
        owners[0].fp32_precision = mode
        owners[1].fp32_precision = "ieee"  # a CPU's own short cuts are no part of any of our modes
        yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            owner.fp32_precision = value
