"""A step-time model with numbers measured on some machine, whatever their cause."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from solutions.engine.step import Step

from .demand import Demand

KNEES = (2, 4, 8, 16, 32, 64, 128, 256)
SWEEPS = 5_000


@dataclass(frozen=True)
class FittedTime:
    """Seconds as a sum of parts, each in proportion to one of a step's demands.

        step ───── per token up to the knee ── per token beyond it ── per sequence ── per token read ── per pair

    Up to the knee a matrix product waits for its weights, beyond it for its arithmetic: the ridge of the roofline,
    found by measuring.

    Args:
        knee: tokens at which the linear layers' slope changes.
        step: seconds of any step.
        token: of each token up to the knee.
        further_token: of each beyond it.
        sequence: of each request.
        read: of each token whose keys and values are read.
        pair: of each query and key.

    Raises:
        ValueError: a number that is negative or not finite.
    """

    knee: int
    step: float
    token: float
    further_token: float
    sequence: float
    read: float
    pair: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}")

    def __call__(self, step: Step) -> float:
        return self.seconds(Demand.of(step))

    def seconds(self, demand: Demand) -> float:
        """The time of a step with this demand."""
        return float(np.dot(_features(demand, self.knee), [getattr(self, name) for name in _COEFFICIENTS]))

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read_file(cls, path: str | Path) -> FittedTime:
        """What `save` wrote.

        Raises:
            ValueError: it can't be read as one.
        """
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no step times ({error}); `calibrate --out {path}` writes some") from error


_COEFFICIENTS = ("step", "token", "further_token", "sequence", "read", "pair")


def fit(demands: Sequence[Demand], seconds: Sequence[float]) -> FittedTime:
    """The model whose relative errors have the least squares, with no part below zero.

    Args:
        demands: of the measured steps, at least 6 of them.
        seconds: that each took.

    Raises:
        ValueError: too few, or times that aren't positive.
    """
    if len(demands) != len(seconds) or len(demands) < len(_COEFFICIENTS):
        raise ValueError(
            f"{len(_COEFFICIENTS)} measured steps are needed at least, each with its demand; got {len(demands)} "
            f"demands and {len(seconds)} times"
        )
    if not all(math.isfinite(one) and one > 0 for one in seconds):
        raise ValueError("times of steps must be positive numbers")
    tried = [_fit_with(knee, demands, seconds) for knee in KNEES]
    return min(tried, key=lambda model: sum(error**2 for error in relative_errors(model, demands, seconds)))


def relative_errors(model: FittedTime, demands: Sequence[Demand], seconds: Sequence[float]) -> list[float]:
    """Predicted over measured, less 1, for each step."""
    return [model.seconds(demand) / measured - 1 for demand, measured in zip(demands, seconds, strict=True)]


def typical_error(model: FittedTime, demands: Sequence[Demand], seconds: Sequence[float]) -> float:
    """Median of the relative errors' sizes."""
    return statistics.median(abs(error) for error in relative_errors(model, demands, seconds))


def _features(demand: Demand, knee: int) -> list[float]:
    """In the order of the coefficients."""
    up_to = min(demand.tokens, knee)
    return [1.0, up_to, demand.tokens - up_to, demand.sequences, demand.read, demand.pairs]


def _fit_with(knee: int, demands: Sequence[Demand], seconds: Sequence[float]) -> FittedTime:
    """Least squares by coordinate descent: each coefficient in turn gets its best value that is not negative."""
    features = np.array([_features(demand, knee) for demand in demands]) / np.array(seconds)[:, None]
    scales = np.maximum(np.linalg.norm(features, axis=0), 1e-300)
    columns = features / scales
    gram, target = columns.T @ columns, columns.T @ np.ones(len(seconds))
    values = np.zeros(len(_COEFFICIENTS))
    for _ in range(SWEEPS):
        before = values.copy()
        for index in range(len(values)):
            if gram[index, index] > 0:
                rest = target[index] - gram[index] @ values + gram[index, index] * values[index]
                values[index] = max(0.0, rest / gram[index, index])
        if np.abs(values - before).max() <= 1e-10 * max(1.0, np.abs(values).max()):
            break
    return FittedTime(knee, *(float(value) for value in values / scales))
