"""Our GGUF blocks, read by the gguf package: what they decode to, how well they round, and what they refuse."""

from __future__ import annotations

import gguf
import pytest
import torch

from grader.judge.numerics import check_equal
from labkit.quantized import QuantizedTensor
from solutions.quantization.gguf_blocks import BLOCK_TYPES, decode_blocks, encode_blocks, encode_codes
from solutions.quantization.uniform import dequantize, quantize

KINDS = tuple(BLOCK_TYPES)


def matrix(seed: int = 0, rows: int = 7, columns: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator)


def read_by_gguf(data: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind]))


def awkward() -> torch.Tensor:
    """Blocks of zeros, of one sign, of one number, tiny, with one huge number, and negative alone."""
    values = matrix(1, rows=6, columns=64)
    values[0, :32] = 0
    values[1] = values[1].abs() + 1
    values[2] = -values[2].abs() - 1
    values[3, :32] = 0.25
    values[4] *= 1e-9
    values[5, 40] = 3000
    return values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [matrix(), awkward()], ids=["gaussian", "awkward"])
def test_the_gguf_package_dequantizes_our_bytes_to_our_own_values(kind: str, values: torch.Tensor) -> None:
    data = encode_blocks(values, kind)
    check_equal(kind, decode_blocks(data, kind), read_by_gguf(data, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_our_rounding_is_about_as_good_as_the_gguf_packages_own(kind: str) -> None:
    values = matrix(2, rows=64, columns=256)
    theirs = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind])
    ours = (decode_blocks(encode_blocks(values, kind), kind) - values).square().mean()
    reference = (read_by_gguf(torch.from_numpy(theirs), kind) - values).square().mean()
    assert ours <= 1.05 * reference, f"{kind}: mean squared error {ours:.3g}, the gguf package's {reference:.3g}"


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_come_back_as_zeros(kind: str) -> None:
    check_equal(kind, decode_blocks(encode_blocks(torch.zeros(3, 64), kind), kind), torch.zeros(3, 64))


@pytest.mark.parametrize(
    ("bits", "symmetric", "kind"),
    [(4, True, "Q4_0"), (5, True, "Q5_0"), (8, True, "Q8_0"), (4, False, "Q4_1"), (5, False, "Q5_1")],
)
def test_codes_of_another_method_are_kept_as_they_are(bits: int, symmetric: bool, kind: str) -> None:
    q = quantize(matrix(3), bits, symmetric=symmetric, group_size=32)
    halves = QuantizedTensor(q.codes, q.scale.half().float(), q.zero_point, bits, 32)
    found, data = encode_codes(halves)
    assert found == kind
    expected = dequantize(halves)
    if symmetric:
        check_equal(kind, read_by_gguf(data, kind), expected)
    else:
        # The minimum is rounded to float16, too: half a unit in its last place.
        bound = float(expected.abs().max()) * 2 * torch.finfo(torch.float16).eps
        assert float((read_by_gguf(data, kind) - expected).abs().max()) < bound


def test_codes_that_no_block_type_holds_are_refused() -> None:
    encode_codes(quantize(matrix(), 4, group_size=32))
    for bad in (
        quantize(matrix(), 3, group_size=32),
        quantize(matrix(), 4, group_size=48),
        quantize(matrix(), 8, symmetric=False, group_size=32),
    ):
        with pytest.raises(ValueError, match="blocks of 32 columns"):
            encode_codes(bad)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(kind: str) -> None:
    values = matrix()
    encode_blocks(values, kind)
    with pytest.raises(ValueError, match="32 columns"):
        encode_blocks(values[:, :40], kind)
    with pytest.raises(ValueError, match="values"):
        encode_blocks(values.clone().fill_(float("nan")), kind)
    with pytest.raises(ValueError, match="65504"):
        encode_blocks(values * 1e9, kind)
    with pytest.raises(ValueError, match="block type"):
        encode_blocks(values, "Q9_9")
