"""Task 11: bytes predicted, then counted: first lane by lane on the test's side, then by the record of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from grader.judge.kernel_checks import check_traffic

pytestmark = pytest.mark.task(11)

Traffic = tuple[int, int]


def tiles(count: int, size: int) -> Iterator[range]:
    """The elements of each tile that covers so many."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def check_prediction(what: str, got: object, right: Traffic, advice: str) -> None:
    """Two whole numbers, loaded and stored."""
    assert isinstance(got, (tuple, list)) and len(got) == 2, f"{what} must be (loaded, stored), got {got!r}"
    whole = all(type(number) is int for number in got)
    assert whole, f"{what} must be two ints, got {got!r}"
    assert tuple(got) == right, f"{what} is {tuple(got)}, right is {right} (loaded, stored). {advice}"


@pytest.mark.parametrize(
    ("rows", "columns", "itemsize", "block_size"),
    [(64, 1000, 4, 1024), (3, 1000, 2, 256), (5, 17, 4, 16), (5, 16, 2, 16), (1, 1, 4, 1)],
)
def test_softmax_bytes(lab: Any, rows: int, columns: int, itemsize: int, block_size: int) -> None:
    loaded = 0
    for _ in range(rows):
        whole = list(tiles(columns, block_size))
        for _ in range(1 if len(whole) == 1 else 2):
            loaded += sum(len(tile) for tile in whole) * itemsize
    advice = "A row in one tile is loaded once, a longer one twice; masked lanes move nothing."
    got = lab.softmax_traffic(rows, columns, itemsize, block_size)
    check_prediction("softmax_traffic", got, (loaded, rows * columns * itemsize), advice)


@pytest.mark.parametrize(
    ("rows", "hidden_size", "itemsize", "block_rows"), [(64, 576, 2, 1), (7, 13, 4, 2), (8, 13, 2, 4), (1, 5, 4, 16)]
)
def test_norm_bytes(lab: Any, rows: int, hidden_size: int, itemsize: int, block_rows: int) -> None:
    loaded = stored = 0
    for tile in tiles(rows, block_rows):
        loaded += (2 * len(tile) + 1) * hidden_size * itemsize
        stored += 2 * len(tile) * hidden_size * itemsize
    got = lab.add_rms_norm_traffic(rows, hidden_size, itemsize, block_rows)
    check_prediction("add_rms_norm_traffic", got, (loaded, stored), "x and residual once, the weight once a tile.")


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "num_tokens", "head_dim", "itemsize"),
    [(1, 9, 3, 100, 64, 2), (2, 6, 2, 5, 8, 4), (3, 4, 4, 1, 40, 2)],
)
def test_rope_bytes(
    lab: Any, batch: int, heads: int, kv_heads: int, num_tokens: int, head_dim: int, itemsize: int
) -> None:
    loaded = stored = 0
    for _ in range(batch * num_tokens):
        loaded += 8 + head_dim // 2 * 4 + head_dim // 2 * 4
        for _ in range(heads + kv_heads):
            loaded += head_dim * itemsize
            stored += head_dim * itemsize
    got = lab.rope_traffic(batch, heads, kv_heads, num_tokens, head_dim, itemsize)
    advice = "A position of 8 bytes and a row of each fp32 table for a token, whatever the number of heads."
    check_prediction("rope_traffic", got, (loaded, stored), advice)


@pytest.mark.parametrize(("rows", "columns", "itemsize"), [(64, 1536, 2), (3, 5, 4), (1, 1, 2)])
def test_swiglu_bytes(lab: Any, rows: int, columns: int, itemsize: int) -> None:
    size = sum(itemsize for _ in range(rows * columns))
    check_prediction("swiglu_traffic", lab.swiglu_traffic(rows, columns, itemsize), (2 * size, size), "2 in, 1 out.")


