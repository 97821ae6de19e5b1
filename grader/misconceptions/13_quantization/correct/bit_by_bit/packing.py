"""Everything through one long row of bits, written and read as such."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pack_int4(codes: Tensor, signed: bool) -> Tensor:
    """Four bits a code, eight bits a byte."""
    _codes(codes, -8 if signed else 0, 7 if signed else 15)
    return torch.from_numpy(_bytes_of(codes.numpy(), 4, 8)).reshape(*codes.shape[:-1], -1)


def unpack_int4(packed: Tensor, columns: int, signed: bool) -> Tensor:
    """Bits back to numbers; the fourth one weighs -8 if there are signs."""
    if packed.dtype != torch.uint8 or packed.dim() == 0:
        raise ValueError(f"packed must be bytes, got {packed.dtype} {list(packed.shape)}")
    _columns(columns, packed.shape[-1] * 8, 8, 4)
    weights = np.array([1, 2, 4, -8 if signed else 8])
    return torch.from_numpy(_numbers(packed.numpy(), columns, weights).astype(np.int8))


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """`bits` bits a code, four bytes a word, the lowest byte first."""
    _bits(bits)
    _codes(codes, 0, 2**bits - 1)
    data = _bytes_of(codes.numpy(), bits, 32)
    return torch.from_numpy(data.view("<i4").astype(np.int32)).reshape(*codes.shape[:-1], -1)


def unpack_words(words: Tensor, columns: int, bits: int) -> Tensor:
    """The bytes of the words, then their bits."""
    _bits(bits)
    if words.dtype != torch.int32 or words.dim() == 0:
        raise ValueError(f"words must be int32, got {words.dtype} {list(words.shape)}")
    _columns(columns, words.shape[-1] * 32, 32, bits)
    data = np.ascontiguousarray(words.numpy().astype("<i4")).view(np.uint8)
    codes = _numbers(data.reshape(*words.shape[:-1], -1), columns, 1 << np.arange(bits))
    return torch.from_numpy(codes.astype(np.int16 if bits == 8 else np.int8))


def _bytes_of(codes: np.ndarray, bits: int, unit: int) -> np.ndarray:
    """Rows of bytes, padded with zeros to whole units."""
    rows = codes.astype(np.int64).reshape(-1, codes.shape[-1])
    stream = ((rows[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(len(rows), -1)
    padded = np.pad(stream, ((0, 0), (0, -stream.shape[1] % unit)))
    return np.packbits(padded, axis=1, bitorder="little")


def _numbers(data: np.ndarray, columns: int, weights: np.ndarray) -> np.ndarray:
    """The first numbers of each row of bytes."""
    stream = np.unpackbits(data.reshape(-1, data.shape[-1]), axis=1, bitorder="little")
    used = stream[:, : columns * len(weights)].reshape(-1, columns, len(weights))
    return (used.astype(np.int64) * weights).sum(-1).reshape(*data.shape[:-1], columns)


def _codes(codes: Tensor, low: int, high: int) -> None:
    if codes.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise ValueError(f"codes must be integers, got {codes.dtype}")
    if codes.dim() == 0 or codes.shape[-1] == 0:
        raise ValueError("there are no codes in a row")
    for code in (int(codes.min()), int(codes.max())):
        if not low <= code <= high:
            raise ValueError(f"the code {code} isn't one of {low} to {high}")


def _bits(bits: int) -> None:
    if type(bits) is not int or bits not in range(2, 9):
        raise ValueError(f"bits must be 2, 3, … 8, got {bits!r}")


def _columns(columns: int, given: int, unit: int, bits: int) -> None:
    if type(columns) is not int or columns < 1 or -(-columns * bits // unit) * unit != given:
        raise ValueError(f"{given} bits a row don't hold {columns!r} codes of {bits} bits")
