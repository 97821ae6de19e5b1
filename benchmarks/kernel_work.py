"""What each kernel of lab 06 has to do at the least: floating-point operations, and bytes of global memory.

Counts are of the task, not of an implementation: what must be read once and written once, and the multiplications and
additions that the definition names. Achieved rates are these counts over measured time, for every contender alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """The least that a call must do.

    Args:
        flops: multiplications and additions.
        num_bytes: bytes read and written, each tensor once.
    """

    flops: int
    num_bytes: int

    @property
    def intensity(self) -> float:
        """Operations for each byte; where it exceeds a card's ratio of the two, arithmetic is the limit."""
        return self.flops / self.num_bytes

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The least time on a card, by the roofline model: the slower of computing and moving."""
        return max(self.flops / flops_per_second, self.num_bytes / bytes_per_second)


@dataclass(frozen=True)
class Attention:
    """The shape of an attention call.

    Args:
        batch: sequences.
        heads: query heads.
        kv_heads: key and value heads.
        queries: tokens that ask, of each sequence.
        keys: tokens that are asked, of each sequence.
        head_dim: channels of a head.
        causal: whether query i sees only keys up to i + keys - queries.
        itemsize: bytes of an element.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = True
    itemsize: int = 2

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, in one head of one sequence."""
        if not self.causal:
            return self.queries * self.keys
        # The last query sees every key, the one before it one less, and none sees fewer than 0.
        rows = min(self.queries, self.keys)
        return rows * self.keys - rows * (rows - 1) // 2

    def _tensor(self, heads: int, tokens: int) -> int:
        return self.batch * heads * tokens * self.head_dim * self.itemsize

    def forward(self) -> Work:
        """Two products of 2·head_dim operations a pair; q, k, v in, output and fp32 log-sum-exp out."""
        flops = self.batch * self.heads * self.pairs * 4 * self.head_dim
        q, kv = self._tensor(self.heads, self.queries), self._tensor(self.kv_heads, self.keys)
        return Work(flops, 2 * q + 2 * kv + 4 * self.batch * self.heads * self.queries)

    def backward(self) -> Work:
        """Five products, that of the scores over again among them; q, k, v, output and its gradient in, three out."""
        q, kv = self._tensor(self.heads, self.queries), self._tensor(self.kv_heads, self.keys)
        return Work(self.forward().flops * 5 // 2, 4 * q + 4 * kv + 4 * self.batch * self.heads * self.queries)


def softmax_work(rows: int, columns: int, itemsize: int) -> Work:
    """Maximum, subtraction, exponential, sum and division: five operations an element, one read, one write."""
    return Work(5 * rows * columns, 2 * rows * columns * itemsize)


def add_rms_norm_work(rows: int, hidden_size: int, itemsize: int) -> Work:
    """Addition, square, sum and two multiplications; two tensors and the weight in, two tensors out."""
    return Work(5 * rows * hidden_size, (4 * rows + 1) * hidden_size * itemsize)


def rope_work(batch: int, heads: int, kv_heads: int, tokens: int, head_dim: int, itemsize: int) -> Work:
    """Three operations a channel; q and k in and out, the fp32 tables and the int64 positions in."""
    channels = batch * (heads + kv_heads) * tokens * head_dim
    return Work(3 * channels, 2 * channels * itemsize + 4 * tokens * head_dim + 8 * batch * tokens)


def swiglu_work(rows: int, columns: int, itemsize: int) -> Work:
    """Five operations an element: exponential, addition, division and two multiplications; two in, one out."""
    return Work(5 * rows * columns, 3 * rows * columns * itemsize)


def matmul_work(
    rows: int, in_features: int, out_features: int, *, weight_bytes: int, input_size: int, output_size: int
) -> Work:
    """A product of activations and weights.

    Args:
        rows: of the activations.
        in_features: that are summed over.
        out_features: rows of the weight matrix.
        weight_bytes: of the weights as stored, with scales and zero points.
        input_size: bytes of an element of the activations.
        output_size: bytes of an element of the result.
    """
    num_bytes = rows * in_features * input_size + weight_bytes + rows * out_features * output_size
    return Work(2 * rows * in_features * out_features, num_bytes)


def w4a16_weight_bytes(in_features: int, out_features: int, group_size: int, itemsize: int) -> int:
    """Half a byte a weight; for each group a scale and a zero point of one byte."""
    return out_features * (in_features // 2 + in_features // group_size * (itemsize + 1))
