"""Beam search on the real model: texts and scores are those of transformers' `generate`."""

from __future__ import annotations

import pytest
import torch

from grader.judge.numerics import check_close
from labkit.checkpoints import load
from labkit.transformers_model import build_transformers_model
from labkit.workloads import WORKLOADS, prompts
from solutions.engine import Engine, EngineConfig
from solutions.engine.beam_search import BeamSearchParams
from solutions.engine.request import blocks_for
from solutions.engine.scheduler import SchedulerConfig
from tests.evidence.conftest import Length


@pytest.mark.parametrize(("length_penalty", "early_stopping"), [(1.0, False), (0.0, "never"), (2.0, True)])
def test_the_real_models_beams_are_those_of_transformers(
    length: Length, length_penalty: float, early_stopping: bool | str
) -> None:
    model, width, most = load("smollm2"), 4, 24
    oracle = build_transformers_model(model.config, model.decoder.weights, torch.float32)
    each = 1 if length.prompts < 20 else 3
    texts = [prompt for workload in WORKLOADS for prompt in prompts(workload, model.tokenizer, each)]
    # So few blocks that beams are preempted: room for the longest text, and for where its beams differ.
    num_blocks = blocks_for(max(map(len, texts)) + most, 16) + width
    engine = Engine(model, EngineConfig(SchedulerConfig(max_running=12), num_blocks=num_blocks))
    params = BeamSearchParams(width, most, length_penalty, early_stopping, width)
    found = engine.beam_search(texts, params)
    engine.check_idle()
    stops = set(model.tokenizer.stop_ids)
    for prompt, answers in zip(texts, found, strict=True):
        expected = oracle.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), num_beams=width,
            max_new_tokens=most, do_sample=False, length_penalty=length_penalty, early_stopping=early_stopping,
            num_return_sequences=width, eos_token_id=sorted(stops), pad_token_id=0, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
        for answer, sequence in zip(answers, expected.sequences[:, len(prompt) :].tolist(), strict=True):
            end = next((place for place, token in enumerate(sequence) if token in stops), len(sequence))
            assert answer.tokens == tuple(sequence[:end])
        scores = torch.tensor([answer.score for answer in answers])
        # A log-probability is known as well as a logit: to some 1e-6 of the largest, which is near 30.
        check_close("scores", scores, expected.sequences_scores.double(), scale=30.0 * most, dtype=torch.float32)
    assert engine.metrics.num_preemptions > 0
    print(f"{len(texts)} prompts, {width} beams, {engine.metrics.num_preemptions} preemptions")
