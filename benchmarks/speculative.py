"""What speculation is worth on this machine: measured, predicted by the formula, and by transformers' own loop.

Rounds alternate between all sides, so that they meet the same state of the machine; a speed-up is the ratio to plain
decoding of the same prompts in the same round and the same batch. The formula gets what was measured here: acceptance,
the cost c of a draft and the cost v(k) of a pass over k + 1 tokens of each text, both in plain steps of that batch.
Run: ``python -m benchmarks.speculative``; ``--help`` lists the sizes. The trained heads are the bundled model's; any
other target takes a draft model of its family:
``--model Qwen/Qwen2.5-1.5B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct``.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers

from benchmarks.reporting import bounds_line, load_line, spread
from labkit.checkpoints import CheckpointError, Model, load
from labkit.drafting import Draft, DraftTree, Round
from labkit.machine import facts
from labkit.trained_heads import load_head
from labkit.transformers_model import TransformersModel, build_transformers_model
from labkit.workloads import WORKLOADS, prompts
from solutions.speculative.batch_model import BatchModel
from solutions.speculative.batch_requests import RunRequest
from solutions.speculative.batched import speculate_batch
from solutions.speculative.loop import GREEDY
from solutions.speculative.measuring import acceptance_estimate, predicted_tokens_per_round, tokens_per_round
from solutions.speculative.model_drafter import ModelDrafter
from solutions.speculative.ngram import NgramDrafter
from solutions.speculative.trained_drafters import RUNS, TREES, TrainedDrafters

KINDS = tuple(kind for kind in RUNS if kind != "adaptive")
IN_COMPANY = ("n-gram", "draft model", "EAGLE-3")
"""Drafters of runs that are measured in batches, too; those of trees all are."""
ROOM = 16
"""For the drafts behind a text."""
CHARACTERS = 200
"""Of source or docstring in a prompt."""


@dataclass
class Series:
    """What one drafter did with one workload, one k and one batch size.

    Args:
        rounds: of all texts.
        speedups: of each batch, time per token of plain decoding by that of this.
        draft_seconds: spent in the drafter.
        step_seconds: of a plain step of the same batches.
        same: whether each text equals the plain one.
    """

    rounds: list[Round] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)
    draft_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    same: bool = True


@dataclass(frozen=True)
class Timed:
    """A batch of texts and what it took, behind the pass that read the prompts."""

    seconds_a_token: float
    texts: list[tuple[int, ...]]
    rounds: list[Round]
    draft_seconds: float
    step_seconds: float


class Clocked:
    """A drafter that notes how long it takes, but for its first call, which reads the prompt."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.calls: list[float] = []

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        start = time.perf_counter()
        draft: Draft = self._drafter.propose(tokens, max_drafts, uniforms)
        self.calls.append(time.perf_counter() - start)
        return draft

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float]) -> DraftTree:
        start = time.perf_counter()
        tree: DraftTree = self._drafter.propose_tree(tokens, max_depth, uniforms)
        self.calls.append(time.perf_counter() - start)
        return tree


class FamilyDrafters:
    """What drafts for a target without trained heads: n-grams, and a smaller model of its family.

    Args:
        small: that model, in transformers' implementation.
    """

    def __init__(self, small: Any) -> None:
        self._small = small

    def layers(self, kind: str) -> tuple[int, ...]:
        """The hidden states of the target that a drafter reads: none."""
        return ()

    def request(
        self, kind: str, model: BatchModel, index: int, prompt: Sequence[int], max_new_tokens: int, num_drafts: int = 4
    ) -> RunRequest:
        """A text of a batch, with a new drafter."""
        drafter = (
            NgramDrafter() if kind == "n-gram" else ModelDrafter(TransformersModel(self._small, model.capacity), GREEDY)
        )
        return RunRequest(tuple(prompt), max_new_tokens, drafter, num_drafts=num_drafts)


class ClockedModel(BatchModel):
    """A target that notes how long its passes take, and when they end."""

    def run(self, ids: Any, tokens: Any, drafts: Any, parents: Any) -> list[torch.Tensor]:
        self.passes: list[float] = getattr(self, "passes", [])
        self.ends: list[float] = getattr(self, "ends", [])
        start = time.perf_counter()
        answers = super().run(ids, tokens, drafts, parents)
        self.ends.append(time.perf_counter())
        self.passes.append(self.ends[-1] - start)
        return answers


