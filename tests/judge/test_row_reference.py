"""The references of the row kernels against torch's own, and layouts that hold what they were given."""

from __future__ import annotations

import math

import pytest
import torch

from grader.judge.kernel_checks import check_accesses, check_traffic, check_unwritten
from grader.judge.layouts import LAYOUTS, arranged, laid_out, unwritten
from grader.judge.row_reference import plain_softmax, rms_norm64, rope64, softmax_rows64, swiglu64
from labkit.instruments.access_log import AccessLog, Flag, Launch, StrayAccess, TensorTraffic


def test_softmax_agrees_with_torch_and_hides() -> None:
    scores = torch.tensor([[1.0, -2.0, 0.5], [-math.inf, 3.0, -math.inf], [-math.inf] * 3])
    right = scores.double().softmax(1).nan_to_num(0.0)
    torch.testing.assert_close(softmax_rows64(scores), right, rtol=1e-15, atol=0)
    assert torch.equal(plain_softmax(scores)[2], torch.zeros(3))


def test_norm_and_gate_agree_with_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 7, generator=generator).double(), torch.randn(7, generator=generator).double()
    right = torch.nn.functional.rms_norm(x, (7,), weight, 0.1)
    torch.testing.assert_close(rms_norm64(x, weight, 0.1), right, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(swiglu64(x, x.flip(0)), x / (1 + (-x).exp()) * x.flip(0), rtol=1e-13, atol=1e-15)


def test_rope_agrees_with_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, generator=generator).double() for heads in (4, 2))
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 3, 70, 8, 1]])
    frequencies = 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    angles = torch.cat([positions.double()[..., None] * frequencies] * 2, dim=-1)
    right = modeling.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    for x, turned in zip((q, k), right, strict=True):
        torch.testing.assert_close(rope64(x, positions, 10_000.0), turned, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_values_and_give_nan_to_write_to(layout: str) -> None:
    a, b = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) * 10
    for num_outputs in (1, 2, 3):
        inputs, outputs = arranged(layout, [a, b], num_outputs)
        assert torch.equal(inputs[0], a) and torch.equal(inputs[1], b)
        assert len(outputs) == num_outputs and all(bool(out.isnan().all()) for out in outputs)
        assert all(out.shape == a.shape for out in outputs)
        for out in outputs:
            out.zero_()
        assert torch.equal(inputs[0], a) and torch.equal(inputs[1], b), "an output overlaps an input"
    assert laid_out(a, "columns first").stride() == (1, 3)
    assert laid_out(a, "every other").stride() == (11, 2)


def test_side_by_side_reads_beyond_a_row_meet_nan() -> None:
    (x,), (out,) = arranged("side by side", [torch.ones(3, 4)], 1)
    assert x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    beyond = x.as_strided((3, 5), x.stride())[:, 4]
    assert bool(beyond.isnan().all())


def test_records_are_held_to_what_was_promised() -> None:
    tensors = (TensorTraffic("x_ptr", (4,), torch.float32, 16, 0), TensorTraffic("out_ptr", (4,), torch.float32, 0, 16))
    log = AccessLog((Launch("copy", (1, 1, 1), tensors),))
    check_traffic("copy", log, launches=1, loaded=16, stored=16)
    check_accesses("copy", log)
    with pytest.raises(AssertionError, match="must start 2 kernels"):
        check_traffic("copy", log, launches=2, loaded=16, stored=16)
    with pytest.raises(AssertionError, match="x_ptr 16 in, 0 out"):
        check_traffic("copy", log, launches=1, loaded=12, stored=16)
    stray = StrayAccess("copy", "load", "x_ptr", 3, (0, 0, 0), (4,), 1)
    with pytest.raises(AssertionError, match="loads outside x_ptr"):
        check_accesses("copy", AccessLog(log.launches, (stray,)))
    flag = Flag("missing_other", "copy", 3, (0, 0, 0), "name other")
    with pytest.raises(AssertionError, match="name other"):
        check_accesses("copy", AccessLog(log.launches, (), (flag,)))
    out = unwritten((2, 2), torch.float16)
    check_unwritten("copy", out)
    out[0, 1] = 1.0
    with pytest.raises(AssertionError, match="1 of 4 numbers"):
        check_unwritten("copy", out)
