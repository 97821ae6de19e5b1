"""Calls of the lab's launchers as a model makes them, for compiling their kernels without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.instruments.compiled import Case

HALF, FULL = torch.float16, torch.float32


def _rows(dtype: torch.dtype, columns: int) -> Tensor:
    return torch.zeros(8, columns, dtype=dtype)


CASES = [
    *(Case(2, "fused_softmax", "fused_softmax", lambda d=d: (_rows(d, 1000),)) for d in (HALF, FULL)),
    Case(2, "fused_softmax", "fused_softmax", lambda: (_rows(HALF, 49_152),)),
    *(
        Case(3, "rms_norm", "add_rms_norm", lambda d=d: (_rows(d, 576), _rows(d, 576), torch.ones(576, dtype=d)))
        for d in (torch.bfloat16, FULL)
    ),
    Case(5, "swiglu", "swiglu", lambda: (_rows(torch.bfloat16, 1536), _rows(torch.bfloat16, 1536))),
]
