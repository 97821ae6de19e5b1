"""What arrives when: streams of requests, drawn or read from a trace."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from labkit.checks import check_count
from solutions.engine.load import Arrival
from solutions.engine.sampling_params import SamplingParams

from .lengths import Lengths

VOCAB_SIZE = 32_000
"""No model here has a smaller one, so that the same workload can be served for real."""


@dataclass(frozen=True)
class TimedRequest(Arrival):
    """A request of a workload; what the engine's load runs take, and what they leave out.

    Args:
        kind: name of its stream, by which a report can be split.
        priority: smaller is more urgent.
    """

    kind: str = ""
    priority: int = 0


@dataclass(frozen=True)
class Stream:
    """Requests of one kind: a Poisson process with lengths and prefixes.

    Args:
        rate: arrivals per second.
        prompt: tokens of a prompt, its prefix included.
        output: tokens of an answer.
        kind: its name.
        prefix: tokens at the beginning of prompts that are shared, 0 for none; a shorter prompt is part of it.
        num_prefixes: how many different prefixes there are.
        skew: how much more popular the first of them are; prefix i has weight 1 / i ** skew.
        priority: of all its requests.
        start: seconds before the first can arrive.

    Raises:
        ValueError: a number that can't be.
    """

    rate: float
    prompt: Lengths
    output: Lengths
    kind: str = "chat"
    prefix: int = 0
    num_prefixes: int = 1
    skew: float = 0.0
    priority: int = 0
    start: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"rate must be positive, got {self.rate}")
        check_count("prefix", self.prefix, 0)
        check_count("num_prefixes", self.num_prefixes, 1)
        if not (self.skew >= 0 and self.start >= 0):
            raise ValueError(f"skew and start must be at least 0, got {self.skew} and {self.start}")

    def draw(self, seconds: float, seed: int) -> list[TimedRequest]:
        """What arrives within so many seconds, in order; the seed decides everything."""
        choose = random.Random(f"{self.kind} {seed}")
        prefixes = [_tokens(choose, self.prefix) for _ in range(self.num_prefixes)]
        weights = [1 / (i + 1) ** self.skew for i in range(self.num_prefixes)]
        requests, now = list[TimedRequest](), self.start + choose.expovariate(self.rate)
        while now < seconds:
            shared = choose.choices(prefixes, weights)[0]
            length = self.prompt.draw(choose)
            prompt = shared[:length] + _tokens(choose, length - self.prefix)
            requests.append(_request(now, prompt, self.output.draw(choose), choose, self.kind, self.priority))
            now += choose.expovariate(self.rate)
        return requests


def merge(*streams: Iterable[TimedRequest]) -> list[TimedRequest]:
    """Several streams as one workload, in the order of arrival."""
    return sorted((one for stream in streams for one in stream), key=lambda one: one.seconds)


def read_trace(path: str | Path, seed: int = 0) -> list[TimedRequest]:
    """A recorded workload: a JSON object on each line.

    Each has `seconds`, `input` and `output` (tokens), and may have `prefix` (a name), `prefix_tokens`, `kind` and
    `priority`. Prompts with the same prefix name begin alike; what else they hold is drawn.

    Raises:
        ValueError: a line that can't be read, named by its number; or no line at all.
    """
    choose = random.Random(seed)
    requests = list[TimedRequest]()
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            shared = min(int(entry.get("prefix_tokens", 0)), int(entry["input"]))
            prefix = _tokens(random.Random(f"prefix {entry.get('prefix')} {seed}"), shared)
            check_count("input", entry["input"], 1)
            prompt = prefix + _tokens(choose, entry["input"] - shared)
            request = _request(
                float(entry["seconds"]), prompt, int(entry["output"]), choose, str(entry.get("kind", "")),
                int(entry.get("priority", 0)),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: {type(error).__name__} {error}; a line is a JSON object such as "
                '{"seconds": 0.5, "input": 100, "output": 20}'
            ) from error
        requests.append(request)
    if not requests:
        raise ValueError(f"{path} holds no request")
    return merge(requests)


def _request(
    seconds: float, prompt: list[int], num_output: int, choose: random.Random, kind: str, priority: int
) -> TimedRequest:
    # The seed is what the answer will consist of, and must differ: else answers would be found in the prefix cache.
    params = SamplingParams(temperature=0.0, max_tokens=num_output, seed=choose.randrange(VOCAB_SIZE), ignore_eos=True)
    return TimedRequest(seconds, tuple(prompt), params, kind, priority)


def _tokens(choose: random.Random, count: int) -> list[int]:
    return choose.choices(range(VOCAB_SIZE), k=max(0, count))
