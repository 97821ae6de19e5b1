"""Machine facts are this machine's, and plain values."""

from __future__ import annotations

import dataclasses
import json

import psutil
import torch

from labkit import machine


def test_facts_describe_this_machine_and_are_plain_values() -> None:
    facts = machine.facts()
    assert facts.cpu and facts.logical_cores >= 1
    assert facts.memory_bytes == psutil.virtual_memory().total
    assert facts.torch == torch.__version__ and (facts.gpu is None) == (not torch.cuda.is_available())
    json.dumps(dataclasses.asdict(facts))
