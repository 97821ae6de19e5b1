"""The tolerance rule lets right results pass and nothing else."""

from __future__ import annotations

import pytest
import torch

from grader.judge.numerics import check_close, check_equal, error_bound
from grader.judge.reference import attention64, plain_attention

REFERENCE = torch.linspace(-2, 3, 24, dtype=torch.float64).reshape(2, 3, 4)


def judge(actual: object, **changes: object) -> None:
    """Judge something that should be REFERENCE in fp32."""
    settings = {"scale": 3.0, "dtype": torch.float32, **changes}
    check_close("it", actual, REFERENCE, **settings)  # type: ignore[arg-type]


def test_a_rounded_result_passes() -> None:
    judge(REFERENCE.float())
    judge(REFERENCE.float() + 20 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (None, "must be a tensor"),
        (REFERENCE, "dtype"),
        (REFERENCE.float()[:1], "shape"),
        (REFERENCE.float().unsqueeze(0), "shape"),
        (torch.empty(0), "shape"),
        (torch.zeros(2, 3, 4), "all zeros"),
        (torch.full((2, 3, 4), 0.5), "same value"),
        (REFERENCE.float() + 1e-4, "off by"),
        (REFERENCE.float() * 1.01, "off by"),
        (REFERENCE.float().where(REFERENCE > -2, torch.nan), "NaN at [0, 0, 0]"),
        (REFERENCE.float().where(REFERENCE > -2, torch.inf), "off by"),
    ],
)
def test_wrong_results_fail_with_their_reason(actual: object, words: str) -> None:
    with pytest.raises(AssertionError, match="it") as caught:
        judge(actual)
    assert words in str(caught.value)


def test_an_echo_of_an_input_fails_even_where_the_bound_is_loose() -> None:
    given = (REFERENCE + 1e-3).float()
    judge(given, scale=1e5)
    with pytest.raises(AssertionError, match="repeats one of the inputs"):
        judge(given, scale=1e5, inputs=(given,))


def test_zero_references_accept_zeros_and_nothing_else() -> None:
    zeros = torch.zeros(2, 2, dtype=torch.float64)
    check_close("it", zeros.float(), zeros, scale=1.0, dtype=torch.float32)
    with pytest.raises(AssertionError, match="off by"):
        check_close("it", zeros.float() + 1e-3, zeros, scale=1.0, dtype=torch.float32)


def test_the_bound_follows_the_dtype_and_a_plain_result() -> None:
    plain = (REFERENCE + 1e-3).float()
    without = error_bound(REFERENCE, None, 3.0, torch.float32)
    assert without == pytest.approx(24 * torch.finfo(torch.float32).eps)
    assert error_bound(REFERENCE, plain, 3.0, torch.float32) == pytest.approx(2e-3, rel=1e-2)
    assert error_bound(REFERENCE, plain / 0, 3.0, torch.float32) == without, "an overflow explains nothing"
    assert error_bound(REFERENCE, None, 3.0, torch.float16) == pytest.approx(24 * 2**-10)


def test_check_equal_names_the_first_difference() -> None:
    check_equal("it", torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]))
    with pytest.raises(AssertionError, match=r"\[1\]: got 5, right is 2"):
        check_equal("it", torch.tensor([1, 5, 4]), torch.tensor([1, 2, 3]))
    with pytest.raises(AssertionError, match="dtype"):
        check_equal("it", torch.tensor([1, 2, 3]).int(), torch.tensor([1, 2, 3]))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(4, 4), (1, 6), (3, 7), (5, 2), (3, 0)])
def test_both_references_of_attention_agree(num_queries: int, num_keys: int) -> None:
    # One has a mask and repeats heads, the other loops over rows without either: they share no mistake.
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, num_queries, 8, dtype=torch.float64, generator=generator)
    k, v = (torch.randn(2, 2, num_keys, 8, dtype=torch.float64, generator=generator) for _ in "kv")
    torch.testing.assert_close(attention64(q, k, v), plain_attention(q, k, v), atol=1e-13, rtol=0)


def test_attention_reference_equals_torch_on_whole_sequences() -> None:
    q, k, v = (torch.randn(1, 4, 9, 16, dtype=torch.float64) for _ in "qkv")
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention64(q, k, v), right, atol=1e-13, rtol=0)
