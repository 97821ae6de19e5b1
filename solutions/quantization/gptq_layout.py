"""The GPTQ layout: weights stand on their side, `[in, out]`, and words hold codes of neighbouring inputs.

- `qweight` int32 `[in · bits / 32, out]`: a stream of bits down each column. Codes are unsigned; without zero points a
  code is raised by 2^(bits − 1), and that is the zero point.
- `scales` float16 `[groups, out]`.
- `qzeros` int32 `[groups, out · bits / 32]`: the zero points along each row. Version 1 of the layout stores each *minus
  one*. That is done here in unsigned arithmetic, as its readers undo it: a zero point of 0 is stored as 2^bits − 1, and
  adding one wraps around to 0. A reader that adds without wrapping sees 2^bits. Version 2 stores them as they are.
- `g_idx` int32 `[in]`: the group of each input. Groups here are neighbours whatever order GPTQ took the columns in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.quantized import QuantizedTensor
from solutions.quantization.packing import pack_words, unpack_words
from solutions.quantization.quantized_model import QuantizedLinear

BITS = (2, 3, 4, 8)


def quantization_config(q: QuantizedTensor, version: int, damping: float, act_order: bool) -> dict[str, Any]:
    """The `quantization_config` of `config.json`, which also lies beside it as `quantize_config.json`."""
    return {
        "quant_method": "gptq",
        "bits": q.bits,
        "group_size": q.group_size,
        "sym": q.zero_point is None,
        # Groups are neighbours even if the columns were taken in another order, so no reader has to reorder.
        "desc_act": False,
        "static_groups": act_order,
        "damp_percent": damping,
        "true_sequential": False,
        "lm_head": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }


def to_tensors(name: str, linear: QuantizedLinear, version: int) -> dict[str, Tensor]:
    """The tensors of one layer.

    Args:
        name: of the layer.
        linear: integer codes in whole groups, of 2, 3, 4 or 8 bits.
        version: 1 stores zero points minus one, 2 as they are.

    Raises:
        ValueError: what this layout cannot hold.
    """
    q = check_integer(name, linear, BITS, "GPTQ")
    rows, columns = q.codes.shape
    middle = 2 ** (q.bits - 1)
    codes = q.codes.to(torch.int64) + (middle if q.zero_point is None else 0)
    zeros = torch.full_like(q.scale, middle, dtype=torch.int64) if q.zero_point is None else q.zero_point.long()
    if rows * q.bits % 32 or columns * q.bits % 32:
        raise ValueError(f"{name}: GPTQ words hold 32 bits; {rows} × {columns} codes of {q.bits} bits don't fill them")
    stored_zeros = (zeros - 1) % 2**q.bits if version == 1 else zeros
    return {
        f"{name}.qweight": pack_words(codes, q.bits).T.contiguous(),
        f"{name}.qzeros": pack_words(stored_zeros.T.contiguous(), q.bits),
        f"{name}.scales": q.scale.T.to(torch.float16).contiguous(),
        f"{name}.g_idx": (torch.arange(columns) // q.group_size).to(torch.int32),
    }


def from_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, QuantizedLinear]:
    """The layers of a checkpoint in this layout.

    Args:
        config: the `quantization_config`.
        tensors: all of the checkpoint.

    Raises:
        ValueError: groups that are no neighbours, as act-order without static groups makes them.
    """
    bits, symmetric = int(config["bits"]), bool(config["sym"])
    version = 2 if config.get("checkpoint_format") == "gptq_v2" else 1
    found = {}
    for key, qweight in tensors.items():
        if not key.endswith(".qweight"):
            continue
        name = key.removesuffix(".qweight")
        index, scales = tensors[f"{name}.g_idx"], tensors[f"{name}.scales"]
        columns, rows = len(index), scales.shape[1]
        group_size = columns if int(config["group_size"]) == -1 else int(config["group_size"])
        if not torch.equal(index.long(), torch.arange(columns) // group_size):
            raise ValueError(f"{name}: g_idx puts inputs into groups that are no neighbours; not read here")
        codes = unpack_words(qweight.T.contiguous(), columns, bits)
        zeros = unpack_words(tensors[f"{name}.qzeros"], rows, bits).T.long()
        zeros = (zeros + 1) % 2**bits if version == 1 else zeros
        found[name] = QuantizedLinear(unsigned(codes, scales.T, zeros, bits, group_size, symmetric))
    return found


def unsigned(
    codes: Tensor, scale: Tensor, zeros: Tensor, bits: int, group_size: int, symmetric: bool
) -> QuantizedTensor:
    """Our form of unsigned codes and zero points: signed codes where all zero points are the middle."""
    middle, wide = 2 ** (bits - 1), scale.to(torch.float32).contiguous()
    if symmetric and bool((zeros == middle).all()):
        return QuantizedTensor((codes.to(torch.int16) - middle).to(torch.int8), wide, None, bits, group_size)
    narrow = torch.int16 if bits == 8 else torch.int8
    return QuantizedTensor(codes.contiguous(), wide, zeros.to(narrow).contiguous(), bits, group_size)


def check_integer(name: str, linear: QuantizedLinear, bits: tuple[int, ...], layout: str) -> QuantizedTensor:
    """The integer codes of a layer.

    Raises:
        ValueError: no integer codes, activations that are quantized, other bits, or a group that is cut short.
    """
    q = linear.stored
    allowed = ", ".join(map(str, bits))
    if not isinstance(q, QuantizedTensor) or linear.activations != "float" or q.bits not in bits:
        found = f"{q.bits} bits" if isinstance(q, QuantizedTensor) else type(q).__name__
        raise ValueError(
            f"{name}: the {layout} layout holds integer codes of {allowed} bits and float activations, got {found} "
            f"with {linear.activations} activations; choose another --format"
        )
    rows, columns = q.codes.shape
    if columns % q.group_size or q.scale.shape != (rows, columns // q.group_size):
        raise ValueError(f"{name}: the {layout} layout needs whole groups, got {q.group_size} over {columns} columns")
    return q