class Bench:
    """The models, and ways to time texts.

    Args:
        model: the target.
        new_tokens: of each text.
        draft: a smaller model of its family; None takes the trained heads.
    """

    def __init__(self, model: Model, new_tokens: int, draft: Model | None = None) -> None:
        decoder = model.decoder
        self.decoder, self.tokenizer, self.new_tokens = decoder, model.tokenizer, new_tokens
        self.target = build_transformers_model(decoder.config, decoder.weights, decoder.dtype)
        self.drafters: TrainedDrafters | FamilyDrafters
        if draft is None:
            head = load_head("draft", decoder)
            small = {name: weight for name, weight in head.weights.items() if name.startswith("model.")}
            small["model.embed_tokens.weight"] = decoder.weights["model.embed_tokens.weight"]
            self.small = build_transformers_model(head.config, small, decoder.dtype)
            self.drafters = TrainedDrafters(decoder)
        else:
            self.small = build_transformers_model(draft.config, draft.decoder.weights, decoder.dtype)
            self.drafters = FamilyDrafters(self.small)
        for peer in (self.target, self.small):
            peer.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Drafters of runs that are there."""
        return KINDS if isinstance(self.drafters, TrainedDrafters) else ("n-gram", "draft model")

    def batch(self, those: list[list[int]], kind: str, k: int = 0) -> Timed:
        """Texts together; k = 0 is plain decoding, and means nothing to trees."""
        capacity = max(map(len, those)) + self.new_tokens + ROOM
        model = ClockedModel(self.decoder, len(those), capacity, self.drafters.layers(kind))
        requests = [
            self.drafters.request(kind, model, index, prompt, self.new_tokens, num_drafts=k)
            for index, prompt in enumerate(those)
        ]
        clocked: list[Any] = [Clocked(request.drafter) for request in requests]
        results = speculate_batch(
            [replace(request, drafter=drafter) for request, drafter in zip(requests, clocked, strict=True)],
            model,
            len(those),
        )
        seconds = time.perf_counter() - model.ends[0]
        counted = sum(len(result.tokens) - result.rounds[0].emitted for result in results)
        # Features come with the first pass, so that the heads read the prompt in the second call.
        drafting = sum(sum(sorted(drafter.calls)[:-1]) for drafter in clocked)
        rounds = [round_ for result in results for round_ in result.rounds]
        step = statistics.median(model.passes[1:]) if len(model.passes) > 1 else model.passes[0]
        return Timed(seconds / max(1, counted), [r.tokens for r in results], rounds, drafting, step)

    def theirs(self, prompt: list[int], **how: Any) -> tuple[float, tuple[int, ...]]:
        """Seconds, prompt included, and tokens of transformers' generate."""
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        out = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.new_tokens, do_sample=False, **how
        )
        return time.perf_counter() - start, tuple(out[0, len(prompt) :].tolist())

    def assistants(self, k: int) -> dict[str, dict[str, Any]]:
        """transformers' own drafters, by name, with the arguments that ask for them."""
        settings = self.small.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
        settings.assistant_confidence_threshold = 0.0
        return {
            f"prompt lookup, {k} tokens": {"prompt_lookup_num_tokens": k},
            f"our draft model, {k} tokens": {"assistant_model": self.small},
        }


def pass_costs(bench: Bench, prompt: list[int], size: int, most: int, repeats: int) -> list[float]:
    """v(k) for k from 0 to `most`: a pass over k + 1 tokens of each text of a batch, in passes over one; medians."""
    model = BatchModel(bench.decoder, size, len(prompt) + most + 1)
    ids = list(range(size))
    none: list[Any] = [()] * size
    model.run(ids, [prompt] * size, none, none)
    ratios: list[list[float]] = [[] for _ in range(most + 1)]
    for repeat in range(repeats + 1):
        seconds = []
        for k in range(most + 1):
            start = time.perf_counter()
            model.run(ids, [prompt[: k + 1]] * size, none, none)
            seconds.append(time.perf_counter() - start)
            for index in ids:
                model.truncate(index, len(prompt))
        if repeat:  # the first one warms up
            for k, taken in enumerate(seconds):
                ratios[k].append(taken / seconds[0])
    return [statistics.median(those) for those in ratios]


def measure(
    bench: Bench, those: list[list[int]], size: int, kinds: Sequence[str], ks: Sequence[int]
) -> dict[tuple[str, int], Series]:
    """Drafters and values of k on the prompts of one workload, in batches of a size."""
    series: dict[tuple[str, int], Series] = {}
    for start in range(0, len(those) - size + 1, size):
        batch = those[start : start + size]
        plain = bench.batch(batch, "n-gram", 0)
        for k in ks:
            for kind in kinds:
                timed = bench.batch(batch, kind, k)
                entry = series.setdefault((kind, k), Series())
                entry.rounds += timed.rounds
                entry.speedups.append(plain.seconds_a_token / timed.seconds_a_token)
                entry.draft_seconds += timed.draft_seconds
                entry.step_seconds.append(plain.step_seconds)
                entry.same = entry.same and timed.texts == plain.texts
    return series


def report(size: int, series: dict[tuple[str, int], Series], verify: list[float]) -> bool:
    """Print the rows of one workload and batch size; whether all texts were the plain ones."""
    for (kind, k), entry in series.items():
        judged = any(round_.drafted for round_ in entry.rounds)
        alpha = acceptance_estimate(entry.rounds) if judged else 0.0
        foreseen = predicted_tokens_per_round(entry.rounds) if judged else 1.0
        drafted = sum(round_.drafted for round_ in entry.rounds)
        cost = entry.draft_seconds / max(1, drafted) / statistics.median(entry.step_seconds)
        # Drafters take their turns, one text after another, while the pass is one for all.
        price = statistics.mean(r.drafted * cost * size + verify[r.drafted] for r in entry.rounds)
        print(
            f"  {kind:<12} {size:>5} {k:>3}  {alpha:>10.2f}  {tokens_per_round(entry.rounds):>14.2f}  {foreseen:>9.2f}"
            f"  {cost:>5.2f}  {spread(entry.speedups):<24}  {foreseen / price:>9.2f}"
        )
    return all(entry.same for entry in series.values())


