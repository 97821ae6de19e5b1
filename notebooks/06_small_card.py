# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: jupytext,kernelspec,quick,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   quick:
#     CALIBRATION: 1
#     DRAFTS: [2]
#     LAYERS: 2
#     LENGTHS: [64, 128]
#     NEW_TOKENS: 8
#     SCORED: 64
#     SECONDS: 0.02
# ---

# %% [markdown]
# # Four exercises for a small card
#
# Attention in tiles beside torch's, decoding with a cache and without, fewer bits against quality, and speculation that
# is really timed. Everything here runs with the bundled model on a processor. Where there is a card, and a model hub to
# fetch from, name `"Qwen/Qwen2.5-1.5B-Instruct"` as TARGET and `"Qwen/Qwen2.5-0.5B-Instruct"` as DRAFT below: both fit
# into 8 GB in bf16, and the sections marked *on the card* run there.

# %%
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.checkpoints import load
from labkit.decoder import Decoder, full_attention
from labkit.early_exit import early_exit
from labkit.notebook import check_answer
from labkit.notebook.palette import BLUE, GREEN, ORANGE, PURPLE, QUIET, RED
from labkit.notebook.style import panels, use_style
from labkit.probing import machine_bounds
from labkit.probing.timing import Effort, clock_of, time_of
from labkit.sampling_params import SamplingParams
from labkit.texts import documents
from labkit.trained_heads import DraftModel, load_head
from solutions.kernels.flash_attention import flash_attention
from solutions.quantization.calibration import calibration_text
from solutions.quantization.methods import Settings
from solutions.quantization.packed_linear import PackedDecoder
from solutions.quantization.perplexity import token_losses
from solutions.quantization.pipeline import quantize_model
from solutions.speculative.loop import speculate
from solutions.speculative.measuring import acceptance_estimate
from solutions.speculative.model_drafter import ModelDrafter
from solutions.speculative.speedup import expected_tokens, speedup

use_style()
print(machine_bounds(quick=True).line())

# %% tags=["parameters"]
TARGET = "smollm2"  # a hub id or a folder in its place
DRAFT = ""  # a smaller model of the same family; empty for the bundled model's own draft head
LENGTHS = [256, 512, 1024]  # of attention
NEW_TOKENS = 32  # that are generated
SCORED = 512  # tokens that quality is measured on
CALIBRATION = 4  # sequences of 256 tokens
DRAFTS = [1, 2, 4]  # a round
LAYERS = None  # of the model whose bits are counted; None for all
SECONDS = 0.5  # for one time, about

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.float32
model = load(TARGET)
config, tokenizer = model.config, model.tokenizer
timed = partial(time_of, effort=Effort(SECONDS, repeats=3))

# %% [markdown]
# ## 1 Attention in tiles (on the card)
#
# Three ways to the same numbers: scores written out as a matrix of T², lab 06's FlashAttention, and torch's
# `scaled_dot_product_attention`. On a card the second is the Triton kernel; without one it is the kernel's twin, a
# plain loop over tiles, which shows the memory and not the speed. (`make bench` compares the kernels in full.)


# %%
def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with the whole matrix of scores."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


ways = {
    "written out": (written_out, RED),
    "lab 06": (partial(flash_attention, causal=True), ORANGE),
    "torch": (partial(F.scaled_dot_product_attention, is_causal=True), BLUE),
}
times: dict[str, list[float]] = {name: [] for name in ways}
with torch.inference_mode():
    for length in LENGTHS:
        q, k, v = torch.randn(3, 1, 8, length, 64, dtype=half, device=device)
        outputs = {name: way(q, k, v) for name, (way, _) in ways.items()}
        assert all((output - outputs["torch"]).abs().max() < 0.01 for output in outputs.values())
        for name, (way, _) in ways.items():
            times[name].append(timed(partial(way, q, k, v), clock_of(device)).median)
left, right = panels(2, height=2.8)
for name, (_, colour) in ways.items():
    ratios = [t / base for t, base in zip(times[name], times["torch"], strict=True)]
    left.plot(LENGTHS, ratios, "o-", color=colour, label=name)
left.set(xscale="log", yscale="log", xlabel="tokens", title="Time, of torch's")
left.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
left.minorticks_off()
left.legend(fontsize=8)
item = half.itemsize
right.plot(LENGTHS, [8 * n * n * item / 1e6 for n in LENGTHS], "o-", color=RED, label="the scores")
right.plot(LENGTHS, [4 * 8 * n * 64 * item / 1e6 for n in LENGTHS], "o-", color=BLUE, label="q, k, v and the output")
right.set(xscale="log", yscale="log", xlabel="tokens", title="MB")
right.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
right.minorticks_off()
right.legend(fontsize=8)
for panel in (left, right):
    panel.grid(True)

# %% [markdown]
# **Exercise 1.** How many gigabytes (10⁹ bytes) do the scores of 32 heads and 8,192 tokens take in 16 bits, for one
# layer and one sequence?
#
# <details><summary>Answer</summary>
#
# 32 × 8,192² × 2 bytes = 4.3 GB: half of an 8 GB card, for numbers that nobody wants to keep. In tiles they never leave
# the chip.
#
# </details>

