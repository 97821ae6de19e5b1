"""Small replicas, and the engine's tiny model."""

from __future__ import annotations

from typing import Any

import pytest

from solutions.engine.scheduler import SchedulerConfig
from solutions.simulate.replica import Replica, ReplicaConfig
from solutions.simulate.step_time import ConstantTime, StepTimeModel
from tests.engine.conftest import make_engine, tiny_model

__all__ = ["make_engine", "tiny_model"]


def make_replica(step_time: StepTimeModel | None = None, index: int = 0, **settings: Any) -> Replica:
    """A replica; settings of its scheduler and of itself in one, steps of a second if no other time is given."""
    limits = {key: settings.pop(key) for key in list(settings) if key in SchedulerConfig.__dataclass_fields__}
    return Replica(ReplicaConfig(SchedulerConfig(**limits), **settings), step_time or ConstantTime(1.0), index)


@pytest.fixture
def replica() -> Replica:
    """One at a time, a second each."""
    return make_replica(max_running=1, token_budget=1, prefix_cache="none")
