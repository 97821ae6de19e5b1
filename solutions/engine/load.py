"""An engine under load: what its requests waited for, and how much of what it did was in time."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.checks import check_count

from .engine import Engine
from .metrics import Served
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class Arrival:
    """A request that comes at its own time, whether or not the engine has kept up (open loop).

    Args:
        seconds: after the start.
        prompt: token ids.
        params: what it asks for.
    """

    seconds: float
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class LoadReport:
    """What a load run showed.

    Args:
        served: all answered requests.
        seconds: from the first arrival to the last token.
    """

    served: tuple[Served, ...]
    seconds: float

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return sum(one.num_tokens for one in self.served) / self.seconds

    def goodput(self, ttft: float, tpot: float) -> float:
        """Output tokens per second of those requests alone that met both limits, in seconds."""
        good = [one for one in self.served if one.ttft <= ttft and one.tpot <= tpot]
        return sum(one.num_tokens for one in good) / self.seconds

    def percentile(self, name: str, share: float) -> float:
        """The value of `ttft`, `tpot` or `e2e` that this share of requests does not exceed."""
        values = sorted(getattr(one, name) for one in self.served)
        return float(values[max(0, math.ceil(share * len(values)) - 1)])

    def mean(self, name: str) -> float:
        """Mean of `ttft`, `tpot` or `e2e`."""
        return statistics.mean(getattr(one, name) for one in self.served)


def random_load(
    count: int, rate: float | None, num_input: int, num_output: int, shared: float, vocab_size: int, seed: int
) -> list[Arrival]:
    """Requests of random lengths.

    Args:
        count: how many.
        rate: arrivals per second of a Poisson process; None lets all come at once.
        num_input: mean length of prompts; lengths spread evenly from half to one and a half of it.
        num_output: mean length of answers, spread alike.
        shared: share of each prompt that is the same for all, 0 to 1.
        vocab_size: ids are drawn below it.
        seed: decides everything.

    Raises:
        ValueError: a value that can't be.
    """
    for name, value in (("count", count), ("num_input", num_input), ("num_output", num_output)):
        check_count(name, value, 1)
    if rate is not None and not rate > 0:
        raise ValueError(f"rate must be positive, got {rate}")
    if not 0 <= shared <= 1:
        raise ValueError(f"shared must lie between 0 and 1, got {shared}")
    choose = random.Random(seed)
    common = [choose.randrange(vocab_size) for _ in range(2 * num_input)]
    arrivals, now = [], 0.0
    for number in range(count):
        length = choose.randint(num_input - num_input // 2, num_input + num_input // 2)
        same = round(shared * length)
        prompt = common[:same] + [choose.randrange(vocab_size) for _ in range(length - same)]
        tokens = choose.randint(num_output - num_output // 2, num_output + num_output // 2)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, seed=number, ignore_eos=True)
        arrivals.append(Arrival(now, tuple(prompt), params))
        now += choose.expovariate(rate) if rate is not None else 0.0
    return arrivals


def run_load(engine: Engine, arrivals: Sequence[Arrival]) -> LoadReport:
    """Serves a load; time runs from each request's own arrival, not from when the engine took it in.

    Args:
        engine: with nothing to do.
        arrivals: in the order of their times.

    Raises:
        ValueError: no request, or one that the engine refuses.
    """
    if not arrivals:
        raise ValueError("a load needs at least one request")
    start = time.monotonic()
    waiting = list(reversed(arrivals))
    due: dict[str, float] = {}
    first: dict[str, float] = {}
    served: list[Served] = []
    while waiting or engine.has_work:
        now = time.monotonic() - start
        while waiting and waiting[-1].seconds <= now:
            one = waiting.pop()
            due[engine.add_request(one.prompt, one.params)] = one.seconds
        if not engine.has_work:
            time.sleep(max(0.0, waiting[-1].seconds - now))
            continue
        progress = engine.step()
        now = time.monotonic() - start
        for item in progress:
            first.setdefault(item.request_id, now)
            if item.completion is not None:
                name = item.request_id
                tokens = len(item.completion.tokens)
                served.append(Served(first[name] - due[name], now - due[name], max(1, tokens)))
    return LoadReport(tuple(served), time.monotonic() - start)
