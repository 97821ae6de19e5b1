"""What quantization to levels and small floats makes of a tensor: codes, and the scales that blocks of them share.

Each form checks itself: a tensor whose parts don't belong together can't be made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.quantization_checks import check_integers, check_scale

MX_BLOCK = 32
"""Neighbours in a row that share a scale in MXFP4."""

NV_BLOCK = 16
"""The same in NVFP4."""

FP8_FORMATS = ("e4m3", "e5m2")


@dataclass(frozen=True)
class QuantizedAbsmax:
    """The scales of blocks, quantized themselves: absmax = mean + scale · code, and never below 0.

    Args:
        codes: int8, `[blocks]`.
        scale: float32, positive, `[⌈blocks / block_size⌉]`, each shared by `block_size` neighbouring codes.
        mean: float32, `[]`, of all that was quantized.
        block_size: codes that share a scale; the last block may be shorter.

    Raises:
        ValueError: parts that don't belong together.

    Source: double quantization in QLoRA (2305.14314), section 3.
    """

    codes: Tensor
    scale: Tensor
    mean: Tensor
    block_size: int

    def __post_init__(self) -> None:
        check_count("block_size", self.block_size, 1)
        _check_part("codes", self.codes, torch.int8, (self.codes.numel(),))
        _check_part("scale", self.scale, torch.float32, (-(-self.codes.numel() // self.block_size),))
        check_scale("scale", self.scale)
        _check_part("mean", self.mean, torch.float32, ())


@dataclass(frozen=True)
class Nf4Tensor:
    """A tensor in NormalFloat of 4 bits: value = absmax · level[code].

    Args:
        codes: uint8 from 0 to 15, of the tensor's own shape.
        absmax: float32, `[⌈values / block_size⌉]`, the largest magnitude of each block of neighbouring values, or that
            in 8 bits. Values are counted row by row, and a block runs on over the end of a row.
        block_size: values that share an absmax; the last block may be shorter.

    Raises:
        ValueError: parts that don't belong together.

    Source: QLoRA (2305.14314), section 3.
    """

    codes: Tensor
    absmax: Tensor | QuantizedAbsmax
    block_size: int

    def __post_init__(self) -> None:
        check_count("block_size", self.block_size, 1)
        _check_codes(self.codes, 15)
        blocks = -(-self.codes.numel() // self.block_size)
        if isinstance(self.absmax, Tensor):
            _check_part("absmax", self.absmax, torch.float32, (blocks,))
        else:
            _check_part("absmax.codes", self.absmax.codes, torch.int8, (blocks,))


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix in floats of 8 bits: value = scale · float of the code.

    Args:
        codes: uint8, `[rows, columns]`.
        scale: float32, positive and finite, `[⌈rows / block_rows⌉, ⌈columns / block_columns⌉]`.
        format: "e4m3" or "e5m2".
        block_rows: neighbouring rows that share a scale; the last block may have fewer.
        block_columns: the same for columns.

    Raises:
        ValueError: parts that don't belong together.

    Source: FP8 formats (2209.05433).
    """

    codes: Tensor
    scale: Tensor
    format: str
    block_rows: int
    block_columns: int

    def __post_init__(self) -> None:
        if self.format not in FP8_FORMATS:
            raise ValueError(f"format must be one of {', '.join(FP8_FORMATS)}, got {self.format!r}")
        check_count("block_rows", self.block_rows, 1)
        check_count("block_columns", self.block_columns, 1)
        rows, columns = _check_codes(self.codes, 255, matrix=True)
        blocks = (-(-rows // self.block_rows), -(-columns // self.block_columns))
        _check_part("scale", self.scale, torch.float32, blocks)
        check_scale("scale", self.scale)


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A matrix in MXFP4: value = 2^(scale code − 127) · FP4 of the code. 32 neighbours in a row share a scale.

    Args:
        codes: uint8 from 0 to 15, `[rows, columns]`.
        scale_codes: uint8 in E8M0, `[rows, ⌈columns / 32⌉]`; the last block of a row may be shorter.

    Raises:
        ValueError: parts that don't belong together.

    Source: OCP Microscaling Formats v1.0; 2310.10537.
    """

    codes: Tensor
    scale_codes: Tensor

    def __post_init__(self) -> None:
        rows, columns = _check_codes(self.codes, 15, matrix=True)
        _check_part("scale_codes", self.scale_codes, torch.uint8, (rows, -(-columns // MX_BLOCK)))


@dataclass(frozen=True)
class Nvfp4Tensor:
    """A matrix in NVFP4: value = tensor scale · E4M3 of the scale code · FP4 of the code.

    Args:
        codes: uint8 from 0 to 15, `[rows, columns]`.
        scale_codes: uint8 in FP8 E4M3, `[rows, ⌈columns / 16⌉]`: 16 neighbours in a row share a scale; the last block
            of a row may be shorter.
        tensor_scale: float32, `[]`, positive and finite.

    Raises:
        ValueError: parts that don't belong together.

    Source: module section 4.3.
    """

    codes: Tensor
    scale_codes: Tensor
    tensor_scale: Tensor

    def __post_init__(self) -> None:
        rows, columns = _check_codes(self.codes, 15, matrix=True)
        _check_part("scale_codes", self.scale_codes, torch.uint8, (rows, -(-columns // NV_BLOCK)))
        _check_part("tensor_scale", self.tensor_scale, torch.float32, ())
        check_scale("tensor_scale", self.tensor_scale)


def _check_codes(codes: Tensor, largest: int, *, matrix: bool = False) -> tuple[int, ...]:
    """The shape of codes, which must be uint8 up to `largest`, and a matrix if that is wanted."""
    if codes.dtype != torch.uint8 or (matrix and codes.dim() != 2):
        wanted = "a uint8 matrix" if matrix else "uint8"
        raise ValueError(f"codes must be {wanted}, got {codes.dtype} {list(codes.shape)}")
    check_integers("codes", codes, 0, largest)
    return tuple(codes.shape)


def _check_part(name: str, part: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if part.dtype != dtype or tuple(part.shape) != shape:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {part.dtype} {list(part.shape)}")
