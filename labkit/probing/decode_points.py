"""Points under the roof: the weights of some layers, multiplied with few tokens and with many."""

from __future__ import annotations

from itertools import count

from labkit.probing.bounds import Point
from labkit.probing.precision import float32_products
from labkit.probing.products import product, random_matrix
from labkit.probing.timing import Clock, Effort, time_of

WIDTHS = {"cpu": 2048, "cuda": 8192}
"""Columns and rows of a matrix. On a fast card reading a small one takes less time than launching its product."""

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def measure_points(device: str, dtype: str, num_bytes: int, clock: Clock, effort: Effort) -> tuple[Point, ...]:
    """What a pass over so many bytes of weights reaches, for ever more tokens, until a pass takes too long.

    One pass reads all matrices once, one after the other, as a model does. Together they are larger than every cache.

    Args:
        device: `"cpu"` or `"cuda"`.
        dtype: of weights and activations, one of `labkit.probing.products.DTYPES` that this device has.
        num_bytes: of all matrices, at least.
        clock: by what.
        effort: how much of it.
    """
    weights, width = [], WIDTHS[device]
    for seed in count():
        weights.append(random_matrix(width, width, dtype, device, seed))
        if sum(weight.nbytes for weight in weights) >= num_bytes:
            break
    points = []
    with float32_products("tf32" if dtype == "tf32" else "ieee"):
        for tokens in TOKENS:
            inputs = random_matrix(tokens, width, dtype, device, seed=tokens)
            products = [product(inputs, weight, dtype) for weight in weights]
            flops, moved = sum(p.flops for p in products), sum(p.num_bytes for p in products)

            def run(calls: tuple = tuple(p.call for p in products)) -> None:
                for call in calls:
                    call()

            seconds = time_of(run, clock, effort)
            points.append(Point(tokens, flops / moved, seconds.rate(flops)))
            if 2 * seconds.median > effort.seconds:
                break
    return tuple(points)
