"""What a cache of one layer's keys and values looks like from outside, and the check of what is put into it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from labkit.quantization_checks import check_finite

KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LayerKV(Protocol):
    """Keys and values of one layer, for a batch of sequences that are equally long."""

    @property
    def length(self) -> int:
        """Tokens held."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is stored: codes, scales and what stayed in full precision."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new keys and values, `[batch, kv_heads, new, head_dim]`, and returns all that the layer holds."""

    def truncate(self, length: int) -> None:
        """Forgets every token from position `length` on."""


def check_new_kv(k: Tensor, v: Tensor, held: Tensor | None) -> None:
    """Refuse keys and values that don't fit each other, or those that a cache holds already.

    Args:
        k: new keys, `[batch, kv_heads, new, head_dim]`, at least one token.
        v: new values, of the same shape and dtype.
        held: any tensor of the same cache, of whose shape all but the tokens must agree, and the dtype; None for the
            first tokens.

    Raises:
        ValueError: shapes or dtypes that don't fit, or numbers that aren't finite.
    """
    if k.dim() != 4 or not k.numel() or k.shape != v.shape or k.dtype != v.dtype or k.dtype not in KV_DTYPES:
        raise ValueError(
            "keys and values must have the same shape [batch, kv_heads, new, head_dim] and dtype, one of "
            f"{', '.join(map(str, KV_DTYPES))}, with at least one token; got {list(k.shape)} {k.dtype} and "
            f"{list(v.shape)} {v.dtype}"
        )
    if held is not None and (_form(held) != _form(k)):
        raise ValueError(
            f"the cache holds (batch, kv_heads, head_dim) and dtype {_form(held)}, the new tokens have {_form(k)}; a "
            "batch keeps its form from the first token to the last"
        )
    check_finite("keys", k)
    check_finite("values", v)


def _form(x: Tensor) -> tuple[int, int, int, torch.dtype]:
    return x.shape[0], x.shape[1], x.shape[3], x.dtype
