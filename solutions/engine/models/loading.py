"""From a model's name to a model that runs: which family it is, and what of its configuration is followed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from labkit import checkpoints
from labkit.checkpoints import bundled, folder, hub
from labkit.checkpoints.errors import CheckpointError
from labkit.checkpoints.loading import Model
from labkit.config import ModelConfig, rope_entries
from labkit.latent_config import LatentConfig
from labkit.tokenizer import Tokenizer

from .blocks import Decoder, Weights, same_kind
from .deepseek import Deepseek, DeepseekConfig
from .group_routing import Routing
from .llama import Llama
from .mixtral import Mixtral
from .qwen3 import Qwen3
from .windows import Windows, read_windows
from .yarn import Yarn

Entries = Mapping[str, Any]
"""The content of a `config.json`."""

Build = Callable[[Weights, torch.dtype], Decoder]
"""Makes a model of its weights, to compute in a type."""

_MISTRAL_DEFAULTS = {"sliding_window": 4096}
_MIXTRAL_DEFAULTS = {"rope_theta": 1e6}
_QWEN_DEFAULTS = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
"""What transformers takes for granted where a `config.json` is silent."""

_COUNTS = ("num_hidden_layers", "num_local_experts", "n_routed_experts")
_MOST = 1024
"""A damaged file may claim billions of layers, and naming all their weights would fill the memory."""


@dataclass(frozen=True)
class LoadedModel:
    """A model of any family, and the tokenizer that belongs to it."""

    model: Decoder
    tokenizer: Tokenizer


def load(
    source: str | Model, dtype: torch.dtype = torch.float32, hold: Callable[[Weights], Weights] = dict
) -> LoadedModel:
    """Loads a model and its tokenizer.

    Args:
        source: a name or path as in `labkit.checkpoints.load`, or what that has loaded.
        dtype: of weights and activations.
        hold: given the weights, returns what the model is made of: see `weights.store`.

    Raises:
        CheckpointError: the model can't be found, read or followed; the message says why and what to do.
    """
    path = _folder(source) if isinstance(source, str) else None
    if path is not None:
        return LoadedModel(load_decoder(path, dtype, hold), checkpoints.load_tokenizer(str(path)))
    given = checkpoints.load(source, dtype) if isinstance(source, str) else source
    return LoadedModel(Llama(given.config, hold(given.decoder.weights), dtype), given.tokenizer)


def load_decoder(path: Path, dtype: torch.dtype = torch.float32, hold: Callable[[Weights], Weights] = dict) -> Decoder:
    """Loads the model of a folder in Hugging Face's layout, without a tokenizer.

    Raises:
        CheckpointError: as `load`.
    """
    file = path / "config.json"
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        core, build = read_config(entries)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} has no config.json; give a folder in Hugging Face's layout") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    weights = folder.read_weights(path, core)
    try:
        return build(hold(weights), dtype)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_config(entries: Entries) -> tuple[ModelConfig, Build]:
    """Finds out what a `config.json` describes.

    Returns:
        The sizes that all families have, and what makes the model of its weights.

    Raises:
        ValueError: a family that is not supported, or a feature of one that is.
    """
    names = entries.get("architectures") if isinstance(entries, Mapping) else None
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise ValueError(f"config.json must name one architecture, got {names!r}")
    if names[0] not in FAMILIES:
        raise ValueError(f"{names[0]} is not supported; supported are {', '.join(FAMILIES)}")
    for name in _COUNTS:
        if isinstance(claimed := entries.get(name), int) and claimed > _MOST:
            raise ValueError(f"{name} is {claimed}, more than the {_MOST} that any model has; download it again")
    model_type, read = FAMILIES[names[0]]
    if entries.get("model_type", model_type) != model_type:
        raise ValueError(f"model_type {entries['model_type']!r} is not that of {names[0]}; it must be {model_type!r}")
    try:
        return read(entries)
    except KeyError as error:
        raise ValueError(f"config.json has no entry {error}; it does not describe a complete model") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"config.json holds an entry of the wrong kind: {error}") from error


def _llama(entries: Entries) -> tuple[ModelConfig, Build]:
    core = _core(entries)
    return core, partial(Llama, core)


def _mistral(entries: Entries) -> tuple[ModelConfig, Build]:
    core = _core(entries)
    return core, partial(Llama, core, windows=_windows_everywhere({**_MISTRAL_DEFAULTS, **entries}, core.num_layers))


def _qwen2(entries: Entries) -> tuple[ModelConfig, Build]:
    core = _core(entries, model_type="qwen2")
    return core, partial(Llama, core, windows=read_windows({**_QWEN_DEFAULTS, **entries}, core.num_layers))


def _qwen3(entries: Entries) -> tuple[ModelConfig, Build]:
    core = _core(entries)
    return core, partial(Qwen3, core, windows=read_windows({**_QWEN_DEFAULTS, **entries}, core.num_layers))


def _mixtral(entries: Entries) -> tuple[ModelConfig, Build]:
    core = _core({**_MIXTRAL_DEFAULTS, **entries})
    counts = {"num_experts": entries["num_local_experts"], "top_k": entries["num_experts_per_tok"]}
    _only("layer_types", entries.get("layer_types"), (None,))
    return core, partial(Mixtral, core, windows=_windows_everywhere(entries, core.num_layers), **counts)


def _windows_everywhere(entries: Entries, num_layers: int) -> Windows:
    """For families that have none of Qwen's entries by which some layers go without a window."""
    if entries.get("sliding_window") is not None:
        _only("use_sliding_window", entries.get("use_sliding_window"), (None, True))
        _only("max_window_layers", entries.get("max_window_layers"), (None, 0))
    return read_windows(entries, num_layers)


