"""The scheduler and its blocks, over thousands of random lives."""

from __future__ import annotations

from tests.engine.schedules import Facts, Schedule

NUM_SCHEDULES = 5000


def test_no_schedule_leaks_mixes_texts_or_stands_still() -> None:
    facts = Facts()
    for seed in range(NUM_SCHEDULES):
        facts.add(Schedule(seed).run())
    missing = [name for name, value in vars(facts).items() if value < 50]
    assert not missing, f"hardly anything of this happened: {missing}; {facts}"
