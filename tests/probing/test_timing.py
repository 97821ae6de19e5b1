"""Times: what is counted, how many calls make a sample, and how a range turns over."""

from __future__ import annotations

import pytest

from labkit.probing.timing import Call, Effort, Spread, WallClock, time_of


class FakeClock:
    """Each call takes the next of the given times, the last of them for ever."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)
        self.counts: list[int] = []

    def seconds(self, call: Call, count: int) -> float:
        """As `Clock`."""
        self.counts.append(count)
        call()
        return count * (self.times.pop(0) if len(self.times) > 1 else self.times[0])


def test_a_spread_is_the_median_with_its_range() -> None:
    assert Spread.of([3.0, 1.0, 100.0]) == Spread(3.0, 1.0, 100.0, 3)
    assert Spread.of([1.0, 3.0]).median == 2.0


def test_a_rate_is_highest_where_the_time_was_least() -> None:
    assert Spread(2.0, 1.0, 4.0, 5).rate(8.0) == Spread(4.0, 2.0, 8.0, 5)


def test_the_first_call_is_not_counted_and_one_slow_repeat_does_not_move_the_median() -> None:
    clock = FakeClock(50.0, 1.0, 1.0, 9.0, 1.2)
    spread = time_of(lambda: None, clock, Effort(seconds=100.0, repeats=5, sample_seconds=0.1))
    assert spread == Spread(1.2, 1.0, 9.0, 5)


def test_short_calls_are_timed_together_and_long_ones_only_as_often_as_there_is_time() -> None:
    clock = FakeClock(1e-5)
    spread = time_of(lambda: None, clock, Effort(seconds=1.0, repeats=7, sample_seconds=1e-3))
    assert clock.counts == [1, 1, *[100] * 7] and spread.median == pytest.approx(1e-5)
    clock = FakeClock(10.0)
    assert time_of(lambda: None, clock, Effort(seconds=1.0, repeats=7, fewest=3)).repeats == 3
    clock = FakeClock(0.2)
    assert time_of(lambda: None, clock, Effort(seconds=1.0, repeats=7, fewest=3)).repeats == 5


def test_the_wall_clock_counts_every_call() -> None:
    calls = []
    seconds = WallClock("cpu").seconds(lambda: calls.append(1), 5)
    assert len(calls) == 5 and seconds > 0
