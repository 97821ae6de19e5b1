"""What the engine would run on a GPU, as far as it can be shown without one; nothing of it is verified on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from grader.judge.numerics import check_close
from labkit.config import ModelConfig
from labkit.decoder import random_weights
from labkit.launch import VARIABLE, triton_fault
from labkit.manifest import ROOT
from labkit.paths import cache_dir
from solutions.engine.compiled_step import compiled, compiler_fault
from solutions.engine.cuda_graphs import Again
from solutions.engine.model_runner import ModelRunner
from solutions.engine.models.llama import Llama
from solutions.engine.padded_decoding import PaddedDecoding
from tests.engine.decode_case import Memory, decode_step

NO_COMPILER = compiler_fault(torch.device("cpu"))


@pytest.mark.skipif(triton_fault() is not None, reason=f"not verified here: {triton_fault()}")
def test_the_engines_kernels_compile_for_the_other_cards() -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["TRITON_CACHE_DIR"] = str(cache_dir() / "triton")
    command = [sys.executable, "-m", "tests.engine.compile_kernels", "80", "90"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["capability"] for one in made} == {80, 90}
    assert all(one["fits"] for one in made), [one["text"] for one in made]


@pytest.mark.skipif(NO_COMPILER is not None, reason=f"not verified here: {NO_COMPILER}")
def test_steps_compiled_to_machine_code() -> None:
    torch._dynamo.reset()
    config = ModelConfig.tiny(num_layers=2)
    weights = random_weights(config, seed=5)
    model, exact = (Llama(config, weights, dtype, windows=[None, 7]) for dtype in (torch.float32, torch.float64))
    memory, true_memory = Memory(model), Memory(exact)
    decoding = PaddedDecoding(model, memory.pool, 8, 128, Again(), compile=partial(compiled, backend="inductor"))
    runner = ModelRunner(model, memory.pool, decoding=decoding)
    for seed, lengths in enumerate(([5], [9, 2], [30, 1, 1, 1, 1], [7] * 6)):
        step = decode_step(lengths, config.vocab_size, seed)
        want = true_memory.logits(ModelRunner(exact, true_memory.pool), step)
        plain = memory.logits(ModelRunner(model, memory.pool), step)
        got = memory.logits(runner, step)
        check_close("logits", got, want, plain=plain, scale=float(want.abs().max()), dtype=torch.float32)
