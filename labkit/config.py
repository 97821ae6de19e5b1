"""The shape of a model, as one immutable value, read from GGUF metadata or a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = ("llama", "qwen2")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
          "head_dim", "max_context")
_CLASS_NAMES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


@dataclass(frozen=True)
class RopeScaling:
    """How the RoPE frequencies of a long-context model are slowed down.

    Args:
        kind: `"linear"` divides every frequency by `factor`; `"llama3"` divides the slow ones, keeps the
            fast ones and blends in between.
        factor: the divisor, at least 1.
        low_freq_factor: `"llama3"`: a frequency with fewer turns than this in `original_context` is divided.
        high_freq_factor: `"llama3"`: a frequency with more turns than this is kept.
        original_context: `"llama3"`: context of the first training, in tokens.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"RoPE scaling {self.kind!r} is not supported; the decoder knows 'linear' and "
                             f"'llama3'")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"RoPE scaling factor must be at least 1, got {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(f"RoPE scaling needs 0 < low_freq_factor < high_freq_factor, "
                             f"got {self.low_freq_factor} and {self.high_freq_factor}")
        if self.original_context < 1:
            raise ValueError(f"RoPE scaling original_context must be at least 1, got {self.original_context}")


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix a decoder-only transformer of the Llama or Qwen2 family.

    Args:
        architecture: `"llama"` or `"qwen2"`.
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: number of transformer blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: width of one head, even; `num_heads * head_dim` need not equal `hidden_size`.
        max_context: positions run from 0 to `max_context - 1`.
        rope_theta: base of the RoPE frequencies.
        norm_eps: constant inside the root of RMSNorm.
        tie_embeddings: the output projection is the embedding table.
        attention_bias: the q, k and v projections have biases; for `"llama"` the output projection too.
        rope_scaling: how RoPE is stretched to a longer context, or None.

    Raises:
        ValueError: a value that no model can have; the message names it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    attention_bias: bool = False
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture {self.architecture!r} is not supported; "
                             f"the decoder knows {' and '.join(ARCHITECTURES)}")
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, "
                             f"got {self.num_heads} and {self.num_kv_heads}")
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim must be even, since RoPE turns pairs of numbers, got {self.head_dim}")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
        if self.architecture == "qwen2" and not self.attention_bias:
            raise ValueError("attention_bias must be True for qwen2: its q, k and v always have biases")

    @property
    def num_query_groups(self) -> int:
        """Query heads that share one key/value head: query head h reads KV head `h // num_query_groups`."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def tiny(cls, **overrides: Any) -> ModelConfig:
        """Return a model for tests that runs in a millisecond; no two of its sizes are equal.

        Args:
            overrides: fields to replace.
        """
        values: dict[str, Any] = {
            "architecture": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
            "num_layers": 4, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "max_context": 128,
            "rope_theta": 10_000.0, "norm_eps": 1e-5, "tie_embeddings": True,
            "attention_bias": overrides.get("architecture") == "qwen2"}
        unknown = sorted(set(overrides) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"ModelConfig has no field {', '.join(unknown)}")
        return cls(**{**values, **overrides})

    @classmethod
    def from_huggingface(cls, source: Mapping[str, Any] | str | Path) -> ModelConfig:
        """Read the config of a Hugging Face model.

        Args:
            source: the content of a `config.json`, or the path of that file or of its folder.

        Raises:
            ValueError: an architecture or feature that the decoder does not compute, or a missing entry.
        """
        if isinstance(source, (str, Path)):
            path = Path(source)
            path = path / "config.json" if path.is_dir() else path
            try:
                source = json.loads(path.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(source, Mapping):
            raise ValueError(f"a Hugging Face config is a JSON object, got {type(source).__name__}")
        entries = dict(source)
        architecture = _required(entries, "model_type", "config.json")
        if architecture not in ARCHITECTURES:
            raise ValueError(f"model type {architecture!r} is not supported; choose a model of type "
                             f"{' or '.join(ARCHITECTURES)}")
        _refuse_unsupported_features(entries)
        hidden_size = _required(entries, "hidden_size", "config.json")
        num_heads = _required(entries, "num_attention_heads", "config.json")
        try:
            rope = rope_entries(entries)
            return cls(
                architecture=architecture,
                vocab_size=_required(entries, "vocab_size", "config.json"),
                hidden_size=hidden_size,
                intermediate_size=_required(entries, "intermediate_size", "config.json"),
                num_layers=_required(entries, "num_hidden_layers", "config.json"),
                num_heads=num_heads,
                num_kv_heads=entries.get("num_key_value_heads") or num_heads,
                head_dim=entries.get("head_dim") or hidden_size // num_heads,
                max_context=_required(entries, "max_position_embeddings", "config.json"),
                rope_theta=float(rope.get("rope_theta") or entries.get("rope_theta") or 10_000.0),
                norm_eps=float(_required(entries, "rms_norm_eps", "config.json")),
                tie_embeddings=bool(entries.get("tie_word_embeddings", False)),
                attention_bias=architecture == "qwen2" or bool(entries.get("attention_bias", False)),
                rope_scaling=_rope_scaling(rope),
            )
        except (TypeError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(f"config.json holds an entry of the wrong kind: {error}") from error

    @classmethod
    def from_gguf(cls, source: GGUFReader | str | Path) -> ModelConfig:
        """Read the config from the metadata of a GGUF file.

        Args:
            source: an open reader, or the path of the file.

        Raises:
            ValueError: an architecture or feature that the decoder does not compute, or a missing entry.
        """
        if isinstance(source, (str, Path)):
            from labkit.checkpoints.gguf_file import open_gguf
            source = open_gguf(source)
        from labkit.checkpoints.gguf_file import read_config
        return read_config(source)

    def to_huggingface(self) -> dict[str, Any]:
        """Return the content of the `config.json` that transformers reads as the same model."""
        entries: dict[str, Any] = {
            "architectures": [_CLASS_NAMES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_context,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "hidden_act": "silu",
        }
        if self.architecture == "llama":
            entries |= {"attention_bias": self.attention_bias, "mlp_bias": False}
        scaling = self.rope_scaling
        if scaling is not None:
            entries["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
            if scaling.kind == "llama3":
                entries["rope_scaling"] |= {
                    "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": scaling.original_context}
        return entries


def rope_entries(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a `config.json` says of RoPE, under whichever of its names; empty if it says nothing.

    Raises:
        ValueError: two descriptions that differ, one for each kind of layer, or one that turns parts of heads.
    """
    new, old = entries.get("rope_parameters") or {}, entries.get("rope_scaling") or {}
    if new and old and new != old:
        raise ValueError(f"rope_parameters {new!r} and rope_scaling {old!r} contradict each other; take one out")
    rope: Mapping[str, Any] = new or old
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope_parameters that differ from layer to layer are not supported, got {rope!r}")
    if any(where.get("partial_rotary_factor") not in (None, 1.0) for where in (entries, rope)):
        raise ValueError("partial_rotary_factor below 1 is not supported; the decoder rotates whole heads")
    outside, inside = (where.get("original_max_position_embeddings") for where in (entries, rope))
    if outside is not None and inside not in (None, outside):
        raise ValueError(f"original_max_position_embeddings is {outside!r}, and {inside!r} among the entries of RoPE; "
                         f"take one of them out")
    return rope


