"""Loading for a thread that steps: what is made is given back, what fails is told, and no thread of torch stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from solutions.engine.async_engine import made_apart

COUNT = """
import os, time, torch
from solutions.engine.async_engine import made_apart

def compute():
    return torch.ones(1 << 20).mul(2).sum()

tasks = lambda: len(os.listdir("/proc/self/task"))
compute_here = {here}
before = tasks()
compute() if compute_here else made_apart(compute)
deadline = time.monotonic() + 10  # on a busy machine threads take a moment to end
while tasks() - before > compute_here and time.monotonic() < deadline:
    time.sleep(0.01)
print(tasks() - before)
"""


def test_it_gives_back_what_was_made() -> None:
    assert made_apart(lambda: [7]) == [7]


def test_it_tells_what_failed() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        made_apart(fail)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux's way")
@pytest.mark.parametrize("here", [True, False])
def test_no_thread_of_torch_stays(here: bool) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(here=here)], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == here, "in the thread that computes one more waits for the next product"
