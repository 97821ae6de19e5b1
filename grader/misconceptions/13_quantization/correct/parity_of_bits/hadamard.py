"""Other matrices of the same orders: signs from the parity of bits, squares by Euler's criterion, P ⊗ S."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard_matrix(order: int) -> Tensor:
    """The Kronecker product the other way round."""
    power, base = _factors(order)
    return torch.kron(_small(base), _walsh(power)).double()


def hadamard_transform(values: Tensor) -> Tensor:
    """By halves, recursively."""
    if values.ndim == 0 or not values.is_floating_point() or not values.isfinite().all():
        raise ValueError(f"values must be finite floats along an axis, got {values.dtype} of shape {values.shape}")
    power, base = _factors(values.shape[-1])
    dtype = values.dtype if values.dtype == torch.float64 else torch.float32
    table = values.to(dtype).reshape(*values.shape[:-1], base, power)
    table = torch.einsum("...ij,ik->...kj", table, _small(base).to(dtype))
    return (_halves(table).reshape(values.shape) * values.shape[-1] ** -0.5).to(values.dtype)


def random_rotation(order: int, seed: int) -> Tensor:
    """Signs from numbers in [0, 1)."""
    draws = torch.rand(order, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.diag(torch.where(draws < 0.5, 1.0, -1.0).double()) @ hadamard_matrix(order) * order**-0.5


def _halves(table: Tensor) -> Tensor:
    if table.shape[-1] == 1:
        return table
    first, second = table.chunk(2, -1)
    return torch.cat((_halves(first + second), _halves(first - second)), -1)


def _factors(order: int) -> tuple[int, int]:
    if type(order) is not int or order < 1:
        raise ValueError(f"order must be a whole number above 0, got {order!r}")
    power = order & -order
    while power:
        if _construction(order // power):
            return power, order // power
        power //= 2
    raise ValueError(f"found no Hadamard matrix of order {order}")


def _construction(order: int) -> int:
    """0 if there is none; else which."""
    if order == 1:
        return 1
    for which, q, remainder in ((2, order - 1, 3), (3, order // 2 - 1, 1)):
        if order % 4 == 0 and q > 2 and q % 4 == remainder and all(q % d for d in range(2, q) if d * d <= q):
            return which
    return 0


def _walsh(order: int) -> Tensor:
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(order)] for i in range(order)])


def _small(order: int) -> Tensor:
    which = _construction(order)
    if which == 1:
        return torch.ones(1, 1)
    q = order - 1 if which == 2 else order // 2 - 1
    core = [[_symbol(j - i, q) for j in range(q)] for i in range(q)]
    if which == 2:
        rows = [[1] * order] + [[1, *row] for row in core]
        for i in range(1, order):
            rows[i][i] = -1
        return torch.tensor(rows, dtype=torch.float32)
    rows = [[0] + [1] * q] + [[1, *row] for row in core]
    blocks = {0: [[1, -1], [-1, -1]], 1: [[1, 1], [1, -1]], -1: [[-1, -1], [-1, 1]]}
    return torch.cat([torch.cat([torch.tensor(blocks[entry]) for entry in row], 1) for row in rows]).float()


def _symbol(a: int, q: int) -> int:
    power = pow(a, (q - 1) // 2, q)
    return power - q if power == q - 1 else power
