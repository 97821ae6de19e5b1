"""Projections with plain weights; on an x86 CPU they are laid out once as oneDNN reads them.

A product of few tokens with a plain matrix arranges the matrix anew every time, which costs more than the arithmetic
does, and torch's float32 product is a library's that leaves half of some CPUs unused. Measured with one thread on a CPU
with AVX-512: in float32 from 1.4 times as fast with one token to 2.5 times with 8 and more; in bfloat16 twice with one
token, 1.3 times with 32, 1.1 times with 256.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from itertools import count
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""A projection `[tokens, in] -> [tokens, out]`: the seam for packed weights."""

_X86 = ("x86_64", "AMD64")
_UNITS = {torch.float32: ("avx2",), torch.bfloat16: ("avx512_bf16", "amx_bf16")}
"""What a CPU must have for a type to be worth it, any of them."""
_TOKENS = 32
"""For so many the layout is chosen; others read the same one."""
_MOST_TOKENS = 512
"""In one product; beyond, reading the weights once more costs little."""


def padded_tokens(count: int) -> int:
    """How many tokens are multiplied in place of so many, at most 512.

    oneDNN writes a kernel for each number of tokens, which takes about a megabyte, and keeps a thousand of them. So the
    numbers of tokens are few; a tenth is computed in vain on average.
    """
    step = 1 if count <= 8 else 8 if count <= 64 else 32 if count <= 256 else 64
    return -(-count // step) * step


class LaidOutProduct:
    """`x · Wᵀ + b` over weights in oneDNN's layout.

    Args:
        weight: `[out, in]`, of a type that `has_layout` knows.
        bias: `[out]`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._width = len(weight)
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TOKENS)
        self._number = next(_NUMBERS)
        _PRODUCTS[self._number] = self

    def __call__(self, inputs: Tensor) -> Tensor:
        """`[tokens, in] -> [tokens, out]`."""
        if torch.compiler.is_compiling():  # torch compiles nothing that reads such a layout
            return torch.ops.workbook.laid_out_product(inputs, self._number, self._width)
        return self.product(inputs)

    def product(self, inputs: Tensor) -> Tensor:
        """As a call, outside of what is compiled."""
        count = inputs.shape[0]
        if count > _MOST_TOKENS:
            return torch.cat([self.product(part) for part in inputs.split(_MOST_TOKENS)])
        padded = F.pad(inputs, (0, 0, 0, padded_tokens(count) - count))
        return torch.ops.mkldnn._linear_pointwise(padded, self._weight, self._bias, "none", [], "")[:count]


_NUMBERS = count()
_PRODUCTS: WeakValueDictionary[int, LaidOutProduct] = WeakValueDictionary()


@torch.library.custom_op("workbook::laid_out_product", mutates_args=())
def _by_number(inputs: Tensor, number: int, width: int) -> Tensor:
    return _PRODUCTS[number].product(inputs)


@_by_number.register_fake
def _(inputs: Tensor, number: int, width: int) -> Tensor:
    return inputs.new_empty(inputs.shape[0], width)


def has_layout(weight: Tensor) -> bool:
    """Whether oneDNN's layout is to be had, and pays, where a matrix lies and for its type."""
    if weight.device.type != "cpu" or platform.machine() not in _X86 or not torch.backends.mkldnn.is_available():
        return False
    return has_units(weight.dtype)


def has_units(dtype: torch.dtype) -> bool:
    """Whether the CPU has units that make products of a type worth it."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(unit) for unit in _UNITS.get(dtype, ()))


def dense(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A projection with plain weights `[out, in]`."""
    if has_layout(weight):
        return LaidOutProduct(weight, bias)
    return lambda inputs: F.linear(inputs, weight, bias)
