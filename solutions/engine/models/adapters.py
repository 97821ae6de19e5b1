"""Adapters (LoRA): fine-tuned models that differ from their base by products of low rank, one for each request.

A layer gives x Wᵀ + s · (x Aᵀ) Bᵀ, where A and B are the adapter's. The first product is the same for all requests of a
step, whosever tokens they are; the second is added to the rows of those that asked for the adapter. Keys and values
differ with the adapter, so the prefix cache keeps them apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from labkit.checkpoints.errors import CheckpointError

from ..step import Work
from .blocks import HeldWeights, Weights
from .dense import Linear, dense

_LAYER = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj")
_KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
_MUST_BE = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "lora_bias": False, "fan_in_fan_out": False,
    "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "use_qalora": False, "layer_replication": None,
    "alora_invocation_tokens": None,
}  # fmt: skip
"""Entries of an `adapter_config.json` that would mean another computation, and the values that mean this one."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to begin that take a part out of the base model's own matrices; the adapter is then one for what is left."""


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a layer.

    Args:
        down: A, `[rank, in]`.
        up: s · B, `[out, rank]`.
    """

    down: Tensor
    up: Tensor


def read_adapter(folder: Path) -> dict[str, LowRank]:
    """Reads an adapter in peft's layout: `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        folder: that holds both.

    Returns:
        For each layer that it changes, by the name of its weight without ".weight".

    Raises:
        CheckpointError: files that are missing, damaged, or mean something else than low-rank products.
    """
    try:
        entries = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no adapter in peft's layout: {error}") from error
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is damaged: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{folder} is damaged: adapter_config.json must hold an object")
    for name, value in _MUST_BE.items():
        if (given := entries.get(name, value)) != value:
            raise CheckpointError(f"{folder}: {name} must be {value!r}, got {given!r}; merge it into its base model")
    begun = entries.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(_CHANGE_THE_BASE):
        raise CheckpointError(f"{folder}: init_lora_weights {begun!r} changes the base model; convert it first")
    scale = _scale(folder, entries)
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key)
        if found is None or _LAYER.fullmatch(found["layer"]) is None:
            raise CheckpointError(
                f"{folder} changes {key}; only q, k, v, o, gate, up and down projections of dense layers can be changed"
            )
        parts.setdefault(found["layer"], {})[found["part"]] = tensor
    layers = {}
    for layer, pair in parts.items():
        shapes = {part: tuple(tensor.shape) for part, tensor in pair.items()}
        if pair.keys() != {"A", "B"} or shapes["A"][0] != entries["r"] or shapes["B"][1:] != (entries["r"],):
            raise CheckpointError(f"{folder}: {layer} must have A [{entries['r']}, in] and B [out, same], got {shapes}")
        layers[layer] = LowRank(pair["A"], scale * pair["B"])
    return layers


def _scale(folder: Path, entries: Mapping[str, Any]) -> float:
    """The factor s, which keeps the size of the product when the rank changes."""
    rank, alpha = entries.get("r"), entries.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(f"{folder}: r must be a count and lora_alpha a number, got {rank!r} and {alpha!r}")
    return float(alpha / (rank**0.5 if entries.get("use_rslora") else rank))


class Adapters:
    """The adapters of an engine, and the rows of the present step that each of them is for.

    Args:
        folders: by the names that requests ask by.

    Raises:
        CheckpointError: see `read_adapter`.
    """

    def __init__(self, folders: Mapping[str, str]) -> None:
        self.layers = {name: read_adapter(Path(folder)) for name, folder in folders.items()}
        self.rows: dict[str, Tensor] = {}

    def check(self, name: str | None) -> None:
        """Refuses what is not there.

        Raises:
            ValueError: an unknown name.
        """
        if name is not None and name not in self.layers:
            known = ", ".join(map(repr, self.layers)) or "none"
            raise ValueError(f"there is no adapter {name!r}; this engine has {known}")

    def begin(self, work: Sequence[Work]) -> None:
        """Notes whose rows are whose, for the pass that follows."""
        rows: dict[str, list[int]] = {}
        first = 0
        for one in work:
            if one.request.adapter is not None:
                rows.setdefault(one.request.adapter, []).extend(range(first, first + len(one.tokens)))
            first += len(one.tokens)
        self.rows = {name: torch.tensor(found) for name, found in rows.items()}


class AdaptedWeights(HeldWeights):
    """Plain weights whose projections add what adapters say.

    Args:
        weights: of the base model.
        adapters: for it.

    Raises:
        ValueError: an adapter of another model, or of latent attention.
    """

    def __init__(self, weights: Weights, adapters: Adapters) -> None:
        self._weights = weights
        self._adapters = adapters
        for name, layers in adapters.layers.items():
            for layer, change in layers.items():
                weight = weights.get(f"{layer}.weight")
                fits = (change.up.shape[0], change.down.shape[1])
                if weight is None or tuple(weight.shape) != fits:
                    has = "has no such layer" if weight is None else f"has {list(weight.shape)}"
                    raise ValueError(f"adapter {name!r} changes {layer} of {list(fits)}, and the model {has}")
                if f"{layer.rpartition('.')[0]}.kv_a_proj_with_mqa.weight" in weights:
                    raise ValueError(f"adapter {name!r} changes {layer}, and latent attention can have no adapters")

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
        """See `HeldWeights`."""
        return AdaptedWeights(tensors, self._adapters)

    def joins(self, name: str) -> bool:
        """Whether an adapter changes the layer; see `HeldWeights`."""
        return any(name in layers for layers in self._adapters.layers.values())

    def joined(self, names: Sequence[str]) -> Linear:
        """See `HeldWeights`."""
        matrices = [self._weights[f"{name}.weight"] for name in names]
        base, adapters = dense(torch.cat(matrices)), self._adapters
        changes = {name: self._changes(layers, names, matrices) for name, layers in adapters.layers.items()}

        def product(inputs: Tensor) -> Tensor:
            outputs = base(inputs)
            for name, rows in adapters.rows.items():
                for first, change in changes[name]:
                    added = inputs[rows] @ change.down.T @ change.up.T
                    outputs[rows, first : first + added.shape[1]] += added
            return outputs

        return product

    def _changes(
        self, layers: Mapping[str, LowRank], names: Sequence[str], matrices: Sequence[Tensor]
    ) -> list[tuple[int, LowRank]]:
        """An adapter's products for layers side by side, and the column of the outputs at which each begins."""
        changes, first = [], 0
        for name, matrix in zip(names, matrices, strict=True):
            if name in layers:
                down, up = (part.to(matrix) for part in (layers[name].down, layers[name].up))
                changes.append((first, LowRank(down, up)))
            first += len(matrix)
        return changes
