"""Task 7: levels where normal weights lie, the nearest of them in each block, and scales that are quantized, too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.refusal import check_refused
from labkit.float_formats import Nf4Tensor, QuantizedAbsmax

pytestmark = pytest.mark.task(7)

LEVELS = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=torch.float64,
)  # fmt: skip
"""As published with QLoRA."""


def weights(*shape: int, seed: int) -> Tensor:
    """Normal numbers in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def block_maxima(x: Tensor, size: int) -> Tensor:
    """max |x| of each block of neighbours in row-by-row order."""
    return torch.stack([block.abs().max() for block in x.reshape(-1).split(size)])


def check_nearest(what: str, q: object, x: Tensor, size: int) -> Nf4Tensor:
    """Fail unless the absmax is right and every value has the level nearest to it; returns the quantized tensor."""
    assert isinstance(q, Nf4Tensor), f"{what} must be an Nf4Tensor, got {type(q).__name__}"
    assert q.block_size == size, f"{what}: block_size is {q.block_size}, right is {size}"
    absmax = block_maxima(x.float(), size)
    check_equal(f"{what}: absmax", q.absmax, absmax, "The largest magnitude of each block, of either sign.")
    codes = check_form(f"{what}: codes", q.codes, tuple(x.shape), torch.uint8)
    assert bool((codes[x == 0] == 7).all()), f"{what}: a 0 must have code 7, in a block of zeros as well"
    scale = absmax.double().repeat_interleave(size)[: x.numel()].reshape(x.shape)
    distances = (scale[..., None] * LEVELS - x.double()[..., None]).abs()
    loss = distances.gather(-1, codes.long()[..., None])[..., 0] - distances.amin(-1)
    # Where two levels are equally near, either will do; the levels have float32's precision.
    bad = loss > 1e-6 * scale
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: the value {float(x[place]):.5g} at {list(place)} is {float(x[place] / scale[place]):.5f} of its "
            f"block's absmax, and got code {int(codes[place])}; nearest is {int(distances[place].argmin())}"
        )
    return q


def test_levels_are_the_published_ones(lab: Any) -> None:
    levels = lab.nf4_levels()
    check_close("the levels", levels, LEVELS, scale=1.0, dtype=torch.float32,
                advice="Eight steps of probability from 1/2 up, seven down; then divide by the largest.")  # fmt: skip
    ends = (float(levels[0]), float(levels[7]), float(levels[15]))
    assert ends == (-1.0, 0.0, 1.0), f"levels 0, 7 and 15 must be -1, 0 and 1 exactly, got {ends}"
    for absmax in (1.0, 3.0):
        got = lab.dequantize_nf4(Nf4Tensor(torch.arange(16, dtype=torch.uint8), torch.tensor([absmax]), 16))
        check_close(f"codes 0 to 15 under absmax {absmax}", got, absmax * LEVELS, scale=absmax, dtype=torch.float32)


def test_each_value_takes_the_nearest_level(lab: Any) -> None:
    for size, shape, seed in ((64, (3, 64), 1), (16, (7, 48), 2), (256, (5, 256), 3)):
        x = 0.02 * weights(*shape, seed=seed)
        q = check_nearest(f"{list(shape)} in blocks of {size}", lab.quantize_nf4(x, size), x, size)
        used = torch.bincount(q.codes.reshape(-1).int(), minlength=16)
        assert bool((used > 0).all()), f"{x.numel()} normal numbers use all 16 codes, got counts {used.tolist()}"


def test_blocks_go_on_over_rows_and_the_last_is_shorter(lab: Any) -> None:
    for shape, size in (((5, 40), 64), ((1, 16), 64), ((65,), 64), ((3, 2, 21), 64), ((63,), 64), ((4, 9), 7)):
        x = weights(*shape, seed=len(shape) + shape[0])
        x = x * torch.linspace(1, 40, x.numel()).reshape(shape)  # neighbouring blocks differ in scale
        q = check_nearest(f"{list(shape)} in blocks of {size}", lab.quantize_nf4(x, size), x, size)
        got = lab.dequantize_nf4(q)
        scale = block_maxima(x, size).double().repeat_interleave(size)[: x.numel()].reshape(shape)
        right = scale * LEVELS[q.codes.long()]
        check_close(f"{list(shape)} dequantized", got, right, scale=float(x.abs().max()), dtype=torch.float32)
    x = weights(6, 32, seed=9)
    check_nearest("a transposed view", lab.quantize_nf4(x.T), x.T.contiguous(), 64)
    check_nearest("blocks of 64 by default", lab.quantize_nf4(weights(130, seed=1)), weights(130, seed=1), 64)


def test_codes_stand_for_levels_times_absmax(lab: Any) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).reshape(4, 8)
    for absmax in (torch.tensor([2.0, 0.25, 16.0]), torch.tensor([0.5, 8.0, 0.0])):
        right = LEVELS.repeat(2) * absmax.double().repeat_interleave(12)[:32]
        got = lab.dequantize_nf4(Nf4Tensor(codes, absmax, 12))
        check_close("all codes in blocks of 12", got, right.reshape(4, 8), scale=16.0, dtype=torch.float32)
        check_equal("the value of code 7", got.reshape(-1)[[7, 23]], torch.zeros(2), "It is exactly 0.")


