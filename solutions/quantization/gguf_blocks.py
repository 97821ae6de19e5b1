"""Blocks of 32 weights as GGUF files hold them: Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1.

A block begins with its scale d in float16, for the `_1` types followed by its minimum m in float16; then come, for five
bits, the highest bits of all 32 codes in four bytes, and the low four bits of codes j and j + 16 in byte j. Codes are
unsigned. The `_0` types put the value 0 on the middle code: value = d · (code − 2^(bits − 1)); the others have
value = d · code + m. Q8_0 holds d and signed bytes.

Source: module section 4.3 (GGUF); the layouts are those of the `ggml` library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.quantization_checks import check_finite
from labkit.quantized import QuantizedTensor

BLOCK = 32
"""Weights of a block."""


@dataclass(frozen=True)
class BlockType:
    """A block type of GGUF.

    Args:
        bits: of a code.
        has_minimum: value = d · code + m, instead of a code in the middle that means 0.
    """

    bits: int
    has_minimum: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of a block of 32 weights."""
        return 2 + 2 * self.has_minimum + BLOCK * self.bits // 8

    @property
    def middle(self) -> int:
        """The unsigned code of the value 0; for types without a minimum."""
        return 2 ** (self.bits - 1)


BLOCK_TYPES = {
    "Q8_0": BlockType(8, False),
    "Q4_0": BlockType(4, False),
    "Q4_1": BlockType(4, True),
    "Q5_0": BlockType(5, False),
    "Q5_1": BlockType(5, True),
}


def encode_blocks(values: Tensor, kind: str) -> Tensor:
    """Round a matrix to blocks.

    Args:
        values: finite, `[rows, columns]`; 32 divides the columns.
        kind: one of `BLOCK_TYPES`.

    Returns:
        uint8 `[rows, columns / 32 · bytes of a block]`.

    Raises:
        ValueError: an unknown type, columns that 32 does not divide, values that aren't finite, or so large that
            their scale leaves float16.
    """
    block_type = _block_type(kind)
    blocks = _blocks(values)
    check_finite("values", values)
    if block_type.has_minimum:
        least, most = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        # The range holds 0, so that a block of one sign keeps small numbers small.
        least = _half(least.clamp(max=0), kind)
        scale = _half((most.clamp(min=0) - least) / (2**block_type.bits - 1), kind)
        codes = _divide(blocks - least, scale).round()
        return _bytes(codes.clamp(0, 2**block_type.bits - 1), scale, least, block_type)
    # The number of largest magnitude becomes the lowest code, of which there is one more than of the highest: a step
    # finer than with both ends alike. Eight bits have steps to spare, and keep −127 … 127.
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = _half(largest.abs() / 127 if kind == "Q8_0" else -largest / block_type.middle, kind)
    codes = _divide(blocks, scale).round() + block_type.middle
    return _bytes(codes.clamp(0, 2**block_type.bits - 1), scale, None, block_type)


