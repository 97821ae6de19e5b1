"""Long proofs: how long, and from which seed. `make evidence` runs them; EVIDENCE=quick gives a taste of each.

What a proof prints stands in the summary of the run, whether it has passed or not.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Length:
    """How much a proof does.

    Args:
        prompts: continued by the real model.
        new_tokens: for each prompt.
        distributions: random settings of the sampler.
        draws: for each of them.
        schedules: random schedules for each of the five owners of KV blocks.
        scored_tokens: of text that readers of quantized checkpoints score.
        soak_waves: of a hundred requests to the real model through the server.
    """

    prompts: int
    new_tokens: int
    distributions: int
    draws: int
    schedules: int
    scored_tokens: int
    soak_waves: int


LENGTHS = {
    "quick": Length(prompts=3, new_tokens=12, distributions=10, draws=4_000, schedules=200,
                    scored_tokens=300, soak_waves=1),
    "full": Length(prompts=50, new_tokens=48, distributions=300, draws=40_000, schedules=10_000,
                   scored_tokens=1_500, soak_waves=20),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what lies in this folder, so that `make test` leaves it out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.evidence)


@pytest.fixture(scope="session")
def length() -> Length:
    """The length that EVIDENCE asks for."""
    wanted = os.environ.get("EVIDENCE") or "full"
    if wanted not in LENGTHS:
        raise pytest.UsageError(f"EVIDENCE={wanted}: allowed are {', '.join(LENGTHS)}")
    return LENGTHS[wanted]


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> random.Random:
    """A generator with a seed of this run; EVIDENCE_SEED repeats an earlier one."""
    chosen = os.environ.get("EVIDENCE_SEED") or str(random.SystemRandom().getrandbits(32))
    print(f"to repeat this run, set EVIDENCE_SEED={chosen}")
    return random.Random(f"{chosen} {request.node.name}")
