"""Each token in a list of its own, its outliers as coordinates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.layer_kv import check_new_kv
from labkit.quantization_checks import check_finite

from .packing import pack_words, unpack_words


def channel_ranges(keys: Tensor, outlier_share: float) -> tuple[Tensor, Tensor]:
    """Sort each channel, and read between neighbours."""
    if keys.dim() != 4 or keys.numel() == 0 or outlier_share < 0 or outlier_share >= 1:
        raise ValueError(f"no ranges of keys {list(keys.shape)} with a share of {outlier_share}")
    check_finite("keys", keys)
    ordered = keys.double().permute(1, 3, 0, 2).flatten(2).sort(-1).values
    ends = []
    for share in (outlier_share / 2, 1 - outlier_share / 2):
        at = share * (ordered.shape[-1] - 1)
        low = int(at)
        high = min(low + 1, ordered.shape[-1] - 1)
        ends.append((ordered[..., low] * (1 - at + low) + ordered[..., high] * (at - low)).float())
    return ends[0], ends[1]


class KVQuantCache:
    """One record a token: codes, ranges, and the numbers apart with their coordinates in the token."""

    def __init__(
        self,
        bits: int,
        low: Tensor,
        high: Tensor,
        inverse_frequencies: Tensor,
        value_outliers: int = 1,
        pack: Callable[[Tensor, int], Tensor] = pack_words,
        unpack: Callable[[Tensor, int, int], Tensor] = unpack_words,
    ) -> None:
        if bits not in (2, 3, 4) or low.shape != high.shape or low.dim() != 2:
            raise ValueError(f"{bits} bits within ranges {list(low.shape)} to {list(high.shape)}")
        check_finite("low", low)
        check_finite("high", high)
        if bool((low > high).any()) or inverse_frequencies.numel() * 2 != low.shape[1]:
            raise ValueError("ranges must not be upside down, and each pair of channels needs a frequency")
        if type(value_outliers) is not int or not 0 <= value_outliers < low.shape[1]:
            raise ValueError(f"value_outliers must be from 0 to {low.shape[1] - 1}, got {value_outliers}")
        self.bits, self.low, self.high, self.frequencies = bits, low, high, inverse_frequencies
        self.outliers, self.pack, self.unpack = value_outliers, pack, unpack
        step = (high - low) / (2**bits - 1)
        self.step = step.masked_fill(step == 0, 1)
        self.records: list[tuple[list[Tensor], list[Tensor]]] = []
        self.seen: Tensor | None = None

    @property
    def length(self) -> int:
        """Records."""
        return len(self.records)

    @property
    def num_bytes(self) -> int:
        """Of all records but the spare coordinates of constant ranges."""
        return sum(part.nbytes for keys, values in self.records for part in (*keys, *values))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Token by token, then everything is read."""
        check_new_kv(k, v, self.seen)
        if (k.shape[1], k.shape[3]) != tuple(self.low.shape) or v.abs().max() > 65504:
            raise ValueError(f"keys {list(k.shape)} don't fit ranges {list(self.low.shape)}, or values are too large")
        self.seen = k
        for token in range(k.shape[2]):
            self.records.append((self._key(k[:, :, token]), self._value(v[:, :, token])))
        keys, values = [], []
        for position, (key, value) in enumerate(self.records):
            plain = self._back(key, self.low, self.step)
            first, second = plain.float().chunk(2, -1)
            angle = position * self.frequencies.float()
            turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
            keys.append(torch.cat(turned, -1).to(plain.dtype))
            values.append(self._back(value, value[3], value[4]))
        return torch.stack(keys, 2), torch.stack(values, 2)

    def truncate(self, length: int) -> None:
        """Drop records."""
        if type(length) is not int or not 0 <= length <= len(self.records):
            raise ValueError(f"length must be from 0 to {len(self.records)}, got {length!r}")
        del self.records[length:]

    def _key(self, x: Tensor) -> list[Tensor]:
        apart = ~((self.low <= x) & (x <= self.high))
        return self._record(x, self.low, self.step, apart)

    def _value(self, x: Tensor) -> list[Tensor]:
        order = x.float().abs().sort(dim=-1, descending=True, stable=True).indices
        apart = torch.zeros(x.shape, dtype=torch.bool).scatter_(-1, order[..., : self.outliers], True)
        rest = x.float().gather(-1, order[..., self.outliers :])
        low, high = rest.aminmax(dim=-1, keepdim=True)
        step = ((high - low) / (2**self.bits - 1)).half()
        step = step.masked_fill(step == 0, 1)
        return [*self._record(x, low.half().float(), step.float(), apart), low.half(), step]

    def _record(self, x: Tensor, low: Tensor, step: Tensor, apart: Tensor) -> list[Tensor]:
        codes = ((x.float() - low) / step).round().clamp(0, 2**self.bits - 1)
        places = apart.reshape(-1).nonzero().reshape(-1).int()
        return [self.pack(codes.short(), self.bits), places, x.reshape(-1)[places.long()]]

    def _back(self, record: list[Tensor], low: Tensor, step: Tensor) -> Tensor:
        codes = self.unpack(record[0], self.low.shape[1], self.bits)
        numbers = (low.float() + step.float() * codes).to(record[2].dtype).contiguous()
        return numbers.reshape(-1).index_copy(0, record[1].long(), record[2]).reshape(numbers.shape)
