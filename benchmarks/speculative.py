"""What speculation is worth on this machine: measured, predicted by the formula, and by transformers' own loop.

Rounds alternate between all sides, so that they meet the same state of the machine; a speed-up is the ratio to plain
decoding of the same prompt in the same round. The formula gets what was measured here: acceptance, the cost c of a
draft and the cost v(k) of a pass over k + 1 tokens, both in plain decode steps.
Run: ``python -m benchmarks.speculative``; ``--help`` lists the sizes.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers

from labkit.checkpoints import Model, load
from labkit.drafting import Drafter, Round
from labkit.early_exit import early_exit
from labkit.machine import facts
from labkit.transformers_model import TransformersModel, build_transformers_model
from labkit.workloads import WORKLOADS, prompts
from solutions.speculative.loop import GREEDY, speculate
from solutions.speculative.measuring import acceptance_estimate, predicted_tokens_per_round, tokens_per_round
from solutions.speculative.model_drafter import ModelDrafter
from solutions.speculative.ngram import NgramDrafter


@dataclass
class Series:
    """What one drafter did with one workload and one k.

    Args:
        rounds: of all texts.
        speedups: of each text, time per token of plain decoding by that of this.
        same: whether each text equals the plain one.
    """

    rounds: list[Round] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)
    same: bool = True


class Bench:
    """The models, and one way to time a text.

    Args:
        model: the target.
        layers: of the early-exit drafter.
        new_tokens: of each text.
    """

    def __init__(self, model: Model, layers: int, new_tokens: int) -> None:
        decoder, short = model.decoder, early_exit(model.decoder, layers)
        self.tokenizer, self.new_tokens = model.tokenizer, new_tokens
        self.target = build_transformers_model(decoder.config, decoder.weights, decoder.dtype)
        self.small = build_transformers_model(short.config, short.weights, short.dtype)
        for peer in (self.target, self.small):
            peer.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
        self.model_drafter_name = f"first {layers} layers"

    def drafters(self, prompt: list[int]) -> dict[str, Drafter]:
        """New drafters for one text."""
        small = TransformersModel(self.small, len(prompt) + self.new_tokens)
        return {"n-gram": NgramDrafter(), self.model_drafter_name: ModelDrafter(small, GREEDY)}

    def ours(self, prompt: list[int], drafter: Drafter, k: int) -> tuple[float, list[int], list[Round]]:
        """Seconds per token behind the first round, which reads the prompt; tokens and rounds of the reference."""
        target = _Timed(TransformersModel(self.target, len(prompt) + self.new_tokens))
        done = speculate(target, drafter, prompt, self.new_tokens, GREEDY, k)
        seconds = time.perf_counter() - target.first
        counted = max(1, len(done.tokens) - done.rounds[0].emitted)
        return seconds / counted, list(done.tokens), list(done.rounds)

    def theirs(self, prompt: list[int], **how: Any) -> tuple[float, list[int]]:
        """Seconds, prompt included, and tokens of transformers' generate."""
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        out = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.new_tokens, do_sample=False, **how
        )
        return time.perf_counter() - start, out[0, len(prompt) :].tolist()


class _Timed:
    """A model that notes when its first pass, which reads the prompt, was over."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        self.capacity, self.vocab_size, self.truncate = model.capacity, model.vocab_size, model.truncate
        self.first = 0.0

    @property
    def length(self) -> int:
        return self._model.length

    def append(self, tokens: Any) -> torch.Tensor:
        logits = self._model.append(tokens)
        self.first = self.first or time.perf_counter()
        return logits


def price_list(
    bench: Bench, prompt: list[int], most: int, repeats: int
) -> tuple[list[list[float]], dict[str, list[float]]]:
    """What passes and drafts cost, each as the ratio to a decode step of the same repetition.

    Returns:
        For k from 0 to `most` the ratios of a pass over k + 1 tokens, v(k); and those of one draft, c, by drafter.
    """
    target, small = (TransformersModel(model, len(prompt) + most + 1) for model in (bench.target, bench.small))
    for model in (target, small):
        model.append(prompt)
    verify: list[list[float]] = [[] for _ in range(most + 1)]
    cost: dict[str, list[float]] = {"n-gram": [], bench.model_drafter_name: []}
    for repeat in range(repeats + 1):
        step = _seconds(partial(_pass, target, prompt, 1))
        passes = [_seconds(partial(_pass, target, prompt, k + 1)) / step for k in range(most + 1)]
        lookup = _seconds(partial(NgramDrafter().propose, prompt, 1)) / step
        draft = _seconds(partial(_pass, small, prompt, 1)) / step
        if repeat == 0:  # the first one warms up
            continue
        for ratios, ratio in zip([*verify, *cost.values()], [*passes, lookup, draft], strict=True):
            ratios.append(ratio)
    return verify, cost


def _pass(model: TransformersModel, prompt: list[int], tokens: int) -> None:
    """Read so many tokens behind the prompt and forget them, as a round does with rejected drafts."""
    model.append(prompt[:tokens])
    model.truncate(len(prompt))


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def spread(values: list[float]) -> str:
    """Median and range, as text."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure(
    bench: Bench, workload: str, texts: int, ks: list[int]
) -> tuple[dict[tuple[str, int], Series], dict[str, Series]]:
    """All drafters and all k on one workload, and transformers beside them.

    Returns:
        Our series by drafter and k, and those of transformers' assisted generation by what assists.
    """
    series: dict[tuple[str, int], Series] = {}
    peers: dict[str, Series] = {}
    for prompt in prompts(workload, bench.tokenizer, texts):
        plain_seconds, plain, _ = bench.ours(prompt, NgramDrafter(), 0)
        for k in ks:
            for name, drafter in bench.drafters(prompt).items():
                seconds, tokens, rounds = bench.ours(prompt, drafter, k)
                entry = series.setdefault((name, k), Series())
                entry.rounds += rounds
                entry.speedups.append(plain_seconds / seconds)
                entry.same = entry.same and tokens == plain
        unaided, _ = bench.theirs(prompt)
        for name, how in assistants(bench, max(ks)).items():
            seconds, tokens = bench.theirs(prompt, **how)
            entry = peers.setdefault(name, Series())
            entry.speedups.append(unaided / seconds)
            entry.same = entry.same and tokens == plain
    return series, peers


