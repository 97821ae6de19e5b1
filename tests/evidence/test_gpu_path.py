"""What the engine would run on a GPU, as far as it can be shown without one; nothing of it is verified on a GPU."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close
from labkit.config import ModelConfig
from labkit.decoder import random_weights
from labkit.launch import VARIABLE, triton_fault
from labkit.manifest import ROOT
from labkit.paths import cache_dir
from solutions.engine.graphs.compiled_step import compiled, compiler_fault
from solutions.engine.graphs.cuda_graphs import Again
from solutions.engine.graphs.padded_decoding import PaddedDecoding
from solutions.engine.memory.kv_pool import KVPool
from solutions.engine.model_runner import ModelRunner
from solutions.engine.models.llama import Llama
from tests.engine.decode_case import BLOCK_SIZE, Memory, decode_step

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


@pytest.mark.skipif(NO_COMPILER is not None or sys.platform != "linux", reason="needs a C++ compiler, and Linux")
def test_a_compiled_step_touches_no_more_of_the_pool_than_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes a write to a part for a change of the whole would copy the pool in every step."""
    torch._dynamo.reset()
    # torch finds programs by what they compute, whether what they write to shares memory or not.
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    config = ModelConfig.tiny(num_layers=2)
    model = Llama(config, random_weights(config, seed=5), torch.float32)
    pool = KVPool(model.kv_shape, 4096, BLOCK_SIZE, scratch=True)
    decoding = PaddedDecoding(model, pool, 8, 128, Again(), compile=partial(compiled, backend="inductor"))
    runner = ModelRunner(model, pool, decoding=decoding)
    step = decode_step([9, 2], config.vocab_size)
    runner.run(step)
    tensors = pool._planes[0].tensors
    for tensor in tensors:
        assert tensor.abs().sum() > 0
        _give_back(tensor)
    assert sum(map(_resident, tensors)) <= 8 * len(tensors)
    runner.run(step)
    assert len(tensors) <= sum(map(_resident, tensors)) <= 16 * len(tensors)
    assert sum(tensor.numel() * 4 // mmap.PAGESIZE for tensor in tensors) > 1000


def _pages(tensor: Tensor) -> tuple[ctypes.c_void_p, int]:
    """Address of a tensor's whole pages, and their bytes."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    return ctypes.c_void_p(first), end - first


def _give_back(tensor: Tensor) -> None:
    """Its memory reads as 0 from now on, and takes none until somebody writes to it."""
    address, size = _pages(tensor)
    assert ctypes.CDLL(None, use_errno=True).madvise(address, ctypes.c_size_t(size), mmap.MADV_DONTNEED) == 0


def _resident(tensor: Tensor) -> int:
    """How many of its pages take memory."""
    address, size = _pages(tensor)
    marks = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), marks) == 0
    return sum(mark & 1 for mark in marks)
