"""Quantize a model block by block: what is done lies on disk, and only one block's activations are in memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import Decoder
from labkit.linear_inputs import LayerWalk, block_linears
from labkit.quantization_checks import check_finite
from solutions.quantization.calibration import Calibration, check_activations
from solutions.quantization.layer_files import load_block, save_block
from solutions.quantization.methods import METHODS, Block, Method, QuantizedBlock, Settings
from solutions.quantization.quantized_model import QuantizedLinear, QuantizedModel

Progress = Callable[[int, int], None]
"""Called as `progress(done, total)` after each block."""
_PLAN = "plan.json"


def quantize_model(
    decoder: Decoder,
    method_name: str,
    settings: Settings,
    calibration: Calibration | None = None,
    work: Path | None = None,
    progress: Progress | None = None,
) -> QuantizedModel:
    """Quantize the linear layers of all blocks; embeddings, head and norms stay in 16 bits.

    Each block is calibrated on what the blocks before it give *after* they were quantized. Memory beyond the model
    and the result is that of one block: its activations, a Hessian and copies of its weights. The decoder's own
    weights are replaced by the quantized ones on the way, unless the method prepares a model of its own first.

    Args:
        decoder: the model, in float32.
        method_name: one of `METHODS`.
        settings: the user's choices.
        calibration: text to run; needed by calibrated methods.
        work: a folder for finished blocks. A later call with the same arguments takes up what it finds there, and the
            result is the same to the last bit.
        progress: told after each block.

    Raises:
        ValueError: an unknown method, settings that the model doesn't allow, no calibration where it is needed, a
            weight or an activation that isn't finite, or a folder of another run.
    """
    method = find_method(method_name)
    check_settings(decoder.config, method_name, settings)
    if method.calibrated is True and calibration is None:
        raise ValueError(f"method {method_name} needs calibration text; give a file, 'prose' or 'code'")
    calibration = calibration if method.calibrated else None
    for name, weight in decoder.weights.items():
        check_finite(name, weight)
    if method.prepare is not None:
        decoder = Decoder(*method.prepare(decoder.config, decoder.weights))
    if work is not None:
        _open_work(work, decoder, method_name, settings, calibration)
    linears: dict[str, QuantizedLinear] = {}
    others = {name: tensor for name, tensor in decoder.weights.items() if not name.startswith("model.layers.")}
    floats = {name: _as_half(name, others.pop(name)) for name in list(others)}
    decoder.weights.update(floats)
    walk = LayerWalk(decoder, calibration.tokens) if calibration is not None else None
    for layer in range(decoder.config.num_layers):
        block = _block(decoder, method, settings, layer, walk, work)
        names = _block_tensors(decoder.config, decoder.weights, layer)
        kept = {n: t for n, t in names.items() if n.removesuffix(".weight") not in block.linears} | block.floats
        floats |= {name: _as_half(name, tensor) for name, tensor in kept.items()}
        linears |= block.linears
        decoder.weights.update({name: floats[name] for name in kept})
        decoder.weights.update({f"{name}.weight": linear.weight() for name, linear in block.linears.items()})
        if walk is not None:
            walk.advance()
        if progress is not None:
            progress(layer + 1, decoder.config.num_layers)
    return QuantizedModel(decoder.config, linears, floats)


def with_own_memory(decoder: Decoder) -> Decoder:
    """The same model with each weight in memory of its own, so that a replaced weight is freed.

    Weights that were read by memory map are all kept as long as one of them is used. The given decoder is left
    without weights, so that the two are never in memory together.
    """
    weights = decoder.weights
    return Decoder(decoder.config, {name: weights.pop(name).clone() for name in list(weights)}, decoder.dtype)


def find_method(name: str) -> Method:
    """The method of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]


def check_settings(config: ModelConfig, method_name: str, settings: Settings) -> None:
    """Refuse bits and groups that don't fit, before anything has run.

    Raises:
        ValueError: the message says which group sizes fit.
    """
    method = find_method(method_name)
    if method.fixed_bits is not None:
        if method_name.startswith("q") and any(width % 32 for width in _widths(config)):
            raise ValueError(f"GGUF blocks hold 32 columns; this model's rows have {_widths(config)}")
        return
    if settings.bits not in range(2, 9):
        raise ValueError(f"bits must be from 2 to 8, got {settings.bits}")
    if settings.group_size < 1 or any(width % settings.group_size for width in _widths(config)):
        fitting = [size for size in (16, 32, 64, 128, 256) if not any(width % size for width in _widths(config))]
        raise ValueError(
            f"group size {settings.group_size} does not divide the rows of this model, which have {_widths(config)} "
            f"columns; fitting sizes are {', '.join(map(str, fitting)) or 'none of 16 to 256'}"
        )


def _widths(config: ModelConfig) -> list[int]:
    return sorted({config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size})


def _block(
    decoder: Decoder, method: Method, settings: Settings, layer: int, walk: LayerWalk | None, work: Path | None
) -> QuantizedBlock:
    """The quantized block from disk, or made and put there."""
    path = None if work is None else work / f"layer-{layer:04d}.safetensors"
    if path is not None and path.is_file():
        return load_block(path)
    inputs: dict[str, Tensor] = {}
    if walk is not None:
        inputs = walk.inputs()
        for name in block_linears(layer):
            check_activations(name, inputs[name])
    with torch.no_grad():
        weights = _block_tensors(decoder.config, decoder.weights, layer)
        block = method.quantize(Block(layer, weights, inputs), settings)
    if path is not None:
        save_block(path, block)
    return block


def _block_tensors(config: ModelConfig, weights: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}."
    return {name: weight for name, weight in weights.items() if name.startswith(prefix)}


def _as_half(name: str, tensor: Tensor) -> Tensor:
    """Round to what float16 holds: checkpoints keep unquantized tensors in 16 bits.

    Raises:
        ValueError: a number beyond float16.
    """
    half = tensor.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise ValueError(f"{name} holds {float(tensor.abs().max()):.3g}, beyond the 65504 of float16")
    return half.to(torch.float32)


def _open_work(
    work: Path, decoder: Decoder, method_name: str, settings: Settings, calibration: Calibration | None
) -> None:
    """Make the folder, or see that it belongs to this very run."""
    plan: dict[str, Any] = {
        "model": dataclasses.asdict(decoder.config),
        "weights": _fingerprint(decoder),
        "method": method_name,
        "settings": dataclasses.asdict(settings),
        "calibration": None if calibration is None else calibration.digest,
    }
    # As it reads back: tuples become lists.
    plan = json.loads(json.dumps(plan))
    path = work / _PLAN
    if not path.is_file():
        work.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        other = [key for key, value in plan.items() if found.get(key) != value]
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged; delete the folder {work} to start anew") from error
    if other:
        raise ValueError(
            f"{work} holds an unfinished run with another {' and '.join(other)}; give the same arguments to go on, "
            f"choose another folder, or delete it to start anew"
        )


def _fingerprint(decoder: Decoder) -> list[float]:
    """A few sums of weights: enough to tell models of the same shape apart."""
    last = f"model.layers.{decoder.config.num_layers - 1}.mlp.down_proj.weight"
    return [float(decoder.weights[name].double().sum()) for name in ("model.embed_tokens.weight", last)]
