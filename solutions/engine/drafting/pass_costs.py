"""What a pass costs by its tokens: from it an adaptive drafter sees whether the load leaves room for drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PassCosts:
    """Costs of passes, given beforehand, so that no clock decides how a text is drafted.

    Those given by default are of the bundled model in float32 on two cores: the products with matrices took 75, 128 and
    153 ms with 1, 4 and 32 tokens. The point at 512 was not measured: it takes 2.2 ms a token, by the arithmetic and
    the rate at which those cores multiply. Fewer bits or a GPU shift the bend; give your own.

    Args:
        points: pairs (tokens, cost), rising in tokens and never falling in cost; a line runs between two of them, and
            on behind the last. The first is a pass over one token, whose cost is the unit.

    Raises:
        ValueError: fewer than two points, or points that don't rise.
    """

    points: tuple[tuple[int, float], ...] = ((1, 1.0), (4, 1.7), (32, 2.0), (512, 15.0))

    def __post_init__(self) -> None:
        tokens, costs = [point[0] for point in self.points], [point[1] for point in self.points]
        if len(tokens) < 2 or tokens[0] != 1 or tokens != sorted(set(tokens)):
            raise ValueError(f"points must rise in tokens from 1 on, at least two of them, got {self.points}")
        if costs != sorted(costs) or not all(math.isfinite(cost) and cost > 0 for cost in costs):
            raise ValueError(f"costs must be finite, above 0 and never fall, got {self.points}")

    def of(self, num_tokens: int) -> float:
        """A pass over so many tokens."""
        index = next((i for i, (tokens, _) in enumerate(self.points) if tokens >= num_tokens), len(self.points) - 1)
        (low, low_cost), (high, high_cost) = self.points[max(index, 1) - 1 : max(index, 1) + 1]
        return low_cost + (high_cost - low_cost) * (num_tokens - low) / (high - low)

    def shares(self, num_requests: int, most: int) -> list[float]:
        """v(0), v(1), … v(most): one request's share of a pass in which all of them have so many drafts."""
        return [self.of(num_requests * (k + 1)) / num_requests for k in range(most + 1)]
