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
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from benchmarks.reporting import load_line, spread
from labkit.checkpoints import CheckpointError, Model, load
from labkit.drafting import Draft, Drafter, Round
from labkit.machine import facts
from labkit.trained_heads import load_head
from labkit.transformers_model import TransformersModel, build_transformers_model
from labkit.workloads import WORKLOADS, prompts
from solutions.speculative.batch_model import BatchModel
from solutions.speculative.batched import SpeculativeRequest, speculate_batch
from solutions.speculative.loop import GREEDY
from solutions.speculative.measuring import acceptance_estimate, predicted_tokens_per_round, tokens_per_round
from solutions.speculative.model_drafter import ModelDrafter
from solutions.speculative.ngram import NgramDrafter
from solutions.speculative.trained_drafters import RUNS, TREES, TrainedDrafters, generate

KINDS = tuple(kind for kind in RUNS if kind != "adaptive")
IN_COMPANY = ("n-gram", "draft model", "EAGLE-3")
"""Drafters that are measured in batches, too."""
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

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.calls: list[float] = []

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        start = time.perf_counter()
        draft = self._drafter.propose(tokens, max_drafts, uniforms)
        self.calls.append(time.perf_counter() - start)
        return draft


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

    def run_drafter(self, kind: str, source: Any, capacity: int) -> Drafter:
        """A drafter for one text."""
        return NgramDrafter() if kind == "n-gram" else ModelDrafter(TransformersModel(self._small, capacity), GREEDY)


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

    def batch(self, those: list[list[int]], kind: str, k: int) -> Timed:
        """Texts together by drafts of runs; k = 0 is plain decoding."""
        capacity = max(map(len, those)) + self.new_tokens + ROOM
        model = BatchModel(self.decoder, len(those), capacity, self.drafters.layers(kind))
        ends: list[float] = []
        passes: list[float] = []

        def run(ids: list[int], tokens: list[list[int]]) -> list[torch.Tensor]:
            start = time.perf_counter()
            answers = model.run(ids, tokens)
            ends.append(time.perf_counter())
            passes.append(ends[-1] - start)
            return answers

        clocked = [Clocked(self.drafters.run_drafter(kind, model.source(i), capacity)) for i in range(len(those))]
        requests = [
            SpeculativeRequest(tuple(prompt), self.new_tokens, drafter, num_drafts=k)
            for prompt, drafter in zip(those, clocked, strict=True)
        ]
        results = speculate_batch(requests, run, model.truncate, self.decoder.config.vocab_size, len(those))
        seconds = time.perf_counter() - ends[0]
        counted = sum(len(result.tokens) - result.rounds[0].emitted for result in results)
        # Features come with the first pass, so that the heads read the prompt in the second call.
        drafting = sum(sum(sorted(drafter.calls)[:-1]) for drafter in clocked)
        rounds = [round_ for result in results for round_ in result.rounds]
        step = statistics.median(passes[1:]) if len(passes) > 1 else passes[0]
        return Timed(seconds / max(1, counted), [r.tokens for r in results], rounds, drafting, step)

    def tree(self, prompt: list[int], kind: str) -> tuple[float, tuple[int, ...], list[Round]]:
        """Seconds per token, prompt included, of one text by trees; its tokens and rounds."""
        target, drafter = self._pair(kind, prompt)
        start = time.perf_counter()
        done = generate(kind, target, drafter, prompt, self.new_tokens)
        return (time.perf_counter() - start) / self.new_tokens, done.tokens, list(done.rounds)

    def plain_tree(self, prompt: list[int]) -> float:
        """The same without drafts."""
        target, drafter = self._pair("n-gram", prompt)
        start = time.perf_counter()
        generate("n-gram", target, drafter, prompt, self.new_tokens, num_drafts=0)
        return (time.perf_counter() - start) / self.new_tokens

    def _pair(self, kind: str, prompt: list[int]) -> tuple[Any, Any]:
        assert isinstance(self.drafters, TrainedDrafters), "trees grow from trained heads"
        return self.drafters.pair(kind, len(prompt) + self.new_tokens + ROOM)

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
    model.run(ids, [prompt] * size)
    ratios: list[list[float]] = [[] for _ in range(most + 1)]
    for repeat in range(repeats + 1):
        seconds = []
        for k in range(most + 1):
            start = time.perf_counter()
            model.run(ids, [prompt[: k + 1]] * size)
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
    """All drafters of runs and all k on the prompts of one workload, in batches of a size."""
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


def report_trees(bench: Bench, those: list[list[int]]) -> bool:
    """Measure and print the drafters of trees, alone; whether all texts were the plain ones."""
    same = True
    rows: dict[str, tuple[list[Round], list[float]]] = {kind: ([], []) for kind in TREES}
    for prompt in those:
        plain, text = bench.plain_tree(prompt), bench.batch([prompt], "n-gram", 0).texts[0]
        for kind, (rounds, speedups) in rows.items():
            seconds, tokens, more = bench.tree(prompt, kind)
            rounds += more
            speedups.append(plain / seconds)
            same = same and tokens == text
    for kind, (rounds, speedups) in rows.items():
        drafts = statistics.mean(round_.drafted for round_ in rounds)
        print(
            f"  {kind + ', trees of ' + format(drafts, '.0f'):<34}  {tokens_per_round(rounds):>14.2f}  "
            f"{'':>16}  {spread(speedups)}"
        )
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
            company = measure(bench, those, size, kinds, [min(arguments.drafts), max(arguments.drafts)])
            all_same = report(size, company, costs[size]) and all_same
        if arguments.draft is None:
            all_same = report_trees(bench, alone) and all_same
        report_peer(bench, alone, max(arguments.drafts))
    print(f"\nthe plain text on all of our sides: {'yes' if all_same else 'NO, but for near-ties it must be'}")
    print("speed-ups of transformers and of trees are with the prompt; those of runs without it")
    print(load_line("at the end"))
    print("on a GPU: *not verified here*" if machine.gpu is None else "GPU present, not used by this benchmark")


if __name__ == "__main__":
    main()
