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
#     BATCHES: [1, 16]
#     CONTEXTS: [16, 64]
#     FRAMES: 3
#     PROMPTS: [4, 32]
#     QUICK: true
#     SECONDS: 0.1
# ---

# %% [markdown]
# # Two phases and the roofline
#
# A prompt is read in one pass, an answer is written a token a pass. Both run the same weights, and yet one waits for
# arithmetic and the other for memory. This notebook measures what *this* machine can do at most, places the bundled
# model's two phases under that roof, and follows what comes of it: batches, latency, the KV cache, the size of a card.
#
# With a GPU everything runs there, in bf16; without one on the processor, in float32. The formulas are
# `solutions.planning`'s, and none of them knows which machine it is.

# %%
from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor

from labkit.decoder import Decoder
from labkit.notebook import Digest, check_answer
from labkit.notebook.animation import animate
from labkit.notebook.palette import BLUE, FAINT, GREEN, INK, LINES, ORANGE, PURPLE, QUIET, RED
from labkit.notebook.roofline import draw_roofline
from labkit.notebook.style import panels, use_style
from labkit.probing import machine_bounds
from labkit.probing.timing import Effort, clock_of, time_of
from labkit.specs import Checkpoint
from solutions.planning.hardware import H100, RTX_5060, Hardware
from solutions.planning.model_shape import KNOWN
from solutions.planning.roofline import Serving

use_style()

# %% tags=["parameters"]
# How much is measured; more is slower and smoother.
QUICK = False  # whether a hurried measurement of the machine will do
SECONDS = 1.0  # for one dot of a plot, about
PROMPTS = [8, 32, 128, 512]  # tokens of a prefill
BATCHES = [1, 2, 4, 8, 16, 32, 64]  # sequences of a decode step
CONTEXTS = [16, 256, 512, 1024, 2048]  # cached tokens of each sequence
FRAMES = 24  # of the animation

# %% [markdown]
# ## 1 What this machine can do at most
#
# Two numbers bound everything that follows: bytes per second from memory, and FLOP per second of matrix products. A
# piece of work is as many FLOP for each byte that it moves, its *arithmetic intensity*; what it can reach is the lower
# of intensity × bandwidth and the peak. They meet at the **ridge point**. Left of it a processor waits for memory.
#
# The dots are passes over weights that are far larger than every cache, by ever more tokens at once: the same bytes,
# ever more arithmetic. (`make measure` prints all numbers, for each dtype.)

# %%
bounds = machine_bounds(quick=QUICK)
device, dtype = bounds.device, bounds.point_dtype
here = Hardware.measured(bounds)
axes = panels(height=3.6)
others = [name for name in ("bf16", "int8", "fp8", "fp32") if name in bounds.products and name != dtype]
draw_roofline(axes, bounds, [dtype, *others[:2]])
axes.set_title(f"This machine; dots: passes over weights in {dtype}")

# %% [markdown]
# **Exercise 1.** An H100 reads 3.35 TB/s and multiplies 989 TFLOP/s in dense bf16. Where is its ridge point, in FLOP
# per byte?
#
# <details><summary>Answer</summary>
#
# 989 × 10¹² / 3.35 × 10¹² ≈ 295. A weight of two bytes takes part in two FLOP for each token, so in bf16 the intensity
# of a pass is about its number of tokens: 295 of them until arithmetic limits.
#
# </details>

# %% tags=["exercise"] solution="989 / 3.35"
answer = None  # FLOP per byte
check_answer("1", answer, H100.ridge("bf16"), hint="At which intensity do intensity × bandwidth and the peak agree?")

# %% [markdown]
# **Exercise 2.** How many tokens must share a pass on *this* machine, with weights in `dtype`, until arithmetic limits
# it? Use `bounds.ridge(dtype)` and `itemsize`, the bytes of a weight.
#
# <details><summary>Answer</summary>
#
# For each weight a pass of $B$ tokens does $2B$ FLOP and reads `itemsize` bytes, so its intensity is $2B/$`itemsize`,
# and it reaches the ridge with `bounds.ridge(dtype) * itemsize / 2` tokens.
#
# </details>

# %% tags=["exercise"] solution="itemsize * bounds.flops(dtype) / bounds.read / 2"
itemsize = {"fp32": 4, "bf16": 2}[dtype]
answer = None  # tokens
check_answer("2", answer, bounds.ridge(dtype) * itemsize / 2, hint="FLOP for each weight, over the bytes of a weight?")

