"""Trained heads on disk, and the card that says how each was made and what file belongs to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as write_safetensors
from torch import Tensor

from labkit.config import ModelConfig
from labkit.trained_heads.packing import pack, unpack

FOLDER = Path(__file__).parent
HEADS = ("draft", "medusa", "eagle", "eagle3", "mtp")
CARD = "card.json"
TRAINING_COMMAND = "python -m solutions.speculative.train"


class HeadTarget(Protocol):
    """What a head takes of its target, such as a `labkit.decoder.Decoder`."""

    @property
    def config(self) -> ModelConfig:
        """Its sizes."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """At least embeddings and output matrix, under their Hugging Face names."""


@dataclass(frozen=True)
class TrainedHead:
    """A head with all it needs to draft for its target.

    Args:
        config: shape of its layers, and the target's vocabulary.
        weights: float32 under the names of its forward function; with "embed_tokens.weight", the target's, and
            "lm_head.weight", the target's output matrix for the draft vocabulary alone.
        target_ids: the target's id of each token of the draft vocabulary, int64, rising.
        layers: the hidden states of the target that it reads; none for a model of its own.
        card: how it was made and how often its drafts were right.
    """

    config: ModelConfig
    weights: Mapping[str, Tensor]
    target_ids: Tensor
    layers: tuple[int, ...]
    card: Mapping[str, Any]


def save_head(
    name: str,
    weights: Mapping[str, Tensor],
    target_ids: Tensor,
    config: ModelConfig,
    layers: tuple[int, ...],
    card: Mapping[str, Any],
    folder: Path = FOLDER,
) -> Path:
    """Pack a head and write it down in the card.

    Args:
        name: one of `HEADS`.
        weights: its own ones, without the target's.
        target_ids: the draft vocabulary, int64.
        config: shape of its layers.
        layers: the hidden states that it reads.
        card: what is to be known about it.
        folder: where it goes.

    Returns:
        The file.

    Raises:
        ValueError: another name, or weights that cannot be packed.
    """
    _check_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    content = write_safetensors({**pack(weights), "target_ids": target_ids.to(torch.int32)})
    head_file(name, folder).write_bytes(content)
    entry = {
        "file": head_file(name, folder).name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(),
        "layers": list(layers), "num_layers": config.num_layers, "intermediate_size": config.intermediate_size,
        "target": _target(config), **card,
    }  # fmt: skip
    _write_card({**read_card(folder), name: entry}, folder)
    return head_file(name, folder)


def describe_head(name: str, more: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Add to what the card says of a head.

    Raises:
        ValueError: another name, or a head that the card doesn't know.
    """
    _check_name(name)
    card = read_card(folder)
    if name not in card:
        raise ValueError(f"{folder / CARD} knows no head {name!r}; train it with `{TRAINING_COMMAND} {name}`")
    _write_card({**card, name: {**card[name], **more}}, folder)


def load_head(name: str, target: HeadTarget, folder: Path = FOLDER) -> TrainedHead:
    """A trained head, ready to draft for its target.

    Args:
        name: one of `HEADS`.
        target: the model that it was trained for; its embeddings and its output matrix are used, not copied.
        folder: where the heads lie.

    Raises:
        ValueError: another name, a head that was not trained or has been damaged, or another target.
    """
    _check_name(name)
    entry = read_card(folder).get(name)
    path = head_file(name, folder)
    again = f"train it with `{TRAINING_COMMAND} {name}`, or check the files out again"
    if entry is None or not path.is_file():
        raise ValueError(f"the head {name!r} is not in {folder}; {again}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise ValueError(f"{path} is not the file that {CARD} describes, so it is not used; {again}")
    if _target(target.config) != entry["target"]:
        raise ValueError(f"the head {name!r} was trained for {entry['target']}, not for {_target(target.config)}")
    try:
        stored = read_safetensors(content)
        target_ids = stored.pop("target_ids").to(torch.int64)
        own = unpack(stored)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} holds no head: {error}; {again}") from error
    embeddings = target.weights["model.embed_tokens.weight"]
    weights = {**own, "embed_tokens.weight": embeddings, "lm_head.weight": output_matrix(target)[target_ids]}
    config = replace(
        target.config, num_layers=entry["num_layers"], intermediate_size=entry["intermediate_size"]
    )  # fmt: skip
    return TrainedHead(config, weights, target_ids, tuple(entry["layers"]), entry)


def read_card(folder: Path = FOLDER) -> dict[str, Any]:
    """What is known of every head; nothing if there are none.

    Raises:
        ValueError: the card cannot be read.
    """
    path = folder / CARD
    if not path.is_file():
        return {}
    try:
        entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); check the files out again") from error
    return entries


def _write_card(entries: Mapping[str, Any], folder: Path) -> None:
    (folder / CARD).write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def output_matrix(target: HeadTarget) -> Tensor:
    """What a model's head multiplies by, `[vocab_size, hidden]`."""
    return target.weights["model.embed_tokens.weight" if target.config.tie_embeddings else "lm_head.weight"]


def head_file(name: str, folder: Path = FOLDER) -> Path:
    """Where a head lies."""
    return folder / f"{name}.safetensors"


def _check_name(name: str) -> None:
    if name not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, got {name!r}")


def _target(config: ModelConfig) -> dict[str, Any]:
    """What a head's target must have in common with the one that it was trained for."""
    return {
        "hidden_size": config.hidden_size, "num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
    }  # fmt: skip
