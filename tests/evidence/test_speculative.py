"""Speculation changes no probability of a sampled text, for drafters of every kind, alone and in company."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from grader.judge.distributions import chi_square
from grader.judge.reference import filtered, softmax64
from labkit.client import LabClient, local_lab
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention
from labkit.drafting import Drafter, DraftTree, Speculation
from labkit.features import FeatureSource
from labkit.manifest import load_manifest
from labkit.sampling_params import SamplingParams
from labkit.specs import Markov, TinyLlama
from solutions.speculative.acceptance import draw
from solutions.speculative.adaptive import AdaptiveDrafter
from solutions.speculative.batch_model import BatchModel
from solutions.speculative.batch_requests import RunRequest, TreeRequest
from solutions.speculative.batched import speculate_batch
from solutions.speculative.dynamic_tree import DynamicTreeDrafter
from solutions.speculative.eagle import EagleHead
from solutions.speculative.eagle3 import Eagle3Head
from solutions.speculative.feature_drafter import FeatureDrafter
from solutions.speculative.feature_model import FeatureModel
from solutions.speculative.lookahead import LookaheadDrafter, LookaheadModel
from solutions.speculative.loop import speculate
from solutions.speculative.medusa import MedusaDrafter
from solutions.speculative.model_drafter import ModelDrafter
from solutions.speculative.mtp import MtpHead
from solutions.speculative.ngram import NgramDrafter
from solutions.speculative.training.objectives import objective
from solutions.speculative.tree import verify_tree
from solutions.speculative.tree_loop import speculate_tree
from solutions.speculative.tree_model import TreeModel
from solutions.speculative.verification import verify
from solutions.speculative.vocabulary_map import VocabularyMapDrafter
from tests.evidence.conftest import Length
from tests.solutions.markov_trees import Chain, MarkovBatch, MarkovText, Siblings

FALSE_ALARM_PER_RUN = 1e-6
VOCABULARY, PLACES = 5, 3
CHAIN_KINDS = (
    "n-gram", "model", "model with filters of its own", "model of another vocabulary", "adaptive", "drawn siblings"
)  # fmt: skip
TREES = ("Medusa", "EAGLE-2", "lookahead")
COMPANY = ("alone", "in one batch")
RUNNING = 64
"""Texts of a batch that run at a time."""
ROOM = 20
"""For a text of a decoder, and the drafts behind it."""
MANIFEST = load_manifest("14")


def random_chain(fresh: random.Random) -> Chain:
    """Probabilities of the token after each token."""
    return tuple(tuple(softmax64([fresh.gauss(0, 1.2) for _ in range(VOCABULARY)], 1.0)) for _ in range(VOCABULARY))


def random_params(fresh: random.Random) -> SamplingParams:
    """Settings of which each may be off."""
    return SamplingParams(
        temperature=fresh.choice([0.6, 1.0, 1.5]), top_k=fresh.choice([0, 3]), top_p=fresh.choice([1.0, 0.8]),
        min_p=fresh.choice([0.0, 0.1]),
    )  # fmt: skip


def exact_rows(chain: Sequence[Sequence[float]], params: SamplingParams) -> Tensor:
    """What is drawn after each token, `[vocab, vocab]`, by the definitions in Python floats."""
    logits = [[math.log(p) for p in row] for row in chain]
    rows = [softmax64(row, params.temperature) for row in logits]
    return torch.tensor([filtered(row, params.top_k, params.top_p, params.min_p) for row in rows], dtype=torch.float64)


def joint_law(rows: Tensor, last: int, places: int) -> Tensor:
    """Probabilities of the next tokens together, `[vocab ** places]`."""
    law = rows[last]
    for _ in range(places - 1):
        law = (law.reshape(-1, len(rows))[:, :, None] * rows).reshape(-1)
    return law


def joint_index(texts: Tensor, vocab: int) -> Tensor:
    """Each text `[runs, places]` as one number, in the order of `joint_law`."""
    powers = torch.tensor([vocab**i for i in reversed(range(texts.shape[1]))])
    return (texts * powers).sum(1)


@pytest.mark.parametrize("company", COMPANY)
@pytest.mark.parametrize("kind", CHAIN_KINDS)
def test_sampled_text_has_the_target_s_law(kind: str, company: str, length: Length, fresh: random.Random) -> None:
    settings, texts = max(2, length.distributions // 75), length.draws // 20
    alpha = FALSE_ALARM_PER_RUN / settings
    least = 1.0
    for _ in range(settings):
        target, small, params = random_chain(fresh), random_chain(fresh), random_params(fresh)
        own = SamplingParams() if kind == "model" else random_params(fresh)
        prompt = [fresh.randrange(VOCABULARY) for _ in range(10)]
        wishes = [
            Wish(_chain_drafter(kind, small, own), replace(params, seed=fresh.getrandbits(48))) for _ in range(texts)
        ]
        drawn = _texts_of_chain(target, prompt, wishes, company == "alone")
        law = joint_law(exact_rows(target, params), prompt[-1], PLACES)
        result = chi_square(joint_index(torch.tensor(drawn), VOCABULARY), law / law.sum())
        assert result.p_value >= alpha, f"{kind}, {company}, {params}, drafts by {own}: {result}, alpha {alpha:.1e}"
        least = min(least, result.p_value)
    print(f"{kind}, {company}: {settings} settings, {texts} texts each, least p-value {least:.1e}, alpha {alpha:.1e}")


@dataclass(frozen=True)
class Wish:
    """A text that somebody wants: who drafts, and how it is drawn."""

    drafter: Drafter | Siblings
    params: SamplingParams


def _chain_drafter(kind: str, small: Chain, own: SamplingParams) -> Drafter | Siblings:
    """A drafter for a Markov chain, of its own for each text."""
    if kind == "n-gram":
        return NgramDrafter()
    if kind == "drawn siblings":
        return Siblings(small)
    drafter = ModelDrafter(Markov(small, 40).build(), own)
    if kind == "model of another vocabulary":
        # Its token 1 is none of the target's, and it reads that one in place of the target's token 2.
        return VocabularyMapDrafter(drafter, (3, None, 0, 4, 1), VOCABULARY, unknown=1)
    if kind == "adaptive":
        return AdaptiveDrafter(drafter, lambda: (1.0, 1.1, 1.5), 0.05, decay=0.5, probe_every=2)
    return drafter


def _texts_of_chain(target: Chain, prompt: list[int], wishes: list[Wish], alone: bool) -> list[tuple[int, ...]]:
    """Three tokens for each wish, by one loop each or by one batch for all."""
    if alone:
        return [
            speculate_tree(cast(TreeModel, MarkovText(target, 40)), wish.drafter, prompt, PLACES, wish.params).tokens
            if isinstance(wish.drafter, Siblings)
            else speculate(Markov(target, 40).build(), wish.drafter, prompt, PLACES, wish.params, num_drafts=2).tokens
            for wish in wishes
        ]
    requests = [
        TreeRequest(tuple(prompt), PLACES, wish.drafter, wish.params, arrival=place // 50)
        if isinstance(wish.drafter, Siblings)
        else RunRequest(tuple(prompt), PLACES, wish.drafter, wish.params, num_drafts=2, arrival=place // 50)
        for place, wish in enumerate(wishes)
    ]
    return [result.tokens for result in speculate_batch(requests, MarkovBatch(target, 40), RUNNING)]


def toy_law(decoder: Decoder, prompt: list[int], params: SamplingParams) -> Tensor:
    """Probabilities of the next tokens of a decoder together, `[vocab ** places]`, by its whole passes."""
    law = torch.ones(1, dtype=torch.float64)
    for place in range(PLACES):
        texts = [[*prompt, *rest] for rest in itertools.product(range(VOCABULARY), repeat=place)]
        logits = decoder(torch.tensor(texts), torch.arange(len(texts[0])), full_attention)[:, -1]
        rows = [
            filtered(softmax64(row, params.temperature), params.top_k, params.top_p, params.min_p)
            for row in logits.double().tolist()
        ]
        law = (law[:, None] * torch.tensor(rows, dtype=torch.float64)).flatten()
    return law


class Toy:
    """A decoder of five tokens, and heads for it that nobody trained: right or wrong, they must not show.

    Args:
        seed: of all weights.
    """

    def __init__(self, seed: int) -> None:
        config = ModelConfig.tiny(vocab_size=VOCABULARY, num_layers=3)
        self.decoder = TinyLlama(config, seed, torch.float64).build()
        self._seed = seed

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """The hidden states that a drafter reads."""
        return (1, 2, 3) if kind == "EAGLE-3" else (3,)

    def drafter(self, kind: str, params: SamplingParams, source: FeatureSource) -> Any:
        """A drafter that reads a target; lookahead's reads none."""
        if kind == "lookahead":
            return LookaheadDrafter(2, 2, 2)
        if kind == "Medusa":
            return MedusaDrafter(source, self._weights("medusa"), [(0,), (1,), (0, 0)], VOCABULARY)
        if kind == "EAGLE-2":
            return DynamicTreeDrafter(source, self._head(EagleHead, "eagle"), 2, 2, 4)
        heads = {"EAGLE": (EagleHead, "eagle"), "EAGLE-3": (Eagle3Head, "eagle3"), "MTP": (MtpHead, "mtp")}
        return FeatureDrafter(source, self._head(*heads[kind]), params)

    def alone(self, kind: str, own: SamplingParams, prompt: list[int], params: SamplingParams) -> Speculation:
        """One text by the loop that belongs to a drafter."""
        target = FeatureModel(self.decoder, ROOM, self.layers_of(kind))
        drafter = self.drafter(kind, own, target)
        if kind == "lookahead":
            return speculate_tree(LookaheadModel(self.decoder, ROOM, drafter), drafter, prompt, PLACES, params)
        if kind in TREES:
            return speculate_tree(target, drafter, prompt, PLACES, params)
        return speculate(target, drafter, prompt, PLACES, params, num_drafts=2)

    def together(
        self, kind: str, own: SamplingParams, prompt: list[int], chosen: list[SamplingParams]
    ) -> list[Speculation]:
        """As many texts in one batch, which they join in groups."""
        model = BatchModel(self.decoder, len(chosen), ROOM, self.layers_of(kind))
        requests: list[RunRequest | TreeRequest] = []
        for place, params in enumerate(chosen):
            drafter = self.drafter(kind, own, model.source(place))
            if kind == "lookahead":
                model.let_observe(place, drafter)
            arrival = place // 50
            requests.append(
                TreeRequest(tuple(prompt), PLACES, drafter, params, arrival=arrival)
                if kind in TREES
                else RunRequest(tuple(prompt), PLACES, drafter, params, num_drafts=2, arrival=arrival)
            )
        return speculate_batch(requests, model, RUNNING)

    def _head(self, head: Any, name: str) -> Any:
        return head(self.decoder.config, self._weights(name))

    def _weights(self, name: str) -> dict[str, Tensor]:
        """Where training would start, moved at random, since Medusa's heads start as nothing."""
        chance = torch.Generator().manual_seed(self._seed)
        start = objective(name, self.decoder, 40, 2, self._seed).start
        moved = {key: w + 0.3 * torch.randn(w.shape, generator=chance, dtype=w.dtype) for key, w in start.items()}
        embeddings = self.decoder.weights["model.embed_tokens.weight"]
        whole = {**moved, "embed_tokens.weight": embeddings, "lm_head.weight": embeddings}
        return {key: weight.double() for key, weight in whole.items()}


