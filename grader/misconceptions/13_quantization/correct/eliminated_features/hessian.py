"""The Hessian token by token, and the inverse's factor from the eigenvectors and one QR decomposition."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def update_hessian(hessian: Tensor | None, count: int, inputs: Tensor) -> tuple[Tensor, int]:
    """Sums over all tokens, kept by undoing the division."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"count must be an int of at least 0, got {count!r}")
    if inputs.dim() < 2 or inputs.numel() == 0 or not inputs.is_floating_point():
        raise ValueError(f"inputs must be floating point [..., in] with tokens, got {list(inputs.shape)}")
    if not bool(inputs.isfinite().all()):
        raise ValueError("inputs must be finite")
    if (hessian is None) != (count == 0):
        raise ValueError(f"hessian and count do not belong together: count is {count}")
    width = inputs.shape[-1]
    if hessian is not None:
        _check(hessian, width)
    rows = inputs.reshape(-1, width)
    total = torch.zeros(width, width, dtype=torch.float64) if hessian is None else hessian.double() * count
    for row in rows.double():
        total = total + 2 * torch.outer(row, row)
    kept = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    return (total / (count + len(rows))).to(kept), count + len(rows)


def layer_loss(weight: Tensor, approximation: Tensor, hessian: Tensor) -> float:
    """Row by row."""
    if weight.dim() != 2 or weight.shape != approximation.shape:
        raise ValueError(f"weight and approximation must be [rows, in], got {weight.shape}, {approximation.shape}")
    for name, given in (("weight", weight), ("approximation", approximation)):
        if not bool(given.isfinite().all()):
            raise ValueError(f"{name} must be finite")
    _check(hessian, weight.shape[1])
    wide = hessian.double()
    return math.fsum(float(row @ wide @ row) / 2 for row in approximation.double() - weight.double())


def inverse_factor(hessian: Tensor, damping: float) -> tuple[Tensor, float] | None:
    """With H = V diag(λ) Vᵀ, H⁻¹ = AᵀA for A = diag(λ)^-½ Vᵀ, and the R of A's QR decomposition is U up to signs."""
    _check(hessian, None)
    if isinstance(damping, bool) or not isinstance(damping, (int, float)) or not 0 <= damping < math.inf:
        raise ValueError(f"damping must be finite and at least 0, got {damping!r}")
    wide = hessian.double().clone()
    sizes = [float(value) for value in wide.diagonal() if value > 0]
    if not sizes:
        return None
    mean = math.fsum(sizes) / len(sizes)
    dead = [i for i in range(len(wide)) if float(wide[i, i]) == 0]
    for share in (damping, 0.01, 0.1, 1.0):
        if share < damping:
            continue
        damped = wide + share * mean * torch.eye(len(wide), dtype=torch.float64)
        for i in dead:
            damped[i, i] = mean
        values, vectors = torch.linalg.eigh(damped)
        if float(values[0]) < 1e-7 * mean:
            continue
        upper = torch.linalg.qr(vectors.T / values.sqrt()[:, None]).R
        return (upper * upper.diagonal().sign()[:, None]).triu(), share
    return None


def _check(hessian: Tensor, width: int | None) -> None:
    if hessian.dim() != 2 or not hessian.is_floating_point() or not bool(hessian.isfinite().all()):
        raise ValueError(f"hessian must be a finite matrix, got {list(hessian.shape)}")
    side = hessian.shape[0] if width is None else width
    if tuple(hessian.shape) != (side, side):
        raise ValueError(f"hessian must be [{side}, {side}], got {list(hessian.shape)}")
    if not torch.allclose(hessian, hessian.T, rtol=1e-3, atol=1e-4 * float(hessian.abs().max())):
        raise ValueError("hessian must be symmetric")
    if bool((hessian.diagonal() < 0).any()):
        raise ValueError("hessian must not be negative on its diagonal")
