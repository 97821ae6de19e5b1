"""The benchmark of the kernels: its counts, its arithmetic, and that its contenders do the same task."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import kernels
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
from grader.judge.numerics import check_close
from labkit.client import LabClient, local_lab
from labkit.instruments.access_log import AccessLog
from labkit.launch import VARIABLE, triton_fault
from labkit.manifest import load_manifest


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> LabClient:
    """The reference, interpreted."""
    monkeypatch.setenv(VARIABLE, "1")
    if fault := triton_fault():
        pytest.skip(f"not verified here: {fault}")
    manifest = load_manifest("06")
    return local_lab(manifest, manifest.solutions)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (1, 4), (6, 2)])
def test_pairs_are_those_that_the_mask_lets_through(queries: int, keys: int, causal: bool) -> None:
    shape = Attention(2, 6, 3, queries, keys, 8, causal)
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    visible = (j <= i + keys - queries) | torch.tensor(not causal)
    assert shape.pairs == int(visible.sum())
    assert shape.forward().flops == 2 * 6 * shape.pairs * 4 * 8
    assert shape.backward().flops * 2 == shape.forward().flops * 5


def test_the_least_bytes_are_what_the_kernels_move_when_a_tile_holds_all(lab: LabClient) -> None:
    def moved(log: AccessLog) -> int:
        return log.bytes_loaded + log.bytes_stored

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, 24, generator=generator) for _ in range(2))
    assert moved(lab.observe("fused_softmax", x)[1]) == softmax_work(6, 24, 4).num_bytes
    assert moved(lab.observe("swiglu", x, y)[1]) == swiglu_work(6, 24, 4).num_bytes
    one_tile = lab.observe("add_rms_norm", x, y, x[0].clone(), block_rows=8)[1]
    assert moved(one_tile) == add_rms_norm_work(6, 24, 4).num_bytes
    q, k, v = (torch.randn(1, heads, 9, 16, generator=generator).half() for heads in (2, 1, 1))
    # One tile of queries: keys and values are read once for each query head of their group.
    shape = Attention(1, 2, 1, 9, 9, 16, causal=False)
    repeated = (2 - 1) * 2 * k.numel() * 2
    forward = lab.observe("flash_attention_forward", q, k, v, block_q=16, block_k=16)[1]
    assert moved(forward) == shape.forward().num_bytes + repeated
    cos, sin = lab.rope_tables(9, 16)
    rope = lab.observe("apply_rope", q, k, cos, sin, torch.arange(9).unsqueeze(0))[1]
    assert moved(rope) == rope_work(1, 2, 1, 9, 16, 2).num_bytes


def test_a_product_counts_each_operand_once(lab: LabClient) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=generator).half()
    packed = lab.pack_int4(torch.randint(0, 16, (48, 64), dtype=torch.uint8, generator=generator))
    scales = torch.rand(48, 2, generator=generator).half()
    zeros = torch.full((48, 2), 8, dtype=torch.uint8)
    weights = w4a16_weight_bytes(64, 48, 32, 2)
    assert weights == packed.numel() + 2 * scales.numel() + zeros.numel()
    work = matmul_work(4, 64, 48, weight_bytes=weights, input_size=2, output_size=2)
    log = lab.observe("w4a16_matmul", x, packed, scales, zeros, 32, block_n=64)[1]
    assert log.bytes_loaded + log.bytes_stored == work.num_bytes
    assert work.flops == 2 * 4 * 64 * 48


def test_the_roofline_is_the_slower_of_two() -> None:
    assert Work(1000, 10).seconds(100.0, 10.0) == 10.0
    assert Work(10, 1000).seconds(100.0, 10.0) == 100.0
    assert Work(10, 4).intensity == 2.5


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, and the twins in the kernels' place."""
    monkeypatch.setenv(VARIABLE, "0")
    for name, value in dict(HEADS=4, KV_HEADS=2, HEAD_DIM=16, HIDDEN=128, MLP=96, LENGTHS=(24,)).items():
        monkeypatch.setattr(kernels, name, value)


@pytest.mark.usefixtures("small")
def test_contenders_compute_the_same() -> None:
    names = []
    for contest in kernels.contests(24):
        torch.manual_seed(0)
        calls = contest.contenders("cpu", torch.float32)
        # Compiling on a CPU wants a C++ compiler; the GPU run compiles the very function that is called plainly here.
        answers = [_tensors(call()) for name, call in calls.items() if name != "compiled"]
        for ours, theirs in zip(*answers, strict=True):
            scale = max(1.0, float(theirs.abs().max()))
            ours = ours.reshape(theirs.shape)
            check_close(contest.name, ours, theirs.double(), dtype=torch.float32, plain=theirs, scale=scale)
        names.append(contest.name)
    assert len(names) == 9 and len(set(names)) == 8


def _tensors(answer: object) -> list[torch.Tensor]:
    """The tensors to compare; of attention's two results the first."""
    if isinstance(answer, torch.Tensor):
        return [answer]
    assert isinstance(answer, tuple)
    return [answer[0]] if answer[-1].dim() < answer[0].dim() else list(answer)


def test_result_lines_are_rates_ratios_and_shares() -> None:
    contest = kernels.Contest("a task", 7, Work(2 * 10**12, 10**9), lambda device, dtype: {})
    seconds = {"ours": [1.0, 2.0, 4.0], "torch": [2.0, 2.0, 2.0], "compiled": [4.0, 1.0, 1.0]}
    ours, torchs, _ = kernels.result_lines(contest, seconds, kernels.Roof(4e12, 1e12))
    assert ours == "| a task | 7 | ours | 1.00 | 0.5 | 25% | 2.00 (0.50 to 4.00) |"
    assert torchs.endswith("| 1.00 | 0.5 | 25% |  |")


def test_without_a_gpu_it_says_so_and_only_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("not verified here: this machine has a GPU")
    text = "\n".join(kernels.report((512,), 1))
    assert kernels.NOT_VERIFIED in text and "TFLOP/s" not in text
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(sys, "argv", ["kernels"])
    assert kernels.main() == 2 and "no speed worth measuring" in capsys.readouterr().err


def test_the_kept_results_name_a_card_or_say_that_there_was_none() -> None:
    text = kernels.RESULTS.read_text(encoding="utf-8")
    assert kernels.NOT_VERIFIED in text or "compute capability" in text