def test_zero_tiny_huge_and_one_signed_blocks(lab: Any) -> None:
    x = torch.cat([
        torch.zeros(64), torch.full((64,), 3.0), torch.full((64,), -0.5), weights(64, seed=4).abs(),
        -weights(64, seed=5).abs(), torch.full((64,), 1e-45), 1e38 * weights(64, seed=6).clamp(-3, 3), torch.zeros(10),
    ])  # fmt: skip
    x[70] = 0.0
    q = check_nearest("special blocks", lab.quantize_nf4(x), x, 64)
    got = lab.dequantize_nf4(q)
    check_form("special blocks dequantized", got, (458,), torch.float32)
    assert bool(got.isfinite().all()), f"block {int((~got.isfinite()).nonzero()[0]) // 64} does not come back finite"
    for what, part in (("zeros", slice(0, 64)), ("zeros at the end", slice(448, 458)), ("a zero", slice(70, 71))):
        check_equal(what, got[part], torch.zeros(len(got[part])), "Zero is a level; nothing may move it.")
    for what, part in (("constants", slice(64, 70)), ("negative constants", slice(128, 192))):
        check_equal(what, got[part], x[part], "The largest magnitude of a block is a level, on either side.")


def test_half_precision_is_worked_on_in_float32(lab: Any) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = (0.02 * weights(9, 30, seed=7)).to(dtype)
        check_nearest(f"{dtype}", lab.quantize_nf4(x, 32), x, 32)


def test_the_error_grows_smoothly_with_the_block(lab: Any) -> None:
    x = weights(1 << 17, seed=8)
    # Mean |error| on the standard normal. Maxima of 32 blocks of 4096 vary, so that it deviates by 0.0009 there.
    for size, right in ((64, 0.0728), (256, 0.0804), (1024, 0.0867), (4096, 0.0927)):
        error = float((lab.dequantize_nf4(lab.quantize_nf4(x, size)).double() - x.double()).abs().mean())
        assert abs(error - right) < 0.003, (
            f"blocks of {size} normal numbers: the mean |error| is {error:.4f}, right is {right}"
        )


def test_scales_lose_their_mean_and_become_int8(lab: Any) -> None:
    for count, size, seed in ((700, 256, 1), (256, 256, 2), (10, 256, 3), (25, 8, 4)):
        absmax = (2.5 + 0.3 * weights(count, seed=seed)).abs() * torch.linspace(0.5, 1.5, count)
        q = lab.quantize_absmax(absmax, size)
        what = f"{count} scales in blocks of {size}"
        assert isinstance(q, QuantizedAbsmax), f"{what}: must be a QuantizedAbsmax, got {type(q).__name__}"
        exact = absmax.double()
        check_close(f"{what}: mean", q.mean[None], exact.mean()[None], scale=4.0, dtype=torch.float32)
        centred = exact - q.mean.double()
        scale = block_maxima(centred, size) / 127
        check_close(f"{what}: scale", q.scale, scale, scale=0.1, dtype=torch.float32,
                    advice="max |absmax - mean| / 127 of each block.")  # fmt: skip
        codes = check_form(f"{what}: codes", q.codes, (count,), torch.int8)
        steps = centred / scale.repeat_interleave(size)[:count]
        worst = float((codes.double() - steps).abs().max())
        assert worst < 0.501, f"{what}: a code is {worst:.3f} steps from (absmax - mean) / scale; half a step at most"
        right = q.mean.double() + q.scale.double().repeat_interleave(size)[:count] * codes.double()
        check_close(f"{what}: restored", lab.dequantize_absmax(q), right, scale=5.0, dtype=torch.float32)


def test_equal_scales_come_back_as_they_were(lab: Any) -> None:
    for value in (0.75, 0.0, 3e38):
        absmax = torch.full((300,), value)
        q = lab.quantize_absmax(absmax)
        check_equal(f"codes of 300 scales {value}", q.codes, torch.zeros(300, dtype=torch.int8), "All are the mean.")
        check_equal(f"300 scales {value}", lab.dequantize_absmax(q), absmax, "A block without spread must not be 0/0.")
    mixed = torch.cat([torch.linspace(1.0, 3.0, 257), torch.full((255,), 2.0), torch.full((4,), 2.0)])
    got = lab.dequantize_absmax(lab.quantize_absmax(mixed))
    check_equal("two blocks, each with its own range", got[512:], torch.full((4,), 2.0), "The last block is the mean.")


