"""The judge's quantizer against torch's own, and what its check lets through."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from grader.judge.quantization_reference import (
    awkward_matrix,
    check_quantized_matrix,
    code_limits,
    reference_dequantize,
    reference_quantize,
)
from labkit.quantized import QuantizedTensor


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_those_of_torch(bits: int, symmetric: bool) -> None:
    x = awkward_matrix(7, 21, bits)
    low, high = code_limits(bits, symmetric)
    for granularity, size in (("channel", None), ("group", 7), ("group", 8)):
        q = reference_quantize(x, bits, symmetric=symmetric, granularity=granularity, group_size=size)
        for index, part in enumerate(x.split(q.group_size, dim=1)):
            zeros = torch.zeros(len(x), dtype=torch.int32) if q.zero_point is None else q.zero_point[:, index].int()
            right = torch.fake_quantize_per_channel_affine(part, q.scale[:, index], zeros, 0, low, high)
            got = reference_dequantize(q)[:, index * q.group_size : index * q.group_size + part.shape[1]]
            assert float((got - right).abs().max()) <= 1e-5 * float(x.abs().max())


def test_per_tensor_and_per_column_share_what_they_say() -> None:
    x = awkward_matrix(6, 5, 1, torch.float64)
    whole = reference_quantize(x, 4, granularity="tensor")
    assert whole.scale.shape == (1, 1) and whole.group_size == 5
    assert float(whole.scale) == pytest.approx(float(x.abs().max()) / 7)
    columns = reference_quantize(x, 4, granularity="input_channel")
    assert columns.scale.shape == (1, 5) and columns.group_size == 1
    torch.testing.assert_close(columns.scale[0].double(), x.abs().amax(0) / 7, rtol=1e-6, atol=0)


def changed(q: QuantizedTensor, **fields: object) -> QuantizedTensor:
    """The same but for some fields."""
    return dataclasses.replace(q, **fields)  # type: ignore[arg-type]


def test_the_check_accepts_the_reference_and_rejects_its_neighbours() -> None:
    x = awkward_matrix(7, 23, 3)
    for symmetric in (True, False):
        q = reference_quantize(x, 4, symmetric=symmetric, group_size=7)
        check_quantized_matrix("the reference", q, x, 4, symmetric=symmetric, group_size=7)

        def one_more(values: Tensor) -> Tensor:
            spoilt = values.clone()
            spoilt[0, 0] += 1 if spoilt[0, 0] < 7 else -1
            return spoilt

        wrong = [
            changed(q, codes=one_more(q.codes)),
            changed(q, codes=q.codes.short()),
            changed(q, codes=torch.zeros_like(q.codes)),
            changed(q, scale=q.scale * (1 + 1e-5)),
            changed(q, scale=q.scale.half()),
            changed(q, scale=q.scale[:, :1]),
            changed(q, scale=torch.where(q.scale == 1, torch.nan, q.scale)),
            changed(q, group_size=8),
            changed(q, bits=3),
        ]
        if q.zero_point is not None:
            wrong += [changed(q, zero_point=None), changed(q, zero_point=one_more(q.zero_point))]
        for bad in wrong:
            with pytest.raises(AssertionError):
                check_quantized_matrix("a neighbour", bad, x, 4, symmetric=symmetric, group_size=7)