@pytest.mark.parametrize("company", COMPANY)
@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE-3", "MTP", *TREES])
def test_sampled_text_of_a_decoder_has_its_law(kind: str, company: str, length: Length, fresh: random.Random) -> None:
    """Drafters that read the target's features, or its mind; a setting that keeps none of the drafts shows nothing."""
    settings, most, texts = 2, 12, length.draws // 60
    alpha = FALSE_ALARM_PER_RUN / most
    least, telling, tried = 1.0, 0, 0
    while telling < settings:
        tried += 1
        assert tried <= most, f"no draft was kept in {tried - 1 - telling} of {tried - 1} settings"
        toy, params, own = Toy(fresh.getrandbits(30)), random_params(fresh), random_params(fresh)
        prompt = [fresh.randrange(VOCABULARY) for _ in range(6)]
        chosen = [replace(params, seed=fresh.getrandbits(48)) for _ in range(texts)]
        if company == "alone":
            results = [toy.alone(kind, own, prompt, one) for one in chosen]
        else:
            results = toy.together(kind, own, prompt, chosen)
        law = toy_law(toy.decoder, prompt, params)
        drawn = torch.tensor([result.tokens for result in results])
        result = chi_square(joint_index(drawn, VOCABULARY), law / law.sum())
        assert result.p_value >= alpha, f"{kind}, {company}, {params}, drafts by {own}: {result}, alpha {alpha:.1e}"
        least = min(least, result.p_value)
        telling += any(round_.accepted for result in results for round_ in result.rounds)
    print(f"{kind}, {company}: {tried} settings, {texts} texts each, least p-value {least:.1e}, alpha {alpha:.1e}")