def encode_codes(q: QuantizedTensor) -> tuple[str, Tensor]:
    """Store codes that another method has chosen; nothing is rounded but scale and minimum, to float16.

    Args:
        q: of 4, 5 or 8 bits in groups of 32 columns; 8 bits without a zero point.

    Returns:
        The block type, and the bytes as in `encode_blocks`.

    Raises:
        ValueError: bits or groups that no block type has, or a scale that leaves float16.
    """
    names = {(4, False): "Q4_0", (5, False): "Q5_0", (8, False): "Q8_0", (4, True): "Q4_1", (5, True): "Q5_1"}
    kind = names.get((q.bits, q.zero_point is not None))
    rows, columns = q.codes.shape
    if kind is None or q.group_size != BLOCK or columns % BLOCK or q.scale.shape != (rows, columns // BLOCK):
        raise ValueError(
            f"GGUF has blocks of {BLOCK} columns with 4 or 5 bits, and with 8 bits without a zero point; got {q.bits} "
            f"bits {'with' if q.zero_point is not None else 'without'} a zero point in groups of {q.group_size} over "
            f"{columns} columns; quantize with --group-size {BLOCK}, or choose a GGUF type as method"
        )
    block_type = BLOCK_TYPES[kind]
    codes, scale = q.codes.to(torch.float32).unflatten(-1, (-1, BLOCK)), _half(q.scale[..., None], kind)
    if q.zero_point is None:
        return kind, _bytes(codes + block_type.middle, scale, None, block_type)
    return kind, _bytes(codes, scale, _half(-scale * q.zero_point[..., None], kind), block_type)


def decode_blocks(data: Tensor, kind: str) -> Tensor:
    """The values of blocks, float32 `[rows, columns]`.

    Args:
        data: uint8, as `encode_blocks` returns it.
        kind: its block type.

    Raises:
        ValueError: an unknown type, or bytes that are no whole number of blocks.
    """
    codes, scale, minimum = split_blocks(data, kind)
    values = scale * codes if minimum is not None else scale * (codes - _block_type(kind).middle)
    return (values if minimum is None else values + minimum).flatten(-2)


def split_blocks(data: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """The unsigned codes of blocks, their scales and their minima.

    Args:
        data: uint8, as `encode_blocks` returns it.
        kind: its block type.

    Returns:
        codes: int32 `[rows, blocks, 32]`.
        scale: float32 `[rows, blocks, 1]`.
        minimum: float32 `[rows, blocks, 1]`, None for types without.

    Raises:
        ValueError: an unknown type, or bytes that are no whole number of blocks.
    """
    block_type = _block_type(kind)
    if data.dtype != torch.uint8 or data.ndim != 2 or data.shape[1] % block_type.num_bytes:
        raise ValueError(
            f"{kind} has {block_type.num_bytes} bytes a block; expected uint8 [rows, a multiple of that], "
            f"got {data.dtype} {list(data.shape)}"
        )
    blocks = data.unflatten(-1, (-1, block_type.num_bytes))
    halves = 2 if block_type.has_minimum else 1
    shared = blocks[..., : 2 * halves].contiguous().view(torch.float16).to(torch.float32)
    packed = blocks[..., 2 * halves :]
    if kind == "Q8_0":
        codes = packed.contiguous().view(torch.int8).to(torch.int32) + block_type.middle
    else:
        low = packed[..., -BLOCK // 2 :].to(torch.int32)
        codes = torch.cat((low & 15, low >> 4), dim=-1)
        if block_type.bits == 5:
            shifts = torch.arange(8, dtype=torch.int32)
            high = (packed[..., :4].to(torch.int32)[..., None] >> shifts & 1).flatten(-2)
            codes = codes | high << 4
    return codes, shared[..., :1], shared[..., 1:] if block_type.has_minimum else None


def _block_type(kind: str) -> BlockType:
    if kind not in BLOCK_TYPES:
        raise ValueError(f"block type must be one of {', '.join(BLOCK_TYPES)}, got {kind!r}")
    return BLOCK_TYPES[kind]


def _blocks(values: Tensor) -> Tensor:
    """`[rows, columns] -> [rows, columns / 32, 32]` float32."""
    if values.ndim != 2 or values.shape[1] == 0 or values.shape[1] % BLOCK:
        raise ValueError(f"GGUF blocks hold {BLOCK} columns each; got a matrix of shape {list(values.shape)}")
    return values.to(torch.float32).unflatten(-1, (-1, BLOCK))


def _half(shared: Tensor, kind: str) -> Tensor:
    """Round scales to float16, so that codes are chosen for the scale that the file holds."""
    rounded = shared.to(torch.float16)
    if not bool(rounded.isfinite().all()):
        raise ValueError(
            f"the largest scale of a {kind} block is {float(shared.abs().max()):.3g}, beyond the 65504 of float16; "
            f"these weights need another format"
        )
    return rounded.to(torch.float32)


def _divide(values: Tensor, scale: Tensor) -> Tensor:
    """values / scale, and 0 where a block has no scale: all its values are 0, or too small for float16."""
    return torch.where(scale == 0, torch.zeros_like(values), values / scale.where(scale != 0, torch.ones_like(scale)))


def _bytes(codes: Tensor, scale: Tensor, minimum: Tensor | None, block_type: BlockType) -> Tensor:
    """Lay out blocks: codes `[rows, blocks, 32]`, unsigned, scale and minimum `[rows, blocks, 1]`."""
    shared = scale if minimum is None else torch.cat((scale, minimum), dim=-1)
    parts = [shared.to(torch.float16).contiguous().view(torch.uint8)]
    whole = codes.to(torch.int32)
    if block_type.bits == 8:
        parts.append((whole - block_type.middle).to(torch.int8).view(torch.uint8))
    else:
        if block_type.bits == 5:
            weights = 2 ** torch.arange(8, dtype=torch.int32)
            parts.append(((whole >> 4).unflatten(-1, (4, 8)) * weights).sum(-1).to(torch.uint8))
        low = whole & 15
        parts.append((low[..., : BLOCK // 2] | low[..., BLOCK // 2 :] << 4).to(torch.uint8))
    return torch.cat(parts, dim=-1).flatten(-2)
