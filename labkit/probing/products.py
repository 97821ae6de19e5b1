"""How fast a device multiplies matrices, by dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.probing.precision import float32_products
from labkit.probing.timing import Call, Clock, Effort, Spread, time_of

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
_TORCH = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip
_SIDES = (128, 256, 512, 1024, 2048, 4096, 8192)
_LEAST_CAPABILITY = {"tf32": (8, 0), "fp8": (8, 9)}


class NoSuchProductError(Exception):
    """A device or a build of torch can't multiply in a dtype; the message says which and why."""


@dataclass(frozen=True)
class Product:
    """A product of matrices, ready to be run.

    Args:
        call: runs it.
        flops: of one call: a multiplication and an addition for each pair.
        num_bytes: of both factors and the result.
    """

    call: Call
    flops: int
    num_bytes: int


def measure_products(
    device: str, clock: Clock, effort: Effort, dtypes: tuple[str, ...] = DTYPES
) -> tuple[dict[str, Spread], dict[str, str]]:
    """FLOP per second (for int8, integer operations) of square products.

    The side grows as long as a product stays short, so that a dtype without units of its own costs no more time than
    one that has them. The fastest side counts.

    Returns:
        Rates by dtype, and for each dtype without one, why.
    """
    rates, missing = {}, {}
    for dtype in dtypes:
        try:
            rates[dtype] = _fastest(dtype, device, clock, effort)
        except NoSuchProductError as error:
            missing[dtype] = str(error)
    return rates, missing


def product(left: Tensor, right: Tensor, dtype: str) -> Product:
    """The product of two matrices in a dtype.

    Args:
        left: `[m, k]`, as `random_matrix` makes them for this dtype.
        right: `[n, k]`, likewise; it is multiplied transposed, as a layer's weight is.
        dtype: one of `DTYPES`.
    """
    (m, k), n = left.shape, right.shape[0]
    if dtype == "int8":
        call, itemsize = (lambda: torch._int_mm(left, right.T)), 4
    elif dtype == "fp8":
        one = torch.ones((), device=left.device)
        # Tensor cores reach their rate only if they add up in fewer bits; inference engines let them.
        fast = left.is_cuda

        def call() -> Tensor:
            return torch._scaled_mm(left, right.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        itemsize = 2
    else:
        out = torch.empty(m, n, dtype=left.dtype, device=left.device)
        call, itemsize = (lambda: torch.mm(left, right.T, out=out)), out.itemsize
    return Product(call, 2 * m * n * k, left.nbytes + right.nbytes + m * n * itemsize)


def random_matrix(rows: int, columns: int, dtype: str, device: str, seed: int) -> Tensor:
    """Random contents: a GPU that multiplies zeros draws less power and runs faster than it ever would."""
    generator = torch.Generator(device).manual_seed(seed)
    if dtype == "int8":
        return torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=device, generator=generator)
    return torch.randn(rows, columns, device=device, generator=generator).to(_TORCH[dtype])


def _fastest(dtype: str, device: str, clock: Clock, effort: Effort) -> Spread:
    _check(dtype, device)
    best: tuple[float, Product] | None = None
    with float32_products("tf32" if dtype == "tf32" else "ieee"):
        for side in _SIDES:
            try:
                left, right = (random_matrix(side, side, dtype, device, seed) for seed in (0, 1))
                candidate = product(left, right, dtype)
                clock.seconds(candidate.call, 1)
                seconds = clock.seconds(candidate.call, 1)
            except torch.cuda.OutOfMemoryError:
                break
            except (RuntimeError, TypeError) as error:  # what torch raises for a dtype that it can't multiply
                told = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise NoSuchProductError(f"torch has no such product for this device: {told[:120]}") from error
            if best is None or candidate.flops / seconds > best[0]:
                best = candidate.flops / seconds, candidate
            # The next side takes eight times as long, three times and more.
            if 8 * seconds > effort.seconds / effort.fewest:
                break
        if best is None:
            raise NoSuchProductError("too little memory is free even for a small product")
        return time_of(best[1].call, clock, effort).rate(best[1].flops)


def _check(dtype: str, device: str) -> None:
    """Refuses what torch would compute in another way than the name says."""
    if dtype == "tf32" and device == "cpu":
        raise NoSuchProductError("a mode of NVIDIA's tensor cores; a CPU has none")
    if device == "cuda" and dtype in _LEAST_CAPABILITY:
        needed, here = _LEAST_CAPABILITY[dtype], torch.cuda.get_device_capability()
        if here < needed:
            raise NoSuchProductError(
                f"needs compute capability {needed[0]}.{needed[1]}, this card has {here[0]}.{here[1]}"
            )