def assistants(bench: Bench, k: int) -> dict[str, dict[str, Any]]:
    """transformers' own drafters, by name, with the arguments that ask for them."""
    bench.small.generation_config.num_assistant_tokens = k
    bench.small.generation_config.num_assistant_tokens_schedule = "constant"
    bench.small.generation_config.assistant_confidence_threshold = 0.0
    return {
        f"prompt lookup, {k} tokens": {"prompt_lookup_num_tokens": k},
        f"{bench.model_drafter_name}, {k} tokens": {"assistant_model": bench.small},
    }


def report(
    workload: str, series: dict[tuple[str, int], Series], cost: dict[str, float], verify: dict[int, float]
) -> bool:
    """Print one workload's rows; whether all texts were the plain ones."""
    print(f"\n{workload}:")
    print("  drafter            k  acceptance  tokens a round  predicted  speed-up, median (range)     predicted")
    for (name, k), entry in series.items():
        judged = any(round_.drafted for round_ in entry.rounds)
        alpha = acceptance_estimate(entry.rounds) if judged else 0.0
        foreseen = predicted_tokens_per_round(entry.rounds) if judged else 1.0
        # A round costs what its drafts cost; where the drafter found fewer than k, both sides are smaller.
        price = [r.drafted * cost[name] + verify[r.drafted] for r in entry.rounds]
        gain = foreseen / statistics.mean(price)
        print(
            f"  {name:<16} {k:>3}  {alpha:>10.2f}  {tokens_per_round(entry.rounds):>14.2f}  {foreseen:>9.2f}  "
            f"{spread(entry.speedups):<27}  {gain:>8.2f}"
        )
    return all(entry.same for entry in series.values())


@torch.inference_mode()
def main() -> None:
    """Measure, and print ratios with their spread, the machine and the versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=3, help="prompts of each workload (default 3)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of each text (default 32)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4], help="values of k (default 1 2 4)")
    parser.add_argument("--layers", type=int, default=24, help="of the early-exit drafter, untrained (default 24)")
    parser.add_argument("--repeats", type=int, default=9, help="passes timed for c and v(k) (default 9)")
    arguments = parser.parse_args()

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    bench = Bench(load("smollm2"), arguments.layers, arguments.new_tokens)
    context = prompts("code", bench.tokenizer, 1)[0]
    passes, drafts = price_list(bench, context, max(arguments.drafts), arguments.repeats)
    verify = {k: statistics.median(ratios) for k, ratios in enumerate(passes)}
    cost = {name: statistics.median(ratios) for name, ratios in drafts.items()}

    machine = facts()
    print(f"{machine.cpu}, {machine.logical_cores} cores, {torch.get_num_threads()} threads, Python {machine.python}")
    print(f"torch {machine.torch}, transformers {transformers.__version__}, float32, greedy, batch of 1")
    print(f"{arguments.texts} texts of {arguments.new_tokens} tokens for each workload")
    print("in decode steps of the same repetition, median (range):")
    for name, ratios in drafts.items():
        print(f"  a draft by {name}: c = {spread(ratios)}")
    for k in sorted({0, *arguments.drafts}):
        print(f"  a pass over {k + 1} tokens: v({k}) = {spread(passes[k])}")
    all_same = True
    for workload in WORKLOADS:
        series, peers = measure(bench, workload, arguments.texts, arguments.drafts)
        all_same = report(workload, series, cost, verify) and all_same
        for name, entry in peers.items():
            same = "" if entry.same else "; NOT the plain text"
            print(f"  transformers, {name}: speed-up {spread(entry.speedups)}{same}")
    print(f"\nthe plain text on all of our sides: {'yes' if all_same else 'NO'}")
    print("speed-ups of transformers are by its own unaided generate, both with the prompt; ours are without it")
    print("on a GPU: *not verified here*" if machine.gpu is None else "GPU present, not used by this benchmark")


if __name__ == "__main__":
    main()
