"""One registry of methods: how each turns the linear layers of a block into stored numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.linear_inputs import block_linears
from labkit.quantized import QuantizedTensor
from solutions.quantization.awq import search_scales
from solutions.quantization.folding import fold_scales
from solutions.quantization.fp8 import quantize_fp8
from solutions.quantization.gguf_blocks import BLOCK_TYPES, encode_blocks
from solutions.quantization.gptq import gptq
from solutions.quantization.hadamard import random_rotation
from solutions.quantization.hessian import update_hessian
from solutions.quantization.importance import update_importance
from solutions.quantization.k_quants import encode_q4_k, encode_q6_k
from solutions.quantization.microscaling import quantize_mxfp4, quantize_nvfp4
from solutions.quantization.nf4 import quantize_nf4
from solutions.quantization.quantized_model import GgufTensor, QuantizedLinear, Stored
from solutions.quantization.rotation import fold_gains, rotate_gated, rotate_heads, rotate_residual
from solutions.quantization.smoothquant import smooth
from solutions.quantization.uniform import dequantize, group_params, quantize, to_codes

SUPER_BLOCK = 256
"""Weights that a super-block of the k-quants holds."""
FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""What the field takes for rows that super-blocks do not divide: a block of 32 with about the bits in reserve."""
_SMALLEST_HALF = 2.0**-24
_SEARCH_TOKENS = 512
"""AWQ tries every scale on all of them, and means over more tokens hardly differ."""


@dataclass(frozen=True)
class Settings:
    """What a user may choose.

    Args:
        bits: of integer codes.
        group_size: columns that share a scale.
        symmetric: without zero points.
        damping: of GPTQ's Hessian, as a share of its mean diagonal.
        act_order: GPTQ takes the columns with the largest Hessian diagonal first.
        alpha: how much of the outliers SmoothQuant moves to the weights.
    """

    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    damping: float = 0.01
    act_order: bool = False
    alpha: float = 0.5


@dataclass(frozen=True)
class Block:
    """A transformer block to quantize.

    Args:
        layer: its index.
        weights: its tensors under their full names.
        inputs: what each linear layer reads, `[tokens, in]` under the layer's name; empty for methods without
            calibration.
    """

    layer: int
    weights: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class QuantizedBlock:
    """What became of a block.

    Args:
        linears: its layers by name, without ".weight".
        floats: tensors that changed and stay in floating point: norms and biases that took a scale.
    """

    linears: dict[str, QuantizedLinear]
    floats: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A way to quantize.

    Args:
        summary: one line for the help.
        quantize: does it for a block.
        calibrated: needs activations; "optional" takes them if there are any.
        formats: checkpoint formats that hold the result; none for what is only simulated here.
        fixed_bits: the bits of a code if the user cannot choose.
        prepare: turns the model into an equal one that quantizes better.
    """

    summary: str
    quantize: Callable[[Block, Settings], QuantizedBlock]
    calibrated: bool | str = False
    formats: tuple[str, ...] = ()
    fixed_bits: int | None = None
    prepare: Callable[[ModelConfig, Mapping[str, Tensor]], tuple[ModelConfig, dict[str, Tensor]]] | None = None


def half_group_params(values: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Task 1's scale and zero point with the scale rounded to float16, which is what checkpoints hold.

    Codes are then chosen for the scale that a reader will multiply by.

    Raises:
        ValueError: a scale beyond float16.
    """
    scale, zero_point = group_params(values, bits, symmetric)
    half = scale.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise ValueError(f"the scale {float(scale.max()):.3g} of a group is beyond the 65504 of float16")
    return half.to(torch.float32).clamp(min=_SMALLEST_HALF), zero_point