def attention_by_lanes(
    programs: int,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    itemsize: int,
    block_q: int,
    block_k: int,
    causal: bool,
) -> Traffic:
    """Tile by tile: a tile of keys is loaded if any query of the program sees any of its keys."""
    loaded = stored = 0
    for queries in tiles(num_queries, block_q):
        loaded += len(queries) * head_dim * itemsize
        stored += len(queries) * (head_dim * itemsize + 4)
        for keys in tiles(num_keys, block_k):
            if not causal or any(key <= query + num_keys - num_queries for key in keys for query in queries):
                loaded += 2 * len(keys) * head_dim * itemsize
    return programs * loaded, programs * stored


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "block_q", "block_k"),
    [(64, 64, 16, 16), (33, 50, 16, 32), (50, 33, 32, 16), (1, 40, 16, 16), (17, 17, 16, 32), (40, 3, 16, 16)],
)
def test_flash_attention_bytes(
    lab: Any, num_queries: int, num_keys: int, block_q: int, block_k: int, causal: bool
) -> None:
    for batch, heads, head_dim, itemsize in ((2, 3, 40, 2), (1, 4, 64, 4)):
        right = attention_by_lanes(
            batch * heads, num_queries, num_keys, head_dim, itemsize, block_q, block_k, causal
        )  # fmt: skip
        got = lab.flash_attention_traffic(
            batch, heads, num_queries, num_keys, head_dim, itemsize, block_q, block_k, causal
        )
        advice = "Queries once; keys and values once a tile of queries, up to the last tile that it sees; out and 4T."
        check_prediction("flash_attention_traffic", got, right, advice)


def test_twice_the_query_tile_halves_keys_and_values(lab: Any) -> None:
    for num_tokens, head_dim in ((4096, 128), (8192, 64)):
        shape = (1, 1, num_tokens, num_tokens, head_dim, 2)
        moved = [lab.flash_attention_traffic(*shape, block_q, 64) for block_q in (32, 64, 128)]
        queries = num_tokens * head_dim * 2
        for tile, got in zip((32, 64, 128), moved, strict=True):
            right = queries + num_tokens // tile * 2 * queries, queries + 4 * num_tokens
            check_prediction(f"the traffic of query tiles of {tile}", got, right, "b·(2Td + ⌈T/Bq⌉·2Td) + 4T in all.")


@pytest.mark.parametrize(
    ("batch", "heads", "num_tokens", "head_dim", "itemsize"), [(8, 32, 8192, 128, 2), (2, 3, 5, 40, 4)]
)
def test_standard_attention_bytes(
    lab: Any, batch: int, heads: int, num_tokens: int, head_dim: int, itemsize: int
) -> None:
    rows, square = num_tokens * head_dim * itemsize, num_tokens**2 * itemsize
    steps = [(2 * rows, square), (square, square), (square + rows, rows)]
    right = batch * heads * sum(step[0] for step in steps), batch * heads * sum(step[1] for step in steps)
    got = lab.standard_attention_traffic(batch, heads, num_tokens, head_dim, itemsize)
    advice = "Q, K in and S out; S in and P out; P, V in and O out: b·(4Td + 4T²) in all."
    check_prediction("standard_attention_traffic", got, right, advice)


@pytest.mark.parametrize(
    ("num_tokens", "head_dim"), [(8192, 128), (8192, 64), (4096, 40), (1000, 256), (16, 64), (1, 8)]
)
def test_flash_attention_wins_from_some_tile_on(lab: Any, num_tokens: int, head_dim: int) -> None:
    itemsize = 2
    standard = itemsize * (4 * num_tokens * head_dim + 4 * num_tokens**2)
    tile = 1
    while True:
        flash = itemsize * 2 * num_tokens * head_dim * (1 + len(list(tiles(num_tokens, tile)))) + 4 * num_tokens
        if flash < standard:
            break
        tile *= 2
    got = lab.smallest_winning_tile(num_tokens, head_dim, itemsize)
    advice = (
        f"At that tile FlashAttention moves {flash} bytes, the standard operators {standard}; half of it is too small."
    )
    assert type(got) is int and got == tile, f"smallest_winning_tile gave {got!r}, right is {tile}. {advice}"


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "group_size"), [(1, 576, 1536, 64), (20, 33, 128, 128), (17, 16, 96, 32)]
)
def test_w4a16_bytes(
    lab: Any, rows: int, out_features: int, in_features: int, group_size: int, has_zeros: bool
) -> None:
    for block_m, block_n, block_k, itemsize, scale_itemsize in (
        (16, 64, 32, 2, 2),
        (32, 16, 32, 4, 2),
        (16, 16, 32, 2, 4),
    ):
        loaded = stored = 0
        for m in tiles(rows, block_m):
            for n in tiles(out_features, block_n):
                stored += len(m) * len(n) * itemsize
                for k in tiles(in_features, block_k):
                    loaded += len(m) * len(k) * itemsize + len(n) * len(k) // 2
                    loaded += len(n) * (scale_itemsize + has_zeros)
        got = lab.w4a16_traffic(
            rows, out_features, in_features, group_size, itemsize, scale_itemsize, has_zeros, block_m, block_n, block_k
        )
        advice = "x once a tile of weight rows; packed weights, scales and zeros once a tile of rows of x."
        check_prediction("w4a16_traffic", got, (loaded, stored), advice)


