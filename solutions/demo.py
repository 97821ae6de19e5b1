"""The reference answers a prompt with a real model, token by token, and says how well it used the machine.

    python -m solutions.demo "Why is the sky blue?" --max-tokens 80
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import typer

from labkit.checkpoints import CheckpointError, Model, load
from labkit.probing import machine_bounds
from labkit.sampling_params import SamplingParams
from labkit.tokenizer import StreamDecoder
from solutions.kv_cache.cache import KVCache
from solutions.kv_cache.generation import CachedDecoder, stream
from solutions.kv_cache.sampling import Sampler
from solutions.kv_cache.sizing import kv_bytes_per_token

app = typer.Typer(add_completion=False)

PROMPT = "Why is the sky blue? Answer in three sentences."


@dataclass(frozen=True)
class Figures:
    """What one answer cost.

    Args:
        ttft: seconds from the request to the first token.
        tpot: mean seconds between two tokens; None for an answer of one token.
        num_tokens: tokens generated.
        bytes_per_step: weights and cache that a decode step reads, in bytes, averaged over the steps.
        bandwidth: what this machine reads, in bytes per second.
    """

    ttft: float
    tpot: float | None
    num_tokens: int
    bytes_per_step: float
    bandwidth: float

    @property
    def seconds(self) -> float:
        """From the request to the last token: TTFT + (n − 1) · TPOT."""
        return self.ttft + (self.num_tokens - 1) * (self.tpot or 0.0)

    @property
    def bandwidth_share(self) -> float | None:
        """Bytes that had to be read, over what the machine could have read in the time of a step."""
        return None if self.tpot is None else self.bytes_per_step / (self.tpot * self.bandwidth)

    def __str__(self) -> str:
        parts = [f"TTFT {self.ttft * 1e3:.0f} ms"]
        if self.tpot is not None and self.bandwidth_share is not None:
            parts.append(f"TPOT {self.tpot * 1e3:.1f} ms")
            parts.append(f"{self.num_tokens / self.seconds:.1f} tokens/s")
            parts.append(
                f"{self.bandwidth_share:.0%} of this machine's {self.bandwidth / 1e9:.1f} GB/s "
                f"({self.bytes_per_step / 1e6:.0f} MB a step)"
            )
        return " · ".join(parts)


def weight_bytes_per_step(model: Model) -> int:
    """Bytes of weights that one decode step reads: all but an embedding table that is only looked up in."""
    looked_up = set() if model.config.tie_embeddings else {"model.embed_tokens.weight"}
    return sum(t.numel() * t.element_size() for name, t in model.decoder.weights.items() if name not in looked_up)


def answer(
    model: Model,
    prompt: str,
    max_tokens: int,
    params: SamplingParams,
    bandwidth: float,
    show: Callable[[str], object],
) -> Figures:
    """Generate an answer, handing over its text as it comes.

    Args:
        model: decoder and tokenizer.
        prompt: what the user says; wrapped in the model's chat template if it has one.
        max_tokens: the most tokens to generate.
        params: how to draw them.
        bandwidth: of this machine, in bytes per second.
        show: called with each new piece of text.

    Returns:
        The figures of this answer.

    Raises:
        ValueError: prompt and answer don't fit into the model's context, or the prompt is empty.
    """
    ids = _encode(model, prompt)
    room = model.config.max_context + 1 - len(ids)
    if max_tokens > room:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and the model's context {model.config.max_context}, which leaves room "
            f"for {max(room, 0)} new tokens, not {max_tokens}; shorten the prompt or lower --max-tokens"
        )
    cache = KVCache(model.config, capacity=len(ids) + max_tokens - 1, dtype=model.decoder.dtype)
    cached = CachedDecoder(model.decoder, cache)
    # The first pass over weights fresh from disk maps their pages; that belongs to loading, not to the answer.
    cached.append(ids[:1])
    cached.truncate(0)

    text = StreamDecoder(model.tokenizer)
    tokens = stream(cached, ids, max_tokens, Sampler(params), model.tokenizer.stop_ids)
    times = [time.perf_counter()]
    for token in _timed(tokens, times):
        show(text.feed(token))
    show(text.finish())

    gaps = [after - before for before, after in pairwise(times[1:])]
    # Decode step i appends one token and then reads all of them.
    cached_tokens = len(ids) + (len(gaps) + 1) / 2
    kv_bytes = cached_tokens * kv_bytes_per_token(model.config, model.decoder.dtype.itemsize)
    return Figures(
        ttft=times[1] - times[0],
        tpot=statistics.fmean(gaps) if gaps else None,
        num_tokens=len(times) - 1,
        bytes_per_step=weight_bytes_per_step(model) + kv_bytes,
        bandwidth=bandwidth,
    )


def _encode(model: Model, prompt: str) -> list[int]:
    """The prompt as a chat message, or as plain text for a model without a chat template."""
    if not prompt.strip():
        raise ValueError("the prompt is empty; give the model something to answer")
    if model.tokenizer.chat_template is None:
        return model.tokenizer.encode(prompt, special=True)
    return model.tokenizer.chat([{"role": "user", "content": prompt}])


def _timed(tokens: Iterator[int], times: list[float]) -> Iterator[int]:
    """The same tokens, with the time of each noted as it arrives."""
    for token in tokens:
        times.append(time.perf_counter())
        yield token


@app.command()
def main(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy; 1 is the model's own distribution.")] = 0.6,
    top_k: Annotated[int, typer.Option(help="Keep so many of the likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass; 1 keeps all.")] = 0.9,
    min_p: Annotated[float, typer.Option(help="Keep tokens of this share of the likeliest; 0 keeps all.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answer.")] = 0,
    model: Annotated[str, typer.Option(help="'smollm2', a folder, a .gguf file or a hub id.")] = "smollm2",
) -> None:
    """Stream an answer of a real model through the reference of lab 07, then one line of figures."""
    try:
        params = SamplingParams(temperature, top_k, top_p, min_p, seed)
        loaded = load(model)
        bandwidth = machine_bounds("cpu", quick=True).read
        typer.secho(f"{model}: {prompt}\n", bold=True)
        figures = answer(loaded, prompt, max_tokens, params, bandwidth, lambda piece: typer.echo(piece, nl=False))
    except (CheckpointError, ValueError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"\n\n{figures}")


if __name__ == "__main__":
    app()
