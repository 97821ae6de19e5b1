"""Attention of one step by Triton kernels that follow block tables: lab 06's for decodes, the engine's for pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.attention_checks import MAX_HEAD_DIM
from solutions.kernels.paged_decode import paged_decode

from ..kernels.paged_attention import paged_attention
from ..memory.kv_pool import KVPool
from ..models.packed_attention import LatentMaps
from ..step import Work
from .decode_inputs import DecodeInputs
from .paged_attention import PagedAttention


def kernels_fault(pool: KVPool) -> str | None:
    """Why the kernels can't read a pool; None if they can."""
    parts = pool.parts(0)
    if parts is None:
        return "keys and values are stored as codes"
    if len(parts) != 2:
        return "the layers keep latents"
    if (head_dim := parts[0].shape[-1]) > MAX_HEAD_DIM:
        return f"head_dim is {head_dim}, more than {MAX_HEAD_DIM}"
    return None


def attention_of(pool: KVPool, work: tuple[Work, ...]) -> KernelAttention | PagedAttention:
    """The attention of a step. To the kernels a token sees all before it, and in a tree of drafts it does not."""
    return PagedAttention(pool, work) if any(one.parents for one in work) else KernelAttention(pool, work)


class KernelAttention:
    """Stores the new keys and values of a step, and lets each query read its own request's, up to itself.

    Requests that compute a single token are decoded in one launch, all others attend in a second one. Layers with a
    window need but that one.

    Args:
        pool: the memory.
        work: of the step, in the order of its tokens.
    """

    def __init__(self, pool: KVPool, work: Sequence[Work]) -> None:
        self._pool = pool
        self.slots = torch.tensor([slot for one in work for slot in one.slots], device=pool.device)
        firsts, first = [], 0
        for one in work:
            firsts.append(first)
            first += len(one.tokens)
        pairs = list(zip(firsts, work, strict=True))
        self._all = _Group(pairs, pool.device)
        self._singles = _Group([pair for pair in pairs if len(pair[1].tokens) == 1], pool.device)
        self._pieces = _Group([pair for pair in pairs if len(pair[1].tokens) > 1], pool.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """See `PackedAttention`."""
        self._pool.write(layer, self.slots, k, v)
        parts = self._pool.parts(layer)
        assert parts is not None, "`kernels_fault` tells"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if window is not None:
            return self._all.attend(q, parts, out, window)
        if self._pieces.max_count:
            self._pieces.attend(q, parts, out, None)
        if self._singles.max_count:
            one, (keys, values) = self._singles, parts
            out[one.firsts] = paged_decode(q[one.firsts], keys, values, one.tables, one.lengths)[0]
        return out

    def latent(self, layer: int, q: Tensor, latents: Tensor, maps: LatentMaps) -> Tensor:
        """See `PackedAttention`."""
        raise AssertionError("the kernels read keys and values only; `kernels_fault` tells")


class _Group:
    """Some requests of a step, as kernels are told of them.

    Args:
        pairs: each with the place of its first token among all tokens of the step.
        device: of the pool.
    """

    def __init__(self, pairs: Sequence[tuple[int, Work]], device: torch.device) -> None:
        self.max_count = max((len(one.tokens) for _, one in pairs), default=0)
        width = max((len(one.blocks) for _, one in pairs), default=0)
        # One tensor for all: what goes to a GPU waits for each piece of it.
        numbers = torch.tensor(
            [
                (first, len(one.tokens), one.end, *one.blocks, *(0,) * (width - len(one.blocks)))
                for first, one in pairs
            ],
            dtype=torch.int64, device=device,
        ).reshape(-1, 3 + width)  # fmt: skip
        self.firsts, self._counts, self.lengths = (column.contiguous() for column in numbers[:, :3].unbind(1))
        self.tables = numbers[:, 3:]

    def attend(self, q: Tensor, parts: Sequence[Tensor], out: Tensor, window: int | None) -> Tensor:
        """Writes what their queries read."""
        keys, values = parts
        return paged_attention(
            q, keys, values, self.tables, self.firsts, self._counts, self.lengths, self.max_count, window=window,
            out=out,
        )  # fmt: skip


class KernelDecodeAttention:
    """The same for a pure decode step over static inputs; see `decode_attention.DecodeAttention`.

    Args:
        pool: the memory.
        inputs: of the step.
    """

    def __init__(self, pool: KVPool, inputs: DecodeInputs) -> None:
        self._pool = pool
        self._inputs = inputs
        self._counts = torch.ones_like(inputs.lengths)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """See `PackedAttention`."""
        inputs = self._inputs
        self._pool.write(layer, inputs.slots, k, v)
        parts = self._pool.parts(layer)
        assert parts is not None, "`kernels_fault` tells"
        keys, values = parts
        if window is None:
            return paged_decode(q, keys, values, inputs.tables, inputs.lengths)[0]
        return paged_attention(
            q, keys, values, inputs.tables, inputs.every_row, self._counts, inputs.lengths, 1, window=window
        )

    def latent(self, layer: int, q: Tensor, latents: Tensor, maps: LatentMaps) -> Tensor:
        """See `PackedAttention`."""
        raise AssertionError("the kernels read keys and values only; `kernels_fault` tells")