def round_in_groups(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> QuantizedTensor:
    """Round to nearest in groups along the rows, with scales that float16 holds."""
    plain = quantize(weight, bits, symmetric=symmetric, group_size=group_size)
    params = [half_group_params(group, bits, symmetric) for group in weight.split(group_size, dim=1)]
    scale = torch.cat([scale for scale, _ in params], dim=1)
    columns = weight.shape[1]

    def spread(shared: Tensor) -> Tensor:
        return shared.repeat_interleave(min(group_size, columns), dim=1)[:, :columns]

    zero_point = plain.zero_point
    codes = to_codes(weight, spread(scale), None if zero_point is None else spread(zero_point), bits)
    return QuantizedTensor(codes, scale, zero_point, bits, group_size)


def round_channels(weight: Tensor, bits: int) -> QuantizedTensor:
    """Round to nearest with one scale a row, which float16 holds."""
    scale, _ = half_group_params(weight, bits, symmetric=True)
    return QuantizedTensor(to_codes(weight, scale, None, bits), scale, None, bits, weight.shape[1])


def _rtn(block: Block, settings: Settings) -> QuantizedBlock:
    return _each(block, lambda _, weight: _grouped(weight, settings))


def _gptq(block: Block, settings: Settings) -> QuantizedBlock:
    hessians: dict[int, Tensor] = {}

    def one(name: str, weight: Tensor) -> QuantizedTensor:
        inputs = block.inputs[name]
        # q, k and v read the same tensor, gate and up, too.
        if id(inputs) not in hessians:
            hessians[id(inputs)], _ = update_hessian(None, 0, inputs)
        return gptq(
            weight, hessians[id(inputs)], settings.bits, settings.group_size, symmetric=settings.symmetric,
            damping=settings.damping, act_order=settings.act_order, group_params=half_group_params,
        )  # fmt: skip

    return _each(block, one)


def _awq(block: Block, settings: Settings) -> QuantizedBlock:
    def back(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> Tensor:
        return dequantize(round_in_groups(weight, bits, group_size, symmetric))

    def scales(readers: tuple[Tensor, ...], inputs: Tensor) -> Tensor:
        step = -(-len(inputs) // _SEARCH_TOKENS)
        few = inputs[::step]
        return search_scales(
            readers, few, settings.bits, settings.group_size, symmetric=settings.symmetric, round_to_nearest=back
        )

    def fold(producers: list[Tensor], readers: tuple[Tensor, ...], inputs: Tensor) -> Folded:
        return fold_scales(producers, readers, scales(readers, inputs))

    floats, weights = _fold_all(block, fold)
    return QuantizedBlock({n: QuantizedLinear(_grouped(w, settings)) for n, w in weights.items()}, floats)


def _smoothquant(block: Block, settings: Settings) -> QuantizedBlock:
    def fold(producers: list[Tensor], readers: tuple[Tensor, ...], inputs: Tensor) -> Folded:
        new_producers, new_readers, _ = smooth(producers, readers, inputs.abs().amax(0), settings.alpha)
        return new_producers, new_readers

    floats, weights = _fold_all(block, fold)
    return QuantizedBlock({n: QuantizedLinear(round_channels(w, 8), "int8") for n, w in weights.items()}, floats)


Folded = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def _fold_all(
    block: Block, fold: Callable[[list[Tensor], tuple[Tensor, ...], Tensor], Folded]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Move scales between what makes features and what reads them, everywhere in a block where that is exact.

    down_proj first, since up_proj makes its inputs and then reads those of the norm itself. o_proj is left out: with
    grouped-query attention several of its inputs are one feature of v_proj.

    Returns:
        The norms and biases that changed, and all linear weights by their layers' names.
    """
    base = f"model.layers.{block.layer}"
    q, k, v, _, gate, up, down = block_linears(block.layer)
    tensors = dict(block.weights)
    for producer, readers in (
        (up, (down,)),
        (f"{base}.input_layernorm", (q, k, v)),
        (f"{base}.post_attention_layernorm", (gate, up)),
    ):
        made = [name for name in (f"{producer}.weight", f"{producer}.bias") if name in tensors]
        read = [f"{name}.weight" for name in readers]
        new_made, new_read = fold(
            [tensors[name] for name in made], tuple(tensors[name] for name in read), block.inputs[readers[0]]
        )
        tensors |= dict(zip(made, new_made, strict=True)) | dict(zip(read, new_read, strict=True))
    linears = {name: tensors.pop(f"{name}.weight") for name in block_linears(block.layer)}
    return tensors, linears


def _fp8(block: Block, settings: Settings) -> QuantizedBlock:
    return _each(block, lambda _, weight: quantize_fp8(weight, "e4m3", "channel"), "fp8")


def _nf4(block: Block, settings: Settings) -> QuantizedBlock:
    return _each(block, lambda _, weight: quantize_nf4(weight, 64, double_quantization=True))


def _llm_int8(block: Block, settings: Settings) -> QuantizedBlock:
    return _each(block, lambda _, weight: round_channels(weight, 8), "llm.int8")


def _mxfp4(block: Block, settings: Settings) -> QuantizedBlock:
    return _each(block, lambda _, weight: quantize_mxfp4(weight))


def _nvfp4(block: Block, settings: Settings) -> QuantizedBlock:
    return _each(block, lambda _, weight: quantize_nvfp4(weight))


def _w4a4(block: Block, settings: Settings) -> QuantizedBlock:
    return _each(block, lambda _, weight: _grouped(weight, settings), "int4")


def _quarot(block: Block, settings: Settings) -> QuantizedBlock:
    plain = _w4a4(block, settings)
    down = block_linears(block.layer)[-1]
    return QuantizedBlock(plain.linears | {down: QuantizedLinear(plain.linears[down].stored, "hadamard-int4")})


def _rotated(config: ModelConfig, weights: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The same model in coordinates in which no channel stands out; down_proj expects its input transformed."""
    config, rotated = fold_gains(config, weights)
    rotated = rotate_residual(config, rotated, random_rotation(config.hidden_size, 0))
    rotated = rotate_heads(config, rotated, random_rotation(config.head_dim, 1))
    return config, rotate_gated(config, rotated)


def _gguf(kind: str) -> Callable[[Block, Settings], QuantizedBlock]:
    def quantize_block(block: Block, settings: Settings) -> QuantizedBlock:
        return _each(block, lambda name, weight: gguf_tensor(weight, kind, block.inputs.get(name)))

    return quantize_block


def gguf_tensor(weight: Tensor, kind: str, inputs: Tensor | None = None) -> GgufTensor:
    """A matrix in blocks of GGUF; k-quants give way to their `FALLBACK` where 256 does not divide the rows.

    Args:
        weight: `[out, in]`.
        kind: "F32", "F16" or a block type.
        inputs: what the layer reads, `[tokens, in]`; k-quants then weigh each column's errors by its mean square.
    """
    if kind in ("F32", "F16"):
        return GgufTensor(kind, weight.to(torch.float32 if kind == "F32" else torch.float16))
    if kind in FALLBACK and weight.shape[1] % SUPER_BLOCK:
        kind = FALLBACK[kind]
    if kind in FALLBACK:
        importance = None if inputs is None else update_importance(None, 0, inputs)[0]
        return GgufTensor(kind, (encode_q4_k if kind == "Q4_K" else encode_q6_k)(weight, importance))
    return GgufTensor(kind, encode_blocks(weight, kind))


def _each(block: Block, quantize_one: Callable[[str, Tensor], Stored], activations: str = "float") -> QuantizedBlock:
    """Quantize each linear layer by itself; an error names the layer."""
    linears = {}
    for name in block_linears(block.layer):
        try:
            linears[name] = QuantizedLinear(quantize_one(name, block.weights[f"{name}.weight"]), activations)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return QuantizedBlock(linears)


def _grouped(weight: Tensor, settings: Settings) -> QuantizedTensor:
    return round_in_groups(weight, settings.bits, settings.group_size, settings.symmetric)


_INTEGER = ("compressed-tensors", "gptq", "gptq_v2", "awq", "gguf")
METHODS: dict[str, Method] = {
    "rtn": Method("round to nearest in groups", _rtn, formats=_INTEGER),
    "gptq": Method("errors made good by later columns (2210.17323)", _gptq, True, _INTEGER),
    "awq": Method("salient channels scaled up first (2306.00978)", _awq, True, _INTEGER),
    "smoothquant": Method("W8A8, outliers moved to weights (2211.10438)", _smoothquant, True, _INTEGER[:1], 8),
    "fp8": Method("W8A8 in FP8 E4M3, scales per channel and token", _fp8, formats=_INTEGER[:1], fixed_bits=8),
    "llm.int8": Method("W8A8 but for outlier features (2208.07339)", _llm_int8, fixed_bits=8),
    "nf4": Method("normal quantiles, double quantization (2305.14314)", _nf4, fixed_bits=4),
    "mxfp4": Method("FP4 with a power of two per 32 weights", _mxfp4, fixed_bits=4),
    "w4a4": Method("RTN, and activations of each token in 4 bits", _w4a4),
    "quarot": Method("the same behind Hadamard rotations (2404.00456)", _quarot, prepare=_rotated),
    "nvfp4": Method("FP4 with an FP8 scale per 16 weights", _nvfp4, fixed_bits=4),
    **{
        kind.lower(): Method(f"llama.cpp's {kind}", _gguf(kind), "optional" if kind in FALLBACK else False, ("gguf",),
                             int(kind[1]))
        for kind in (*BLOCK_TYPES, *FALLBACK)
    },
}  # fmt: skip
