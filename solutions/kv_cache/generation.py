"""Task 3: the generation loop on top of a cached decoder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from labkit.decoder import Decoder
from labkit.protocols import CachedModel, KVStore

from .attention import cached_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Choose = Callable[[Tensor, int], int]


class CachedDecoder:
    """A decoder, a KV store and an attention function joined into a model that remembers its tokens.

    Args:
        decoder: the given decoder; called as `decoder(tokens, positions, attend)`.
        cache: where keys and values are kept; for one sequence.
        attention: called as `attention(q, keys, values)` with the queries of the new tokens and the keys and
            values of all tokens; must apply the causal mask itself.
    """

    def __init__(self, decoder: Decoder, cache: KVStore, attention: Attention = cached_attention) -> None:
        self._decoder = decoder
        self._cache = cache
        self._attention = attention

    @property
    def length(self) -> int:
        """Tokens that the model has seen and not forgotten."""
        return self._cache.length

    @property
    def capacity(self) -> int:
        """The most tokens that the model can remember."""
        return self._cache.capacity

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to `vocab_size - 1`."""
        return self._decoder.config.vocab_size

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Run the decoder on new tokens only, and remember them.

        In each layer the new tokens' keys and values go into the cache, and their queries attend to everything
        that the layer then holds. Positions continue where the remembered tokens end.

        Args:
            tokens: ids of the new tokens, at least one.

        Returns:
            Logits `[new_tokens, vocab_size]`: row i scores the token that follows `tokens[i]`.

        Raises:
            ValueError: no tokens, an id outside the vocabulary, or more tokens than the capacity has left.
                Nothing has run then. If the pass itself fails half-way, the cache is truncated to the length
                it had before, and the error goes on to the caller.
        """
        ids = _check_tokens("tokens", tokens, self.vocab_size)
        if self.length + len(ids) > self.capacity:
            raise ValueError(
                f"{self.length} tokens are remembered and {len(ids)} more exceed the capacity of {self.capacity}"
            )
        # BEGIN SOLUTION
        start = self._cache.length

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            keys, values = self._cache.append(layer, k, v)
            return self._attention(q, keys, values)

        positions = torch.arange(start, start + len(ids))
        try:
            with torch.no_grad():
                logits = self._decoder(torch.tensor([ids]), positions, attend)
        except BaseException:
            # The layers before the failing one hold the new tokens already.
            self._cache.truncate(start)
            raise
        return logits[0]
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`; errors as for the cache's own `truncate`."""
        # BEGIN SOLUTION
        self._cache.truncate(length)
        # END SOLUTION


def greedy(logits: Tensor, step: int) -> int:
    """The most likely token; of equally likely ones the lowest id.

    Args:
        logits: `[vocab_size]`.
        step: how many tokens were generated before this one; greedy choice doesn't depend on it.

    Returns:
        A token id.

    Raises:
        ValueError: `logits` has another number of axes, is empty or contains NaN.
    """
    if logits.dim() != 1 or logits.numel() == 0:
        raise ValueError(f"logits must have shape [vocab_size >= 1], got {list(logits.shape)}")
    if bool(logits.isnan().any()):
        raise ValueError(f"logits contain NaN, first at token id {int(logits.isnan().int().argmax())}")
    # BEGIN SOLUTION
    return int(logits.argmax())
    # END SOLUTION


def stream(
    model: CachedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    choose: Choose = greedy,
    stop_tokens: Collection[int] = (),
) -> Iterator[int]:
    """Generate tokens one at a time, each handed over before any work on the next begins.

    The whole prompt goes into the model in one call; after that each call has exactly one token, the one chosen
    last. A token that nothing follows (the last one, or a stop token) never goes into the model.

    Args:
        model: continues from what it remembers already; it may be empty or not.
        prompt: ids of the tokens to start with.
        max_new_tokens: the most tokens to generate.
        choose: called as `choose(logits, step)` with the logits `[vocab_size]` that follow the newest token and
            the number of tokens generated so far (0, 1, 2, ...); returns the next token's id.
        stop_tokens: ids that end the generation; the one that did is the last token handed over.

    Returns:
        An iterator over token ids. It may be left before its end.

    Raises:
        ValueError: the prompt is empty or has an id outside the vocabulary, `max_new_tokens` is not an int of
            at least 1, or what the model would have to remember in the longest case exceeds its capacity.
            Raised before the model runs, by this call or by the first step of its iterator.
    """
    prompt = _check_tokens("prompt", prompt, model.vocab_size)
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be an int of at least 1, got {max_new_tokens!r}")
    # BEGIN SOLUTION
    # The last token is never appended, hence the -1.
    needed = model.length + len(prompt) + max_new_tokens - 1
    if needed > model.capacity:
        raise ValueError(
            f"{model.length} remembered tokens, a prompt of {len(prompt)} and {max_new_tokens} new tokens need room "
            f"for {needed}, but the capacity is {model.capacity}; shorten the prompt or lower max_new_tokens"
        )

    def steps() -> Iterator[int]:
        logits = model.append(prompt)
        for step in range(max_new_tokens):
            token = int(choose(logits[-1], step))
            yield token
            if token in stop_tokens or step == max_new_tokens - 1:
                return
            logits = model.append([token])

    return steps()
    # END SOLUTION


def generate(
    model: CachedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    choose: Choose = greedy,
    stop_tokens: Collection[int] = (),
) -> list[int]:
    """All tokens that `stream` would hand over, as a list; arguments and errors as there."""
    # BEGIN SOLUTION
    return list(stream(model, prompt, max_new_tokens, choose, stop_tokens))
    # END SOLUTION


def _check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The tokens as a list; refuses an empty one and ids outside the vocabulary."""
    ids = list(tokens)
    if not ids:
        raise ValueError(f"{name} must hold at least one token id, got none")
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"{name}[{index}] must be an int from 0 to {vocab_size - 1}, got {token!r}")
    return ids
