"""Each kernel of lab 06 beside torch's own, and beside what this card was measured to do.

For every size the contenders take turns, so that all meet the same clocks; what is printed is the median of the rounds,
the ratio to the best contender of torch's within a round with its range, and the share of the roofline: the least time
in which the card could move the bytes and do the operations that the task needs.

Run: ``python -m benchmarks.kernels [--quick] [--write]``. Without a GPU it measures nothing, says so, and prints what
would have to be moved and computed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from benchmarks.kernel_work import (
    Attention,
    Work,
    add_rms_norm_work,
    matmul_work,
    rope_work,
    softmax_work,
    swiglu_work,
    w4a16_weight_bytes,
)
from labkit.launch import interpreting
from labkit.machine import facts
from labkit.probing import machine_bounds
from solutions.kernels.flash_attention import flash_attention
from solutions.kernels.flash_decoding import flash_decoding
from solutions.kernels.flash_forward import flash_attention_forward
from solutions.kernels.fused_softmax import fused_softmax
from solutions.kernels.rms_norm import add_rms_norm
from solutions.kernels.rope import apply_rope, rope_tables
from solutions.kernels.swiglu import swiglu
from solutions.kernels.w4a16 import dequantize_int4, pack_int4, w4a16_matmul

RESULTS = Path(__file__).parent / "results" / "kernels.md"
NOT_VERIFIED = "*not verified on a GPU*"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP = 32, 8, 128, 4096, 14336
"""Those of an 8-billion-parameter model of the Llama family."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Contest:
    """One task at one size.

    Args:
        name: of the task.
        tokens: the size that varies.
        work: the least that must be done.
        contenders: given a device and a dtype, makes the calls, by name; "ours" is among them.
    """

    name: str
    tokens: int
    work: Work
    contenders: Callable[[str, torch.dtype], dict[str, Call]]


@dataclass(frozen=True)
class Roof:
    """What the card was measured to do: matrix operations a second, bytes read a second."""

    flops_per_second: float
    bytes_per_second: float


def contests(tokens: int) -> Iterator[Contest]:
    """Every task at one length."""
    shape = Attention(1, HEADS, KV_HEADS, tokens, tokens, HEAD_DIM)
    yield Contest("attention, forward", tokens, shape.forward(), partial(_attention, tokens))
    yield Contest("attention, backward", tokens, shape.backward(), partial(_attention_backward, tokens))
    step = Attention(8, HEADS, KV_HEADS, 1, tokens, HEAD_DIM)
    yield Contest("decode, 8 sequences", tokens, step.forward(), partial(_decode, tokens))
    yield Contest("softmax", tokens, softmax_work(tokens, HIDDEN, 2), partial(_softmax, tokens))
    yield Contest("add + RMSNorm", tokens, add_rms_norm_work(tokens, HIDDEN, 2), partial(_norm, tokens))
    yield Contest("RoPE", tokens, rope_work(1, HEADS, KV_HEADS, tokens, HEAD_DIM, 2), partial(_rope, tokens))
    yield Contest("SwiGLU", tokens, swiglu_work(tokens, MLP, 2), partial(_swiglu, tokens))
    for rows in (1, 16) if tokens == LENGTHS[0] else ():
        weights = w4a16_weight_bytes(HIDDEN, MLP, 128, 2)
        work = matmul_work(rows, HIDDEN, MLP, weight_bytes=weights, input_size=2, output_size=2)
        yield Contest("W4A16 product, rows", rows, work, partial(_w4a16, rows))