def _required(entries: Mapping[str, Any], key: str, where: str) -> Any:
    value = entries.get(key)
    if value is None:
        raise ValueError(f"{where} has no entry {key!r}; it does not describe a complete model")
    return value


def _refuse_unsupported_features(entries: Mapping[str, Any]) -> None:
    """Refuse what would change the result but is not computed here: a wrong answer is worse than none."""
    activation = entries.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; the decoder's MLP uses 'silu'")
    if entries.get("mlp_bias"):
        raise ValueError("mlp_bias true is not supported; choose a model without biases in its MLP")
    if entries.get("use_sliding_window"):
        raise ValueError("use_sliding_window true is not supported; choose a model with full attention")
    if entries.get("quantization_config"):
        raise ValueError("quantized folders are not supported; give the original model or a GGUF file")


def _rope_scaling(entries: Mapping[str, Any]) -> RopeScaling | None:
    kind = entries.get("rope_type") or entries.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        return RopeScaling(kind, float(_required(entries, "factor", "rope_scaling") if kind == "linear" else 1.0))
    return RopeScaling(
        kind, float(_required(entries, "factor", "rope_scaling")),
        float(_required(entries, "low_freq_factor", "rope_scaling")),
        float(_required(entries, "high_freq_factor", "rope_scaling")),
        int(_required(entries, "original_max_position_embeddings", "rope_scaling")))