def test_sampled_trees_have_the_target_s_law(length: Length, fresh: random.Random) -> None:
    """Two siblings without replacement, the second of them with a child; judged for a filtered target."""
    settings, trees = max(2, length.distributions // 75), length.draws // 8
    alpha = FALSE_ALARM_PER_RUN / settings
    for _ in range(settings):
        target, small, params = random_chain(fresh), random_chain(fresh), random_params(fresh)
        rows, q = exact_rows(target, params), torch.tensor(small, dtype=torch.float64)
        generator = torch.Generator().manual_seed(fresh.getrandbits(32))
        numbers = torch.rand(trees, 4, 2, generator=generator, dtype=torch.float64)
        draws = torch.rand(trees, 4, generator=generator, dtype=torch.float64)
        texts = []
        for run in range(trees):
            first = int(draw(q[0], draws[run, 0]))
            rest = q[0].clone()
            rest[first] = 0
            rest /= rest.sum()
            second = int(draw(rest, draws[run, 1]))
            child = int(draw(q[second], draws[run, 2]))
            tree = DraftTree((first, second, child), (-1, -1, 1), torch.stack([q[0], rest, q[second]]))
            p = torch.stack([rows[0], rows[first], rows[second], rows[child]])
            path, token = verify_tree(p, tree, numbers[run])
            text = [*(tree.tokens[index] for index in path), token]
            if len(text) == 1:
                text.append(int(draw(rows[token], draws[run, 3])))
            texts.append(text[:2])
        law = joint_law(rows, 0, 2)
        result = chi_square(joint_index(torch.tensor(texts), VOCABULARY), law / law.sum())
        assert result.p_value >= alpha, f"{params}: {result}, alpha {alpha:.1e}"
    print(f"{settings} settings, {trees} trees each, alpha {alpha:.1e}")


def test_the_proof_has_power(fresh: random.Random) -> None:
    """A drafter that hands over its raw q though it drew with top-k must fail, and the same one with its true q pass.

    With 20,000 rounds the wrong one's p-value lies far below any alpha used here.
    """
    generator = torch.Generator().manual_seed(fresh.getrandbits(32))
    runs = 20_000
    p = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1], dtype=torch.float64)
    raw = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    true = torch.tensor(filtered(raw.tolist(), top_k=2), dtype=torch.float64)
    drafts = torch.multinomial(true, runs, replacement=True, generator=generator)[:, None]
    numbers = torch.rand(runs, 2, 2, generator=generator, dtype=torch.float64)
    p_values = [
        chi_square(verify(p.expand(runs, 2, -1), q.expand(runs, 1, -1), drafts, numbers)[0][:, 0], p).p_value
        for q in (raw, true)
    ]
    assert p_values[0] < 1e-12 and p_values[1] >= FALSE_ALARM_PER_RUN, p_values


