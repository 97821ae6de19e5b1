"""Task 11: what each kernel moves between global memory and the chip, told from shapes and tile sizes alone.

Every function returns the bytes that a call loads and those that it stores, summed over all programs. What two
programs load counts twice, as if there were no cache; lanes whose mask is off move nothing.
"""

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
    # BEGIN SOLUTION
    size = rows * columns * itemsize
    passes = 1 if columns <= block_size else 2
    return passes * size, size
    # END SOLUTION


def add_rms_norm_traffic(rows: int, hidden_size: int, itemsize: int, block_rows: int) -> Traffic:
    """Of `add_rms_norm`.

    Args:
        rows: of x and of the residual.
        hidden_size: columns.
        itemsize: bytes of an element; the weight has the same dtype.
        block_rows: rows in a tile.
    """
    # BEGIN SOLUTION
    size = rows * hidden_size * itemsize
    weight = hidden_size * itemsize
    return 2 * size + _tiles(rows, block_rows) * weight, 2 * size
    # END SOLUTION


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
    # BEGIN SOLUTION
    tokens = batch * num_tokens
    turned = tokens * (heads + kv_heads) * head_dim * itemsize
    position, cos_and_sin = 8, 2 * (head_dim // 2) * 4
    return turned + tokens * (position + cos_and_sin), turned
    # END SOLUTION


def swiglu_traffic(rows: int, columns: int, itemsize: int) -> Traffic:
    """Of `swiglu`.

    Args:
        rows: of gate and up.
        columns: in a row.
        itemsize: bytes of an element.
    """
    # BEGIN SOLUTION
    size = rows * columns * itemsize
    return 2 * size, size
    # END SOLUTION


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
    # BEGIN SOLUTION
    keys_read = 0
    for tile in range(_tiles(num_queries, block_q)):
        last_query = min((tile + 1) * block_q, num_queries) - 1
        visible = last_query + num_keys - num_queries + 1 if causal else num_keys
        keys_read += min(num_keys, _tiles(max(0, visible), block_k) * block_k)
    programs = batch * heads
    queries = num_queries * head_dim * itemsize
    keys_and_values = 2 * keys_read * head_dim * itemsize
    return programs * (queries + keys_and_values), programs * (queries + num_queries * LSE_BYTES)
    # END SOLUTION


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
    # BEGIN SOLUTION
    rows = num_tokens * head_dim * itemsize
    square = num_tokens * num_tokens * itemsize
    loaded = 2 * rows + square + (square + rows)
    stored = square + square + rows
    return batch * heads * loaded, batch * heads * stored
    # END SOLUTION


def smallest_winning_tile(num_tokens: int, head_dim: int, itemsize: int) -> int:
    """The smallest query tile with which FlashAttention moves less than the standard operators do.

    Args:
        num_tokens: queries and keys; nothing is masked.
        head_dim: channels of a head.
        itemsize: bytes of an element.

    Returns:
        The first of 1, 2, 4, … (a kernel takes 16 at least) whose loads and stores together are fewer.
    """
    # BEGIN SOLUTION
    standard = sum(standard_attention_traffic(1, 1, num_tokens, head_dim, itemsize))
    block_q = 1
    while sum(flash_attention_traffic(1, 1, num_tokens, num_tokens, head_dim, itemsize, block_q, 16)) >= standard:
        block_q *= 2
    return block_q
    # END SOLUTION


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
    # BEGIN SOLUTION
    x = _tiles(out_features, block_n) * rows * in_features * itemsize
    packed = out_features * in_features // 2
    parameters = out_features * (in_features // block_k) * (scale_itemsize + int(has_zeros))
    return x + _tiles(rows, block_m) * (packed + parameters), rows * out_features * itemsize
    # END SOLUTION


# BEGIN SOLUTION
def _tiles(count: int, size: int) -> int:
    """How many tiles cover so many elements."""
    return -(-count // size)


# END SOLUTION
