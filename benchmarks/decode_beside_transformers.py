"""Prefill and decode of the reference of lab 07 beside transformers, on the same weights in the same run.

Rounds alternate, so that both meet the same state of the machine; what counts is the ratio within a round.
Run: ``make bench``, or ``python -m benchmarks.decode_beside_transformers --help``.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers

from benchmarks.reporting import spread
from labkit.checkpoints import bundled_folder, load_decoder
from labkit.machine import facts
from labkit.probing import machine_bounds
from solutions.kv_cache.cache import KVCache
from solutions.kv_cache.generation import CachedDecoder, greedy


@dataclass(frozen=True)
class Timing:
    """One run of one side.

    Args:
        prefill_seconds: the whole prompt in one pass.
        seconds_per_token: mean over the decode steps.
        tokens: greedy continuation, to see that both sides did the same work.
    """

    prefill_seconds: float
    seconds_per_token: float
    tokens: list[int]


def run_reference(model: CachedDecoder, prompt: list[int], steps: int) -> Timing:
    """Time the reference; the cache is emptied first."""
    model.truncate(0)
    start = time.perf_counter()
    tokens = [greedy(model.append(prompt)[-1], 0)]
    decoded_from = time.perf_counter()
    for step in range(1, steps + 1):
        tokens.append(greedy(model.append([tokens[-1]])[-1], step))
    end = time.perf_counter()
    return Timing(decoded_from - start, (end - decoded_from) / steps, tokens)


def load_transformers() -> transformers.PreTrainedModel:
    """The bundled model in float32, as transformers has it; its progress bars and warnings are not shown."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Its newest releases rename an argument; the old name works in the whole range that we support.
    warnings.filterwarnings("ignore", message=".*past_key_values", category=FutureWarning)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        bundled_folder(), dtype=torch.float32
    )
    return model.eval()


def run_transformers(
    model: transformers.PreTrainedModel, prompt: list[int], steps: int,
    clock: Callable[[], float] = time.perf_counter, rows: int = 0,
) -> Timing:  # fmt: skip
    """Time transformers with its own cache, one forward call a step, without its generation loop.

    Args:
        model: the peer.
        prompt: token ids.
        steps: of decoding.
        clock: in seconds.
        rows: logits of the prompt that are computed, counted from its end; 0 for all.
    """
    start = clock()
    out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=rows)
    tokens = [int(out.logits[0, -1].argmax())]
    decoded_from = clock()
    for _ in range(steps):
        out = model(torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True)
        tokens.append(int(out.logits[0, -1].argmax()))
    end = clock()
    return Timing(decoded_from - start, (end - decoded_from) / steps, tokens)


@torch.inference_mode()
def main() -> None:
    """Measure, and print ratios with their spread, the machine and the versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=32)
    arguments = parser.parse_args()

    decoder = load_decoder("smollm2")
    ours = CachedDecoder(decoder, KVCache(decoder.config, arguments.prompt_tokens + arguments.steps + 1))
    peer = load_transformers()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(decoder.config.vocab_size, (arguments.prompt_tokens,), generator=generator).tolist()

    run_reference(ours, prompt, 2)
    run_transformers(peer, prompt, 2)
    pairs = [
        (run_reference(ours, prompt, arguments.steps), run_transformers(peer, prompt, arguments.steps))
        for _ in range(arguments.rounds)
    ]
    same = all(mine.tokens == theirs.tokens for mine, theirs in pairs)
    bytes_per_step = sum(parameter.numel() * parameter.element_size() for parameter in peer.parameters())
    read = machine_bounds("cpu").read
    shares = [bytes_per_step / mine.seconds_per_token / read for mine, _ in pairs]

    machine = facts()
    print(f"{machine.cpu}, {machine.logical_cores} cores, Python {machine.python}")
    print(f"torch {machine.torch}, transformers {transformers.__version__}, float32")
    print(f"{arguments.prompt_tokens} prompt tokens, {arguments.steps} decode steps, {arguments.rounds} rounds")
    print("time of the reference / time of transformers, median (range); below 1 the reference is faster:")
    print(f"  prefill  {spread([mine.prefill_seconds / theirs.prefill_seconds for mine, theirs in pairs])}")
    print(f"  decode   {spread([mine.seconds_per_token / theirs.seconds_per_token for mine, theirs in pairs])}")
    print(f"share of the measured memory bandwidth that the reference's decoding reaches: {spread(shares)}")
    print(f"the same greedy tokens on both sides: {'yes' if same else 'NO'}")
    print("on a GPU: *not verified here*" if machine.gpu is None else "GPU present, not used by this benchmark")


if __name__ == "__main__":
    main()
