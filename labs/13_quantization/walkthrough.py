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
#     CALIBRATION: [64]
#     DOCUMENTS: 1
#     LAYER: 1
#     LAYERS: 2
#     LENGTH: 64
#     REPEATS: 1
#     SEARCHED: 32
#     SEQUENCES: 2
# ---

# %% [markdown]
# # Lab 13 on a real model
#
# A walk through the tasks of the lab, with SmolLM2-135M on the CPU. Each section shows what a task is good for, then
# runs that task's tests on *your* file: `check("13.1")` reads it as it is on disk, so edit it beside this notebook and
# run the cell again.
#
# The cells call your code where it is written, and the reference where it is not. The table below says which; run its
# cell again after an edit. The derivations are in the [handout](README.md).

# %%
from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.checkpoints import bundled_gguf, load_tokenizer
from labkit.checkpoints.gguf_file import open_gguf
from labkit.decoder import Decoder, full_attention, rope_frequencies
from labkit.early_exit import early_exit
from labkit.evaluation import Interval
from labkit.int4_product import MIDDLE, Int4Product
from labkit.linear_inputs import LayerWalk, block_linears
from labkit.notebook import check, open_lab, progress
from labkit.notebook.palette import BLUE, GREEN, ORANGE, PURPLE, QUIET, RED, TEAL, owner_colour
from labkit.notebook.style import bare, panels, use_style
from labkit.probing import machine_bounds
from labkit.quantized import QuantizedTensor
from labkit.specs import Checkpoint
from labkit.texts import documents

use_style()
print(machine_bounds(quick=True).line())
# Processor time, so that whatever else the machine does leaves the curves alone.
clock = time.process_time
decoder = Checkpoint("smollm2").build()
tokenizer = load_tokenizer("smollm2")

lab = open_lab("13")
lab

# %% tags=["parameters"]
# How much is run; more is slower and smoother.
LAYER = 5  # where the single layers of the plots are taken from
LENGTH = 512  # tokens of a sequence
CALIBRATION = [256, 512, 1024, 2048, 4096]  # tokens for one layer
LAYERS = 30  # of the model whose perplexity is measured
SEQUENCES = 4  # that the whole model is calibrated on
SEARCHED = 128  # tokens that AWQ tries its scales on
DOCUMENTS = 2  # of each kind that perplexity is measured on
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128]
REPEATS = 5

# %%
GROUP, BITS = 64, 4


