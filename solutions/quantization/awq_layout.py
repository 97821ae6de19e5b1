"""The AWQ layout ("gemm"): 4-bit codes stand on their side, and words hold eight outputs in an order of their own.

- `qweight` int32 `[in, out / 8]`: nibble i of a word, from the lowest, holds the code of output 8 · word + ORDER[i].
  GPUs unpack nibbles 0 and 4, 1 and 5 … in pairs, and so get neighbouring outputs together.
- `qzeros` int32 `[groups, out / 8]`: the zero points in the same order, as they are.
- `scales` float16 `[groups, out]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.quantized import QuantizedTensor
from solutions.quantization.gptq_layout import check_integer, unsigned
from solutions.quantization.packing import pack_words, unpack_words
from solutions.quantization.quantized_model import QuantizedLinear

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each nibble of a word holds, from the lowest nibble on."""


def quantization_config(q: QuantizedTensor) -> dict[str, Any]:
    """The `quantization_config` of `config.json`."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": q.group_size,
        # Codes are unsigned in any case: without zero points, all of them are the middle, 8.
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def to_tensors(name: str, linear: QuantizedLinear) -> dict[str, Tensor]:
    """The tensors of one layer.

    Raises:
        ValueError: what this layout cannot hold.
    """
    q = check_integer(name, linear, (4,), "AWQ")
    if q.codes.shape[0] % 8:
        raise ValueError(f"{name}: AWQ words hold 8 outputs; {q.codes.shape[0]} outputs don't fill them")
    codes = q.codes.long() + (8 if q.zero_point is None else 0)
    zeros = torch.full_like(q.scale, 8, dtype=torch.int64) if q.zero_point is None else q.zero_point.long()
    return {
        f"{name}.qweight": _pack(codes.T),
        f"{name}.qzeros": _pack(zeros.T),
        f"{name}.scales": q.scale.T.to(torch.float16).contiguous(),
    }


def from_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, QuantizedLinear]:
    """The layers of a checkpoint in this layout.

    Args:
        config: the `quantization_config`.
        tensors: all of the checkpoint.

    Raises:
        ValueError: another version of the layout, or other bits.
    """
    if int(config["bits"]) != 4 or str(config.get("version", "gemm")).lower() != "gemm":
        raise ValueError(f"AWQ is read with 4 bits in version gemm, got {config['bits']} in {config.get('version')}")
    found = {}
    for key, qweight in tensors.items():
        if key.endswith(".qweight"):
            name = key.removesuffix(".qweight")
            scales = tensors[f"{name}.scales"]
            group_size = qweight.shape[0] // scales.shape[0]
            codes, zeros = _unpack(qweight).T, _unpack(tensors[f"{name}.qzeros"]).T
            found[name] = QuantizedLinear(unsigned(codes, scales.T, zeros.long(), 4, group_size, symmetric=True))
    return found


def _pack(codes: Tensor) -> Tensor:
    """`[n, out]` unsigned -> int32 `[n, out / 8]`."""
    return pack_words(codes.unflatten(-1, (-1, 8))[..., list(ORDER)].flatten(-2).contiguous(), 4)


def _unpack(words: Tensor) -> Tensor:
    codes = unpack_words(words, words.shape[-1] * 8, 4).unflatten(-1, (-1, 8))
    back = [ORDER.index(output) for output in range(8)]
    return codes[..., back].flatten(-2)
