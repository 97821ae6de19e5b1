"""transformers' own implementation of a model over given weights, and a `CachedModel` on top of its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.config import ModelConfig


def build_transformers_model(config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """A causal model of transformers that computes with the given tensors.

    Args:
        config: shape of the model.
        weights: under their Hugging Face names; shared where they have `dtype` already.
        dtype: of weights and activations.

    Raises:
        ValueError: the weights don't fit the configuration.
    """
    # Imported here since it takes seconds, and most suites need no transformers.
    import transformers

    entries: dict[str, Any] = config.to_huggingface()
    settings = transformers.AutoConfig.for_model(entries.pop("model_type"), **entries)
    with torch.device("meta"):  # the random weights of a new model would take seconds and be thrown away
        model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa", dtype=dtype)
    given = {name: tensor.to(dtype) for name, tensor in weights.items()}
    result = model.load_state_dict(given, strict=False, assign=True)
    absent = [name for name in result.missing_keys if not (config.tie_embeddings and name == "lm_head.weight")]
    if absent or result.unexpected_keys:
        raise ValueError(f"weights do not fit: missing {absent}, unknown {result.unexpected_keys}")
    model.tie_weights()
    # The frequencies of RoPE are no weights: they have to be computed again off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=settings)
    return model.eval()


class TransformersModel:
    """A `CachedModel` for one sequence on transformers' `DynamicCache`, for labs that build on a cache.

    Args:
        model: of `build_transformers_model`; several sequences may share it.
        capacity: tokens that it agrees to remember.

    Raises:
        ValueError: `capacity` is not an int of at least 1.
    """

    def __init__(self, model: Any, capacity: int) -> None:
        check_count("capacity", capacity, 1)
        self._model = model
        self._capacity = capacity
        self._cache = _empty_cache()

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return int(self._cache.get_seq_length())

    @property
    def capacity(self) -> int:
        """Tokens that can be remembered."""
        return self._capacity

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self._model.config.vocab_size)

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Runs new tokens, and returns the logits after each, `[new, vocab_size]`.

        Raises:
            ValueError: no tokens, an id outside the vocabulary, or no room. Nothing has run then.
        """
        ids = check_tokens("tokens", tokens, self.vocab_size)
        if self.length + len(ids) > self.capacity:
            raise ValueError(
                f"{self.length} tokens are remembered and {len(ids)} more exceed the capacity of {self.capacity}"
            )
        with torch.no_grad():
            logits: Tensor = self._model(torch.tensor([ids]), cache=self._cache, use_cache=True).logits[0]
        return logits

    def truncate(self, length: int) -> None:
        """Forgets the tokens from position `length` on.

        Raises:
            ValueError: `length` is no int from 0 to the present length.
        """
        check_count("length", length, 0)
        if length > self.length:
            raise ValueError(f"length must be at most the {self.length} tokens remembered, got {length}")
        if length < self.length:
            self._cache.crop(length - self.length)


def _empty_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()
