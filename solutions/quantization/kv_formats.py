"""What a quantized KV cache costs a real model: its own text through caches of every format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.decoder import Decoder, full_attention, rope_frequencies, rotate
from labkit.layer_kv import LayerKV
from solutions.quantization.kivi import KiviCache
from solutions.quantization.kv_quantization import Fp8KVCache, Int8KVCache, fp8_scale
from solutions.quantization.kvquant import KVQuantCache, channel_ranges


@dataclass(frozen=True)
class KVFormat:
    """A way to store keys and values.

    Args:
        name: for tables.
        make: makes an empty cache for a layer.
        before_rope: the cache takes keys before RoPE and returns them after.
    """

    name: str
    make: Callable[[int], LayerKV]
    before_rope: bool = False


class PlainKV:
    """Keys and values as they come; a `LayerKV`.

    Args:
        dtype: that they are stored in; what is returned has the dtype of what came.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._held: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return 0 if self._held is None else self._held[0].shape[2]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return 0 if self._held is None else sum(x.numel() * x.element_size() for x in self._held)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new tokens, and returns all."""
        new = k.to(self._dtype), v.to(self._dtype)
        if self._held is not None:
            new = torch.cat((self._held[0], new[0]), 2), torch.cat((self._held[1], new[1]), 2)
        self._held = new
        return new[0].to(k.dtype), new[1].to(v.dtype)

    def truncate(self, length: int) -> None:
        """Forgets the tokens from position `length` on."""
        if self._held is not None:
            self._held = self._held[0][:, :, :length], self._held[1][:, :, :length]


class CachedLogits:
    """A model that reads a text in chunks through quantized caches; the `logits` of task 9.

    A query sees keys and values as the cache holds them after its own chunk. So the chunk should not be longer than
    the window of a cache that keeps its newest tokens in full precision.

    Args:
        decoder: the model.
        format: of its caches.
        chunk: tokens that are read at once.
    """

    def __init__(self, decoder: Decoder, format: KVFormat, chunk: int = 32) -> None:
        self._decoder, self._format, self._chunk = decoder, format, chunk
        self._frequencies = rope_frequencies(decoder.config)
        self.bytes_per_token = 0.0
        """Of all layers, after the last text that was read."""

    def __call__(self, tokens: list[int]) -> Tensor:
        """Logits `[n, vocab_size]` of a text that begins anew."""
        caches = [self._format.make(layer) for layer in range(self._decoder.config.num_layers)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            if self._format.before_rope:
                k = before_rope(k, positions, self._frequencies)
            keys, values = caches[layer].append(k, v)
            visible = torch.arange(keys.shape[2]) <= positions[0, :, None]
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)

        ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))
        with torch.no_grad():
            parts = [
                self._decoder(ids[:, at : at + self._chunk], positions[at : at + self._chunk], attend)[0]
                for at in range(0, len(tokens), self._chunk)
            ]
        self.bytes_per_token = sum(cache.num_bytes for cache in caches) / len(tokens)
        return torch.cat(parts)


def before_rope(keys: Tensor, positions: Tensor, inverse_frequencies: Tensor) -> Tensor:
    """Turn keys back, `[batch, kv_heads, tokens, head_dim]` at `positions` `[batch, tokens]`."""
    angles = positions[:, None, :, None].to(torch.float32) * inverse_frequencies
    return rotate(keys, angles.cos(), -angles.sin())


def recorded_kv(decoder: Decoder, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keys after RoPE, keys before it, and values of each layer on calibration text, `[sequences, tokens]`."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    frequencies = rope_frequencies(decoder.config)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        found.append((k, before_rope(k, positions, frequencies), v))
        return full_attention(layer, q, k, v, positions)

    with torch.no_grad():
        decoder(tokens, torch.arange(tokens.shape[1]), attend)
    return found


def kv_formats(decoder: Decoder, tokens: Tensor, residual: int = 64, group_size: int = 32) -> list[KVFormat]:
    """All formats, with scales and ranges from calibration text.

    Args:
        decoder: the model.
        tokens: calibration text, `[sequences, tokens]`.
        residual: newest tokens that KIVI keeps in full precision.
        group_size: of KIVI.
    """
    seen = recorded_kv(decoder, tokens)
    frequencies = rope_frequencies(decoder.config)
    scales = [(fp8_scale(k), fp8_scale(v)) for k, _, v in seen]
    ranges = [channel_ranges(k, 0.01) for _, k, _ in seen]

    def kvquant(bits: int) -> KVFormat:
        return KVFormat(f"KVQuant {bits}", lambda layer: KVQuantCache(bits, *ranges[layer], frequencies), True)

    def kivi(bits: int) -> KVFormat:
        return KVFormat(f"KIVI {bits}", lambda layer: KiviCache(bits, group_size, residual))

    return [
        KVFormat("FP16", lambda layer: PlainKV(torch.float16)),
        KVFormat("INT8", lambda layer: Int8KVCache()),
        KVFormat("FP8 E4M3", lambda layer: Fp8KVCache(*scales[layer])),
        kivi(4), kivi(3), kivi(2), kvquant(4), kvquant(3), kvquant(2),
    ]  # fmt: skip
