"""Training heads: a toy target teaches every kind of head, a broken run goes on as if nothing had been, and packing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from labkit.config import ModelConfig
from labkit.decoder import Attend, Decoder, full_attention
from labkit.specs import TinyLlama
from labkit.texts import documents
from labkit.trained_heads import load_head
from solutions.speculative import train
from solutions.speculative.eagle import eagle_features
from solutions.speculative.training import acceptance
from solutions.speculative.training.corpus import WRITING, Chunk, training_modules
from solutions.speculative.training.features import Features, feature_layers, make_features, read_features
from solutions.speculative.training.fitting import Fitting, Plan
from solutions.speculative.training.objectives import HEADS, objective
from solutions.speculative.training.rollout import rollout
from solutions.speculative.training.store import write_tensors
from solutions.speculative.training.texts import read_texts, texts_file
from solutions.speculative.training.vocabulary import draft_vocabulary
from solutions.speculative.training.writing import write

CONFIG = ModelConfig.tiny(
    hidden_size=64, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=97, intermediate_size=96
)


@pytest.fixture(scope="module")
def target() -> Decoder:
    """A model that nobody trained."""
    return TinyLlama(CONFIG, seed=3).build()


@pytest.fixture(scope="module")
def chunk() -> Chunk:
    """Prompts of uneven length."""
    chance = torch.Generator().manual_seed(5)
    rows = [torch.randint(0, 97, (2 + place % 5,), generator=chance).tolist() for place in range(40)]
    return Chunk("00-toy", WRITING, tuple(map(tuple, rows)))


@pytest.fixture(scope="module")
def cache(target: Decoder, chunk: Chunk, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts and features of the toy."""
    folder = tmp_path_factory.mktemp("training")
    texts = write(target, chunk.rows, 20, 0.8, (96,), seed=1)
    tensors = {
        "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "prompts": torch.tensor([len(row) for row in chunk.rows], dtype=torch.int32),
    }
    write_tensors(texts_file(folder, chunk), tensors, {})
    make_features(target, chunk, folder, False, lambda done, total: None)
    return folder


def whole(target: Decoder, tokens: list[int]) -> Tensor:
    """Logits of a text in one uncached pass."""
    return target(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0]


def test_greedy_texts_are_what_the_target_prefers(target: Decoder, chunk: Chunk) -> None:
    texts = write(target, chunk.rows, 20, 0.8, (96,), seed=1)
    for prompt, text in list(zip(chunk.rows, texts, strict=True))[::2]:
        assert tuple(text[: len(prompt)]) == prompt
        favourites = whole(target, text).argmax(-1).tolist()
        assert text[len(prompt) :] == favourites[len(prompt) - 1 : -1]
        assert len(prompt) < len(text) <= 20
    again = write(target, chunk.rows, 20, 0.8, (96,), seed=1)
    other = write(target, chunk.rows, 20, 0.8, (96,), seed=2)
    assert again == texts
    assert other[::2] == texts[::2]
    assert other[1::2] != texts[1::2]


