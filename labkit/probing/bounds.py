"""What was measured of a machine, with what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.probing.timing import Spread

SCHEMA = 1
"""Of the JSON form; a record of another one is measured again."""


@dataclass(frozen=True)
class Point:
    """A measured pass over some weights.

    Args:
        tokens: of the pass.
        intensity: FLOP per byte that it moves.
        rate: FLOP per second that it reached.
    """

    tokens: int
    intensity: float
    rate: Spread


@dataclass(frozen=True)
class MachineBounds:
    """The bounds of a processor or a GPU.

    Args:
        device: `"cpu"` or `"cuda"`.
        name: of processor or card.
        threads: of the CPU that were used; 0 on a GPU.
        memory_bytes: all of its memory.
        free_bytes: what was free when it was measured.
        cache_bytes: its last-level cache, None if nobody tells.
        buffer_bytes: that bandwidth was measured on.
        bandwidth: bytes per second, of `"read"`, `"write"` and `"copy"`.
        products: FLOP per second of matrix products by dtype.
        launches: seconds for one operator, `"operator"` by itself and `"graph"` in a CUDA graph.
        points: passes over weights, of ever more tokens, in `point_dtype`.
        point_dtype: the dtype of the points.
        missing: what could not be measured, and why.
        quick: whether it was measured in a hurry.
        torch: its version.
    """

    device: str
    name: str
    threads: int
    memory_bytes: int
    free_bytes: int
    cache_bytes: int | None
    buffer_bytes: int
    bandwidth: Mapping[str, Spread]
    products: Mapping[str, Spread]
    launches: Mapping[str, Spread]
    points: tuple[Point, ...] = ()
    point_dtype: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)
    quick: bool = False
    torch: str = ""

    @property
    def read(self) -> float:
        """Bytes per second that are read at most, which bounds decoding.

        A bound is the best of the repeats: whatever was slower had company, and a bound that a median pass exceeds is
        none.
        """
        return self.bandwidth["read"].high

    def flops(self, dtype: str) -> float:
        """FLOP per second of matrix products at most, which bounds prefill.

        Raises:
            ValueError: a dtype that wasn't measured here; the message says why.
        """
        if dtype not in self.products:
            why = self.missing.get(dtype, "no such dtype is measured")
            known = ", ".join(self.products) or "none"
            raise ValueError(f"{self.name} has no rate for {dtype}: {why}; measured are {known}")
        return self.products[dtype].high

    def ridge(self, dtype: str) -> float:
        """FLOP per byte above which the arithmetic limits and below which the memory does."""
        return self.flops(dtype) / self.read

    def attainable(self, intensity: float, dtype: str) -> float:
        """FLOP per second under the roof, for work of so many FLOP per byte."""
        return min(self.flops(dtype), intensity * self.read)

    def line(self) -> str:
        """The bounds in one line, for the head of a notebook or a benchmark."""
        rates = ", ".join(f"{self.flops(dtype) / 1e9:,.0f} GFLOP/s in {dtype}" for dtype in self.products)
        return f"{self.name}: reads {self.read / 1e9:.1f} GB/s, multiplies {rates or 'at a rate nobody measured'}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, all numbers in base units, with the ridge points beside what they follow from."""
        ridges = {dtype: self.ridge(dtype) for dtype in self.products}
        return {"schema": SCHEMA, **dataclasses.asdict(self), "ridge": ridges}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> MachineBounds:
        """From what `to_json` gave.

        Raises:
            ValueError: it has another form.
        """
        if told.get("schema") != SCHEMA:
            raise ValueError(f"bounds of schema {SCHEMA} are wanted, got {told.get('schema')!r}; run: make measure")
        try:
            values = {part.name: told[part.name] for part in dataclasses.fields(cls)}
            for name in ("bandwidth", "products", "launches"):
                values[name] = {key: Spread(**spread) for key, spread in values[name].items()}
            values["points"] = tuple(Point(p["tokens"], p["intensity"], Spread(**p["rate"])) for p in values["points"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"these are no bounds of a machine: {error!r}; run: make measure") from error
        return cls(**values)
