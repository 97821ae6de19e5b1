"""Task 13: which columns of a weight count: the mean square of what they are multiplied by."""

from __future__ import annotations

from torch import Tensor

from labkit.checks import check_count
from labkit.quantization_checks import check_matrix


def update_importance(importance: Tensor | None, count: int, inputs: Tensor) -> tuple[Tensor, int]:
    """Take more calibration tokens into the mean square of each input of a linear layer.

    An error e_j in column j of the weight adds e_j · x_j to the output. If inputs don't correlate, the mean square of
    that output error is the sum of mean(x_j²) · e_j².

    Args:
        importance: the mean squares of the tokens so far, `[in]` float64; None before the first.
        count: number of tokens so far; 0 if and only if there is no importance yet.
        inputs: inputs of the layer, `[tokens, in]`, any float type, at least one token.

    Returns:
        The mean squares over all tokens, `[in]` float64, and their number. The tensors given stay as they are.

    Raises:
        ValueError: inputs that are no matrix of finite floats with at least one row, a count that doesn't belong to
            the importance, or importance of another width.

    Source: module section 4.2, the importance matrix of k-quants.
    """
    check_count("count", count, 0)
    check_matrix("inputs", inputs)
    if (importance is None) != (count == 0):
        raise ValueError(f"count must be 0 exactly if there is no importance yet, got count {count}")
    if importance is not None and importance.shape != inputs.shape[1:]:
        raise ValueError(f"importance has shape {list(importance.shape)}, inputs have {inputs.shape[1]} columns")
    # BEGIN SOLUTION
    total = count + inputs.shape[0]
    squares = inputs.double().square().sum(0)
    if importance is not None:
        squares += importance.double() * count
    return squares / total, total
    # END SOLUTION
