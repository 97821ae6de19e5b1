"""The forms of NF4, FP8, MXFP4 and NVFP4 refuse parts that don't belong together; the reference agrees with others."""

from __future__ import annotations

import pytest
import torch

from labkit.float_formats import Fp8Tensor, Mxfp4Tensor, Nf4Tensor, Nvfp4Tensor, QuantizedAbsmax
from solutions.quantization.fp8 import decode_fp8, encode_fp8
from solutions.quantization.microscaling import (
    dequantize_mxfp4,
    dequantize_nvfp4,
    quantize_mxfp4,
    quantize_nvfp4,
)
from solutions.quantization.nf4 import dequantize_nf4, nf4_levels, quantize_nf4

TORCH = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}

CODES = torch.zeros(3, 40, dtype=torch.uint8)


def test_levels_are_the_published_ones_to_the_last_bit() -> None:
    published = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    assert nf4_levels().tolist() == published


@pytest.mark.parametrize("format", list(TORCH))
def test_any_float32_in_range_gets_the_code_that_torch_gives_it(format: str) -> None:
    dtype, largest = TORCH[format]
    patterns = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(1))
    x = patterns.to(torch.int32).view(torch.float32)
    # Half of all bit patterns are far below the smallest number of the format; these are not.
    near = torch.exp2(torch.rand(200_000, generator=torch.Generator().manual_seed(2)) * 28 - 18)
    for values in (x[x.abs() <= largest], near[near <= largest]):
        assert torch.equal(encode_fp8(values, format), values.to(dtype).view(torch.uint8))


def test_codes_survive_a_second_time() -> None:
    x = torch.randn(48, 100, generator=torch.Generator().manual_seed(3))
    once = dequantize_nf4(quantize_nf4(x))
    assert torch.equal(dequantize_nf4(quantize_nf4(once)), once)
    once = dequantize_mxfp4(quantize_mxfp4(x))
    assert torch.equal(dequantize_mxfp4(quantize_mxfp4(once)), once)
    # In NVFP4 the largest value may have moved, and all scales with it. Half of FP4's last step bounds the error.
    once = dequantize_nvfp4(quantize_nvfp4(x))
    assert float((once - x).abs().max() / x.abs().max()) < 0.2
    for format in TORCH:
        once = decode_fp8(encode_fp8(x, format), format)
        assert torch.equal(decode_fp8(encode_fp8(once, format), format), once)


def absmax(blocks: int, size: int) -> QuantizedAbsmax:
    """Equal scales in 8 bits."""
    return QuantizedAbsmax(
        torch.zeros(blocks, dtype=torch.int8), torch.ones(-(-blocks // size)), torch.tensor(1.0), size
    )


def test_parts_that_fit_are_taken() -> None:
    assert Nf4Tensor(CODES, torch.ones(2), 64).block_size == 64
    assert isinstance(Nf4Tensor(CODES, absmax(2, 256), 64).absmax, QuantizedAbsmax)
    assert Fp8Tensor(CODES, torch.ones(2, 3), "e4m3", 2, 16).format == "e4m3"
    assert Mxfp4Tensor(CODES, torch.zeros(3, 2, dtype=torch.uint8)).codes is CODES
    assert Nvfp4Tensor(CODES, torch.zeros(3, 3, dtype=torch.uint8), torch.tensor(1.0)).codes is CODES


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Nf4Tensor(CODES + 16, torch.ones(2), 64), "codes must lie in 0 … 15"),
        (lambda: Nf4Tensor(CODES.int(), torch.ones(2), 64), "codes must be uint8"),
        (lambda: Nf4Tensor(CODES, torch.ones(3), 64), "absmax"),
        (lambda: Nf4Tensor(CODES, torch.ones(2).double(), 64), "absmax"),
        (lambda: Nf4Tensor(CODES, absmax(3, 256), 64), "absmax.codes"),
        (lambda: Nf4Tensor(CODES, torch.ones(2), 0), "block_size"),
        (lambda: QuantizedAbsmax(CODES[0], torch.ones(1), torch.tensor(1.0), 256), "codes"),
        (lambda: QuantizedAbsmax(CODES[0].to(torch.int8), torch.ones(2), torch.tensor(1.0), 256), "scale"),
        (lambda: QuantizedAbsmax(CODES[0].to(torch.int8), torch.zeros(1), torch.tensor(1.0), 256), "above 0"),
        (lambda: QuantizedAbsmax(CODES[0].to(torch.int8), torch.ones(1), torch.ones(1), 256), "mean"),
        (lambda: Fp8Tensor(CODES[0], torch.ones(1, 1), "e4m3", 3, 40), "uint8 matrix"),
        (lambda: Fp8Tensor(CODES, torch.ones(3), "e4m3", 1, 40), "scale"),
        (lambda: Fp8Tensor(CODES, torch.zeros(3, 1), "e4m3", 1, 40), "above 0"),
        (lambda: Fp8Tensor(CODES, torch.ones(3, 1), "e4m3", 0, 40), "block_rows"),
        (lambda: Fp8Tensor(CODES, torch.ones(3, 1), "e3m4", 1, 40), "format"),
        (lambda: Mxfp4Tensor(CODES, torch.zeros(3, 3, dtype=torch.uint8)), "scale_codes"),
        (lambda: Mxfp4Tensor(CODES + 16, torch.zeros(3, 2, dtype=torch.uint8)), "codes"),
        (lambda: Nvfp4Tensor(CODES, torch.zeros(3, 2, dtype=torch.uint8), torch.tensor(1.0)), "scale_codes"),
        (lambda: Nvfp4Tensor(CODES, torch.zeros(3, 3, dtype=torch.uint8), torch.tensor(0.0)), "tensor_scale"),
        (lambda: Nvfp4Tensor(CODES, torch.zeros(3, 3, dtype=torch.uint8), torch.ones(1)), "tensor_scale"),
    ],
)
def test_parts_that_do_not_fit_are_refused(make: object, names: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=names):
        make()
