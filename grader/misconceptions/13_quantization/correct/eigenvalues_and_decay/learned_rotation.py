"""Gradients written out by hand, Cayley's transform by eigenvalues, and steps that shrink by a constant factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.rotation_checks import check_rotation


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, top: int) -> Tensor:
        scale = values.abs().max(-1, keepdim=True).values / top
        codes = torch.where(scale > 0, torch.round(values / scale), 0)
        ctx.save_for_backward(values, scale, codes)
        ctx.top = top
        return codes * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        values, scale, codes = ctx.saved_tensors
        gradient = gradients[0].clone()
        by_scale = (gradient * torch.where(scale > 0, codes - values / scale, 0)).sum(-1, keepdim=True) / ctx.top
        at = values.abs().argmax(-1, keepdim=True)
        return gradient.scatter_add(-1, at, by_scale * values.gather(-1, at).sign()), None


def fake_quantize(values: Tensor, bits: int) -> Tensor:
    """Through a function of its own."""
    _bits(bits)
    if not torch.is_floating_point(values) or not torch.isfinite(values).all():
        raise ValueError("values must be finite floats")
    if values.dtype != torch.float64:
        values = values.float()
    return _FakeQuantize.apply(values, 2 ** (bits - 1) - 1)


def rotation_loss(weights: Sequence[Tensor], inputs: Tensor, rotation: Tensor, bits: int) -> Tensor:
    """All layers as one."""
    _check(weights, inputs)
    _bits(bits)
    if tuple(rotation.shape) != (inputs.shape[1],) * 2 or not torch.isfinite(rotation).all():
        raise ValueError(f"rotation of shape {tuple(rotation.shape)} does not fit {inputs.shape[1]} columns")
    dtype = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    stacked, x, r = torch.cat([weight.to(dtype) for weight in weights]), inputs.to(dtype), rotation.to(dtype)
    right = x @ stacked.T
    if not right.any():
        raise ValueError("nothing comes out of these layers")
    difference = fake_quantize(x @ r, bits) @ fake_quantize(stacked @ r, bits).T - right
    return (difference.norm() / right.norm()) ** 2


def cayley_step(rotation: Tensor, gradient: Tensor, step_size: float) -> Tensor:
    """exp's rational cousin on the eigenvalues: (1 − iτλ/2) / (1 + iτλ/2)."""
    if rotation.ndim != 2 or rotation.shape != gradient.shape or not torch.isfinite(gradient).all():
        raise ValueError("gradient must be finite and of the rotation's shape")
    check_rotation("rotation", rotation, len(rotation))
    _size(step_size)
    r, g = rotation.double(), gradient.double()
    skew = g @ r.T - r @ g.T
    values, vectors = torch.linalg.eigh(-1j * skew.to(torch.complex128))
    turn = (1 - 0.5j * step_size * values) / (1 + 0.5j * step_size * values)
    return ((vectors * turn) @ vectors.mH @ r.to(torch.complex128)).real.to(rotation.dtype)


def learn_rotation(
    weights: Sequence[Tensor], inputs: Tensor, start: Tensor, bits: int = 4, steps: int = 100, step_size: float = 0.5
) -> Tensor:
    """Every place is weighed; steps shrink by a constant factor."""
    _check(weights, inputs)
    check_rotation("start", start, inputs.shape[1])
    _bits(bits)
    _size(step_size)
    if type(steps) is not int or steps < 0:
        raise ValueError(f"steps must be a whole number, got {steps!r}")
    places = [start.double()]
    for step in range(steps):
        free = places[-1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(rotation_loss(weights, inputs, free, bits), free)
        skew = gradient @ places[-1].T
        norm = float((skew - skew.T).norm()) or 1.0
        places.append(cayley_step(places[-1], gradient, step_size * 0.97**step * math.sqrt(2) / norm))
    return min(places, key=lambda place: float(rotation_loss(weights, inputs, place, bits)))


def _check(weights: Sequence[Tensor], inputs: Tensor) -> None:
    if inputs.ndim != 2 or not torch.isfinite(inputs).all():
        raise ValueError("inputs must be a finite matrix")
    if not len(weights):
        raise ValueError("weights are missing")
    for i, weight in enumerate(weights):
        if weight.shape[1:] != inputs.shape[1:] or not torch.isfinite(weight).all():
            raise ValueError(f"weights[{i}] of shape {tuple(weight.shape)} must be finite and {inputs.shape[1]} wide")
    if not any((inputs @ weight.T).any() for weight in weights):
        raise ValueError("nothing comes out of these layers")


def _bits(bits: int) -> None:
    if type(bits) is not int or bits not in range(2, 9):
        raise ValueError(f"bits must be 2 to 8, got {bits!r}")


def _size(step_size: float) -> None:
    if not (0 <= step_size < math.inf):
        raise ValueError(f"step_size must be at least 0 and finite, got {step_size!r}")