# %% [markdown]
# ## 2 Prefill and decode under the roof
#
# With $N$ parameters, a pass costs $2N$ FLOP a token. A prefill of $P$ tokens reads the weights once for all of them. A
# decode step reads them once for *one* token of each sequence, and the keys and values of every sequence besides:
#
# $$t_\text{step} \approx \max\left(\frac{2NB}{F_\text{peak}},\ \frac{\text{weights} + B\,n_\text{ctx}\,s_\text{kv}}
# {BW}\right) + t_\text{overhead}$$
#
# Below, the bundled model does both. Its cache holds random numbers, which cost what real ones cost.

# %%
built = Checkpoint("smollm2").build()
torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
model = Decoder(built.config, {name: weight.to(device, torch_dtype) for name, weight in built.weights.items()})
serving = Serving(KNOWN["smollm2"], here, weights=dtype, kv=dtype, compute=dtype)
config, clock = model.config, clock_of(device)


def seconds_of(batch: int, new: int, cached: int) -> float:
    """The median time of a pass: `new` tokens for each sequence of the batch, behind `cached` ones."""
    tokens = torch.randint(config.vocab_size, (batch, new), device=device)
    positions = torch.arange(cached, cached + new, device=device)
    shape = (config.num_layers, 2, batch, config.num_kv_heads, cached + new, config.head_dim)
    kept = torch.randn(shape, dtype=torch_dtype, device=device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Stores what is new, reads all."""
        kept[layer, 0, :, :, cached:], kept[layer, 1, :, :, cached:] = k, v
        return F.scaled_dot_product_attention(q, *kept[layer], is_causal=new > 1, enable_gqa=True)

    with torch.inference_mode():
        return time_of(lambda: model.forward(tokens, positions, attend), clock, Effort(SECONDS, repeats=5)).median


prefill = {tokens: seconds_of(1, tokens, 0) for tokens in PROMPTS}
decode = {batch: seconds_of(batch, 1, CONTEXTS[0]) for batch in BATCHES}

# %%
left, right = panels(2, height=3.5, width_ratios=[1.5, 1])
draw_roofline(left, bounds, [dtype], points=False, intensities=(0.2, 4 * max(PROMPTS)))
per_token = serving.model.flops_per_token()
for times, intensity, colour, label in (
    (prefill, serving.prefill_intensity, BLUE, "prefill, by tokens of the prompt"),
    (decode, lambda batch: serving.decode_intensity(batch, CONTEXTS[0]), ORANGE, "decode, by sequences"),
):
    xs, ys = [intensity(n) for n in times], [per_token * n / seconds for n, seconds in times.items()]
    left.plot(xs, ys, "o", color=colour, label=label)
    for n in (min(times), max(times)):
        where = (intensity(n), per_token * n / times[n])
        left.annotate(str(n), where, (0, 6), textcoords="offset points", ha="center", size=8, color=colour)
left.set_title("The model's passes on this machine")
left.legend(loc="lower right", fontsize=8)
for times, colour, label in ((prefill, BLUE, "prefill"), (decode, ORANGE, "decode")):
    right.plot(list(times), [seconds / n / decode[1] for n, seconds in times.items()], "o-", color=colour, label=label)
right.set(xscale="log", yscale="log", xlabel="tokens of a pass",
          title="Time a token, of a lonely decode step's")  # fmt: skip
right.legend(fontsize=8)
right.grid(True, axis="y")

# %% [markdown]
# A lonely decode step stands on the slope, a prefill under the flat roof, and a token of a prompt is many times cheaper
# than a token of an answer. The two families lie on one curve: it is the number of tokens in a pass that counts, not
# what they are called. That is why batching is the first thing that a server does.
#
# **Exercise 3.** Llama-3-8B, 8.03 B parameters, on an H100: how many milliseconds does a decode step of one sequence
# take at least if the weights are stored in FP8? (Hardly any context.)
#
# <details><summary>Answer</summary>
#
# It reads 8.03 GB at 3.35 TB/s: 2.4 ms, half of the 4.8 ms in bf16. The arithmetic would take microseconds.
#
# </details>

# %% tags=["exercise"] solution="8.03 / 3.35"
answer = None  # milliseconds
llama = Serving(KNOWN["llama-3-8b"], H100)
check_answer(
    "3", answer, 1e3 * replace(llama, weights="fp8").decode_step(1).seconds,
    hint="Which bytes does a step read, and how often?",
)  # fmt: skip

# %% [markdown]
# **Exercise 4.** A prompt of 1,000 tokens takes Llama-3-8B about 16 ms on an H100 at its bf16 peak. Which of the two
# would shorten that: `"memory"` twice as fast, or `"arithmetic"` twice as fast?
#
# <details><summary>Answer</summary>
#
# Arithmetic: its intensity is about 1,000 FLOP per byte, right of the ridge at 295. Faster memory would shorten decode.
#
# </details>

# %% tags=["exercise"] solution="'arithmetic' if llama.prefill_intensity(1000) > H100.ridge('bf16') else 'memory'"
answer = None  # "memory" or "arithmetic"
check_answer("4", answer, Digest("ce3e167a87e50c85"), hint="On which side of the ridge is a prefill of so many tokens?")

# %% [markdown]
# ## 3 Latency against throughput
#
# More sequences in a step make each of them wait a little longer and all of them together much faster, up to the ridge.
# The dashed lines are the floors by the formula, from two measured numbers of the machine; the dots are the model. What
# lies between is `t_overhead`, attention, and kernels that don't reach the roof. Where the dots jump from one sequence
# to two, the library has changed from the product with a vector to that of matrices.
#
# The right panel is the picture to keep: a server chooses a point on such a curve, and everything in this course either
# bends it or helps to choose. An objective for the time between tokens cuts it off on the right.

# %%
floors = {batch: serving.decode_step(batch, CONTEXTS[0]) for batch in BATCHES}
left, middle, right = panels(3, height=3.0)
unit = decode[1]
left.plot(BATCHES, [decode[b] / unit for b in BATCHES], "o-", color=ORANGE, label="measured")
left.plot(BATCHES, [floors[b].memory / unit for b in BATCHES], "--", color=BLUE, label="floor of the memory")
left.plot(BATCHES, [floors[b].compute / unit for b in BATCHES], "--", color=GREEN, label="floor of the arithmetic")
left.set(xscale="log", yscale="log", xlabel="sequences", title="Time of a step, of a lonely one's")
left.legend(fontsize=8)
middle.plot(BATCHES, [b * unit / decode[b] for b in BATCHES], "o-", color=ORANGE)
middle.plot(BATCHES, [b * unit / floors[b].seconds for b in BATCHES], "--", color=QUIET)
middle.set(xscale="log", yscale="log", xlabel="sequences", title="Tokens a second, of a lonely one's")
tpots, rates = [decode[b] / unit for b in BATCHES], [b * unit / decode[b] for b in BATCHES]
right.plot(tpots, rates, "o-", color=ORANGE)
for batch, x, y in zip(BATCHES, tpots, rates, strict=True):
    right.annotate(str(batch), (x, y), (5, -8), textcoords="offset points", size=8, color=QUIET)
right.axvspan(2 * tpots[0], max(*tpots, 2.5), color=FAINT)
right.set(xlabel="time between two tokens", ylabel="tokens a second", title="Grey: slower than twice a lonely step")
for panel in (left, middle, right):
    panel.grid(True)

# %% [markdown]
# **Exercise 5.** Write the floor of a decode step in milliseconds for Llama-3-8B in bf16 on an H100, as a function of
# batch and context: 16.06 GB of weights, 131,072 bytes of KV a token, 3.35 TB/s, 989 TFLOP/s, 16.06 GFLOP a token.
#
# <details><summary>Answer</summary>
#
# `lambda batch, context: 1e3 * max(16.06e9 * batch / 989e12, (16.06e9 + batch * context * 131072) / 3.35e12)`. At batch
# 64 and 2,048 tokens of context the cache is 17.2 GB, more than the weights; the step takes 9.9 ms, and its arithmetic
# 1 ms.
#
# </details>

# %% tags=["exercise"] solution="lambda b, n: 1e3 * max(16.06e9 * b / 989e12, (16.06e9 + b * n * 131072) / 3.35e12)"
answer = None  # a function of batch and context
check_answer(
    "5", answer, lambda batch, context: 1e3 * llama.decode_step(batch, context).seconds,
    cases=[(1, 0), (64, 0), (64, 2048), (512, 0), (512, 128)],
    hint="Two floors, and the longer one counts. What is read once a step, and what once a sequence?",
)  # fmt: skip

# %% [markdown]
# **Exercise 6.** And with it: how many tokens a second do 64 sequences of 2,048 cached tokens get together?
#
# <details><summary>Answer</summary>
#
# 64 / 9.9 ms ≈ 6,500. Without the cache it would be 64 / 4.8 ms: twice as many.
#
# </details>

# %% tags=["exercise"] solution="64 / ((16.06e9 + 64 * 2048 * 131072) / 3.35e12)"
answer = None  # tokens per second
check_answer("6", answer, llama.decode_rate(64, 2048), hint="A step gives each sequence one token.")

# %% [markdown]
# ## 4 The cache grows
#
# Weights are read once for all sequences; keys and values are everyone's own, and no batch shares them. A token adds
#
# $$2 \times \text{layers} \times \text{KV heads} \times \text{head dim} \times \text{bytes}$$
#
# Left, what that comes to. Dotted, the memory of an RTX 5060 and of an H100. Middle, the model's step at a batch of
# 8 as its context grows, against the floor of the memory: a line that starts at the weights and rises with the cache.
# Right, why large batches don't save a long context: the intensity of decode flattens, below an H100's ridge (dotted).

# %%
batch = 8
growing = {context: seconds_of(batch, 1, context) for context in CONTEXTS}
left, middle, right = panels(3, height=3.1)
tokens = np.geomspace(256, 2**20, 50)
for name, colour in zip(("llama-3-70b", "llama-3-8b", "qwen2.5-1.5b", "qwen2.5-0.5b"), LINES, strict=False):
    left.plot(tokens, tokens * KNOWN[name].kv_bytes_per_token("bf16") / 1e9, color=colour, label=name)
for card in (RTX_5060, H100):
    left.axhline(card.memory / 1e9, color=QUIET, linewidth=1, linestyle=":")
left.set(xscale="log", yscale="log", xlabel="cached tokens, of all sequences", ylabel="GB",
         title="Keys and values, bf16")  # fmt: skip
left.legend(fontsize=8)
xs, first = list(growing), growing[CONTEXTS[0]]
middle.plot(xs, [seconds / first for seconds in growing.values()], "o-", color=ORANGE, label="measured")
lines = [serving.decode_step(batch, context).memory / first for context in xs]
middle.plot(xs, lines, "--", color=BLUE, label="floor of the memory")
middle.set(xlabel="cached tokens of a sequence", ylim=(0, None), title=f"A step of {batch}, of one with no context")
middle.legend(fontsize=8)
sizes = np.geomspace(1, 1024, 60)
for context, colour in ((0, BLUE), (1024, GREEN), (4096, ORANGE), (16384, RED)):
    right.plot(sizes, [llama.decode_intensity(size, context) for size in sizes], color=colour, label=f"{context:,}")
right.axhline(H100.ridge("bf16"), color=QUIET, linewidth=1, linestyle=":")
right.set(xscale="log", yscale="log", xlabel="sequences", title="Llama-3-8B: FLOP per byte")
right.legend(title="context", fontsize=8)
for panel in (left, middle, right):
    panel.grid(True)

# %% [markdown]
# **Exercise 7.** At which context do 64 sequences of Llama-3-8B (128 KiB a token) read as many bytes of cache as the
# 16.06 GB of weights?
#
# <details><summary>Answer</summary>
#
# 16.06 GB / (64 × 131,072) ≈ 1,900 tokens each. From there on the cache is the larger half of a step.
#
# </details>

# %% tags=["exercise"] solution="16.06e9 / (64 * 128 * 1024)"
answer = None  # cached tokens of a sequence
check_answer(
    "7", answer, llama.weight_bytes / (64 * llama.kv_bytes_per_token),
    hint="Which number of tokens, times 64, times the bytes of a token, is the weights?",
)  # fmt: skip

# %% [markdown]
# **Exercise 8.** Decode of Llama-3-8B with 4,096 tokens of context each: what does its intensity tend to as the batch
# grows without end?
#
# <details><summary>Answer</summary>
#
# The weights no longer count: $2N$ FLOP for every $n_\text{ctx}\,s_\text{kv}$ bytes, so 16.06 × 10⁹ / (4,096 × 131,072)
# ≈ 30 FLOP per byte. That is a tenth of the ridge: with such a context no batch makes decode wait for arithmetic.
#
# </details>

# %% tags=["exercise"] solution="16.06e9 / (4096 * 131072)"
answer = None  # FLOP per byte
check_answer(
    "8", answer, llama.decode_intensity(10**9, 4096), hint="Divide both FLOP and bytes by the batch. What is left?"
)

# %% [markdown]
# ## 5 A batch fills up
#
# The same in motion: a server on an H100 admits ever more sequences. Without a cache the step would climb the slope to
# the ridge and turn into the flat roof. With one it is held back, the sooner the longer the contexts; a dot becomes a
# ring where memory has run out.

# %%
steps = np.unique(np.geomspace(1, 1024, FRAMES).round()).tolist()
roof_x = np.geomspace(0.5, 2000, 100)
roof_y = np.minimum(roof_x * H100.bandwidth, H100.flops("bf16"))


def filling(axes: Axes, frame: int) -> None:
    """The roof, and where each context's step stands when the batch has grown so far."""
    axes.plot(roof_x, roof_y, color=INK)
    for context, colour in ((0, BLUE), (1024, GREEN), (4096, ORANGE), (16384, RED)):
        trail = [llama.decode_intensity(size, context) for size in steps[: frame + 1]]
        heights = [min(x * H100.bandwidth, H100.flops("bf16")) for x in trail]
        axes.plot(trail, heights, color=colour, linewidth=4, alpha=0.35)
        fits = steps[frame] * context <= llama.tokens_that_fit()
        face = colour if fits else "white"
        axes.plot(trail[-1], heights[-1], "o", color=colour, markerfacecolor=face, markersize=8, label=f"{context:,}")
    axes.set(xscale="log", yscale="log", xlim=(0.5, 2000), ylim=(1e12, 2e15), xlabel="FLOP per byte",
             ylabel="FLOP per second", title=f"Llama-3-8B on an H100, a step of {steps[frame]:.0f}")  # fmt: skip
    axes.legend(title="context", loc="lower right", fontsize=8)


animate(filling, len(steps), title="Decode steps of growing batches under the roofline of an H100", height=3.4)

# %% [markdown]
# ## 6 What a user sees
#
# The time to the first token (TTFT) is queueing and prefill, the time per output token (TPOT) a decode step, and a
# whole answer takes TTFT + (n − 1) · TPOT. Below are the bundled model's two, as measured above, for an answer of 30
# tokens: the prompt in blue, every token a tick. A longer prompt costs once, a slower step at every token.

# %%
axes = panels(height=2.2)
count, longest = 30, PROMPTS[-1]
rows = [(f"prompt {PROMPTS[0]}, alone", prefill[PROMPTS[0]], decode[1])]
rows += [(f"prompt {longest}, alone", prefill[longest], decode[1])]
rows += [(f"prompt {longest}, in a batch of {BATCHES[-1]}", prefill[longest], decode[BATCHES[-1]])]
for row, (_, ttft, tpot) in enumerate(rows):
    axes.barh(row, ttft / decode[1], height=0.5, color=BLUE)
    axes.barh(row, (count - 1) * tpot / decode[1], left=ttft / decode[1], height=0.5, color=FAINT)
    axes.plot([(ttft + n * tpot) / decode[1] for n in range(count)], [row] * count, "|", color=ORANGE, markersize=9)
axes.set_yticks(range(len(rows)), [row[0] for row in rows])
axes.set(xlabel="lonely decode steps", title=f"An answer of {count} tokens")
axes.invert_yaxis()

# %% [markdown]
# **Exercise 9.** An objective of 30 ms between tokens, Llama-3-8B in bf16 on an H100, contexts of 2,048 tokens, and
# real steps a third longer than their floor. How many sequences may a step have, at most?
#
# <details><summary>Answer</summary>
#
# The floor may take 30 / (4/3) = 22.5 ms, in which an H100 reads 75.4 GB. Less the weights that is 59.3 GB of cache,
# and a sequence has 2,048 × 131,072 B = 0.268 GB: 220 whole ones. Beside the weights there is room for 63.9 GB, 238
# sequences, so the objective binds first, but only just; with memory set aside for activations the two meet.
#
# </details>

# %% tags=["exercise"] solution="max(b for b in range(1, 1000) if llama.decode_step(b, 2048).seconds * 4 / 3 <= 0.030)"
answer = None  # sequences, a whole number
check_answer("9", answer, Digest("eada917b21c7e133"), hint="How long may the floor be, and what is read in that time?")

# %% [markdown]
# ## 7 A card of 8 GB
#
# An RTX 5060 reads about 448 GB/s (desktop; laptop parts differ, which is what `make measure` is for). Its bounds for
# some models and formats, beside an H100's. What doesn't fit has no bar. In decode of a single sequence only bytes
# count, so four bits are nearly four times as fast as sixteen, on either card.

# %%
choices = [("qwen2.5-0.5b", "bf16"), ("qwen2.5-1.5b", "bf16"), ("qwen2.5-1.5b", "int8"), ("llama-3-8b", "bf16"),
           ("llama-3-8b", "int8"), ("llama-3-8b", "int4")]  # fmt: skip
left, right = panels(2, height=3.0, sharey=True)
for panel, card, colour in ((left, RTX_5060, PURPLE), (right, H100, BLUE)):
    for row, (name, weights) in enumerate(choices):
        fitted = Serving(KNOWN[name], card, weights=weights)
        room = fitted.tokens_that_fit(reserved=1e9)
        if room > 0:
            panel.barh(row, fitted.decode_rate(1), color=colour)
        note = f" {room / 1e3:,.0f} k tokens of cache" if room > 0 else " doesn't fit"
        panel.annotate(note, (fitted.decode_rate(1) if room > 0 else 0, row), va="center", size=8, color=QUIET)
    panel.set(xlabel="tokens a second at most, one sequence", title=f"{card.name}, 1 GB set aside")
    panel.set_xlim(0, 1.45 * max(Serving(KNOWN[n], card, weights=w).decode_rate(1) for n, w in choices))
left.set_yticks(range(len(choices)), [f"{name}, {weights}" for name, weights in choices])
left.invert_yaxis()

# %% [markdown]
# **Exercise 10.** Qwen2.5-1.5B in bf16 is 3.09 GB, and a token adds 28 KiB of cache. How many chats of 2,048 tokens fit
# on an 8 GB card if 1.2 GB are set aside for activations and workspace?
#
# <details><summary>Answer</summary>
#
# (8 − 3.09 − 1.2) GB / 28,672 B ≈ 129,500 tokens, 63 whole chats.
#
# </details>

# %% tags=["exercise"] solution="int((8e9 - 3.088e9 - 1.2e9) // (28 * 1024 * 2048))"
answer = None  # chats, a whole number
check_answer("10", answer, Digest("441e6b47112ca905"), hint="What is left beside weights and reserve, in chats?")

# %% [markdown]
# **Exercise 11.** The same model at batch 32 with 2,048 tokens each reads 1.9 GB of cache beside its weights: about 11
# ms at 448 GB/s. How many TFLOP/s must the card multiply so that memory is still what such a step waits for?
#
# <details><summary>Answer</summary>
#
# It computes 2 × 1.544 B × 32 ≈ 99 GFLOP. In 11.1 ms that is 8.9 TFLOP/s; compare with what `make measure` finds for
# bf16 on your card.
#
# </details>

# %% tags=["exercise"] solution="2 * 1.544e9 * 32 / ((2 * 1.544e9 + 32 * 2048 * 28 * 1024) / 448e9) / 1e12"
answer = None  # TFLOP per second
qwen = Serving(KNOWN["qwen2.5-1.5b"], RTX_5060)
check_answer(
    "11", answer, qwen.model.flops_per_token() * 32 / qwen.decode_step(32, 2048).memory / 1e12,
    hint="The arithmetic must be done in the time that the memory takes.", within=0.02,
)  # fmt: skip

# %% [markdown]
# **Exercise 12.** Which of these make a lonely decode step faster on *any* machine whose ridge is far above 1? Give the
# set of letters: **a** weights in 4 bits, **b** a faster clock of the tensor cores, **c** faster memory, **d** a larger
# batch.
#
# <details><summary>Answer</summary>
#
# `{"a", "c"}`: fewer bytes, or more of them a second. A larger batch makes no step faster, only the many cheaper; and
# tensor cores wait already.
#
# </details>

# %% tags=["exercise"] solution="{'a', 'c'}"
answer = None  # a set such as {"b", "d"}
check_answer("12", answer, Digest("9261391bd4f5639f"), hint="Left of the ridge one thing takes all the time.")
