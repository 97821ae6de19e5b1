"""The packed form of a GGUF file is kept, and never outlives what it was made of."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_equal
from labkit.config import ModelConfig
from labkit.decoder import random_weights
from labkit.paths import cache_dir
from solutions.engine import Engine, EngineConfig, SamplingParams
from solutions.engine.weights import loading, packed_files, quantized
from solutions.engine.weights.packing import Packing
from tests.labkit.gguf_files import write_gguf

CONFIG = ModelConfig.tiny(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 4-bit blocks, and a cache with nothing in it."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    return made(tmp_path / "model.gguf", seed=1)


def made(path: Path, seed: int) -> Path:
    from gguf import GGMLQuantizationType

    write_gguf(path, CONFIG, random_weights(CONFIG, seed), kind=GGMLQuantizationType.Q4_1)
    return path


def entries() -> list[Path]:
    root = cache_dir() / "packed"
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def answers(path: Path, **settings: Any) -> list[Any]:
    engine = Engine(str(path), EngineConfig(weights="stored", num_blocks=32, **settings))
    prompts = [[7, 8, 9], list(range(20, 60))]
    return [(one.tokens, one.text, one.logprobs) for (one,) in engine.generate(prompts, PARAMS)]


def forbid_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise AssertionError(f"{path} was taken apart again")

    monkeypatch.setattr(quantized, "load_quantized", refuse)


def test_a_second_load_answers_the_same_from_the_cache(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = answers(gguf)
    assert len(entries()) == 1
    forbid_packing(monkeypatch)
    assert answers(gguf) == first
    with_copies, without = (answers(gguf, packing=Packing(64, dense_copies=kept)) for kept in (True, False))
    assert with_copies == without, "dense copies are no part of the packed form"


def test_every_number_is_that_of_a_fresh_load(gguf: Path) -> None:
    def numbers() -> dict[str, Tensor]:
        model: Any = loading.load(str(gguf), "stored").model
        found = {"head": model._head.packed.dequantized(), "embedding": model.embedding, "norm": model._norm}
        for index, layer in enumerate(model._layers):
            products = {"qkv": layer._attention._qkv, "out": layer._attention._out, "down": layer._feed_forward._down}
            found |= {f"{name} {index}": one.packed.dequantized() for name, one in products.items()}
        return found

    fresh, kept = numbers(), numbers()
    for name, tensor in fresh.items():
        check_equal(name, kept[name], tensor)


def test_packed_tensors_start_where_torch_wants_them(gguf: Path) -> None:
    """Its product of 8-bit weights with four tokens or more crashes on others."""
    answers(gguf)
    model: Any = loading.load(str(gguf), "stored").model
    products = [model._head, *(layer._attention._qkv for layer in model._layers)]
    starts = [tensor.data_ptr() % 64 for product in products for tensor in product.packed.tensors().values()]
    assert len(starts) == 8 and not any(starts)
    engine = Engine(str(gguf), EngineConfig(weights="stored", num_blocks=32))
    assert len(engine.generate([[5, one] for one in range(6)], PARAMS)) == 6


@pytest.mark.parametrize("what", ["file", "torch", "cpu", "head", "version"])
def test_a_change_of_what_it_depends_on_makes_it_anew(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before, packing = answers(gguf), Packing()
    (old,) = entries()
    if what == "file":
        made(gguf, seed=2)
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif what == "cpu":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9")
    elif what == "head":
        packing = Packing(head_bits=None)
    else:
        monkeypatch.setattr(packed_files, "_VERSION", packed_files._VERSION + 1)
    assert packed_files.entry_of(gguf, packing) != old
    after = answers(gguf, packing=packing)
    # The same file packed in another way makes room; another file's content may still be somewhere.
    kept = {packed_files.entry_of(gguf, packing)} | ({old} if what == "file" else set())
    assert set(entries()) == kept
    assert (after == before) == (what in ("torch", "cpu", "version"))


def test_layers_without_a_packed_product_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf: Path
) -> None:
    from gguf import GGMLQuantizationType

    write_gguf(gguf, CONFIG, random_weights(CONFIG, 1), kind=GGMLQuantizationType.Q5_1)
    assert answers(gguf) == answers(gguf)
    assert entries() == []


def test_a_damaged_entry_is_replaced(gguf: Path) -> None:
    first = answers(gguf)
    (entry,) = entries()
    weights = entry / packed_files._WEIGHTS
    whole = weights.read_bytes()
    (entry.parent / ".making-dead").mkdir()
    weights.write_bytes(whole[: len(whole) // 2])
    assert answers(gguf) == first
    assert weights.read_bytes() == whole, "the entry was made again"
    assert [path.name for path in entry.parent.iterdir() if path.is_dir()] == [entry.name], "nothing was left behind"


def test_a_cache_that_can_not_be_written_to_is_no_error(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert answers(gguf) == answers(gguf)


def test_several_processes_at_once_leave_one_whole_entry(gguf: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        results = pool.map(answers, [gguf] * 3)
    assert results[0] == results[1] == results[2] == answers(gguf)
    assert len(entries()) == 1