def _randn(*shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def _heads(tokens: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return [_randn(1, heads, tokens, HEAD_DIM, device=device, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def _attention(tokens: int, device: str, dtype: torch.dtype) -> dict[str, Call]:
    q, k, v = _heads(tokens, device, dtype)
    return {
        "ours": lambda: flash_attention_forward(q, k, v, causal=True),
        "SDPA": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    }


def _attention_backward(tokens: int, device: str, dtype: torch.dtype) -> dict[str, Call]:
    q, k, v = inputs = [tensor.requires_grad_() for tensor in _heads(tokens, device, dtype)]
    ours = flash_attention(q, k, v, causal=True)
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradient = torch.randn_like(q)
    return {
        "ours": lambda: torch.autograd.grad(ours, inputs, gradient, retain_graph=True),
        "SDPA": lambda: torch.autograd.grad(theirs, inputs, gradient, retain_graph=True),
    }


def _decode(tokens: int, device: str, dtype: torch.dtype) -> dict[str, Call]:
    q = _randn(8, HEADS, HEAD_DIM, device=device, dtype=dtype)
    k, v = (_randn(8, KV_HEADS, tokens, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    return {
        "ours": lambda: flash_decoding(q, k, v),
        "SDPA": lambda: scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True),
    }


def _softmax(tokens: int, device: str, dtype: torch.dtype) -> dict[str, Call]:
    x = _randn(tokens, HIDDEN, device=device, dtype=dtype)
    compiled = torch.compile(lambda x: x.softmax(-1))
    return {"ours": lambda: fused_softmax(x), "torch": lambda: x.softmax(-1), "compiled": lambda: compiled(x)}


def _norm(tokens: int, device: str, dtype: torch.dtype) -> dict[str, Call]:
    x, residual = (_randn(tokens, HIDDEN, device=device, dtype=dtype) for _ in range(2))
    weight = _randn(HIDDEN, device=device, dtype=dtype)

    def plain(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return rms_norm(total, (HIDDEN,), weight, 1e-5), total

    compiled = torch.compile(plain)
    return {
        "ours": lambda: add_rms_norm(x, residual, weight),
        "torch": lambda: plain(x, residual),
        "compiled": lambda: compiled(x, residual),
    }


def _rope(tokens: int, device: str, dtype: torch.dtype) -> dict[str, Call]:
    q, k, _ = _heads(tokens, device, dtype)
    cos, sin = (table.to(device) for table in rope_tables(tokens, HEAD_DIM))
    positions = torch.arange(tokens, device=device).unsqueeze(0)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, dim=-1)
        c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(dtype)

    compiled = torch.compile(lambda q, k: (turned(q), turned(k)))
    return {
        "ours": lambda: apply_rope(q, k, cos, sin, positions),
        "torch": lambda: (turned(q), turned(k)),
        "compiled": lambda: compiled(q, k),
    }


def _swiglu(tokens: int, device: str, dtype: torch.dtype) -> dict[str, Call]:
    gate, up = (_randn(tokens, MLP, device=device, dtype=dtype) for _ in range(2))
    compiled = torch.compile(lambda gate, up: silu(gate) * up)
    return {
        "ours": lambda: swiglu(gate, up),
        "torch": lambda: silu(gate) * up,
        "compiled": lambda: compiled(gate, up),
    }


def _w4a16(rows: int, device: str, dtype: torch.dtype) -> dict[str, Call]:
    x = _randn(rows, HIDDEN, device=device, dtype=dtype)
    packed = pack_int4(torch.randint(0, 16, (MLP, HIDDEN), dtype=torch.uint8, device=device))
    scales = _randn(MLP, HIDDEN // 128, device=device, dtype=dtype)
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device=device)
    weight = dequantize_int4(packed, scales, zeros, 128).to(dtype)
    return {"ours": lambda: w4a16_matmul(x, packed, scales, zeros, 128), "cuBLAS, 16-bit": lambda: x @ weight.T}


def measured_roof(dtype: torch.dtype) -> Roof:
    """What the card does at its best: large products by cuBLAS, a long read."""
    bounds = machine_bounds("cuda")
    return Roof(bounds.flops({torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]), bounds.read)


def _timed(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, by the card's own clock."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # compiles, tunes and warms up
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                call()
            end.record()
            end.synchronize()
            seconds[name].append(start.elapsed_time(end) / 1e4)
    return seconds


def result_lines(contest: Contest, seconds: dict[str, list[float]], roof: Roof) -> list[str]:
    """The rows of the table for one contest.

    Args:
        contest: the task.
        seconds: by contender, one number a round.
        roof: of the card.
    """
    lines = []
    rivals = [times for name, times in seconds.items() if name != "ours"]
    best = [min(times) for times in zip(*rivals, strict=True)]
    least = contest.work.seconds(roof.flops_per_second, roof.bytes_per_second)
    for name, times in seconds.items():
        median = statistics.median(times)
        ratios = [mine / theirs for mine, theirs in zip(times, best, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if name == "ours" else ""
        lines.append(
            f"| {contest.name} | {contest.tokens} | {name} | {contest.work.flops / median / 1e12:.2f} | "
            f"{contest.work.num_bytes / median / 1e9:.1f} | {least / median:.0%} | {spread} |"
        )
    return lines


def count_lines(contest: Contest) -> list[str]:
    """The row of the table of what must be done, for a machine that cannot measure."""
    work = contest.work
    return [
        f"| {contest.name} | {contest.tokens} | {work.flops / 1e9:.2f} | {work.num_bytes / 1e6:.2f} | "
        f"{work.intensity:.1f} |"
    ]


def report(lengths: tuple[int, ...], rounds: int) -> Iterator[str]:
    """The lines of the results, as Markdown."""
    machine = facts()
    yield "# Kernels of lab 06 beside torch's own"
    yield ""
    if machine.gpu is None:
        yield f"No GPU was at hand: speeds are {NOT_VERIFIED}. What follows is arithmetic only: what each task"
        yield "has to compute and to move at the least, in 16 bits, and the operations for each byte."
        yield ""
        yield "| task | tokens | GFLOP | MB | FLOP/byte |"
        yield "|---|---|---|---|---|"
        for tokens in lengths:
            for contest in contests(tokens):
                yield from count_lines(contest)
        return
    yield f"{machine.gpu.name}, compute capability {machine.gpu.compute_capability}, torch {machine.torch}, "
    yield f"triton {machine.triton}; medians of {rounds} rounds. The ratio is ours to the fastest of torch's: below 1"
    yield "ours is faster. Roofline: the share that the least possible time has in the measured one."
    for dtype in (torch.float16, torch.bfloat16):
        roof = measured_roof(dtype)
        name = str(dtype).removeprefix("torch.")
        yield ""
        yield f"## {name}: {roof.flops_per_second / 1e12:.0f} TFLOP/s, {roof.bytes_per_second / 1e9:.0f} GB/s measured"
        yield ""
        yield "| task | tokens | by | TFLOP/s | GB/s | roofline | time / torch's, median (range) |"
        yield "|---|---|---|---|---|---|---|"
        for tokens in lengths:
            for contest in contests(tokens):
                try:
                    seconds = _timed(contest.contenders("cuda", dtype), rounds)
                except torch.cuda.OutOfMemoryError:
                    yield f"| {contest.name} | {contest.tokens} | does not fit into this card's memory | | | | |"
                    continue
                yield from result_lines(contest, seconds, roof)


def main() -> int:
    """Measure and print; with --write also keep the results beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the two shortest lengths only")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(RESULTS.parents[2])}")
    options = parser.parse_args()
    if interpreting():
        print("TRITON_INTERPRET is set: interpreted kernels have no speed worth measuring", file=sys.stderr)
        return 2
    lines = []
    for line in report(LENGTHS[:2] if options.quick else LENGTHS, options.rounds):
        print(line, flush=True)
        lines.append(line)
    if options.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