def report_trees(bench: Bench, those: list[list[int]], size: int) -> bool:
    """Measure and print the drafters of trees in batches of a size; whether all texts were the plain ones."""
    same = True
    for (kind, _), entry in measure(bench, those, size, TREES, [0]).items():
        drafts = statistics.mean(round_.drafted for round_ in entry.rounds)
        cost = entry.draft_seconds / max(1, sum(round_.drafted for round_ in entry.rounds))
        print(
            f"  {kind:<12} {size:>5}  trees of {drafts:>5.1f}  {tokens_per_round(entry.rounds):>14.2f}  {'':>9}"
            f"  {cost / statistics.median(entry.step_seconds):>5.2f}  {spread(entry.speedups)}"
        )
        same = same and entry.same
    return same


def report_peer(bench: Bench, those: list[list[int]], k: int) -> None:
    """Measure and print transformers' assisted generation beside its own unaided one."""
    speedups: dict[str, list[float]] = {}
    same: dict[str, bool] = {}
    for prompt in those:
        unaided, text = bench.theirs(prompt)
        for name, how in bench.assistants(k).items():
            seconds, tokens = bench.theirs(prompt, **how)
            speedups.setdefault(name, []).append(unaided / seconds)
            same[name] = same.get(name, True) and tokens == text
    for name, ratios in speedups.items():
        print(f"  transformers, {name}: speed-up {spread(ratios)}{'' if same[name] else '; NOT the plain text'}")


@torch.inference_mode()
def main() -> None:
    """Measure, and print ratios with their spread, the machine and the versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8, help="prompts of each workload (default 8)")
    parser.add_argument("--alone", type=int, default=3, help="those of them that are run alone, too (default 3)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of each text (default 32)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4], help="values of k (default 1 2 4)")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8], help="batch sizes beside 1 (default 4 8)")
    parser.add_argument("--model", default="smollm2", help="the target: a folder, a .gguf file or a hub id")
    parser.add_argument("--draft", help="a smaller model of its family, in place of the trained heads")
    parser.add_argument("--repeats", type=int, default=5, help="passes timed for v(k) (default 5)")
    arguments = parser.parse_args()

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if arguments.model != "smollm2" and arguments.draft is None:
        parser.error("the trained heads are the bundled model's; give --draft, a smaller model of this one's family")
    try:
        draft = None if arguments.draft is None else load(arguments.draft)
        bench = Bench(load(arguments.model), arguments.new_tokens, draft)
    except (CheckpointError, ValueError) as error:
        parser.error(str(error))
    given = {name: prompts(name, bench.tokenizer, arguments.texts, CHARACTERS) for name in WORKLOADS}
    machine = facts()
    print(f"{machine.cpu}, {machine.logical_cores} cores, {torch.get_num_threads()} threads, Python {machine.python}")
    print(
        f"torch {machine.torch}, transformers {transformers.__version__}, float32, greedy, "
        f"{arguments.new_tokens} tokens a text"
    )
    print(bounds_line())
    print(load_line("at the start"))
    costs = {}
    for size in (1, *arguments.batches):
        costs[size] = pass_costs(bench, given["code"][0], size, max(arguments.drafts), arguments.repeats)
        shown = ", ".join(f"v({k}) = {costs[size][k]:.2f}" for k in sorted({*arguments.drafts}))
        print(f"a pass over k + 1 tokens of each text, in passes over one, batch of {size}: {shown}")
    all_same = True
    for workload, those in given.items():
        print(f"\n{workload}:")
        print(
            "  drafter      batch   k  acceptance  tokens a round  predicted      c  speed-up (range)         predicted"
        )
        alone = those[: arguments.alone]
        all_same = report(1, measure(bench, alone, 1, bench.kinds, arguments.drafts), costs[1]) and all_same
        for size in arguments.batches:
            kinds = [kind for kind in IN_COMPANY if kind in bench.kinds]
            company = measure(bench, those, size, kinds, sorted({min(arguments.drafts), max(arguments.drafts)}))
            all_same = report(size, company, costs[size]) and all_same
        if arguments.draft is None:
            all_same = report_trees(bench, alone, 1) and all_same
            for size in arguments.batches:
                all_same = report_trees(bench, those, size) and all_same
        report_peer(bench, alone, max(arguments.drafts))
    print(f"\nthe plain text on all of our sides: {'yes' if all_same else 'NO, but for near-ties it must be'}")
    print("speed-ups of transformers are with the prompt, ours without it")
    print(load_line("at the end"))
    print("on a GPU: *not verified here*" if machine.gpu is None else "GPU present, not used by this benchmark")


if __name__ == "__main__":
    main()
