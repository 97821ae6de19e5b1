"""The engine on Triton kernels: each step, interpreted, is what it is on torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from labkit.launch import VARIABLE, triton_fault, without_launches
from labkit.manifest import ROOT
from labkit.paths import cache_dir
from solutions.engine.attention.paged_attention import PagedAttention
from solutions.engine.back_end import make_runner
from solutions.engine.graphs.cuda_graphs import Again
from solutions.engine.graphs.padded_decoding import PaddedDecoding, as_wide_as_can_be
from solutions.engine.kv_manager import KVManager
from solutions.engine.memory.kv_formats import kv_format
from solutions.engine.memory.kv_pool import KVPool
from solutions.engine.model_runner import ModelRunner
from solutions.engine.models.loading import load_decoder
from solutions.engine.request import Request
from solutions.engine.sampler import Row, draw_filtered, sample
from solutions.engine.sampling_params import SamplingParams
from tests.engine.decode_case import Memory, decode_step
from tests.engine.test_engine import PROMPTS, SETTINGS
from tests.engine.test_models import (  # noqa: F401
    BLOCK_SIZE,
    WINDOW,
    GetFamily,
    Reading,
    get_family,
    poisoned_pool,
    text_of,
)

pytestmark = pytest.mark.skipif(triton_fault() is not None, reason=f"not verified here: {triton_fault()}")

WINDOWED = "qwen3, windows in every other layer"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels imported within are interpreted, and forgotten afterwards."""

    def own() -> list[str]:
        return [name for name in sys.modules if name.startswith(("solutions.kernels.", "solutions.engine.kernel"))]

    monkeypatch.setenv(VARIABLE, "1")
    before = {name: sys.modules.pop(name) for name in own()}
    yield
    for name in own():
        del sys.modules[name]
    sys.modules.update(before)


