"""What is taken for a rotation, and what is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from labkit.rotation_checks import check_rotation

TURN = torch.tensor([[0.6, -0.8], [0.8, 0.6]])


def test_rotations_and_reflections_pass_in_any_float_type() -> None:
    for matrix in (TURN, TURN.double(), TURN.T, TURN[:, [1, 0]], torch.eye(2)):
        check_rotation("r", matrix, 2)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (1.01 * TURN, r"r isn't orthogonal: .* by 0\.0201"),
        (torch.tensor([[1.0, 1.0], [0.0, 0.0]]), "r isn't orthogonal"),
        (torch.eye(3), r"r must be \[2, 2\], got \[3, 3\]"),
        (TURN * math.nan, "r must be finite"),
        (torch.eye(2, dtype=torch.int64), "r must be floating point"),
    ],
    ids=["stretch", "projection", "size", "nan", "integers"],
)
def test_other_matrices_are_refused_by_name(matrix: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_rotation("r", matrix, 2)
