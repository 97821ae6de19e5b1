"""Task 17: KVQuant, which quantizes keys before RoPE turns them, and keeps outliers apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.decoder import rotate
from labkit.layer_kv import check_new_kv
from labkit.quantization_checks import check_finite

from .packing import pack_words, unpack_words

KVQUANT_BITS = (2, 3, 4)
HALF_LARGEST = 65504.0


def channel_ranges(keys: Tensor, outlier_share: float) -> tuple[Tensor, Tensor]:
    """Where a channel's numbers lie, but for a few; found once, in calibration.

    Args:
        keys: of a layer before RoPE, on calibration text, `[batch, kv_heads, tokens, head_dim]`.
        outlier_share: of each channel's numbers, how many are to lie outside, half of them on either side; at least 0
            and below 1.

    Returns:
        low, high: float32 `[kv_heads, head_dim]`, the quantiles outlier_share / 2 and 1 - outlier_share / 2 of each
        channel's numbers in all sequences and tokens, interpolated linearly.

    Raises:
        ValueError: keys of another shape or not finite, or a share out of range.

    Source: KVQuant (2401.18079), sections 3.1 and 3.4.
    """
    if keys.dim() != 4 or not keys.numel():
        raise ValueError(f"keys must be [batch, kv_heads, tokens, head_dim] and not empty, got {list(keys.shape)}")
    check_finite("keys", keys)
    if not 0 <= outlier_share < 1:
        raise ValueError(f"outlier_share must be at least 0 and below 1, got {outlier_share!r}")
    # BEGIN SOLUTION
    channels = keys.float().transpose(0, 1).flatten(1, 2)
    ends = torch.tensor([outlier_share / 2, 1 - outlier_share / 2])
    low, high = channels.quantile(ends, dim=1)
    return low, high
    # END SOLUTION


@dataclass(frozen=True)
class Coded:
    """Tokens as codes, and the numbers that are kept apart.

    The token is the first axis here, so that places stay what they are when tokens are added.

    Args:
        words: packed codes, int32 `[tokens, batch, kv_heads, words]`.
        ranges: of values low and scale, float16 `[tokens, batch, kv_heads, 1]`; of keys nothing, since theirs are
            calibrated.
        index: int32, the places of outliers in the flattened tensor `[tokens, batch, kv_heads, head_dim]`, rising.
        value: the numbers there, in their own dtype.
    """

    words: Tensor
    ranges: tuple[Tensor, ...]
    index: Tensor
    value: Tensor


class KVQuantCache:
    """Keys and values of one layer; a `LayerKV` that takes keys before RoPE and returns them after.

    A channel of a key is much the same from token to token, until RoPE mixes it with its partner by an angle that
    grows with the position. So keys are quantized before, each channel within its calibrated range, and turned when
    they are read. Keys outside of their range, and the largest numbers of each token's values, are kept as they are.

    Args:
        bits: of a code: 2, 3 or 4.
        low: lower end of each channel's range, float32 `[kv_heads, head_dim]`; see `channel_ranges`.
        high: upper end, at least `low`.
        inverse_frequencies: the angle in radians that one position adds to each pair of channels, `[head_dim / 2]`;
            `labkit.decoder.rope_frequencies`.
        value_outliers: how many numbers of each token and head are kept apart from its values, below head_dim.
        pack: called as `pack(codes, bits)`, gives int32 words along the last axis; task 2's.
        unpack: called as `unpack(words, columns, bits)`, gives the codes back; task 2's.

    Raises:
        ValueError: another number of bits, ranges of the wrong shape or upside down, or a count out of range.

    Source: KVQuant (2401.18079); module section 4.3.
    """

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
        if isinstance(bits, bool) or bits not in KVQUANT_BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, KVQUANT_BITS))}, got {bits!r}")
        check_finite("low", low)
        check_finite("high", high)
        if low.dim() != 2 or low.shape != high.shape or not bool((low <= high).all()):
            raise ValueError(
                f"low and high must be [kv_heads, head_dim] with low at most high, got {list(low.shape)} and "
                f"{list(high.shape)}"
            )
        if list(inverse_frequencies.shape) != [low.shape[1] / 2]:
            raise ValueError(
                f"a head_dim of {low.shape[1]} has {low.shape[1] // 2} pairs of channels, got inverse_frequencies "
                f"{list(inverse_frequencies.shape)}"
            )
        check_count("value_outliers", value_outliers, 0)
        if value_outliers >= low.shape[1]:
            raise ValueError(f"value_outliers must be below the head_dim {low.shape[1]}, got {value_outliers}")
        self._bits, self._value_outliers, self._pack, self._unpack = bits, value_outliers, pack, unpack
        self._low, self._high, self._inverse_frequencies = low, high, inverse_frequencies
        self._form: Tensor | None = None
        self._keys: Coded | None = None
        self._values: Coded | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        # BEGIN SOLUTION
        return 0 if self._keys is None else len(self._keys.words)
        # END SOLUTION

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, of the values' ranges, and of outliers with their places.

        The calibrated ranges of keys belong to the model and are not counted.
        """
        # BEGIN SOLUTION
        held = [coded for coded in (self._keys, self._values) if coded is not None]
        parts = [part for c in held for part in (c.words, *c.ranges, c.index, c.value)]
        return sum(part.numel() * part.element_size() for part in parts)
        # END SOLUTION

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens; the first one ever has position 0.

        Keys: code = (k - low) / scale with scale = (high - low) / (2^bits - 1) in float32, 1 where that is 0, rounded
        half to even and clamped. A key below `low` or above `high` is an outlier.

        Values: the `value_outliers` numbers of largest magnitude of each token's head are outliers. The others have
        the codes (v - low) / scale, low and scale from their own smallest and largest number, in float16, as KIVI's.

        Args:
            k: new keys *before* RoPE, `[batch, kv_heads, new, head_dim]`.
            v: new values, magnitudes up to 65504.

        Returns:
            Keys of all tokens *after* RoPE, and values, `[batch, kv_heads, tokens, head_dim]` in the dtype of the new
            ones. Outliers are what they were, the rest is what the codes stand for.

        Raises:
            ValueError: tokens that don't fit the ranges or those before, or aren't finite, or values too large for
                float16. Nothing is stored then.
        """
        check_new_kv(k, v, self._form)
        if [k.shape[1], k.shape[3]] != list(self._low.shape):
            raise ValueError(
                f"the ranges are of {list(self._low.shape)} kv_heads and channels, the keys have {k.shape[1]} and "
                f"{k.shape[3]}"
            )
        if float(v.abs().amax()) > HALF_LARGEST:
            raise ValueError(
                f"values must be at most {HALF_LARGEST}, since their ranges are float16, got {v.abs().amax()}"
            )
        # BEGIN SOLUTION
        first = self.length
        keys, values = (
            self._encode_keys(k.permute(2, 0, 1, 3), first),
            self._encode_values(v.permute(2, 0, 1, 3), first),
        )
        self._keys, self._values = _joined(self._keys, keys), _joined(self._values, values)
        self._form = k[:, :, :0]
        positions = torch.arange(self.length, dtype=torch.float32)
        angles = positions[None, None, :, None] * self._inverse_frequencies
        keys_now = self._read(self._keys, (self._low, self._key_scale()), k.dtype)
        return rotate(keys_now, angles.cos(), angles.sin()), self._read(self._values, self._values.ranges, k.dtype)
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on; those before it are as if the others had never come.

        Raises:
            ValueError: `length` is no int from 0 to the present length.
        """
        check_count("length", length, 0)
        if length > self.length:
            raise ValueError(f"length must be at most the {self.length} tokens held, got {length}")
        # BEGIN SOLUTION
        if self._keys is not None and self._values is not None and self._form is not None:
            numbers = length * self._form.shape[0] * self._low.numel()
            self._keys, self._values = _cut(self._keys, length, numbers), _cut(self._values, length, numbers)
        # END SOLUTION

    # BEGIN SOLUTION
    def _key_scale(self) -> Tensor:
        scale = (self._high - self._low) / (2**self._bits - 1)
        return torch.where(scale > 0, scale, 1.0)

    def _encode_keys(self, k: Tensor, first: int) -> Coded:
        """New keys `[new, batch, kv_heads, head_dim]`, the first of them at position `first`."""
        wide = k.float()
        outlying = (wide < self._low) | (wide > self._high)
        return self._coded(k, (wide - self._low) / self._key_scale(), (), outlying, first)

    def _encode_values(self, v: Tensor, first: int) -> Coded:
        wide = v.float()
        largest = wide.abs().topk(self._value_outliers, dim=-1).indices
        outlying = torch.zeros_like(wide, dtype=torch.bool).scatter(-1, largest, True)
        smallest = wide.masked_fill(outlying, torch.inf).amin(-1, keepdim=True)
        spread = wide.masked_fill(outlying, -torch.inf).amax(-1, keepdim=True) - smallest
        low, scale = smallest.half(), (spread / (2**self._bits - 1)).half()
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        return self._coded(v, (wide - low.float()) / scale.float(), (low, scale), outlying, first)

    def _coded(self, x: Tensor, steps: Tensor, ranges: tuple[Tensor, ...], outlying: Tensor, first: int) -> Coded:
        codes = steps.round().clamp(0, 2**self._bits - 1).to(torch.int16)
        index = outlying.flatten().nonzero()[:, 0] + first * x[0].numel()
        return Coded(self._pack(codes, self._bits), ranges, index.to(torch.int32), x[outlying])

    def _read(self, coded: Coded, ranges: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """All tokens, `[batch, kv_heads, tokens, head_dim]`."""
        low, scale = ranges
        codes = self._unpack(coded.words, self._low.shape[1], self._bits)
        numbers = (low.float() + scale.float() * codes).to(dtype)
        numbers.view(-1)[coded.index.long()] = coded.value
        return numbers.permute(1, 2, 0, 3)

    # END SOLUTION


# BEGIN SOLUTION
def _joined(before: Coded | None, new: Coded) -> Coded:
    """New tokens behind those held."""
    if before is None:
        return new
    return Coded(
        torch.cat((before.words, new.words)),
        tuple(torch.cat(pair) for pair in zip(before.ranges, new.ranges, strict=True)),
        torch.cat((before.index, new.index)),
        torch.cat((before.value, new.value)),
    )


def _cut(coded: Coded, length: int, numbers: int) -> Coded:
    """The first tokens, which hold so many numbers."""
    kept = coded.index < numbers
    ranges = tuple(part[:length] for part in coded.ranges)
    return Coded(coded.words[:length], ranges, coded.index[kept], coded.value[kept])


# END SOLUTION