BATCHED_TESTS = {
    "test_task1_rule": ("test_every_token_comes_out_as_often_as_the_target_wants", 8),
    "test_task2_verification": ("test_rounds_emit_the_target_s_joint_distribution", 2),
    "test_task4_losslessness": ("test_output_distribution_is_exactly_the_target", 8),
    "test_task8_tree": ("test_trees_emit_the_target_s_distribution", 1),
}
"""The lab's tests of many runs at once, each with its number of comparisons, and their false-alarm rate for each."""
ALARM_OF_EACH = 1e-6


@pytest.fixture
def reference() -> Iterator[LabClient]:
    """Lab 14 as its tests see it, on the reference."""
    with local_lab(MANIFEST, MANIFEST.solutions) as lab:
        yield lab


@pytest.mark.parametrize("name", BATCHED_TESTS)
def test_the_lab_s_batched_tests_do_not_flake(
    name: str, reference: LabClient, length: Length, fresh: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, comparisons = BATCHED_TESTS[name]
    runs = 200 if length.prompts >= 50 else 1
    test = getattr(_imported(MANIFEST.folder / "tests" / f"{name}.py"), function)
    alarms = []
    for _ in range(runs):
        offset = fresh.getrandbits(32)
        monkeypatch.setattr(torch, "Generator", _generators_from(offset))
        try:
            test(reference)
        except AssertionError as error:
            alarms.append(f"seeds + {offset}: {error}")
    expected = runs * comparisons * ALARM_OF_EACH
    print(f"{function}: {len(alarms)} false alarms in {runs} runs with fresh seeds; expected at most {expected:.1e}")
    assert not alarms, alarms[0]


def _imported(path: Path) -> ModuleType:
    """A lab's test file as a module."""
    spec = importlib.util.spec_from_file_location(f"evidence_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _generators_from(offset: int, base: Any = torch.Generator) -> type:
    """torch's generator with all seeds moved, so that a test's own fixed seeds become fresh ones."""

    class Moved(base):  # type: ignore[misc]
        def manual_seed(self, seed: int) -> torch.Generator:
            moved: torch.Generator = super().manual_seed(seed + offset)
            return moved

    return Moved


def test_alarms_come_as_often_as_the_limit_says(length: Length, fresh: random.Random) -> None:
    """At a rate of 1 in 50 the right rule is called wrong now and then, and no more often than that.

    Of 200 chi-square tests with alpha 0.02 four fail on average. More than 19 do with a probability of 5e-9.
    """
    repeats, alpha, runs = 200, 0.02, 5_000
    alarms = 0
    for _ in range(repeats):
        generator = torch.Generator().manual_seed(fresh.getrandbits(32))
        p, q = torch.rand(2, VOCABULARY, generator=generator, dtype=torch.float64) + 0.1
        p, q = p / p.sum(), q / q.sum()
        drafts = torch.multinomial(q, runs, replacement=True, generator=generator)[:, None]
        numbers = torch.rand(runs, 2, 2, generator=generator, dtype=torch.float64)
        tokens, _ = verify(p.expand(runs, 2, -1), q.expand(runs, 1, -1), drafts, numbers)
        alarms += chi_square(tokens[:, 0], p).p_value < alpha
    print(f"{alarms} alarms in {repeats} fresh runs of verify, {repeats * alpha:.0f} expected")
    assert alarms <= 19