def _deepseek_v2(entries: Entries) -> tuple[ModelConfig, Build]:
    method = entries.get("topk_method", "greedy")
    _only("topk_method", method, ("greedy", "group_limited_greedy"))
    _only("scoring_func", entries.get("scoring_func", "softmax"), ("softmax",))
    _only("norm_topk_prob", bool(entries.get("norm_topk_prob", False)), (False,))
    groups = {} if method == "greedy" else {"num_groups": entries["n_group"], "top_groups": entries["topk_group"]}
    return _deepseek(entries, Routing(
        entries["n_routed_experts"], entries["num_experts_per_tok"], scale=entries["routed_scaling_factor"], **groups
    ))  # fmt: skip


def _deepseek_v3(entries: Entries) -> tuple[ModelConfig, Build]:
    _only("topk_method", entries.get("topk_method", "noaux_tc"), ("noaux_tc",))
    _only("scoring_func", entries.get("scoring_func", "sigmoid"), ("sigmoid",))
    return _deepseek(entries, Routing(
        entries["n_routed_experts"], entries["num_experts_per_tok"], entries["n_group"], entries["topk_group"],
        sigmoid=True, normalized=bool(entries["norm_topk_prob"]), scale=entries["routed_scaling_factor"],
    ))  # fmt: skip


def _deepseek(entries: Entries, routing: Routing) -> tuple[ModelConfig, Build]:
    """What V2 and V3 have in common."""
    _only("moe_layer_freq", entries.get("moe_layer_freq", 1), (1,))
    _only("rope_interleave", entries.get("rope_interleave", True), (True,))
    rope = rope_entries(entries)
    theta = rope.get("rope_theta") or entries.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    _only("rope_type", kind, ("default", "yarn"))
    core = _core(
        entries, head_dim=entries["qk_rope_head_dim"], num_key_value_heads=None, rope_scaling=None,
        rope_parameters={"rope_theta": theta},
    )  # fmt: skip
    config = DeepseekConfig(
        core,
        LatentConfig(
            core.num_layers, core.num_heads, entries["kv_lora_rank"], entries["qk_rope_head_dim"],
            entries["qk_nope_head_dim"], entries["v_head_dim"],
        ),
        entries.get("q_lora_rank"),
        routing,
        entries["moe_intermediate_size"],
        entries["n_shared_experts"],
        entries["first_k_dense_replace"],
        _yarn(rope) if kind == "yarn" else None,
    )  # fmt: skip
    return core, lambda weights, dtype: Deepseek(config, _without_extra_layers(weights), dtype)


def _yarn(rope: Entries) -> Yarn:
    for name in ("attention_factor", "truncate"):
        _only(name, rope.get(name), (None,))
    return Yarn(
        float(rope["factor"]), rope["original_max_position_embeddings"], float(rope.get("beta_fast") or 32.0),
        float(rope.get("beta_slow") or 1.0), float(rope.get("mscale") or 0.0), float(rope.get("mscale_all_dim") or 0.0),
    )  # fmt: skip


def _core(entries: Entries, **replaced: Any) -> ModelConfig:
    """What all families have, and all that Llama has; features that nobody here follows are refused."""
    return ModelConfig.from_huggingface({**entries, "model_type": "llama", "use_sliding_window": False, **replaced})


def _only(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        choice = " or ".join(repr(one) for one in allowed)
        raise ValueError(f"{name} {value!r} is not supported; it must be {choice}")


def _without_extra_layers(weights: Weights) -> Weights:
    """V3 stores its modules of multi-token prediction as layers behind the last; they are no part of the decoder.

    They are told by `eh_proj`, which no other layer has: one that `config.json` does not count is no extra.
    """
    extra = tuple(name.removesuffix("eh_proj.weight") for name in weights if name.endswith(".eh_proj.weight"))
    return same_kind(weights, {name: weight for name, weight in weights.items() if not name.startswith(extra)})


def _folder(name: str) -> Path | None:
    """The folder that a name stands for; None for a GGUF file, and for what labkit has to refuse."""
    if name == bundled.NAME:
        return bundled.bundled_folder()
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    return hub.download(name) if hub.is_hub_id(name) and not path.exists() else None


FAMILIES: Mapping[str, tuple[str, Callable[[Entries], tuple[ModelConfig, Build]]]] = {
    "LlamaForCausalLM": ("llama", _llama),
    "Qwen2ForCausalLM": ("qwen2", _qwen2),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
    "MistralForCausalLM": ("mistral", _mistral),
    "MinistralForCausalLM": ("ministral", _mistral),
    "MixtralForCausalLM": ("mixtral", _mixtral),
    "DeepseekV2ForCausalLM": ("deepseek_v2", _deepseek_v2),
    "DeepseekV3ForCausalLM": ("deepseek_v3", _deepseek_v3),
}
"""By what `architectures` holds: the `model_type` that belongs to it, and what reads the other entries."""
