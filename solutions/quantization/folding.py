"""Task 5a: take a scale out of a layer's inputs and into its weights, without changing what the model computes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from labkit.quantization_checks import check_finite, check_matrix, check_scale


def fold_scales(
    producers: Sequence[Tensor], weights: Sequence[Tensor], scales: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Divide what makes a layer's inputs by a scale for each feature, and multiply the weights that read them by it.

    Between the two there may be nothing that is not linear in each feature: a norm before q, k and v or before gate
    and up; up_proj before down_proj (its half of a gated product is linear); v_proj before o_proj.

    Args:
        producers: every tensor that the features are made with: the weight of a norm `[in]`; the weight of a linear
            layer `[in, k]`, whose rows make the features; and the bias of either `[in]`, if it has one. At least one.
        weights: all matrices that read these features, each `[out, in]`. At least one.
        scales: positive, `[in]`.

    Returns:
        The producers divided and the weights multiplied, new tensors of the same shapes and dtypes, each computed in
        at least float32 and rounded once. In exact arithmetic the layers' outputs are what they were; with powers
        of two they are so bit for bit.

    Raises:
        ValueError: no producer or no weight, numbers that aren't finite, scales that aren't positive, or widths that
            differ: with grouped-query attention v_proj makes fewer features than o_proj reads, so v_proj can't take
            o_proj's scales.

    Source: Lin et al. 2023 (2306.00978), section 3.2; Xiao et al. 2022 (2211.10438), section 4.
    """
    _check(producers, weights, scales)
    # BEGIN SOLUTION
    wide = scales.double()
    # Row i of a linear layer makes feature i, so its scale stands at the first axis; in a reader it is the last.
    rows = [wide.reshape(-1, *[1] * (made.dim() - 1)) for made in producers]
    divided = tuple((made.double() / by).to(made.dtype) for made, by in zip(producers, rows, strict=True))
    return divided, tuple((weight.double() * wide).to(weight.dtype) for weight in weights)
    # END SOLUTION


def _check(producers: Sequence[Tensor], weights: Sequence[Tensor], scales: Tensor) -> None:
    """Refuse what does not belong together."""
    if isinstance(producers, Tensor) or isinstance(weights, Tensor) or not producers or not weights:
        raise ValueError("producers and weights must each be a sequence of at least one tensor, (weight,) for one")
    if scales.dim() != 1 or scales.numel() == 0:
        raise ValueError(f"scales must be [in], one a feature, got shape {list(scales.shape)}")
    check_scale("scales", scales)
    width = scales.shape[0]
    for index, weight in enumerate(weights):
        check_matrix(f"weights[{index}]", weight)
        if weight.shape[1] != width:
            raise ValueError(f"weights[{index}] reads {weight.shape[1]} features, but there are {width} scales")
    for index, made in enumerate(producers):
        check_finite(f"producers[{index}]", made)
        if made.dim() not in (1, 2):
            raise ValueError(f"producers[{index}] must be [in] or [in, k], got shape {list(made.shape)}")
        if made.shape[0] != width:
            raise ValueError(
                f"producers[{index}] makes {made.shape[0]} features, but the weights read {width}: these scales can't "
                "be folded into it. Is it v_proj of grouped-query attention, whose heads feed several heads of "
                "o_proj? Then leave o_proj without scales"
            )
