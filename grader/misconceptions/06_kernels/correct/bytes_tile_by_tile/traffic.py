"""Predictions that walk through programs and tiles as the kernels do."""

from __future__ import annotations

Traffic = tuple[int, int]
"""Bytes loaded and bytes stored."""

LSE_BYTES = 4
"""The log-sum-exp of a query is one fp32 number."""


def softmax_traffic(rows: int, columns: int, itemsize: int, block_size: int) -> Traffic:
    """Of `fused_softmax`.

    Args:
        rows: of the scores.
        columns: in a row.
        itemsize: bytes of an element.
        block_size: columns in a tile.
    """
    loaded = 0
    for start in range(0, columns, block_size):
        inside = min(block_size, columns - start)
        loaded += rows * inside * itemsize * (1 if block_size >= columns else 2)
    return loaded, rows * columns * itemsize


def add_rms_norm_traffic(rows: int, hidden_size: int, itemsize: int, block_rows: int) -> Traffic:
    """Of `add_rms_norm`.

    Args:
        rows: of x and of the residual.
        hidden_size: columns.
        itemsize: bytes of an element; the weight has the same dtype.
        block_rows: rows in a tile.
    """
    loaded = stored = 0
    for first in range(0, rows, block_rows):
        inside = min(block_rows, rows - first)
        loaded += (2 * inside + 1) * hidden_size * itemsize
        stored += 2 * inside * hidden_size * itemsize
    return loaded, stored


def rope_traffic(batch: int, heads: int, kv_heads: int, num_tokens: int, head_dim: int, itemsize: int) -> Traffic:
    """Of `apply_rope` with int64 positions and fp32 tables.

    Args:
        batch: sequences.
        heads: of the queries.
        kv_heads: of the keys.
        num_tokens: in each sequence.
        head_dim: channels of a head.
        itemsize: bytes of an element of q and k.
    """
    a_token = (heads + kv_heads) * head_dim * itemsize
    angles = head_dim * 4
    return batch * num_tokens * (a_token + angles + 8), batch * num_tokens * a_token


def swiglu_traffic(rows: int, columns: int, itemsize: int) -> Traffic:
    """Of `swiglu`.

    Args:
        rows: of gate and up.
        columns: in a row.
        itemsize: bytes of an element.
    """
    return rows * columns * itemsize * 2, rows * columns * itemsize


def flash_attention_traffic(
    batch: int,
    heads: int,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    itemsize: int,
    block_q: int,
    block_k: int,
    causal: bool = False,
) -> Traffic:
    """Of `flash_attention_forward`, the log-sum-exp included.

    A program holds a tile of queries of one head and reads the tiles of keys and values that any of its queries sees,
    each whole as far as there are keys. Heads of a group read the same keys, each for itself.

    Args:
        batch: sequences.
        heads: query heads.
        num_queries: the last tokens.
        num_keys: all tokens.
        head_dim: channels of a head.
        itemsize: bytes of an element.
        block_q: queries in a tile.
        block_k: keys in a tile.
        causal: query i sees keys up to i + num_keys − num_queries; tiles beyond are not read.
    """
    loaded = stored = 0
    for first in range(0, num_queries, block_q):
        inside = min(block_q, num_queries - first)
        last_position = first + inside - 1 + num_keys - num_queries
        loaded += inside * head_dim * itemsize
        stored += inside * (head_dim * itemsize + LSE_BYTES)
        for key in range(0, num_keys, block_k):
            if not causal or key <= last_position:
                loaded += 2 * min(block_k, num_keys - key) * head_dim * itemsize
    return batch * heads * loaded, batch * heads * stored


def standard_attention_traffic(batch: int, heads: int, num_tokens: int, head_dim: int, itemsize: int) -> Traffic:
    """Of attention as three operators, each of which reads and writes each of its tensors once.

    S = Q·Kᵀ, then P = softmax(S), then O = P·V. Nothing is masked, and all tensors have the same dtype.

    Args:
        batch: sequences.
        heads: of queries, keys and values alike.
        num_tokens: queries and keys.
        head_dim: channels of a head.
        itemsize: bytes of an element.
    """
    # In units of head_dim and of num_tokens: Q, K | S | P, V and S | P | O.
    a, b = num_tokens * head_dim, num_tokens**2
    return batch * heads * itemsize * (3 * a + 2 * b), batch * heads * itemsize * (a + 2 * b)


def smallest_winning_tile(num_tokens: int, head_dim: int, itemsize: int) -> int:
    """The smallest query tile with which FlashAttention moves less than the standard operators do.

    Args:
        num_tokens: queries and keys; nothing is masked.
        head_dim: channels of a head.
        itemsize: bytes of an element.

    Returns:
        The first of 1, 2, 4, … (a kernel takes 16 at least) whose loads and stores together are fewer.
    """

    def moved(block_q: int) -> int:
        tiles = (num_tokens + block_q - 1) // block_q
        return 2 * itemsize * num_tokens * head_dim * (1 + tiles) + 4 * num_tokens

    limit = 4 * itemsize * num_tokens * (head_dim + num_tokens)
    return next(tile for tile in (2**i for i in range(40)) if moved(tile) < limit)


def w4a16_traffic(
    rows: int,
    out_features: int,
    in_features: int,
    group_size: int,
    itemsize: int,
    scale_itemsize: int,
    has_zeros: bool,
    block_m: int,
    block_n: int,
    block_k: int,
) -> Traffic:
    """Of `w4a16_matmul`.

    A program multiplies a tile of rows of x by a tile of weight rows, and reads a scale (and a zero point) for each of
    those and each tile of columns.

    Args:
        rows: of x.
        out_features: weight rows.
        in_features: columns, a multiple of the group size.
        group_size: columns that share a scale.
        itemsize: bytes of an element of x and of the result.
        scale_itemsize: bytes of a scale.
        has_zeros: whether there are zero points, of one byte each.
        block_m: rows of x in a tile.
        block_n: weight rows in a tile.
        block_k: columns in a tile; divides the group size.
    """
    loaded = 0
    for m in range(0, rows, block_m):
        for n in range(0, out_features, block_n):
            height, width = min(block_m, rows - m), min(block_n, out_features - n)
            a_tile = height * block_k * itemsize + width * (block_k // 2 + scale_itemsize + has_zeros)
            loaded += in_features // block_k * a_tile
    return loaded, rows * out_features * itemsize
