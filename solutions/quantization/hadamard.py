"""Task 14: Hadamard matrices of many orders, and products with them without writing them down."""

from __future__ import annotations

# BEGIN SOLUTION
import math

# END SOLUTION
import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.quantization_checks import check_finite


def hadamard_matrix(order: int) -> Tensor:
    """A matrix H of 1 and −1 whose rows are orthogonal: H Hᵀ = order · I.

    Args:
        order: 2^k · m, where m is 1, or q + 1 for a prime q = 3, 7, 11, … (3 mod 4), or 2 (q + 1) for a prime
            q = 5, 13, 17, … (1 mod 4).

    Returns:
        `[order, order]` float64.

    Raises:
        ValueError: `order` is no int of at least 1, or of no such form. No matrix exists where it is neither 1 nor 2
            nor a multiple of 4.

    Source: Sylvester 1867; Paley 1933, constructions I and II. 576 = 16 · 36 with 36 = 2 (17 + 1).
    """
    check_count("order", order, 1)
    # BEGIN SOLUTION
    base = _base(order)
    return torch.kron(_sylvester(order // base), _paley(base))
    # END SOLUTION


def hadamard_transform(values: Tensor) -> Tensor:
    """Each row x as x H / √n, for H = `hadamard_matrix(n)`: a rotation, which leaves lengths as they are.

    The work of a row is n · (k + m) for n = 2^k · m, and no matrix larger than of order m is made.

    Args:
        values: `[..., n]` finite floats, n an order that `hadamard_matrix` knows.

    Returns:
        As `values`; fp16 and bf16 are computed in float32 and rounded once.

    Raises:
        ValueError: no floats, NaN or infinity, no axis at all, or an order that isn't known.

    Source: Ashkboos et al. 2024 (2404.00456), the online Hadamard transform.
    """
    check_finite("values", values)
    if values.ndim == 0:
        raise ValueError("values must have at least one axis, got a single number")
    check_count("the last axis of values", values.shape[-1], 1)
    # BEGIN SOLUTION
    order, dtype = values.shape[-1], torch.promote_types(values.dtype, torch.float32)
    base = _base(order)
    # H = S ⊗ P: with a row written as a matrix [2^k, m], x H is S · x · P.
    table = values.to(dtype).unflatten(-1, (order // base, base))
    if base > 1:
        table = table @ _paley(base).to(dtype)
    width = 1
    while width < order // base:
        pairs = table.unflatten(-2, (-1, 2, width))
        first, second = pairs.unbind(-3)
        table = torch.stack((first + second, first - second), -3).flatten(-4, -2)
        width *= 2
    return (table.flatten(-2) / math.sqrt(order)).to(values.dtype)
    # END SOLUTION


def random_rotation(order: int, seed: int) -> Tensor:
    """A random rotation that spreads every channel over all others: rows of H / √order with random signs.

    Without the signs, what lies along a row of H, such as values that are all alike, would end up in one channel.

    Args:
        order: as in `hadamard_matrix`.
        seed: an int; the same seed gives the same rotation.

    Returns:
        Q = diag(±1) H / √order, `[order, order]` float64; x Q is the rotated row x.

    Raises:
        ValueError: an order that `hadamard_matrix` refuses.

    Source: Ashkboos et al. 2024 (2404.00456), section 3; Halko et al. 2011.
    """
    check_count("order", order, 1)
    # BEGIN SOLUTION
    bits = torch.randint(0, 2, (order, 1), generator=torch.Generator().manual_seed(seed))
    return (1 - 2 * bits) * hadamard_matrix(order) / math.sqrt(order)
    # END SOLUTION


# BEGIN SOLUTION
def _base(order: int) -> int:
    """The smallest m with order = 2^k · m of which a matrix is known."""
    base = order
    while base % 2 == 0:
        base //= 2
    while base <= order:
        if base == 1 or _is_prime(base - 1, 3) or (base % 4 == 0 and _is_prime(base // 2 - 1, 1)):
            return base
        base *= 2
    raise ValueError(
        f"no Hadamard matrix of order {order} is known here; the order must be 2^k · m with m = 1, q + 1 (q prime, "
        "3 mod 4) or 2 (q + 1) (q prime, 1 mod 4), such as 12, 20, 28, 36"
    )


def _is_prime(number: int, remainder: int) -> bool:
    """Whether it is a prime that leaves this remainder when divided by 4."""
    return number > 2 and number % 4 == remainder and all(number % d for d in range(3, math.isqrt(number) + 1, 2))


def _sylvester(order: int) -> Tensor:
    """The matrix of an order 2^k, which is symmetric."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def _paley(order: int) -> Tensor:
    """The matrix of a base order, from the squares among the remainders of a prime."""
    one = torch.ones(1, 1, dtype=torch.float64)
    if order == 1:
        return one
    if _is_prime(order - 1, 3):
        return _conference(order - 1, -1.0) + torch.eye(order, dtype=torch.float64)
    first = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    second = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    half = order // 2
    return torch.kron(_conference(half - 1, 1.0), first) + torch.kron(torch.eye(half, dtype=torch.float64), second)


def _conference(prime: int, sign: float) -> Tensor:
    """C of order q + 1 with a zero diagonal, ±1 elsewhere and C Cᵀ = q I; Cᵀ = sign · C."""
    character = -torch.ones(prime, dtype=torch.float64)
    character[torch.arange(1, prime) ** 2 % prime] = 1
    character[0] = 0
    places = torch.arange(prime)
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[1:, 1:] = character[(places[:, None] - places) % prime]
    matrix[0, 1:], matrix[1:, 0] = 1, sign
    return matrix


# END SOLUTION
