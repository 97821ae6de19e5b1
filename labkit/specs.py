"""Specs: what to build, where it is needed. Models never cross between test and lab; their specs do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.protocols import CachedModel, KVStore, Spec
from labkit.transformers_model import TransformersModel, build_transformers_model


@dataclass(frozen=True)
class TinyLlama(Spec):
    """A decoder with random weights.

    Args:
        config: its shape.
        seed: chooses the weights.
        dtype: of weights and activations.
    """

    config: ModelConfig
    seed: int
    dtype: torch.dtype = torch.float32

    def build(self) -> Decoder:
        """A labkit decoder."""
        return Decoder(self.config, random_weights(self.config, self.seed, self.dtype), self.dtype)


@dataclass(frozen=True)
class Checkpoint(Spec):
    """The decoder of a real model, loaded once in a process.

    Args:
        name: "smollm2" (bundled), a folder, a .gguf file or a hub id.
    """

    name: str

    def build(self) -> Decoder:
        """A labkit decoder in float32."""
        return _load_once(self.name)


@lru_cache(maxsize=1)
def _load_once(name: str) -> Decoder:
    # Imported here: readers of checkpoint formats load slowly, and most suites never open a checkpoint.
    from labkit.checkpoints import load_decoder

    return load_decoder(name)


@dataclass(frozen=True)
class VocabularyBytes(Spec):
    """The bytes of every token of a real model's tokenizer, by id; None for control tokens.

    Args:
        name: as in `Checkpoint`.
    """

    name: str

    def build(self) -> list[bytes | None]:
        """A list as long as the tokenizer's vocabulary."""
        from labkit.checkpoints import load_tokenizer

        return load_tokenizer(self.name).vocabulary_bytes()


@dataclass(frozen=True)
class Recomputed(Spec):
    """A `CachedModel` without a cache: each append runs the decoder over the whole sequence again.

    Args:
        decoder: spec of the decoder.
        capacity: tokens it agrees to remember.
    """

    decoder: TinyLlama | Checkpoint
    capacity: int

    def build(self) -> CachedModel:
        """A model that is right by construction, and slow."""
        decoder = self.decoder if isinstance(self.decoder, Decoder) else self.decoder.build()

        def logits(tokens: list[int]) -> Tensor:
            ids = torch.tensor([tokens])
            return decoder(ids, torch.arange(len(tokens)), full_attention)[0]

        return _TokenList(decoder.config.vocab_size, self.capacity, logits)


@dataclass(frozen=True)
class Cached(Spec):
    """A `CachedModel` on transformers' own cache, for labs that build on one.

    Args:
        decoder: spec of the decoder whose weights it runs.
        capacity: tokens it agrees to remember.
    """

    decoder: TinyLlama | Checkpoint
    capacity: int

    def build(self) -> CachedModel:
        """A model that computes each token once."""
        decoder = self.decoder if isinstance(self.decoder, Decoder) else self.decoder.build()
        return TransformersModel(_transformers_model(decoder), self.capacity)


@lru_cache(maxsize=2)
def _transformers_model(decoder: Decoder) -> Any:
    """Made once for each decoder, so that sequences of a checkpoint share it."""
    return build_transformers_model(decoder.config, decoder.weights, decoder.dtype)


@dataclass(frozen=True)
class Markov(Spec):
    """A `CachedModel` whose next token depends on the last one alone, with probabilities known exactly.

    Args:
        transition: row i holds the probabilities of the tokens after token i, [vocab, vocab].
        capacity: tokens it agrees to remember.
    """

    transition: tuple[tuple[float, ...], ...]
    capacity: int

    def build(self) -> CachedModel:
        """A model of a few numbers."""
        log_probs = torch.tensor(self.transition, dtype=torch.float64).log()
        return _TokenList(len(self.transition), self.capacity, lambda tokens: log_probs[tokens])


class _TokenList:
    """A `CachedModel` that remembers token ids only; `logits` maps all of them to [length, vocab_size]."""

    def __init__(self, vocab_size: int, capacity: int, logits: Callable[[list[int]], Tensor]) -> None:
        self.vocab_size = vocab_size
        self.capacity = capacity
        self._logits = logits
        self._tokens: list[int] = []

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Reads tokens, returns the logits after each, [new, vocab_size]."""
        new = [int(token) for token in tokens]
        if not new:
            raise ValueError("no tokens to append; give at least one")
        if bad := [token for token in new if not 0 <= token < self.vocab_size]:
            raise ValueError(f"token {bad[0]} is outside the vocabulary 0 … {self.vocab_size - 1}")
        if self.length + len(new) > self.capacity:
            raise ValueError(f"{self.length} + {len(new)} tokens exceed the capacity of {self.capacity}")
        self._tokens += new
        return self._logits(self._tokens)[-len(new) :]

    def truncate(self, length: int) -> None:
        """Forgets the tokens from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate to {length}; the length is {self.length}")
        del self._tokens[length:]


@dataclass(frozen=True)
class ScriptedModel(Spec):
    """A `CachedModel` whose answers come from the test's own functions, so that the test sees every call.

    Args:
        vocab_size: number of token ids.
        capacity: tokens it claims to hold.
        append: maps a list of token ids to logits [new, vocab_size].
        truncate: takes the new length.
        length: returns the number of tokens held.
    """

    vocab_size: int
    capacity: int
    append: Callable[[list[int]], Tensor]
    truncate: Callable[[int], None]
    length: Callable[[], int]

    def build(self) -> CachedModel:
        """An object that calls back."""
        return _Scripted(self)


@dataclass(frozen=True)
class ScriptedStore(Spec):
    """A `KVStore` whose answers come from the test's own functions.

    Args:
        capacity: tokens it claims to hold.
        append: maps layer, k and v to all keys and values of that layer.
        truncate: takes the new length.
        length: returns the number of tokens held.
    """

    capacity: int
    append: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
    truncate: Callable[[int], None]
    length: Callable[[], int]

    def build(self) -> KVStore:
        """An object that calls back."""
        return _Scripted(self)


class _Scripted:
    """Shows a script's functions as the methods and properties of the protocol."""

    def __init__(self, script: ScriptedModel | ScriptedStore) -> None:
        self.capacity = script.capacity
        self.vocab_size = getattr(script, "vocab_size", 0)
        self.truncate = script.truncate
        self._script = script

    @property
    def length(self) -> int:
        """Tokens held, by the test's count."""
        return self._script.length()

    def append(self, *args: Any) -> Any:
        """Calls the test's function; token ids go as a plain list."""
        if isinstance(self._script, ScriptedModel):
            return self._script.append([int(token) for token in args[0]])
        return self._script.append(*args)
