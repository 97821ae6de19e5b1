"""Folders in Hugging Face's layout: `config.json`, one or several safetensors files, `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from labkit.checkpoints.errors import CheckpointError
from labkit.config import ModelConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> ModelConfig:
    """Return the sizes of the model in a folder.

    Raises:
        CheckpointError: no `config.json`, or one that the decoder cannot follow.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json; give a folder in Hugging Face's layout")
    try:
        return ModelConfig.from_huggingface(path)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of a folder by memory map, in the types they are stored in.

    Args:
        folder: holds `model.safetensors`, or several files and their `model.safetensors.index.json`.
        config: what `read_config` returned for it.

    Raises:
        CheckpointError: a file that is missing, truncated or not safetensors; an output projection that is stored
            besides the embedding that it is said to be, and is another.
    """
    weights: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; download the model again")
        try:
            weights |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file, perhaps truncated ({error}); "
                                  f"download the model again") from error
    if config.tie_embeddings:
        # Some folders store the tied table twice.
        head = weights.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, weights.get("model.embed_tokens.weight", head)):
            raise CheckpointError(f"{folder} has an lm_head.weight of its own, and its config.json says that it is the "
                                  f"embedding; set tie_word_embeddings to false")
    # Frequencies that early Llama folders stored; they follow from the config.
    return {name: weight for name, weight in weights.items() if not name.endswith("rotary_emb.inv_freq")}


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not index.is_file():
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}; only safetensors weights are read")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a weight index; download the model again") from error
    for name in names:
        # An index from a stranger must not reach files outside its folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names the file {name!r}, which is not in its folder")
    return [folder / name for name in names]


def write(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors` into an existing folder."""
    (folder / "config.json").write_text(json.dumps(config.to_huggingface(), indent=2) + "\n", encoding="utf-8")
    save_file(dict(weights), folder / WEIGHTS, metadata={"format": "pt"})
    # The library makes the file private; a sandboxed worker of another user must read it too.
    (folder / WEIGHTS).chmod(0o644)