# %% tags=["exercise"] solution="2**5 * 2**26 * 2 / 1e9"
answer = None  # GB
check_answer("1", answer, 32 * 8192**2 * 2 / 1e9, hint="One score for each head, query and key.")

# %% [markdown]
# ## 2 With a cache and without (on the card)
#
# Without a cache each token costs a pass over the whole text so far. The class below keeps keys and values where the
# model is; sections 2 and 4 generate with it.


# %%
class Kept:
    """A model that remembers one text, on its own device; as `labkit.protocols.CachedModel`."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        own = decoder.config
        shape = (own.num_layers, 2, 1, own.num_kv_heads, capacity, own.head_dim)
        self._store = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        self._decoder, self.capacity, self.length, self.vocab_size = decoder, capacity, 0, own.vocab_size

    def append(self, tokens: Sequence[int]) -> Tensor:
        """The logits after each new token."""
        start, end = self.length, self.length + len(tokens)
        place = torch.arange(start, end, device=self._decoder.device)
        seen = torch.arange(end, device=place.device) <= place[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            self._store[layer, 0, :, :, start:end], self._store[layer, 1, :, :, start:end] = k, v
            keys, values = self._store[layer, :, :, :, :end]
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)

        with torch.inference_mode():
            logits = self._decoder.forward(torch.tensor([list(tokens)], device=place.device), place, attend)
        self.length = end
        return logits[0].float().cpu()

    def truncate(self, length: int) -> None:
        """Forgets what lies behind."""
        self.length = length


def on(place: str, decoder: Decoder) -> Decoder:
    """A model on a device; on a card in 16 bits."""
    dtype = torch.bfloat16 if place == "cuda" else torch.float32
    return Decoder(decoder.config, {name: weight.to(place, dtype) for name, weight in decoder.weights.items()})


here = on(device, model.decoder)
prompt = tokenizer.encode("The three laws of motion are these. First, a body at rest")
shares = []
for length in (len(prompt), 64, 128, 192):
    tokens = (prompt * 20)[:length]
    cached = Kept(here, length + 1)
    cached.append(tokens[:-1])

    def step(cached: Kept = cached, tokens: list[int] = tokens) -> None:
        """The last token with a cache."""
        cached.truncate(len(tokens) - 1)
        cached.append(tokens[-1:])

    def whole(tokens: list[int] = tokens) -> None:
        """All of them without."""
        Kept(here, len(tokens)).append(tokens)

    shares.append((length, timed(whole, clock_of(device)).median / timed(step, clock_of(device)).median))
axes = panels(height=2.6)
axes.plot(*zip(*shares, strict=True), "o-", color=ORANGE)
axes.axhline(1, color=QUIET, linewidth=1, linestyle=":")
axes.set(xlabel="tokens of the text so far", ylim=(0, None), title="Time of a token without a cache, of one with it")
axes.grid(True)

# %% [markdown]
# **Exercise 2.** A prompt of 64 tokens and an answer of 512. How many times as many tokens run through the model
# without a cache as with it? (With it the prompt runs once, and each token of the answer but the last.)
#
# <details><summary>Answer</summary>
#
# Without: 64 + 65 + … + 575 = 163,584. With: 64 + 511 = 575. 284.5 times. While decode waits for memory a pass of a few
# dozen tokens costs hardly more than one, so the *time* differs less at first; with the length it follows.
#
# </details>

# %% tags=["exercise"] solution="(512 * 64 + 512 * 511 / 2) / (64 + 511)"
answer = None
check_answer("2", answer, sum(range(64, 64 + 512)) / (64 + 511), hint="Token number i needs a pass over …?")

# %% [markdown]
# ## 3 Bits against quality and speed
#
# Four formats of the target's linear layers: perplexity on text that no calibration saw, and the speed of decode with
# the packed products that torch has for processors. On a card the speed of packed layers is *not verified* here: the
# products below are the processor's, and run there.

# %%
texts = documents("prose", "evaluation").values()
tokens = [token for text in texts for token in tokenizer.encode(text[:4000])][: SCORED + 1]
calibration = calibration_text("prose", tokenizer, CALIBRATION, 256)
shallow = model.decoder if LAYERS is None else early_exit(model.decoder, LAYERS)


def perplexity(decoder: Decoder) -> float:
    """Of the tokens, read in windows."""

    def logits(window: list[int]) -> Tensor:
        with torch.inference_mode():
            return decoder(torch.tensor([window]), torch.arange(len(window)), full_attention)[0]

    return float(token_losses(logits, tokens, 256, 128).mean().exp())


def decode_seconds(decoder: Decoder) -> float:
    """Of a token behind a short text."""
    cached = Kept(decoder, 64)
    cached.append(prompt)

    def step() -> None:
        cached.truncate(len(prompt))
        cached.append([prompt[0]])

    return timed(step, clock_of("cpu")).median


formats: dict[str, tuple[str, int, Any]] = {
    "INT8, W8A8": ("smoothquant", 8, calibration),
    "INT4": ("rtn", 4, None),
    "INT3": ("rtn", 3, None),
}
found = {"fp32": (perplexity(shallow), decode_seconds(shallow), 32.0)}
for name, (method, bits, text) in formats.items():
    own = Decoder(shallow.config, dict(shallow.weights))
    quantized = quantize_model(own, method, Settings(bits=bits, group_size=64), text)
    packed = PackedDecoder(quantized, head_bits=8)
    found[name] = perplexity(packed), decode_seconds(packed), quantized.bits_per_weight()
base = found["fp32"]
axes = panels(height=3.0)
for (name, (loss, seconds, bits)), colour in zip(found.items(), (QUIET, BLUE, ORANGE, GREEN), strict=True):
    axes.plot(base[1] / seconds, loss, "o", color=colour, markersize=8)
    axes.annotate(f"{name}, {bits:.2f} bits", (base[1] / seconds, loss), (8, 4), textcoords="offset points", size=8)
axes.set(xlabel="times as fast in decode as float32", ylabel="perplexity", title="Right is faster, low is better")
axes.margins(0.2)
axes.grid(True)

# %% [markdown]
# **Exercise 3.** 106.2 M weights in linear layers and 28.3 M in the embedding, which is also the head. In 16 bits
# throughout, or with the linear layers in 4.25 bits and the embedding left alone: by which factor can decode become
# faster at most while it waits for memory?
#
# <details><summary>Answer</summary>
#
# (106.2 + 28.3) × 16 / (106.2 × 4.25 + 28.3 × 16) = 2.4, and not 16 / 4.25 = 3.8: what was left alone is half of what
# remains. With the head in 8 bits it is 3.2. In a model of 1.5 B the embedding weighs less, and the factor is larger.
#
# </details>

# %% tags=["exercise"] solution="134.5 * 16 / (106.2 * 4.25 + 28.3 * 16)"
answer = None
check_answer("3", answer, 16 / (4.25 * 106.2 / 134.5 + 16 * 28.3 / 134.5), hint="Which bytes does a step read?")

# %% [markdown]
# ## 4 Speculation, really timed (on the card, with a hub's pair)
#
# The target generates alone and then with a draft model, the very same tokens. Green, the speed-up that was measured;
# dashed, what the formula makes of the measured acceptance and of the measured cost of a draft. Where the bars stay
# below 1 nobody should speculate: drafts cost too much, or verification no longer waits for memory.

# %%
place = device if DRAFT else "cpu"  # the draft head that comes with the workbook runs where its target is loaded
target = here if place == device else model.decoder
room = len(prompt) + NEW_TOKENS
head = None if DRAFT else load_head("draft", model.decoder)
small = on(place, load(DRAFT).decoder) if DRAFT else None
greedy = SamplingParams(temperature=0.0)


def run(num_drafts: int) -> Any:
    """A text and its rounds."""
    draft = Kept(small, room) if small else DraftModel(head, room)
    return speculate(Kept(target, room), ModelDrafter(draft, greedy), prompt, NEW_TOKENS, greedy, num_drafts)


clock = clock_of(place)
alone = run(0)
seconds_alone = timed(lambda: run(0), clock).median
draft = Kept(small, room) if small else DraftModel(head, room)
draft.append(prompt)


def one_draft() -> None:
    """A token of the draft model."""
    draft.append(prompt[:1])
    draft.truncate(len(prompt))


cost = timed(one_draft, clock).median / (seconds_alone / NEW_TOKENS)
measured, foreseen = [], []
for num_drafts in DRAFTS:
    done = run(num_drafts)
    assert done.tokens == alone.tokens, "speculation changed the text"
    measured.append(seconds_alone / timed(partial(run, num_drafts), clock).median)
    foreseen.append(speedup(acceptance_estimate(done.rounds), num_drafts, cost))
axes = panels(height=2.8)
axes.bar(range(len(DRAFTS)), measured, color=GREEN, width=0.6, label="measured")
axes.plot(range(len(DRAFTS)), foreseen, "o--", color=PURPLE, label="the formula, with v = 1")
axes.axhline(1, color=QUIET, linewidth=1, linestyle=":")
axes.set_xticks(range(len(DRAFTS)), [str(count) for count in DRAFTS])
axes.set(xlabel="drafts a round", ylabel="times as fast", title="The same tokens, with a draft model")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# **Exercise 4.** A draft model of 0.5 B for a target of 1.5 B, both waiting for memory, so a draft costs about a third
# of a step; drafts are kept with a chance of 0.7. How many times as fast is decoding with 2 drafts a round?
#
# <details><summary>Answer</summary>
#
# 1 + 0.7 + 0.49 = 2.19 tokens a round, for 1 + 2/3 steps: 1.31. With 4 drafts it is 2.77 / 2.33 = 1.19: less. So large
# a drafter is dear; that is why heads on the target's own features replaced them.
#
# </details>

# %% tags=["exercise"] solution="(1 + 0.7 + 0.7**2) / (1 + 2 / 3)"
answer = None
check_answer("4", answer, expected_tokens(0.7, 2) / (1 + 2 / 3), hint="Tokens of a round, over its cost in steps.")
