"""The target writes: many texts at once, half of them greedily, half with chance."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.decoder import Decoder

IGNORED = -1
"""Stands in a row before its first token and behind its last."""


@torch.inference_mode()
def write(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    length: int,
    temperature: float,
    stop_tokens: Collection[int],
    seed: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[list[int]]:
    """Go on with prompts until a stop token, or until prompt and answer have so many tokens.

    Texts at even places are greedy, those at odd ones are sampled.

    Args:
        decoder: the target.
        prompts: token ids, none empty; of one that is too long the beginning is dropped.
        length: tokens of a whole text.
        temperature: of the sampled ones.
        stop_tokens: ids that end a text and are its last token.
        seed: of the sampling.
        progress: called with tokens done and all.

    Returns:
        The texts, prompts included.
    """
    rows = [list(prompt)[-(length - 1) :] for prompt in prompts]
    start = max(len(row) for row in rows)
    # Right-aligned, so that all rows get their next token at the same place.
    padding = torch.tensor([start - len(row) for row in rows])
    text = torch.full((len(rows), length), 0)
    for index, row in enumerate(rows):
        text[index, start - len(row) : start] = torch.tensor(row)
    cache = _Cache(decoder, len(rows), length, padding)
    generator = torch.Generator().manual_seed(seed)
    sampled = torch.arange(len(rows)) % 2 == 1
    ends = torch.full((len(rows),), length)
    done = 0
    while done < length - 1 and bool((ends > start).any()):
        new = text[:, done : max(done + 1, start)]
        logits = cache.run(new)
        done += new.shape[1]
        text[:, done] = logits.argmax(-1)
        text[sampled, done] = _draw(logits[sampled].float() / temperature, generator)
        for index in torch.isin(text[:, done], torch.tensor(list(stop_tokens))).nonzero().flatten().tolist():
            ends[index] = min(int(ends[index]), done + 1)
        progress(done + 1, length)
        if bool((ends <= done + 1).all()):
            break
    return [text[index, int(padding[index]) : int(ends[index])].tolist() for index in range(len(rows))]


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A token from each row, by the inverse of the cumulative distribution; never one of probability 0."""
    cumulative = logits.softmax(-1).cumsum(-1)
    uniforms = torch.rand(len(logits), 1, generator=generator) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, uniforms, right=True)[:, 0].clamp(max=logits.shape[1] - 1)


class _Cache:
    """Keys and values of right-aligned texts, and the decoder that reads on."""

    def __init__(self, decoder: Decoder, rows: int, length: int, padding: Tensor) -> None:
        config = decoder.config
        shape = (config.num_layers, rows, config.num_kv_heads, length, config.head_dim)
        self._decoder, self._padding, self._length = decoder, padding, 0
        self._keys, self._values = (torch.zeros(shape, dtype=decoder.dtype) for _ in range(2))

    def run(self, tokens: Tensor) -> Tensor:
        """Read `[rows, new]` tokens; logits `[rows, vocab_size]` after the last."""
        start, end = self._length, self._length + tokens.shape[1]
        places = torch.arange(start, end)
        columns = torch.arange(end)
        seen = (columns >= self._padding[:, None, None]) & (columns <= places[:, None])
        # A place before the text sees itself, since a row without keys has no softmax.
        mask = (seen | (columns == places[:, None]))[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            self._keys[layer, :, :, start:end], self._values[layer, :, :, start:end] = k, v
            keys, values = self._keys[layer, :, :, :end], self._values[layer, :, :, :end]
            if start == end - 1:
                # One query a head: those of a group are as many queries of one head, read together.
                grouped = q.reshape(len(tokens), keys.shape[1], -1, q.shape[-1])
                return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(q.shape)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

        positions = (places - self._padding[:, None]).clamp(min=0)
        self._length = end
        return self._decoder(tokens, positions, attend)[:, -1]