def test_features_are_the_target_s_hidden_states(target: Decoder, chunk: Chunk, cache: Path) -> None:
    features = read_features(cache, [chunk])
    layers = feature_layers(8)
    assert layers == (2, 4, 5, 8)
    for tokens, hidden in list(zip(features.tokens, features.hidden, strict=True))[:3]:
        states = list(target.hidden_states(tokens[None], torch.arange(len(tokens)), full_attention))
        expected = torch.stack([states[layer][0] for layer in layers], 1)
        torch.testing.assert_close(hidden.float(), expected, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize("name", HEADS)
def test_every_head_learns_is_kept_and_works(
    name: str, target: Decoder, chunk: Chunk, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = read_features(cache, [chunk])
    # Few texts again and again, so that learning shows in seconds, be it by heart.
    some = Features(features.tokens[:17], features.hidden[:17])
    plan = Plan(steps=40, texts=4, judged=48, warm_up=5, learning_rate=3e-3, checkpoint_every=40)
    losses: list[float] = []

    def stage(title: str) -> object:
        return lambda done, total, word: losses.append(float(word.split()[1].rstrip(",")))

    sizes = train.Sizes(vocabulary=64, width=64, draws=2)
    fit = train.train_head(name, _Model(target), some, sizes, plan, tmp_path, tmp_path / "heads", stage)
    assert sum(losses[-10:]) < 0.97 * sum(losses[:10]), losses
    head = load_head(name, target, tmp_path / "heads")
    assert {*fit.weights, "embed_tokens.weight", "lm_head.weight"} == head.weights.keys()
    assert head.layers == {"draft": (), "eagle3": (2, 4, 5)}.get(name, (8,))
    assert head.card["steps"] == 40 and len(head.card["accuracy_by_rank"]) == len(fit.agreement[40])
    assert all(0 <= share <= 1 for places in head.card["accuracy_by_rank"] for share in places)
    monkeypatch.setattr(acceptance, "_passages", lambda model, kind, count: [[1, 2, 3, 4], [5, 6, 7]][:count])
    shares = acceptance.measured_acceptance(name, _Model(target), tmp_path / "heads", 2, 6)
    assert shares.keys() == {"prose", "code"}
    assert all(0 <= kind["acceptance"] <= 1 and len(kind["by_place"]) == 3 for kind in shares.values())


class _Model:
    """As much of a model as training wants."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.config = decoder.config


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_a_broken_run_goes_on_as_if_nothing_had_been(
    name: str, target: Decoder, chunk: Chunk, cache: Path, tmp_path: Path
) -> None:
    def run(folder: str, stop_after: int | None = None, seed: int = 0) -> dict[str, Tensor]:
        plan = Plan(steps=6, texts=3, judged=20, warm_up=2, checkpoint_every=2, seed=seed)
        features = read_features(cache, [chunk])
        goal = objective(name, target, 64, 2, 0)

        def interrupt(done: int, total: int, word: str) -> None:
            if done == stop_after:
                raise KeyboardInterrupt

        ids = draft_vocabulary(features.tokens, 97, 64)
        fitting = Fitting(goal, features, target, ids, plan, tmp_path / folder / "point.safetensors")
        return fitting.run(interrupt).weights

    straight = run("straight")
    with pytest.raises(KeyboardInterrupt):
        run("broken", stop_after=5)
    resumed, other = run("broken"), run("other", seed=1)
    for weight, tensor in straight.items():
        assert torch.equal(resumed[weight], tensor), weight
    assert any(not torch.equal(other[weight], tensor) for weight, tensor in straight.items())
    with pytest.raises(ValueError, match="another plan"):
        run("broken", seed=1)


def test_a_run_may_go_on_to_another_length(target: Decoder, chunk: Chunk, cache: Path, tmp_path: Path) -> None:
    features = read_features(cache, [chunk])
    goal, ids = objective("medusa", target, 64, 2, 0), draft_vocabulary(features.tokens, 97, 64)
    plans = []
    for steps in (2, 4, 4):
        plan = Plan(steps=steps, texts=3, judged=20, checkpoint_every=2)
        fitting = Fitting(goal, features, target, ids, plan, tmp_path / "point.safetensors")
        plans.append(fitting.run(lambda done, total, word: None).plans)
    assert plans == [[(0, 2)], [(0, 2), (2, 4)], [(0, 2), (2, 4)]]


def test_a_rollout_is_what_the_head_would_draft(target: Decoder) -> None:
    """Place by place against a head that is run anew for each draft, on real features and then on its own states."""
    chance = torch.Generator().manual_seed(6)
    goal = objective("eagle", target, 64, 3, 0)
    weights = {**goal.start, "embed_tokens.weight": target.weights["model.embed_tokens.weight"]}
    hidden = torch.randn(1, 7, 64, generator=chance)
    tokens = torch.randint(0, 97, (1, 7), generator=chance)

    def step(hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return eagle_features(goal.config, weights, hidden, tokens, positions, attend)

    given = rollout(step, hidden, tokens, 3)
    for row in range(7):
        for place in range(min(3, row + 1)):
            # The first draft is that of row - place; those behind it read what the head said before.
            states = hidden[:, : row - place + 1]
            for _ in range(place + 1):
                rows = states.shape[1]
                out = step(states, tokens[:, :rows], torch.arange(rows), full_attention)
                states = torch.cat([states, out[:, -1:]], 1)
            torch.testing.assert_close(given[place][0, row], out[0, -1], atol=1e-4, rtol=1e-4)


def test_the_draft_vocabulary_is_what_comes_up() -> None:
    texts = [torch.tensor([5, 5, 5, 2, 2]), torch.tensor([9, 2, 7])]
    assert draft_vocabulary(texts, 11, 3).tolist() == [2, 5, 7]
    assert draft_vocabulary(texts, 11, 11).tolist() == list(range(11))
    for size in (0, 12):
        with pytest.raises(ValueError, match="from 1 to the target's 11"):
            draft_vocabulary(texts, 11, size)


def test_nothing_of_a_workload_is_trained_on() -> None:
    modules = training_modules()
    assert modules
    assert not modules.keys() & {"textwrap.py", "shutil.py", "random.py", "statistics.py", "heapq.py", "functools.py"}
    assert not modules.keys() & documents("code", "evaluation").keys()


def test_what_cannot_be_trained_is_said_in_one_line(tmp_path: Path, chunk: Chunk) -> None:
    missing = CliRunner().invoke(train.app, ["eagle", "--model", str(tmp_path / "nothing.gguf")])
    assert missing.exit_code == 1 and "error: " in missing.output and "Traceback" not in missing.output
    unknown = CliRunner().invoke(train.app, ["oracle"])
    assert unknown.exit_code == 1 and "choose from eagle3, eagle, mtp, draft, medusa" in unknown.output
    with pytest.raises(ValueError, match="is missing"):
        read_texts(tmp_path, chunk)
    texts_file(tmp_path, chunk).parent.mkdir()
    texts_file(tmp_path, chunk).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="damaged"):
        read_texts(tmp_path, chunk)
    with pytest.raises(ValueError, match="at least 8 layers"):
        feature_layers(7)