def test_a_restored_scale_is_never_negative(lab: Any) -> None:
    absmax = torch.full((256,), 1.0)
    absmax[:100] = torch.linspace(0.0, 0.003, 100)
    got = check_form("scales from 0 up", lab.dequantize_absmax(lab.quantize_absmax(absmax)), (256,), torch.float32)
    assert float((got - absmax).abs().max()) < 0.003, "the step is (mean of about 0.61) / 127; half of it at most"
    assert float(got.min()) >= 0, f"a restored absmax is {float(got.min()):.3g}: its block would change sign"
    q = QuantizedAbsmax(torch.tensor([-127, 127, 0], dtype=torch.int8), torch.tensor([0.01]), torch.tensor(1.0), 256)
    right = torch.tensor([0.0, 2.27, 1.0], dtype=torch.float64)
    check_close("mean 1, codes ±127 steps of 0.01", lab.dequantize_absmax(q), right, scale=2.0, dtype=torch.float32)


def test_double_quantization_keeps_the_codes(lab: Any) -> None:
    x = 0.02 * weights(40, 576, seed=11)
    x[3, :128] = 0.0
    x[7, :64] *= 20  # the step is now so long that an absmax of 0 does not come back as 0
    plain = check_nearest("plain", lab.quantize_nf4(x), x, 64)
    q = lab.quantize_nf4(x, double_quantization=True)
    assert isinstance(q, Nf4Tensor) and isinstance(q.absmax, QuantizedAbsmax), "absmax must be a QuantizedAbsmax"
    check_equal("codes", q.codes, plain.codes, "They are chosen with the exact absmax.")
    absmax = block_maxima(x, 64)
    assert (len(q.absmax.codes), len(q.absmax.scale)) == (360, 2), "360 blocks share 2 scales, 256 a scale"
    restored = q.absmax.mean.double() + q.absmax.codes.double() * q.absmax.scale.double().repeat_interleave(256)[:360]
    restored = restored.clamp(min=0)
    off = float((restored - absmax.double()).abs().max() / q.absmax.scale.double().max())
    assert off < 0.501, f"a restored absmax is {off:.3f} steps from the exact one; half a step at most"
    right = (restored[:, None] * LEVELS[plain.codes.long()].reshape(360, 64)).reshape(40, 576)
    got = lab.dequantize_nf4(q)
    check_close("dequantized", got, right, scale=1.0, dtype=torch.float32, inputs=(x,))
    check_equal("a block of zeros", got[3, :128], torch.zeros(128), "0 times any scale.")
    errors = [float((y.double() - x.double()).square().mean()) for y in (got, lab.dequantize_nf4(plain))]
    assert errors[0] < 1.15 * errors[1], f"8-bit scales cost little, even beside an outlier: squared errors {errors}"


def test_bits_of_a_weight(lab: Any) -> None:
    for arguments, right in (
        ((), 4.5), ((32,), 5.0), ((128,), 4.25), ((64, 256), 4 + 8 / 64 + 32 / (64 * 256)),
        ((128, 64), 4 + 8 / 128 + 32 / (128 * 64)),
    ):  # fmt: skip
        got = lab.nf4_bits_per_weight(*arguments)
        assert isinstance(got, float) and math.isclose(got, right, rel_tol=1e-12), (
            f"nf4_bits_per_weight{arguments} is {right}: the code, and the block's absmax (32 bits, or 8 and a share "
            f"of a float32) divided among its weights; got {got!r}"
        )


def test_bad_nf4_arguments_are_refused(lab: Any) -> None:
    x = weights(4, 32, seed=12)
    check_nearest("a good call", lab.quantize_nf4(x, 32), x, 32)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoilt = x.clone()
        spoilt[2, 5] = bad
        check_refused(f"a weight {bad}", lambda given=spoilt: lab.quantize_nf4(given), mentions="[2, 5]")
    check_refused("a float64 beyond float32", lambda: lab.quantize_nf4(torch.tensor([1e300], dtype=torch.float64)))
    check_refused("integers", lambda: lab.quantize_nf4(torch.arange(64)))
    check_refused("nothing", lambda: lab.quantize_nf4(torch.zeros(0)))
    check_refused("blocks of 0", lambda: lab.quantize_nf4(x, 0), mentions="block_size")
    check_equal("good scales", lab.dequantize_absmax(lab.quantize_absmax(torch.ones(3))), torch.ones(3))
    check_refused("a negative absmax", lambda: lab.quantize_absmax(torch.tensor([1.0, -0.5])))
    check_refused("a NaN absmax", lambda: lab.quantize_absmax(torch.tensor([1.0, math.nan])), mentions="[1]")
    check_refused("a matrix of absmax", lambda: lab.quantize_absmax(torch.ones(2, 3)))
    check_refused("absmax in blocks of 0", lambda: lab.quantize_absmax(torch.ones(3), 0), mentions="block_size")
    assert lab.nf4_bits_per_weight(16) == 6.0, "a good call: 4 + 32/16 bits"
    check_refused("bits of blocks of 0", lambda: lab.nf4_bits_per_weight(0))
    check_refused("bits with absmax in blocks of 0", lambda: lab.nf4_bits_per_weight(64, 0))