def sequences(kind: str, part: str, count: int) -> Tensor:
    """Pieces of the documents of one kind and part, spread over all of them, `[count, LENGTH]`."""
    pieces = []
    for text in documents(kind, part).values():
        ids = tokenizer.encode(text[: 24 * LENGTH])
        pieces += [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH + 1, LENGTH)]
    return torch.tensor(pieces[:: max(1, len(pieces) // count)][:count])


def layer_inputs(model: Decoder, tokens: Tensor, layer: int) -> dict[str, Tensor]:
    """What the linear layers of one block read, `[tokens, in]` under their names, such as "mlp.down_proj"."""
    walk = LayerWalk(model, tokens)
    while walk.layer < layer:
        walk.advance()
    return {name.split(".", 3)[3]: inputs for name, inputs in walk.inputs().items()}


def rounded(weight: Tensor, bits: int = BITS) -> Tensor:
    """A weight by round to nearest, in groups."""
    return lab.dequantize(lab.quantize(weight, bits, group_size=GROUP))


def relative(approximation: Tensor, right: Tensor) -> float:
    """The squared error, over the square of what is right."""
    return float((approximation - right).square().sum() / right.square().sum())


model = early_exit(decoder, LAYERS)
parts = [linear.split(".", 3)[3] for linear in block_linears(LAYER)]
weights = {part: decoder.weights[f"model.layers.{LAYER}.{part}.weight"] for part in parts}
inputs = layer_inputs(decoder, sequences("prose", "calibration", -(-max(CALIBRATION) // LENGTH)), LAYER)
unseen = layer_inputs(decoder, sequences("prose", "evaluation", 2), LAYER)

# %% [markdown]
# ## 1 A fight over the step
#
# Left, a real weight in 2 to 8 bits, and who shares a scale: the whole matrix, a row, or 64 neighbours. A bit less
# doubles the step, so it makes the mean squared error four times as large; the dashed lines are $s^2/12$, the mean over
# all scales. Middle, what a scale costs: the same error against bits a weight with 16-bit scales, each dot a group
# size. Small groups are worth their bits up to a point. Right, *activations* of the same layer in 8 bits: here it is
# features that stick out, so a scale for each feature would be best. Task 6 is about why it can't be had.

# %%
weight = weights["self_attn.q_proj"]
bits_range = list(range(2, 9))
left, middle, right = panels(3, height=3.1)
for (granularity, size), colour in zip(
    (("tensor", None), ("channel", None), ("group", GROUP)), (RED, ORANGE, BLUE), strict=True
):
    options = {"granularity": granularity} | ({"group_size": size} if size else {})
    stored = [lab.quantize(weight, bits, **options) for bits in bits_range]
    errors = [float((lab.dequantize(q) - weight).square().mean()) for q in stored]
    promised = [float(lab.rounding_mse(q.scale).mean()) for q in stored]
    left.plot(bits_range, errors, "o-", color=colour, label=f"one scale a {granularity}")
    left.plot(bits_range, promised, "--", color=colour, linewidth=1)
left.set(yscale="log", xlabel="bits of a code", ylabel="mean squared error", title="A weight, and s²/12 (dashed)")
left.legend(fontsize=8)
sizes = [8, 16, 32, 64, 96, 192, 288, 576]
for bits, colour in ((3, PURPLE), (4, BLUE), (5, TEAL)):
    costs = [lab.bits_per_weight(bits, size) for size in sizes]
    errors = [relative(lab.dequantize(lab.quantize(weight, bits, group_size=size)), weight) for size in sizes]
    middle.plot(costs, errors, "o-", color=colour, label=f"{bits} bits")
middle.set(yscale="log", xlabel="bits a weight, scales included", title="Relative error by group size")
middle.legend(fontsize=8)
read = inputs["mlp.down_proj"][:256]
kinds = ["tensor", "token", "input_channel"]
errors = [relative(lab.dequantize(lab.quantize(read, 8, granularity=kind)), read) for kind in kinds]
right.bar(["tensor", "token", "feature"], errors, color=[RED, ORANGE, BLUE])
right.set(yscale="log", title="Activations in 8 bits, one scale a …")
for panel in (left, middle, right):
    panel.grid(True, axis="y")

# %% tags=["check"]
check("13.1")

# %% [markdown]
# ## 2 Whose bits are these?
#
# Each colour is one code. To see where a code lies, all others are packed as 0 and this one as ones: the bits that come
# out set are its own. The lowest bit of a word is on the right. With 3 bits two codes of 32 are cut in two.

# %%
axes = panels(2, height=1.7)
for panel, bits in zip(axes, (4, 3), strict=True):
    count = 32
    picture = np.ones((bits, 32, 3))
    for place in range(count):
        codes = torch.zeros(1, count, dtype=torch.uint8)
        codes[0, place] = 2**bits - 1
        for row, word in enumerate(lab.pack_words(codes, bits)[0].tolist()):
            for bit in range(32):
                if word >> bit & 1:
                    colour = owner_colour(place).lstrip("#")
                    picture[row, 31 - bit] = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    panel.imshow(picture, aspect="auto", extent=(0, 32, bits, 0))
    panel.vlines(range(33), 0, bits, color="white", linewidth=0.6)
    panel.hlines(range(bits + 1), 0, 32, color="white", linewidth=3)
    bare(panel, f"32 codes of {bits} bits in {bits} words").set(ylabel="words")

# %% tags=["check"]
check("13.2")

# %% [markdown]
# ## 3 A whole model
#
# Left, what the model weighs. In 4 bits its linear layers take about a quarter of their bytes; the tied embedding,
# which is also the head, then weighs as much as all of them, and is worth 8 bits. Right, the relative error that
# rounding leaves in each matrix. It is much the same everywhere: how much it *matters* is another question, and the
# one that tasks 4 and 5 ask.

# %%
rtn = lab.quantize_linears(model.weights, BITS, GROUP)
with_head = lab.quantize_linears(model.weights, BITS, GROUP, head_bits=8)
head = "model.embed_tokens.weight"
names = ["16 bits", "linears in 4", "and head in 8"]
total, share = [], []
for chosen in ({}, rtn, with_head):
    total.append(lab.model_bytes(model.weights, chosen) / 1e6)
    # A model of the head alone weighs what the head weighs.
    only = {name: q for name, q in chosen.items() if name == head}
    share.append(lab.model_bytes({head: model.weights[head]}, only) / 1e6)
left, right = panels(2, height=2.9, width_ratios=[1, 1.4])
left.bar(names, share, color=ORANGE, label="embedding and head")
left.bar(names, np.subtract(total, share), bottom=share, color=BLUE, label="everything else")
left.set(ylabel="MB", title="What the model weighs")
left.legend(fontsize=8)
for number, part in enumerate(parts):
    errors = [relative(lab.dequantize(q), model.weights[name]) for name, q in rtn.items() if f".{part}." in name]
    right.plot(range(len(errors)), errors, color=owner_colour(number), label=part.split(".")[-1])
right.set(xlabel="layer", ylim=(0, None), title=f"Relative error of the weights, {BITS} bits, groups of {GROUP}")
right.legend(fontsize=7, ncols=4)
right.grid(True, axis="y")

# %% tags=["check"]
check("13.3")

# %% [markdown]
# ## 4 Errors that cancel
#
# What GPTQ loses on a layer's *outputs*, over what rounding to nearest loses, by the tokens it was calibrated on.
# Dashed, on the very tokens of the calibration: it always looks good there. Solid, on text that it has not seen: with
# few tokens the correlations that it uses are chance, and the more features a layer reads the more tokens they take
# (`down_proj` reads 1536, `q_proj` 576). More damping makes it more careful; the second panel has ten times as much.

# %%
axes = panels(2, height=3.1, sharey=True)
for panel, damping in zip(axes, (0.01, 0.1), strict=True):
    for name, colour in (("self_attn.q_proj", BLUE), ("mlp.down_proj", ORANGE)):
        wide = weights[name]
        held_out, _ = lab.update_hessian(None, 0, unseen[name])
        plain = rounded(wide)
        curves: dict[str, list[float]] = {"seen": [], "unseen": []}
        for count in CALIBRATION:
            hessian, _ = lab.update_hessian(None, 0, inputs[name][:count])
            found = lab.dequantize(lab.gptq(wide, hessian, BITS, GROUP, damping=damping))
            for where, judge in (("seen", hessian), ("unseen", held_out)):
                curves[where].append(lab.layer_loss(wide, found, judge) / lab.layer_loss(wide, plain, judge))
        panel.plot(CALIBRATION, curves["unseen"], "o-", color=colour, label=name.split(".")[-1])
        panel.plot(CALIBRATION, curves["seen"], "--", color=colour, linewidth=1)
    panel.axhline(1, color=QUIET, linewidth=1, linestyle=":")
    panel.set(xscale="log", xlabel="tokens of calibration", ylim=(0, 2),
              title=f"Layer loss over RTN's: damping {damping}")  # fmt: skip
    panel.set_xticks(CALIBRATION, [str(count) for count in CALIBRATION])
    panel.minorticks_off()
axes[0].legend(title="on unseen text (dashed: on its own)", fontsize=8)
for panel in axes:
    panel.grid(True, axis="y")

# %% tags=["check"]
check("13.4")

# %% [markdown]
# ## 5 Scaling what matters
#
# Scale the columns by salience to the power of $\alpha$, round, divide: the error of the outputs over that of plain
# rounding, on unseen text. `q_proj` reads what a norm has made, a few features much louder than the rest; there a
# power in the middle pays. The cross is what `search_scales` chose from calibration text alone, for q, k and v
# together. Right, the salience itself, sorted: the steeper, the more there is to gain.

# %%
left, right = panels(2, height=3.0)
alphas = [step / 20 for step in range(21)]
for names, colour in (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), BLUE),
    (("mlp.gate_proj", "mlp.up_proj"), GREEN),
    (("mlp.down_proj",), ORANGE),
):
    readers = tuple(weights[name] for name in names)
    few, held = inputs[names[0]][:SEARCHED], unseen[names[0]][:256]

    def loss(scales: Tensor, readers: tuple[Tensor, ...] = readers, held: Tensor = held) -> float:
        """Σ of the squared errors of all outputs."""
        return sum(float((held @ (rounded(w * scales) / scales - w).T).square().sum()) for w in readers)

    salience = lab.salience(inputs[names[0]])
    ratio = (salience / salience.max()).clamp(min=1e-4)
    base = loss(torch.ones_like(ratio))
    label = ", ".join(name.split(".")[-1] for name in names)
    left.plot(alphas, [loss(ratio**alpha) / base for alpha in alphas], "-", color=colour, label=label)
    chosen = lab.search_scales(readers, few, BITS, GROUP)
    # α as the chosen scales have it: they are ratio ** α up to a factor.
    low, high = int(ratio.argmin()), int(ratio.argmax())
    alpha = float((chosen[high] / chosen[low]).log() / (ratio[high] / ratio[low]).log())
    left.plot(alpha, loss(chosen) / base, "x", color=colour, markersize=9, markeredgewidth=2)
    right.plot((ratio.sort(descending=True).values).tolist(), color=colour, label=label)
left.axhline(1, color=QUIET, linewidth=1, linestyle=":")
left.set(xlabel="α", ylim=(0, 2), title="Error of the outputs over RTN's")
left.legend(fontsize=8)
right.set(yscale="log", xlabel="features, loudest first", title="Salience, of the loudest feature's")
left.grid(True, axis="y")
right.grid(True, axis="y")

# %% tags=["check"]
check("13.5")

# %% [markdown]
# ## 6 Outliers on the move
#
# Above, the largest magnitude of each feature that `q_proj` reads, and of each column of its weight. A few features
# stick out and set every token's scale. Smoothing divides them and multiplies the columns: what was a problem of the
# activations is a smaller one of the weights. Below, all numbers of both in units of their root mean square: the tails
# are what costs bits. On the right the error of the layer in W8A8 against $\alpha$; the best one differs by layer.

# %%
query = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
maxima = inputs[query[0]].abs().amax(0)
readers = tuple(weights[name] for name in query)
gain = decoder.weights[f"model.layers.{LAYER}.input_layernorm.weight"]
_, smoothed, scales = lab.smooth((gain,), readers, maxima)
pairs = {"plain": (unseen[query[0]], readers[0]), "smoothed": (unseen[query[0]] / scales, smoothed[0])}

grid = panels(3, 2, height=2.3)
for column, what in enumerate(("activations", "weights")):
    for (name, pair), colour in zip(pairs.items(), (RED, GREEN), strict=True):
        values = pair[column]
        tops = values.abs().amax(0)
        grid[0, column].plot((tops / tops.median()).tolist(), color=colour, linewidth=0.9, label=name)
        spread = values / values.square().mean().sqrt()
        grid[1, column].hist(spread.flatten().numpy(), bins=80, log=True, histtype="step", color=colour, label=name)
    grid[0, column].set(title=f"{what}: largest of each feature", xlabel="feature", ylabel="over the median")
    grid[0, column].legend(fontsize=8)
    grid[1, column].set(title=f"{what}: all numbers", xlabel="in root mean squares", ylabel="count")
alphas = [step / 8 for step in range(9)]
for name, producer, colour in (("self_attn.q_proj", gain, BLUE), ("mlp.down_proj", weights["mlp.up_proj"], ORANGE)):
    held, errors = unseen[name], []
    for alpha in alphas:
        _, (scaled,), scales = lab.smooth((producer,), (weights[name],), inputs[name].abs().amax(0), alpha)
        layer = lab.quantize(scaled, 8, granularity="channel")
        errors.append(relative(lab.w8a8_linear(held / scales, layer), held @ weights[name].T))
    grid[0, 2].plot(alphas, errors, "o-", color=colour, label=name.split(".")[-1])
grid[0, 2].set(yscale="log", xlabel="α", title="W8A8: relative error")
grid[0, 2].legend(fontsize=8)
grid[1, 2].remove()

# %% tags=["check"]
check("13.6")

# %% [markdown]
# ## 7 Sixteen levels, put where the weights are
#
# Above, the levels of three codes of 4 bits, each scaled to end at 1: integers at equal distances, NF4 at the quantiles
# of a normal distribution, FP4 with steps that double. Behind them, how the weights of a real layer lie within their
# blocks of 64. Below, how often each level is used: NF4's more evenly than those of integers, of which the outer ones
# lie idle. The numbers are the squared errors, over the square of the weights.

# %%
blocks = weight.reshape(-1, GROUP)
ratios = (blocks / blocks.abs().amax(1, keepdim=True)).flatten()
fp4 = lab.decode_fp4(torch.arange(16, dtype=torch.uint8)).unique() / 6
lines = {"int4": torch.arange(-7, 8) / 7, "NF4": lab.nf4_levels(), "FP4": fp4}
used: dict[str, Tensor] = {}
above, below = panels(1, 2, height=2.0, sharex=True, width=9)
above.hist(ratios.numpy(), bins=120, density=True, color="#dfe3e8")
for height, (name, levels) in enumerate(lines.items()):
    middles = (levels[1:] + levels[:-1]) / 2
    nearest = torch.bucketize(ratios, middles)
    error = relative(levels[nearest], ratios)
    colour = (BLUE, GREEN, ORANGE)[height]
    above.plot(levels, [0.25 + 0.5 * height] * len(levels), "|", color=colour, markersize=16, markeredgewidth=2)
    above.text(1.06, 0.25 + 0.5 * height, f"{name}: error {error:.4f}", color=colour, va="center", size=8)
    counts = torch.bincount(nearest, minlength=len(levels)) / len(ratios) * 100
    below.plot(levels, counts, "o-", color=colour, linewidth=1, label=name)
above.set(yticks=[], title="Where the levels are, and where the weights")
above.spines["left"].set_visible(False)
below.set(ylabel="% of weights", xlim=(-1.05, 1.45), title="How often a level is used")
below.legend(fontsize=8)
below.grid(True, axis="y")

# %% tags=["check"]
check("13.7")

# %% [markdown]
# ## 8 Floats of eight bits
#
# Left, all numbers of the two formats near 0: within a power of two the steps are equal, from one to the next they
# double, and around 0 subnormals keep the smallest step. Right, the relative error of rounding by magnitude, in int8
# and in both formats, each scaled so that 1 is its largest number. A float's stays where it is over many
# powers of two and ends in subnormals; an integer's is the best at the top, and grows with every bit below.

# %%
left, right = panels(2, height=3.0, width_ratios=[1, 1.3])
every = torch.arange(256, dtype=torch.uint8)
for height, (kind, colour) in enumerate((("e4m3", BLUE), ("e5m2", ORANGE))):
    numbers = lab.decode_fp8(every, kind)
    near = numbers[numbers.isfinite() & (numbers.abs() <= 1)]
    left.plot(near, [height] * len(near), "|", color=colour, markersize=22, markeredgewidth=0.7)
left.set_yticks([0, 1], ["E4M3", "E5M2"])
left.set(ylim=(-0.6, 1.6), xticks=[-1, -0.5, 0, 0.5, 1], title="Numbers between −1 and 1")
magnitudes = torch.logspace(-6, 0, 4000)
largest = {"e4m3": 448.0, "e5m2": 57344.0}
back = {"int8": (magnitudes * 127).round() / 127} | {
    kind.upper(): lab.decode_fp8(lab.encode_fp8(magnitudes * top, kind), kind) / top for kind, top in largest.items()
}
for (name, values), colour in zip(back.items(), (RED, BLUE, ORANGE), strict=True):
    error = ((values - magnitudes) / magnitudes).abs()
    # The worst of a few neighbours: the saw's teeth without the noise between them.
    worst = error.reshape(-1, 40).amax(1)
    right.plot(magnitudes.reshape(-1, 40)[:, 20], worst, color=colour, label=name)
right.set(xscale="log", yscale="log", xlabel="magnitude, over the largest", title="Largest relative error of rounding")
right.legend(fontsize=8)
right.grid(True, axis="y")

# %% tags=["check"]
check("13.8")

# %% [markdown]
# ## 9 What is left of the model
#
# Perplexity on documents that nobody was calibrated on, half prose, half code, for methods of about the same bits a
# weight. The bars on the left are the loss that a method adds, with the 95 % interval of a paired bootstrap: both
# models on the same passages, so what makes a passage hard cancels. The wide grey bars are the same comparison as if
# the two had read different texts. In the middle methods are compared with RTN: a bar left of 0 is better, and one that
# crosses 0 has shown nothing. With so little text expect wide bars. The weights as given come from a file in Q4_1, so
# all of this is the harm of a second rounding.
#
# On the right the warning of the module: GPTQ on the *other* kind of text, over GPTQ on the kind that is measured.

# %%
evaluation = {kind: sequences(kind, "evaluation", DOCUMENTS).tolist() for kind in ("prose", "code")}
Step = Callable[[dict[str, Tensor], int, dict[str, Tensor]], None]


def losses_of(changed: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """The loss of every token of every document, by kind."""
    run = Decoder(model.config, changed)

    def logits(ids: list[int]) -> Tensor:
        with torch.no_grad():
            return run(torch.tensor([ids]), torch.arange(len(ids)), full_attention)[0]

    return {kind: [lab.token_losses(logits, ids, LENGTH, LENGTH // 2) for ids in texts]
            for kind, texts in evaluation.items()}  # fmt: skip


def calibrated(step: Step, kind: str) -> dict[str, Tensor]:
    """All weights after each block was quantized on what the quantized blocks before it give."""
    run = Decoder(model.config, model.weights)
    walk = LayerWalk(run, sequences(kind, "calibration", SEQUENCES))
    for layer in range(LAYERS):
        step(run.weights, layer, walk.inputs())
        walk.advance()
    return run.weights


def gptq_block(changed: dict[str, Tensor], layer: int, read: dict[str, Tensor]) -> None:
    """GPTQ. Rows know nothing of each other, so layers that read the same go through it as one."""
    q, k, v, o, gate, up, down = block_linears(layer)
    for readers in ((q, k, v), (o,), (gate, up), (down,)):
        hessian, _ = lab.update_hessian(None, 0, read[readers[0]])
        rows = [changed[f"{name}.weight"] for name in readers]
        stored = lab.gptq(torch.cat(rows), hessian, BITS, GROUP, damping=0.1)
        back = lab.dequantize(stored).split([len(part) for part in rows])
        changed.update({f"{name}.weight": part for name, part in zip(readers, back, strict=True)})


def awq_block(changed: dict[str, Tensor], layer: int, read: dict[str, Tensor]) -> None:
    """AWQ: scales into norms and up_proj, then round to nearest."""
    base = f"model.layers.{layer}"
    q, k, v, _, gate, up, down = block_linears(layer)
    for producer, readers in (
        (up, (down,)), (f"{base}.input_layernorm", (q, k, v)), (f"{base}.post_attention_layernorm", (gate, up))
    ):  # fmt: skip
        names = [f"{name}.weight" for name in (producer, *readers)]
        made, *used = (changed[name] for name in names)
        inputs = read[readers[0]]
        scales = lab.search_scales(tuple(used), inputs[:: max(1, len(inputs) // SEARCHED)], BITS, GROUP, grid=10)
        (made,), used = lab.fold_scales((made,), tuple(used), scales)
        changed.update(zip(names, (made, *used), strict=True))
    for name in block_linears(layer):
        changed[f"{name}.weight"] = rounded(changed[f"{name}.weight"])


def each(change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """All weights, the linear layers changed one by one."""
    return model.weights | {name: change(model.weights[name]) for name in lab.linear_weights(model.weights)}


made = {
    "full": lambda: model.weights,
    "RTN": lambda: each(rounded),
    "GPTQ on prose": lambda: calibrated(gptq_block, "prose"),
    "GPTQ on code": lambda: calibrated(gptq_block, "code"),
    "AWQ on prose": lambda: calibrated(awq_block, "prose"),
    "NF4": lambda: each(lambda w: lab.dequantize_nf4(lab.quantize_nf4(w, double_quantization=True))),
    "MXFP4": lambda: each(lambda w: lab.dequantize_mxfp4(lab.quantize_mxfp4(w))),
}
losses = {name: losses_of(make()) for name, make in made.items()}
bits = dict.fromkeys(made, lab.bits_per_weight(BITS, GROUP))
bits |= {"full": 16.0, "NF4": lab.nf4_bits_per_weight(64, 256), "MXFP4": lab.bits_per_weight(4, 32, scale_bits=8)}

# %%
generator = torch.Generator().manual_seed(13)


def blocks_of(name: str, kinds: tuple[str, ...] = ("prose", "code")) -> list[Tensor]:
    """The losses of a method, cut into blocks of 32 tokens."""
    return lab.split_blocks([document for kind in kinds for document in losses[name][kind]], 32)


def draws(blocks: list[Tensor]) -> Tensor:
    """Uniform numbers for 2,000 resamples."""
    return torch.rand(2000, len(blocks), generator=generator, dtype=torch.float64)


def paired(first: str, second: str, kinds: tuple[str, ...] = ("prose", "code")) -> Interval:
    """How much larger the second's loss is, with its interval."""
    one, other = blocks_of(first, kinds), blocks_of(second, kinds)
    return lab.paired_bootstrap(one, other, draws(one))


def draw(panel: object, place: float, interval: Interval, colour: str, width: float = 2.0) -> None:
    """An interval as a bar with a dot."""
    panel.plot([interval.low, interval.high], [place, place], color=colour, linewidth=width, solid_capstyle="butt")
    panel.plot(interval.estimate, place, "o", color=colour)


methods = [name for name in losses if name != "full"]
left, middle, right = panels(3, height=3.2)
for place, name in enumerate(methods):
    one, other = blocks_of("full"), blocks_of(name)
    draw(left, place, lab.unpaired_bootstrap(one, other, draws(one), draws(other)), "#d5dae0", 7.0)
    draw(left, place, paired("full", name), BLUE)
    if name != "RTN":
        draw(middle, place, paired("RTN", name), PURPLE)
for place, kind in enumerate(("prose", "code")):
    own, foreign = ("GPTQ on prose", "GPTQ on code") if kind == "prose" else ("GPTQ on code", "GPTQ on prose")
    draw(right, place, paired(own, foreign, (kind,)), ORANGE)
    draw(right, place + 0.2, paired(own, "RTN", (kind,)), QUIET)
titles = ("Loss added to the full model", "Beside RTN", "Calibrated on the other text")
for panel, title in zip((left, middle, right), titles, strict=True):
    panel.axvline(0, color=RED, linewidth=1, linestyle=":")
    panel.set(title=title, xlabel="nats a token")
left.set_yticks(range(len(methods)), methods)
middle.set_yticks([])
left.invert_yaxis()
middle.set_ylim(left.get_ylim())
right.set_yticks([0, 0.2, 1, 1.2], ["on prose", "RTN", "on code", "RTN"])
right.set_ylim(1.6, -0.4)
for name, by_kind in losses.items():
    figures = ", ".join(f"{kind} {lab.perplexity(texts):.2f}" for kind, texts in by_kind.items())
    print(f"{name:14} {bits[name]:6.3f} bits a weight; perplexity on {figures}")

# %% tags=["check"]
check("13.9")

# %% [markdown]
# ## 10 Before you trust a checkpoint
#
# Two audits, neither of which reads a single weight. First the file that the bundled model comes from. Then one whose
# config promises groups of 128 while its tensors have scales for groups of 64: the tensors are right. What neither can
# say stands there as well.

# %%
reader = open_gguf(bundled_gguf())
metadata = {key: field.contents() for key, field in reader.fields.items() if len(field.data) <= 1}
shapes = {t.name: (t.tensor_type.name, tuple(int(size) for size in reversed(t.shape))) for t in reader.tensors}
print(lab.audit(metadata, shapes).text(), end="\n\n")
claimed = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}}
tensors = {
    "model.embed_tokens.weight": ("F16", (49152, 576)),
    "model.layers.0.mlp.up_proj.qweight": ("I32", (72, 1536)),
    "model.layers.0.mlp.up_proj.qzeros": ("I32", (9, 192)),
    "model.layers.0.mlp.up_proj.scales": ("F16", (9, 1536)),
    "model.layers.0.mlp.up_proj.g_idx": ("I32", (576,)),
}
print(lab.audit(claimed, tensors).text())

# %% tags=["check"]
check("13.10")

# %% [markdown]
# ## Stretch: rotations
#
# A rotated model answers as before, but none of its channels stands out: each is a mixture of all. Left, the largest
# magnitude of each feature that `q_proj` reads, plain, smoothed and rotated; in the middle all numbers in root mean
# squares: rotation leaves hardly more tail than a normal distribution has. Right, the relative error of the two layers
# in **W4A4**, one scale a token and a row, where plain rounding is hopeless. What `down_proj` reads is rotated while
# the model runs.

# %%
shallow = early_exit(decoder, LAYER + 1)
config, folded = lab.fold_gains(shallow.config, shallow.weights)
turned = lab.rotate_residual(config, folded, lab.random_rotation(config.hidden_size, 0))
rotated = Decoder(config, turned)
texts = sequences("prose", "evaluation", 2)
after = layer_inputs(rotated, texts, LAYER)
with torch.no_grad():
    places = torch.arange(LENGTH)
    before_logits, after_logits = (run(texts[:1], places, full_attention) for run in (shallow, rotated))
print(f"largest difference of the logits: {float((before_logits - after_logits).abs().max()):.1e}")

name = "self_attn.q_proj"
_, (smooth_weight,), scales = lab.smooth((gain,), (weights[name],), maxima)
variants = {
    "plain": (unseen[name], weights[name]),
    "smoothed": (unseen[name] / scales, smooth_weight),
    "rotated": (after[name], turned[f"model.layers.{LAYER}.{name}.weight"]),
}
down = "mlp.down_proj"
_, (smooth_down,), scales = lab.smooth((weights["mlp.up_proj"],), (weights[down],), inputs[down].abs().amax(0))
downs = {
    "plain": (unseen[down], weights[down]),
    "smoothed": (unseen[down] / scales, smooth_down),
    "rotated": (lab.hadamard_transform(unseen[down]), lab.hadamard_transform(weights[down])),
}


def w4a4(values: Tensor, w: Tensor) -> Tensor:
    """A layer's outputs with both operands in 4 bits."""
    tokens, rows = (lab.quantize(part, 4, granularity=kind) for part, kind in ((values, "token"), (w, "channel")))
    return lab.dequantize(tokens) @ lab.dequantize(rows).T


left, middle, right = panels(3, height=3.0)
for (kind, (values, _)), colour in zip(variants.items(), (RED, GREEN, BLUE), strict=True):
    tops = values.abs().amax(0)
    left.plot((tops / tops.median()).tolist(), color=colour, linewidth=0.9, label=kind)
    spread = values / values.square().mean().sqrt()
    ratio = float(lab.outlier_ratio(values).mean())
    middle.hist(spread.flatten().numpy(), bins=80, log=True, histtype="step", color=colour,
                label=f"{kind}: max / rms {ratio:.1f}")  # fmt: skip
left.set(xlabel="feature", title="q_proj's inputs: largest, over the median")
left.legend(fontsize=8)
middle.set(xlabel="in root mean squares", title="All numbers")
middle.legend(fontsize=7)
for offset, (label, layers) in zip((-0.2, 0.2), (("q_proj", variants), ("down_proj", downs)), strict=True):
    exact = layers["plain"][0] @ layers["plain"][1].T
    errors = [relative(w4a4(*pair), exact) for pair in layers.values()]
    right.bar(np.arange(3) + offset, errors, 0.38, color=BLUE if label == "q_proj" else ORANGE, label=label)
right.set_xticks(range(3), list(variants))
right.set_title("W4A4: relative error")
right.legend(fontsize=8)
right.grid(True, axis="y")

# %% tags=["check"]
check("13.14")

# %% [markdown]
# ## Stretch: the KV cache
#
# Left, the keys and values of one head, token by token (down) and channel by channel (across). Keys have channels that
# are large at every token; values have not. So KIVI quantizes keys by channel, values by token, and the third
# panel shows that it matters at 2 bits. Right, what the queries behind the text read from a cache of each format,
# against its bytes a token.

# %%
span = 2 * (LENGTH // 2)
tokens = sequences("prose", "evaluation", 1)[:, :span]
kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}


def remember(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Plain attention that keeps what it was given."""
    kept[layer] = q, k, v
    return full_attention(layer, q, k, v, positions)


with torch.no_grad():
    shallow(tokens, torch.arange(span), remember)
queries, keys, values = kept[LAYER]
# The first half of the text is in the cache, the second half asks.
half = span // 2
asked, keys, values = queries[:, :, half:], keys[:, :, :half], values[:, :, :half]
wide = layer_inputs(decoder, tokens, LAYER)["self_attn.k_proj"][:half] @ weights["self_attn.k_proj"].T
unturned = wide.unflatten(-1, (-1, config.head_dim)).transpose(0, 1)[None].contiguous()
exact = F.scaled_dot_product_attention(asked, keys, values, enable_gqa=True)

first, second, third, fourth = panels(4, height=3.1, width_ratios=[1, 1, 1, 1.5])
for panel, matrix, title in ((first, keys, "|keys|"), (second, values, "|values|")):
    panel.imshow(matrix[0, 0].abs().numpy(), aspect="auto", cmap="Blues")
    bare(panel, title).set(xlabel="channels", ylabel="tokens")


def coarse(matrix: Tensor, along: str) -> Tensor:
    """In 2 bits, 32 neighbours of a token or of a channel sharing a scale."""
    heads = [head.T if along == "channel" else head for head in matrix[0]]
    back = [lab.dequantize(lab.quantize(head, 2, symmetric=False, group_size=32)) for head in heads]
    return torch.stack([head.T if along == "channel" else head for head in back])[None]


def misread(k: Tensor, v: Tensor) -> float:
    """The relative error of what the queries read."""
    return relative(F.scaled_dot_product_attention(asked, k, v, enable_gqa=True), exact)


for offset, along, colour in ((-0.2, "channel", BLUE), (0.2, "token", ORANGE)):
    errors = [misread(coarse(keys, along), values), misread(keys, coarse(values, along))]
    third.bar(np.arange(2) + offset, errors, 0.38, color=colour, label=along)
third.set_xticks(range(2), ["keys", "values"])
third.set_title("2 bits, a scale within a …")
third.legend(fontsize=8)
scales = [lab.fp8_scale(part) for part in (keys, values)]
low, high = lab.channel_ranges(unturned, 0.02)
caches = {
    "INT8": (lab.Int8KVCache(), keys),
    "FP8": (lab.Fp8KVCache(*scales), keys),
    "KIVI, 4 bits": (lab.KiviCache(4, 32, 0), keys),
    "KIVI, 2 bits": (lab.KiviCache(2, 32, 0), keys),
    "KVQuant, 4 bits": (lab.KVQuantCache(4, low, high, rope_frequencies(config)), unturned),
    "KVQuant, 2 bits": (lab.KVQuantCache(2, low, high, rope_frequencies(config)), unturned),
}
for place, (label, (cache, given)) in enumerate(caches.items()):
    error = misread(*cache.append(given, values))
    fourth.plot(cache.num_bytes / half, error, "o", color=(BLUE, TEAL, ORANGE, ORANGE, PURPLE, PURPLE)[place])
    # Neighbours lie close together: one is named above its dot, the next below.
    offset = (6, -9) if label.startswith(("KVQuant", "FP8")) else (6, 3)
    fourth.annotate(label, (cache.num_bytes / half, error), offset, textcoords="offset points", size=7)
whole = 2 * 2 * config.num_kv_heads * config.head_dim
fourth.axvline(whole, color=QUIET, linewidth=1, linestyle=":", label="16 bits")
fourth.set(yscale="log", xlim=(0, 1.1 * whole), xlabel="bytes a token and layer", title="Error of what is read")
fourth.legend(fontsize=8)
fourth.grid(True, axis="y")

# %% tags=["check"]
check("13.16")

# %% [markdown]
# ## What it is for
#
# The seven linear layers of one block, dense in float32 and packed in 4 bits, by the tokens of a pass. A decode step of
# one sequence has one token, one of a batch as many as there are sequences, and a prefill all tokens of its prompt.
# Left of the crossing a pass waits for weights, and fewer bytes are faster; right of it arithmetic counts, and
# unpacking comes on top. So weight-only quantization is for decode and small batches; where the lines cross depends on
# the machine. Above sixteen tokens the packed layer unpacks its weights and multiplies densely, as in the reference.

# %%
PACKED_TOKENS = 16


def packed_layer(stored: QuantizedTensor) -> Callable[[Tensor], Tensor]:
    """A layer that multiplies with its codes for a few tokens, and unpacks them for many."""
    product = Int4Product(stored.codes.to(torch.int16) + MIDDLE, stored.scale, torch.zeros_like(stored.scale))
    return lambda x: product(x) if len(x) <= PACKED_TOKENS else F.linear(x, lab.dequantize(stored))


packed, dense = [], []
for part in weights.values():
    stored = lab.quantize(part, BITS, group_size=GROUP)
    packed.append((packed_layer(stored), part.shape[1]))
    dense.append((partial(F.linear, weight=lab.dequantize(stored)), part.shape[1]))


def seconds(layers: list[tuple[Callable[[Tensor], Tensor], int]], count: int) -> float:
    """The least processor time of a pass of so many tokens through all layers."""
    times = []
    for _ in range(REPEATS + 1):
        start = clock()
        for layer, width in layers:
            layer(torch.ones(count, width))
        times.append(clock() - start)
    return min(times[1:])


with torch.no_grad():
    slow, fast = ([seconds(layers, count) for count in BATCHES] for layers in (dense, packed))
left, right = panels(2, height=2.9)
for times, colour, label in ((slow, QUIET, "dense, float32"), (fast, BLUE, "packed, 4 bits")):
    left.plot(BATCHES, np.divide(times, slow[0]), "o-", color=colour, label=label)
left.set(xscale="log", yscale="log", xlabel="tokens of a pass", title="Time of a pass, in dense passes of one token")
left.legend(fontsize=8)
right.plot(BATCHES, np.divide(slow, fast), "o-", color=BLUE)
right.axhline(1, color=QUIET, linewidth=1, linestyle=":")
right.set(xscale="log", xlabel="tokens of a pass: decode of small batches … prefill", ylim=(0, None),
          title="How many times as fast packed is")  # fmt: skip
for panel in (left, right):
    panel.set_xticks(BATCHES, [str(count) for count in BATCHES])
    panel.minorticks_off()
    panel.grid(True, axis="y")

# %% [markdown]
# ## Where you are

# %%
progress("13")