@dataclass(frozen=True)
class Case:
    """Sequences by their queries and lengths, over blocks anywhere in memory that is NaN where nobody's tokens are."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    dtype: torch.dtype = torch.float32

    def arguments(self) -> tuple[Any, ...]:
        """Of the launcher. Queries lie head by head, and a table names no block behind those that it needs."""
        chance = torch.Generator().manual_seed(sum(self.lengths))
        num_blocks = sum(-(-length // self.block_size) for length in self.lengths) + 2
        shape = (num_blocks, self.block_size, self.kv_heads, self.head_dim)
        memory = [torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2)]
        free = torch.randperm(num_blocks, generator=chance).tolist()
        tables = torch.full((len(self.counts), -(-max(self.lengths) // self.block_size) + 1), 1 << 40)
        for table, length in zip(tables, self.lengths, strict=True):
            for position in range(length):
                if position % self.block_size == 0:
                    table[position // self.block_size] = free.pop()
                place = int(table[position // self.block_size]), position % self.block_size
                for part in memory:
                    part[place] = torch.randn(shape[2:], generator=chance).to(self.dtype)
        firsts = torch.tensor([1 + 2 * i + sum(self.counts[:i]) for i in range(len(self.counts))])
        q = torch.randn(self.heads, int(firsts[-1]) + self.counts[-1] + 1, self.head_dim, generator=chance)
        counts, lengths = torch.tensor(self.counts), torch.tensor(self.lengths)
        return q.to(self.dtype).transpose(0, 1), *memory, tables, firsts, counts, lengths, max(self.counts)

    def formula(self, dtype: torch.dtype) -> Tensor:
        """What is right; rows of no sequence are 7."""
        q, keys, values, tables, firsts, counts, lengths, _ = self.arguments()
        out = torch.full(q.shape, 7.0, dtype=dtype)
        for table, first, count, length in zip(tables, firsts, counts, lengths, strict=True):
            for row in range(int(count)):
                position = int(length - count) + row
                seen = range(max(0, position + 1 - (self.window or position + 1)), position + 1)
                slots = [(int(table[one // self.block_size]), one % self.block_size) for one in seen]
                for head in range(self.heads):
                    kv_head = head * self.kv_heads // self.heads
                    mine = [torch.stack([part[place][kv_head] for place in slots]).to(dtype) if slots else None
                            for part in (keys, values)]  # fmt: skip
                    query = q[first + row, head].to(dtype)
                    read = 0.0 if not slots else (mine[0] @ query * self.head_dim**-0.5).softmax(0) @ mine[1]
                    out[first + row, head] = read
        return out


CASES = [
    Case((1, 5, 1), (1, 9, 17), 6, 2, 40, 4, None),
    Case((33, 2), (33, 40), 4, 4, 16, 16, None),
    Case((3, 1, 1), (20, 0, 7), 6, 2, 8, 4, 5),
    Case((20, 1), (45, 1), 3, 1, 64, 1, 1),
    Case((17, 1, 4), (50, 33, 4), 8, 2, 80, 8, 19),
    Case((6, 1), (39, 32), 2, 1, 128, 16, None, torch.float16),
    Case((6, 1), (39, 70), 2, 1, 24, 16, 33, torch.float16),
]


@pytest.mark.parametrize("way", ["kernel", "twin"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_see_their_own_tokens_up_to_themselves(request: pytest.FixtureRequest, case: Case, way: str) -> None:
    if way == "kernel":
        request.getfixturevalue("interpreted")
    from solutions.engine.kernels.paged_attention import paged_attention

    want, plain = case.formula(torch.float64), case.formula(case.dtype)
    q, *others = case.arguments()
    out = torch.full(q.shape, 7.0, dtype=case.dtype)
    got = paged_attention(q, *others, window=case.window, out=out, block_q=16, block_k=16)
    assert got is out
    scale = float(others[1][others[1].isfinite()].abs().max())
    check_close("what queries read", got, want, plain=plain, scale=scale, dtype=case.dtype)
    if way == "kernel":
        untouched = torch.full(q.shape, 7.0, dtype=case.dtype)
        with without_launches():
            check_equal("without the kernel", paged_attention(q, *others, out=untouched), torch.full_like(q, 7.0))
        wide = paged_attention(q, *others, window=case.window, out=torch.full_like(q, 7.0))
        check_close("with large tiles", wide, want, plain=plain, scale=scale, dtype=case.dtype)


def test_what_does_not_fit_together_is_refused() -> None:
    from solutions.engine.kernels.paged_attention import paged_attention

    q, keys, values, tables, firsts, counts, lengths, most = CASES[0].arguments()
    paged_attention(q, keys, values, tables, firsts, counts, lengths, most)
    bad_table = tables.clone()
    bad_table[2, 3] = 99
    for arguments, message in (
        ((q[0], keys, values, tables, firsts, counts, lengths, most), "q must have shape"),
        ((q.double(), keys, values, tables, firsts, counts, lengths, most), "share one of the dtypes"),
        ((q[:, :5], keys, values, tables, firsts, counts, lengths, most), "multiple of the kv heads"),
        ((q, keys, values, tables.int(), firsts, counts, lengths, most), "block_tables must be int64"),
        ((q, keys, values, tables, firsts[:2], counts, lengths, most), "firsts must be int64"),
        ((q, keys, values, tables, firsts + 9, counts, lengths, most), "are not there"),
        ((q, keys, values, tables, firsts, counts, lengths + 24, most), "can't hold 25"),
        ((q, keys, values, bad_table, firsts, counts, lengths, most), "names block 99"),
        ((q, keys, values, tables, firsts, counts, lengths, 0), "max_count"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_attention(*arguments)
    for wrong in (dict(window=0), dict(block_q=24), dict(block_k=8), dict(scale=float("inf"))):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            paged_attention(q, keys, values, tables, firsts, counts, lengths, most, **wrong)


def test_logits_of_pieces_decodes_and_drafts(get_family: GetFamily, interpreted: None) -> None:  # noqa: F811
    family = get_family(WINDOWED)
    texts = [text_of(length, seed) for seed, length in enumerate((6, 21, 13))]
    reading = Reading(family.model, texts, [4, 15, 1])
    pool = poisoned_pool(family.model, 64)
    reading.runner = make_runner(family.model, pool, len(texts), family.model.max_context, attention="triton")
    assert reading.runner._attend.__name__ == "attention_of"
    reading.run()
    assert {(True, True, True), (True, False, True)} & reading.shapes, "decodes, pieces and drafts were to be mixed"
    got = torch.stack([row for rows in reading.logits.values() for row in rows.values()])
    want, plain = (
        torch.cat([family.logits(text, dtype)[list(rows)] for text, rows in reading.logits.items()])
        for dtype in (torch.float64, torch.float32)
    )
    check_close("logits", got, want, plain=plain, scale=float(want.abs().max()), dtype=torch.float32)


def test_padded_steps_on_kernels(get_family: GetFamily, interpreted: None) -> None:  # noqa: F811
    from solutions.engine.attention.kernel_attention import KernelDecodeAttention
    from solutions.engine.kernels.row_kernels import KernelRows

    family = get_family(WINDOWED)
    model, exact = family.model, load_decoder(family.folder, torch.float64)
    memory, true_memory = Memory(model), Memory(exact)
    on_kernels = model.with_rows(KernelRows(model.dtype, model.device))
    decoding = PaddedDecoding(
        on_kernels, memory.pool, 4, 48, Again(), attend=KernelDecodeAttention, width=as_wide_as_can_be
    )  # fmt: skip
    runner = ModelRunner(model, memory.pool, decoding=decoding)
    for seed, lengths in enumerate(([9, 2, 30], [5])):
        step = decode_step(lengths, model.vocab_size, seed)
        want = true_memory.logits(ModelRunner(exact, true_memory.pool), step)
        plain = memory.logits(ModelRunner(model, memory.pool), step)
        got = memory.logits(runner, step)
        check_close("logits", got, want, plain=plain, scale=float(want.abs().max()), dtype=torch.float32)
        assert memory.written() == sorted(slot for work in step.work for slot in work.slots)
    assert {(bucket.rows, bucket.width) for bucket in decoding._recorded} == {(4, 12), (1, 12)}


@pytest.mark.parametrize("way", ["kernels", "twins"])
def test_answers_on_kernels(request: pytest.FixtureRequest, make_engine: Any, way: str) -> None:
    limits = dict(token_budget=12, max_running=4, block_size=4)
    prompts, settings = PROMPTS, SETTINGS
    if way == "kernels":  # an interpreter takes long to draw from a large vocabulary
        request.getfixturevalue("interpreted")
        prompts, settings = PROMPTS[:2], [replace(SETTINGS[0], max_tokens=4)] * 2
    plain, kernels = (make_engine(**limits, attention=one).generate(prompts, settings) for one in ("torch", "triton"))
    assert [several[0].tokens for several in kernels] == [several[0].tokens for several in plain]


def test_tokens_are_drawn_as_by_lab_07(interpreted: None) -> None:
    from solutions.engine.kernels.fused_draw import draw_fused

    chance = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(15, 97, generator=chance)
    logits[:, ::5] = -torch.inf
    uniforms = torch.rand(len(logits), generator=chance, dtype=torch.float64).tolist()
    uniforms[0] = 1 - 2**-53  # rounds to 1 in float32
    kinds = [dict(), dict(top_k=7), dict(top_p=0.8), dict(min_p=0.1), dict(top_k=20, top_p=0.9, min_p=0.05)]
    rows = []
    for place in range(len(logits)):
        params = SamplingParams(temperature=0.5 + place % 3, **kinds[place % len(kinds)])
        request = Request(str(place), (1,), params, KVManager(1, 4).new_table())
        rows.append(Row(place, request))
    assert draw_fused(logits, rows, uniforms).tolist() == draw_filtered(logits, rows, uniforms).tolist()
    for params in (SamplingParams(temperature=1e-320), SamplingParams(temperature=1e-40), SamplingParams(min_p=1e300)):
        extreme = [replace(row, request=Request("0", (1,), params, KVManager(1, 4).new_table())) for row in rows]
        assert draw_fused(logits, extreme, uniforms).tolist() == logits.argmax(-1).tolist()
    widest = SamplingParams(temperature=1e308, top_k=2**70)
    extreme = [replace(row, request=Request("0", (1,), widest, KVManager(1, 4).new_table())) for row in rows]
    assert draw_fused(logits, extreme, uniforms).tolist() == draw_filtered(logits, extreme, uniforms).tolist()
    broken = logits.clone()
    broken[3, 1], broken[5] = torch.nan, -torch.inf
    with pytest.raises(ValueError, match="logits row 3 holds NaN"):
        sample(broken, rows, draw_fused)
    with pytest.raises(ValueError, match="logits row 3 holds NaN"):
        sample(broken, rows)


def test_kernels_are_taken_where_they_can_be_had(get_family: GetFamily) -> None:  # noqa: F811
    model, latent = get_family("llama").model, get_family("deepseek v2").model
    pool = KVPool(model.kv_shape, 4, BLOCK_SIZE, scratch=True)
    assert make_runner(model, pool, 4, 16, attention="triton")._model is not model
    assert make_runner(model, pool, 4, 16)._model is model, "on a CPU torch is faster than an interpreter, or a twin"
    coded = KVPool(model.kv_shape, 4, BLOCK_SIZE, kv_format=kv_format("int8", model.dtype), scratch=True)
    latents = KVPool(latent.kv_shape, 4, BLOCK_SIZE, scratch=True)
    for one, where, message in ((model, coded, "stored as codes"), (latent, latents, "keep latents")):
        assert make_runner(one, where, 4, 16, attention="torch")._model is one
        with pytest.raises(ValueError, match=f"'triton' can't be had here: .*{message}"):
            make_runner(one, where, 4, 16, attention="triton")
    from solutions.engine.attention.kernel_attention import KernelAttention, attention_of

    (one,) = decode_step([5], model.vocab_size).work
    tree = replace(one, tokens=(1, 2, 3), num_drafts=2, slots=(1, 2, 3), parents=(-1, -1))
    for work, kind in ((one, KernelAttention), (tree, PagedAttention)):
        assert isinstance(attention_of(pool, (work,)), kind)
    with pytest.raises(ValueError, match="torch, triton or None, got 'flash'"):
        make_runner(model, pool, 4, 16, attention="flash")


def test_the_kernel_compiles_and_fits_every_card() -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["TRITON_CACHE_DIR"] = str(cache_dir() / "triton")
    command = [sys.executable, "-m", "tests.engine.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 3 and {one["capability"] for one in made} == {120}
    assert all(one["fits"] for one in made), [one["text"] for one in made]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels were interpreted: not verified on a GPU")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_on_a_gpu(case: Case) -> None:
    from solutions.engine.kernels.paged_attention import paged_attention

    q, *others = case.arguments()
    out = torch.full(q.shape, 7.0, dtype=case.dtype, device="cuda")
    there = [one.cuda() if isinstance(one, Tensor) else one for one in others]
    got = paged_attention(q.cuda(), *there, window=case.window, out=out).cpu()
    want, plain = case.formula(torch.float64), case.formula(case.dtype)
    scale = float(others[1][others[1].isfinite()].abs().max())
    check_close("what queries read", got, want, plain=plain, scale=scale, dtype=case.dtype)
