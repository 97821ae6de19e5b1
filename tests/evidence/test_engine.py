"""The engine: nothing leaks in any schedule, and on the real model a text never depends on how it was served."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from labkit.checkpoints import Model, load
from labkit.decoder import full_attention
from labkit.randomness import uniform
from labkit.workloads import WORKLOADS, prompts
from solutions.engine import Engine, EngineConfig, SamplingParams
from solutions.engine.drafting.speculation import DRAFTERS, SpeculationConfig
from solutions.engine.request import Request
from solutions.engine.sampler import Row, adjust_logits, distribution
from solutions.engine.scheduler import SchedulerConfig
from solutions.kv_cache.block_table import BlockTable
from solutions.kv_cache.blocks import BlockAllocator
from solutions.speculative.ngram import NgramDrafter
from tests.engine.schedules import Facts, Schedule
from tests.evidence.conftest import Length

SCHEDULES_FOR_EACH = 5
"""The engine's scheduler is one where lab 07 has five owners of blocks."""

MOST_TIES = 0.001
LOGIT_ERROR = 2e-3
"""Two paths of the model in float32 differ by far less; a preference below it is a tie."""

SETTINGS = [
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=11, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=50, seed=12, repetition_penalty=1.1, ignore_eos=True),
    SamplingParams(temperature=1.2, min_p=0.05, seed=13, presence_penalty=0.5, ignore_eos=True),
]

SERVED = {
    "all at once": {},
    "prompts in pieces": {"token_budget": 24, "max_running": 16},
    "preempted by recompute": {"num_blocks": 40, "prefix_cache": "none"},
    "preempted by swap": {"num_blocks": 40, "preemption": "swap", "num_host_blocks": 200, "prefix_cache": "none"},
    "radix cache, cached prompts": {"prefix_cache": "radix"},
    "speculative": {"speculation": SpeculationConfig(NgramDrafter)},
}


def test_no_schedule_leaks_mixes_texts_or_stands_still(length: Length, fresh: random.Random) -> None:
    facts = Facts()
    count = length.schedules * SCHEDULES_FOR_EACH
    for _ in range(count):
        facts.add(Schedule(fresh.getrandbits(40)).run())
    print(f"{count} schedules: {facts}")
    assert all(value > 0 for value in vars(facts).values())


@dataclass
class Ties:
    """Where two paths of one model may part."""

    model: Model
    count: int = 0
    tokens: int = 0

    def compare(self, prompt: list[int], params: SamplingParams, first: Any, second: Any, how: str) -> None:
        """Both texts are one, or part where the model itself is undecided."""
        self.tokens += len(first)
        if first == second:
            return
        place = next(i for i, (one, other) in enumerate(zip(first, second, strict=True)) if one != other)
        request = Request("0", tuple(prompt), params, BlockTable(BlockAllocator(1), 1))
        request.tokens += first[:place]
        ids = torch.tensor([request.tokens])
        with torch.no_grad():
            logits = self.model.decoder(ids, torch.arange(ids.shape[1]), full_attention)[0, -1:]
        row = [Row(0, request)]
        logits = adjust_logits(logits, row)
        if params.temperature == 0:
            gap = float((logits[0, first[place]] - logits[0, second[place]]).abs())
            assert gap < LOGIT_ERROR, f"{how}: token {place} differs, and the model prefers one of them by {gap:.3g}"
        else:
            cumulative = distribution(logits, row)[0].cumsum(0)
            edges = torch.stack([cumulative, torch.cat([torch.zeros(1), cumulative[:-1]])])
            near = float((edges - uniform(params.seed, place)).abs().min())
            assert near < LOGIT_ERROR, f"{how}: token {place} differs, and the draw is {near:.3g} from any edge"
        self.count += 1


@dataclass
class Served:
    """Prompts with their settings, and what becomes of them."""

    model: Model
    texts: list[list[int]]
    settings: list[SamplingParams]

    @classmethod
    def of(cls, length: Length, one_in: int) -> Served:
        """One in so many prompts, of all workloads alike."""
        model = load("smollm2")
        each = math.ceil(length.prompts / one_in / len(WORKLOADS))
        texts = [prompt for workload in WORKLOADS for prompt in prompts(workload, model.tokenizer, each)]
        settings = [replace(SETTINGS[i % len(SETTINGS)], max_tokens=length.new_tokens // 2) for i in range(len(texts))]
        return cls(model, texts, settings)

    def serve(self, wanted: list[int], **given: Any) -> list[tuple[int, ...]]:
        """The answers to some of them, together."""
        limits = {key: given.pop(key) for key in list(given) if key in SchedulerConfig.__dataclass_fields__}
        engine = Engine(self.model, EngineConfig(SchedulerConfig(**limits), **{"num_blocks": 512, **given}))
        for _ in range(2 if given.get("prefix_cache") == "radix" else 1):
            done = engine.generate([self.texts[i] for i in wanted], [self.settings[i] for i in wanted])
        engine.check_idle()
        if "num_blocks" in given and len(self.texts) > 4:
            assert engine.metrics.num_preemptions > 0
        if drafted := engine.metrics.num_drafted_tokens:
            print(f"{given['speculation']}: {engine.metrics.num_accepted_tokens} of {drafted} drafts kept")
        return [several[0].tokens for several in done]

    def compare(self, ways: Mapping[str, Mapping[str, Any]]) -> None:
        """Each prompt alone against all of them served in other ways."""
        alone = [self.serve([i], prefix_cache="none")[0] for i in range(len(self.texts))]
        ties = Ties(self.model)
        for how, given in ways.items():
            for i, text in enumerate(self.serve(list(range(len(self.texts))), **given)):
                ties.compare(self.texts[i], self.settings[i], alone[i], text, how)
        print(f"{ties.count} near-ties in {ties.tokens} tokens, {len(self.texts)} prompts served in {len(ways)} ways")
        assert ties.count <= max(1, MOST_TIES * ties.tokens)


def test_how_a_request_is_served_changes_no_token(length: Length) -> None:
    Served.of(length, one_in=3).compare(SERVED)


def test_no_drafter_of_lab_14_changes_a_token(length: Length) -> None:
    Served.of(length, one_in=5).compare({name: {"speculation": name} for name in DRAFTERS})