def random(*shape: int) -> torch.Tensor:
    """fp16 numbers of both signs."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).half()


@pytest.mark.integration
@pytest.mark.parametrize("block_size", [8, 32])
def test_your_softmax_moves_what_you_predict(lab: Any, block_size: int) -> None:
    _, log = lab.observe("fused_softmax", random(5, 27), block_size=block_size)
    loaded, stored = lab.softmax_traffic(5, 27, 2, block_size)
    check_traffic("your fused_softmax, by your prediction,", log, launches=1, loaded=loaded, stored=stored)


@pytest.mark.integration
def test_your_row_kernels_move_what_you_predict(lab: Any) -> None:
    for block_rows in (1, 4):
        _, log = lab.observe("add_rms_norm", random(7, 13), random(7, 13), random(13), block_rows=block_rows)
        loaded, stored = lab.add_rms_norm_traffic(7, 13, 2, block_rows)
        check_traffic("your add_rms_norm, by your prediction,", log, launches=1, loaded=loaded, stored=stored)
    table, positions = torch.ones(9, 4), torch.arange(5).repeat(2, 1)
    _, log = lab.observe("apply_rope", random(2, 6, 5, 8), random(2, 3, 5, 8), table, table.clone(), positions)
    loaded, stored = lab.rope_traffic(2, 6, 3, 5, 8, 2)
    check_traffic("your apply_rope, by your prediction,", log, launches=1, loaded=loaded, stored=stored)
    _, log = lab.observe("swiglu", random(5, 27), random(5, 27), block_size=8)
    loaded, stored = lab.swiglu_traffic(5, 27, 2)
    check_traffic("your swiglu, by your prediction,", log, launches=1, loaded=loaded, stored=stored)


@pytest.mark.integration
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys", "block_q", "block_k"), [(33, 50, 16, 32), (40, 20, 32, 16)])
def test_your_flash_attention_moves_what_you_predict(
    lab: Any, num_queries: int, num_keys: int, block_q: int, block_k: int, causal: bool
) -> None:
    q, k, v = random(1, 4, num_queries, 40), random(1, 2, num_keys, 40), random(1, 2, num_keys, 40)
    _, log = lab.observe("flash_attention_forward", q, k, v, causal=causal, block_q=block_q, block_k=block_k)
    loaded, stored = lab.flash_attention_traffic(1, 4, num_queries, num_keys, 40, 2, block_q, block_k, causal)
    check_traffic("your FlashAttention, by your prediction,", log, launches=1, loaded=loaded, stored=stored)


@pytest.mark.integration
def test_your_w4a16_moves_what_you_predict(lab: Any) -> None:
    packed = torch.full((33, 48), 0x5A, dtype=torch.uint8)
    zeros = torch.full((33, 3), 7, dtype=torch.uint8)
    sizes = dict(block_m=16, block_n=16, block_k=32)
    _, log = lab.observe("w4a16_matmul", random(20, 96), packed, torch.ones(33, 3), zeros, 32, **sizes)
    loaded, stored = lab.w4a16_traffic(20, 33, 96, 32, 2, 4, True, 16, 16, 32)
    check_traffic("your w4a16_matmul, by your prediction,", log, launches=1, loaded=loaded, stored=stored)
