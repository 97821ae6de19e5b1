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
#     BATCHES: [1, 2]
#     CHARACTERS: 60
#     DEPTHS: [4, 30]
#     LAYERS: 4
#     MOST_DRAFTS: 2
#     NEW_TOKENS: 4
#     REPEATS: 1
#     RUNS: 2000
#     TEXTS: 1
# ---

# %% [markdown]
# # Lab 14 on a real model
#
# A walk through the tasks of the lab, with SmolLM2-135M on the CPU. Each section shows what a task is good for, then
# runs that task's tests on *your* file: `check("14.1")` reads it as it is on disk, so edit it beside this notebook and
# run the cell again.
#
# The cells call your code where it is written, and the reference where it is not. The table below says which; run its
# cell again after an edit. The derivations are in the [handout](README.md).

# %%
from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from matplotlib.patches import Rectangle
from torch import Tensor

from labkit.checkpoints import load_tokenizer
from labkit.decoder import full_attention
from labkit.drafting import DraftTree, Round
from labkit.early_exit import early_exit
from labkit.notebook import check, open_lab, progress
from labkit.notebook.palette import BLUE, FAINT, GREEN, ORANGE, PURPLE, QUIET, RED, TEAL, owner_colour
from labkit.notebook.pictures import draw_mask
from labkit.notebook.style import bare, panels, use_style
from labkit.probing import machine_bounds
from labkit.protocols import CachedModel
from labkit.sampling_params import SamplingParams
from labkit.specs import Checkpoint
from labkit.trained_heads import DraftModel, load_head
from labkit.transformers_model import TransformersModel, build_transformers_model
from labkit.workloads import WORKLOADS, prompts

use_style()
print(machine_bounds(quick=True).line())
# transformers' progress bars look for widgets, which nobody needs here.
warnings.filterwarnings("ignore", message="IProgress not found")
# Processor time, so that whatever else the machine does leaves the curves alone.
clock = time.process_time
decoder = Checkpoint("smollm2").build()
tokenizer = load_tokenizer("smollm2")
greedy = SamplingParams(temperature=0.0)

lab = open_lab("14")
lab

# %% tags=["parameters"]
# How much is run; more is slower and smoother.
RUNS = 30_000
TEXTS = 2
CHARACTERS = 160
NEW_TOKENS = 24
MOST_DRAFTS = 6
LAYERS = 26
DEPTHS = [8, 14, 20, 24, 26, 28, 29, 30]
REPEATS = 3
BATCHES = [1, 4, 8]

# %% [markdown]
# ## 1 What may stay, and what is missing
#
# The target draws from $p$, the drafter from $q$. Whatever the drafter proposes may stay as far as the target wants
# it: $\min(p, q)$, the green bars, whose sum is the chance $\alpha$ that a draft is kept; the hatched rest is rejected.
# What is missing to $p$ is the residual, orange; divided by its sum it is what a replacement is drawn from. Green and
# orange stacked are $p$: that is the whole proof.

# %%
letters = list("abcdefgh")
p = torch.tensor([0.30, 0.22, 0.15, 0.12, 0.09, 0.06, 0.04, 0.02], dtype=torch.float64)
q = torch.tensor([0.10, 0.30, 0.05, 0.20, 0.05, 0.02, 0.20, 0.08], dtype=torch.float64)
kept = torch.minimum(p, q)
alpha = float(lab.acceptance_probability(p, q))
replacement = lab.residual(p, q)

axes = panels(4, height=2.3, sharey=True)
axes[0].bar(letters, p, color=BLUE)
axes[0].set_title("p, the target")
axes[1].bar(letters, q, color=PURPLE)
axes[1].set_title("q, the drafter")
axes[2].bar(letters, kept, color=GREEN)
axes[2].bar(letters, q - kept, bottom=kept, color="none", edgecolor=RED, hatch="///", linewidth=0)
axes[2].set_title(f"min(p, q): α = {alpha:.2f}")
axes[3].bar(letters, kept, color=GREEN)
axes[3].bar(letters, (1 - alpha) * replacement, bottom=kept, color=ORANGE)
axes[3].set_title("and the residual")
print(f"largest difference from p: {float((kept + (1 - alpha) * replacement - p).abs().max()):.1e}")

# %% tags=["check"]
check("14.1")

# %% [markdown]
# ## 2 A round
#
# Sixteen rounds of five drafts, all judged in one call. Green drafts were kept, the orange token is the target's own:
# the replacement of the first rejected draft, or a bonus behind the last. Grey drafts were never judged: they were
# drafted for a text that does not exist. On the right, how many drafts a round keeps, beside the $\alpha^i(1-\alpha)$
# of a drafter that is as good at every place.

# %%
k, vocab = 5, len(p)
generator = torch.Generator().manual_seed(1)
drafts = torch.multinomial(q, RUNS * k, replacement=True, generator=generator).reshape(RUNS, k)
uniforms = torch.rand(RUNS, k + 1, 2, generator=generator, dtype=torch.float64)
tokens, counts = lab.verify(p.expand(RUNS, k + 1, vocab), q.expand(RUNS, k, vocab), drafts, uniforms)

left, right = panels(2, height=3.2, width_ratios=[1, 1])
for run in range(16):
    for place in range(k + 1):
        judged = place <= int(counts[run])
        colour = FAINT if not judged else GREEN if place < int(counts[run]) else ORANGE
        if judged or place < k:
            left.add_patch(Rectangle((place + 0.04, run + 0.06), 0.92, 0.88, facecolor=colour))
            token = int(tokens[run, place]) if judged else int(drafts[run, place])
            left.text(place + 0.5, run + 0.5, letters[token], ha="center", va="center", size=7)
bare(left, "16 rounds of 5 drafts")
left.set(xlim=(0, k + 1), ylim=(16, 0), xlabel="place in the round →", ylabel="rounds")
shares = torch.bincount(counts, minlength=k + 1).double() / RUNS
right.bar(range(k + 1), shares, color=GREEN, label="measured")
expected = [alpha**i * (1 - alpha) for i in range(k)] + [alpha**k]
right.plot(range(k + 1), expected, "o", color=RED, label="if all places are alike")
right.set_title("Drafts kept in a round")
right.set(xlabel="drafts", ylabel="share of rounds")
right.legend()
right.grid(True, axis="y")

# %% tags=["check"]
check("14.2")

# %% [markdown]
# ## 3 The loop on a real model
#
# SmolLM2 goes on with a piece of Python, and a drafter that merely copies from the text guesses along. A bar is one
# pass of the target: green tokens were guessed right, the orange one it added itself. The text is that of plain
# decoding, token for token.

# %%
whole = build_transformers_model(decoder.config, decoder.weights, decoder.dtype)
code = tokenizer.encode(
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def add(self, other):\n        return Point(self.x + other.x, self.y + other.y)\n\n    def subtract("
)


def target(prompt: list[int]) -> CachedModel:
    """The real model with room for a text."""
    return TransformersModel(whole, len(prompt) + NEW_TOKENS)


plain = lab.speculate(target(code), lab.NgramDrafter(), code, NEW_TOKENS, num_drafts=0)
done = lab.speculate(target(code), lab.NgramDrafter(), code, NEW_TOKENS, num_drafts=5)
print(f"the same tokens: {plain.tokens == done.tokens}; passes: {len(plain.rounds)} and {len(done.rounds)}")
print(tokenizer.decode([*code[-6:], *done.tokens]))

axes = panels(height=2.0)
accepted = np.array([round_.accepted for round_ in done.rounds])
emitted = np.array([round_.emitted for round_ in done.rounds])
axes.bar(range(len(emitted)), accepted, color=GREEN, label="guessed right")
axes.bar(range(len(emitted)), emitted - accepted, bottom=accepted, color=ORANGE, label="the target's own")
axes.set(xlabel="pass of the target", ylabel="tokens", title="Tokens that each pass gave")
axes.legend()
axes.grid(True, axis="y")

# %% tags=["check"]
check("14.3")

# %% [markdown]
# ## 4 The experiment
#
# Two Markov chains over four tokens, and thousands of texts. The distance of the first three tokens from the target's
# exact law shrinks with the number of texts and stays below the limit, which a right program exceeds once in a million
# times. The red line is a rule that sounds as good: a rejected draft is replaced by a draw from $p$ itself. Its
# distance stays where it is however many texts there are, since it is no scatter.

# %%
chain = torch.tensor(
    [[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2], [0.3, 0.0, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64
)
guess = torch.tensor(
    [[0.1, 0.5, 0.2, 0.2], [0.3, 0.2, 0.3, 0.2], [0.1, 0.3, 0.3, 0.3], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64
)
generator = torch.Generator().manual_seed(2)
numbers = torch.rand(RUNS, 3, 3, generator=generator, dtype=torch.float64)
texts = lab.speculate_many(chain, guess, torch.zeros(RUNS, dtype=torch.int64), 3, 2, numbers)


def from_p(last: Tensor, numbers: Tensor) -> Tensor:
    """The next token of each text by the wrong rule."""
    drafts = lab.draw(guess[last], numbers[:, 0])
    accepted, _ = lab.accept_or_resample(chain[last], guess[last], drafts, numbers[:, 1], numbers[:, 2])
    return torch.where(accepted, drafts, lab.draw(chain[last], numbers[:, 2]))


wrong = [torch.zeros(RUNS, dtype=torch.int64)]
for place in range(3):
    wrong.append(from_p(wrong[-1], numbers[:, place]))
law = (chain[0][:, None, None] * chain[:, :, None] * chain).reshape(-1)
places = torch.tensor([16, 4, 1])
sizes = [int(size) for size in np.geomspace(100, RUNS, 12)]

axes = panels(height=2.8, width=7)
samples = {"speculation": (texts, BLUE), "replaced by a draw from p": (torch.stack(wrong[1:], 1), RED)}
for name, (sample, colour) in samples.items():
    index = (sample * places).sum(1)
    axes.plot(sizes, [lab.total_variation(index[:size], law) for size in sizes], "o-", color=colour, label=name)
limits = [lab.total_variation_limit(law, size, 1e-6) for size in sizes]
axes.plot(sizes, limits, "--", color=QUIET, label="exceeded once in a million")
axes.set(xscale="log", yscale="log", xlabel="texts", ylabel="total variation", title="Distance from the target's law")
axes.legend()
axes.grid(True)

# %% tags=["check"]
check("14.4")

# %% [markdown]
# ## 5 What it is worth
#
# Speed-up against the number of drafts, by the formula. Left, drafts at a twentieth of a decode step: the better the
# drafter, the longer the round that pays. Middle, $\alpha = 0.8$ and drafts of different cost. Right, what
# happens when the pass over $k + 1$ tokens costs more than the pass over one: in a large batch, or on a CPU. The dots
# mark the best $k$; below the dotted line nobody should speculate.

# %%
ks = list(range(17))
axes = panels(3, height=2.9, sharey=True)
families: list[tuple[str, list[tuple[str, Callable[[int], float]]]]] = [
    ("c = 0.05", [(f"α = {a}", lambda k, a=a: lab.speedup(a, k, 0.05)) for a in (0.5, 0.7, 0.8, 0.9)]),
    ("α = 0.8", [(f"c = {c}", lambda k, c=c: lab.speedup(0.8, k, c)) for c in (0.0, 0.05, 0.1, 0.3)]),
    (
        "α = 0.8, c = 0.05",
        [(f"v(k) = 1 + {s} k", lambda k, s=s: lab.speedup(0.8, k, 0.05, 1 + s * k)) for s in (0, 0.05, 0.2, 0.6)],
    ),
]
for panel, (title, curves) in zip(axes, families, strict=True):
    for name, curve in curves:
        values = [curve(k) for k in ks]
        (line,) = panel.plot(ks, values, label=name)
        panel.plot(int(np.argmax(values)), max(values), "o", color=line.get_color())
    panel.axhline(1, color=QUIET, linewidth=1, linestyle=":")
    panel.set(xlabel="drafts a round, k", ylim=(0, 5), title=title)
    panel.legend(fontsize=8)
axes[0].set_ylabel("speed-up")
print(f"α = 0.8, k = 4, c = 0.05: {lab.expected_tokens(0.8, 4):.2f} tokens, {lab.speedup(0.8, 4, 0.05):.1f} times")

# %% tags=["check"]
check("14.5")

# %% [markdown]
# ## 6 Copying
#
# What the n-gram drafter proposes at each place of the code above: green where the text really goes on so, red where
# not, grey where the last token has never been seen before. Names and punctuation that repeat come for nothing; what is
# new must come from the model.

# %%
drafter = lab.NgramDrafter()
colours = []
for place in range(1, len(code)):
    proposed = drafter.propose(code[:place], 1, [0.0]).tokens
    colours.append(FAINT if not proposed else GREEN if proposed[0] == code[place] else "#e8a5a5")
axes = bare(panels(height=1.3), "next tokens that could be copied")
axes.set(xlim=(0, 92), ylim=(4, 0))
x = y = 0
for token, colour in zip(code[1:], colours, strict=True):
    word = tokenizer.decode([token])
    shown = word.replace("\n", "⏎").replace(" ", "·")
    width = max(len(shown), 1) + 0.6
    if x + width > 92:
        x, y = 0, y + 1
    axes.add_patch(Rectangle((x, y + 0.08), width - 0.2, 0.84, facecolor=colour))
    axes.text(x + width / 2 - 0.1, y + 0.5, shown, ha="center", va="center", size=7, family="monospace")
    x += width

# %% tags=["check"]
check("14.6")

# %% [markdown]
# ## 7 A small model
#
# A cheap drafter that needs no download: the first layers of the target, and then its own head. With all layers it is
# the target, and everything is kept; each layer less is cheaper and worse. Left, the chance
# $\sum_x \min(p(x), q(x))$ along a text of each workload: the layers were never trained to be read by the head that
# early, and it shows: such an *early exit* is a drafter to learn from, not to gain by. A draft model must be trained.
#
# Right, why $q$ must be what was drawn from: drafts drawn with top-k 2, judged with the raw $q$. What comes out is no
# longer the target's distribution.

# %%
reading = {name: prompts(name, tokenizer, 1, CHARACTERS)[0] for name in WORKLOADS}


def logits_after(depth: int, ids: list[int]) -> Tensor:
    """What the model prefers after each token if it stops after so many layers, `[tokens, vocab]`."""
    with torch.no_grad():
        return early_exit(decoder, depth)(torch.tensor([ids]), torch.arange(len(ids)), full_attention)[0]


left, right = panels(2, height=3.0)
exits = {}
for name, ids in reading.items():
    exits[name] = {depth: logits_after(depth, ids).double() for depth in DEPTHS}
    wanted = exits[name][DEPTHS[-1]].softmax(-1)
    overlap = [float(lab.acceptance_probability(wanted, exits[name][d].softmax(-1)).mean()) for d in DEPTHS]
    left.plot(DEPTHS, overlap, "o-", label=name)
left.set(xlabel="layers of the drafter", ylim=(0, 1.02), title="Chance that a draft is kept, temperature 1")
left.grid(True)
left.legend()

narrow = torch.where(q >= q.topk(2).values.min(), q, 0 * q)
narrow /= narrow.sum()
generator = torch.Generator().manual_seed(3)
drafts = torch.multinomial(narrow, RUNS, replacement=True, generator=generator)[:, None]
uniforms = torch.rand(RUNS, 2, 2, generator=generator, dtype=torch.float64)
judges = {"judged with what was drawn from": (-0.25, narrow, GREEN), "judged with the raw q": (0.25, q, RED)}
for name, (offset, row, colour) in judges.items():
    out, _ = lab.verify(p.expand(RUNS, 2, vocab), row.expand(RUNS, 1, vocab), drafts, uniforms)
    shares = torch.bincount(out[:, 0], minlength=vocab).double() / RUNS
    right.bar(np.arange(vocab) + offset, shares, 0.5, color=colour, label=name)
right.plot(range(vocab), p, "_", color="black", markersize=22, label="p")
right.set_xticks(range(vocab), letters)
right.set_title("What comes out")
right.legend(fontsize=8)
right.grid(True, axis="y")

# %% tags=["check"]
check("14.7")

# %% [markdown]
# ## 8 Trees
#
# The tree of the handout, in one pass behind a text of four tokens. Every draft sees the text, its ancestors and
# itself, and stands where it would stand in its own text: siblings share a position. In the mask a colour is a
# position.
#
# On the right, what siblings are good for: how often the target's favourite is among the $m$ likeliest tokens of
# an early exit. The second guess brings more than the fifth.

# %%
tree = DraftTree(tokens=(0, 1, 2, 3, 4, 5), parents=(-1, -1, 0, 0, 1, 2))
words = ["the", "a", "cat", "dog", "cat", "sat"]
LENGTH = 4
positions = lab.tree_positions(tree.parents, LENGTH).tolist()
behind = lab.ancestor_mask(tree.parents).numpy()
mask = np.zeros((LENGTH + len(words),) * 2, dtype=bool)
mask[:LENGTH, :LENGTH] = np.tril(np.ones((LENGTH, LENGTH), dtype=bool))
mask[LENGTH:, :LENGTH] = True
mask[LENGTH:, LENGTH:] = behind

left, middle, right = panels(3, height=3.1, width_ratios=[1, 1, 1])
place_of = [*range(LENGTH), *positions]
draw_mask(left, mask, "who sees whom", colours=[owner_colour(place) for place in place_of])
left.set_yticks(range(len(place_of)), [f"text {place}" for place in range(LENGTH)] + words, size=8)
height = {-1: 1.5, 0: 0.7, 1: 2.6, 2: 0.2, 3: 1.3, 4: 2.6, 5: 0.2}
for index, (word, parent) in enumerate(zip(words, tree.parents, strict=True)):
    start = (positions[parent] if parent >= 0 else LENGTH - 1, height[parent])
    middle.plot([start[0], positions[index]], [start[1], height[index]], color=QUIET, zorder=1)
    middle.plot(positions[index], height[index], "o", markersize=24, color=owner_colour(positions[index]))
    middle.text(positions[index], height[index], word, ha="center", va="center", size=8)
middle.plot(LENGTH - 1, height[-1], "s", markersize=24, color=FAINT)
middle.text(LENGTH - 1, height[-1], "text", ha="center", va="center", size=8)
bare(middle, "the tree").set(xlim=(2.5, 6.5), ylim=(3.1, -0.3), xlabel="position →")
widths = range(1, 9)
depth = DEPTHS[len(DEPTHS) // 2]
for name in WORKLOADS:
    favourite = exits[name][DEPTHS[-1]].argmax(-1, keepdim=True)
    guesses = exits[name][depth].topk(max(widths)).indices
    right.plot(widths, [float((guesses[:, :m] == favourite).any(1).double().mean()) for m in widths], "o-", label=name)
right.set(xlabel="siblings, m", ylim=(0, 1), title=f"One of them is right ({depth} layers)")
right.legend(fontsize=8)
right.grid(True)

# %% tags=["check"]
check("14.8")

# %% [markdown]
# ## 9 Measured and predicted
#
# Two drafters, three workloads, the real model at temperature 0. What is copied decides for the n-gram drafter; the
# early exit cares less. The middle panel holds the formula against the rounds: each dot is one drafter on one
# workload, and the closer to the diagonal, the more a single $\alpha$ says. With so few texts expect scatter.

# %%
short = early_exit(decoder, LAYERS)
small = build_transformers_model(short.config, short.weights, short.dtype)
kinds: dict[str, Callable[[int], object]] = {
    "n-gram": lambda capacity: lab.NgramDrafter(),
    f"{LAYERS} layers": lambda capacity: lab.ModelDrafter(TransformersModel(small, capacity), greedy),
}
rounds: dict[tuple[str, str], list[Round]] = {}
for workload in WORKLOADS:
    for prompt in prompts(workload, tokenizer, TEXTS, CHARACTERS):
        for kind, make in kinds.items():
            result = lab.speculate(target(prompt), make(len(prompt) + NEW_TOKENS), prompt, NEW_TOKENS, num_drafts=4)
            rounds.setdefault((kind, workload), []).extend(result.rounds)


def estimate(those: list[Round]) -> float:
    """α of these rounds; 0 where nothing could be drafted."""
    return lab.acceptance_estimate(those) if any(round_.drafted for round_ in those) else 0.0


left, right = panels(2, height=3.0)
for offset, (kind, colour) in zip((-0.2, 0.2), zip(kinds, (BLUE, ORANGE), strict=True), strict=True):
    alphas = [estimate(rounds[kind, workload]) for workload in WORKLOADS]
    left.bar(np.arange(3) + offset, alphas, 0.4, color=colour, label=kind)
    for workload in WORKLOADS:
        those = rounds[kind, workload]
        foreseen = lab.predicted_tokens_per_round(those) if any(r.drafted for r in those) else 1.0
        right.plot(foreseen, lab.tokens_per_round(those), "o", color=colour)
        right.annotate(workload, (foreseen, lab.tokens_per_round(those)), (5, -3), textcoords="offset points", size=7)
left.set_xticks(range(3), WORKLOADS)
left.set(ylim=(0, 1), title="Acceptance, four drafts a round")
left.legend()
most = max(lab.tokens_per_round(those) for those in rounds.values()) + 0.5
right.plot([1, most], [1, most], "--", color=QUIET)
right.set(xlabel="predicted", ylabel="measured", title="Tokens a round")
right.grid(True)

# %% [markdown]
# And the price. Left, the pass over $k + 1$ tokens in decode steps, measured where this notebook ran: one is what
# the rule of thumb assumes, and what a GPU with a small batch comes close to. Right, the speed-up that the formula
# makes of the measured $\alpha$ for copying, first with $v = 1$, then with the measured $v(k)$. A drafter whose solid
# line stays below the dotted one costs time on this machine, however clever it is.

# %%
def seconds_of_pass(model: object, count: int) -> float:
    """The least processor time of a pass over so many tokens behind the code above."""
    cached = TransformersModel(model, len(code) + count)
    cached.append(code)
    seconds = []
    for _ in range(REPEATS + 1):
        start = clock()
        cached.append(code[:count])
        seconds.append(clock() - start)
        cached.truncate(len(code))
    return min(seconds[1:])


step = seconds_of_pass(whole, 1)
ks = list(range(MOST_DRAFTS + 1))
price = [seconds_of_pass(whole, k + 1) / step for k in ks]
costs = {"n-gram": 0.0, f"{LAYERS} layers": seconds_of_pass(small, 1) / step}
left, right = panels(2, height=3.0)
left.plot(ks, price, "o-", color=TEAL, label="measured v(k)")
left.plot(ks, [1] * len(ks), "--", color=QUIET, label="if only reading weights counted")
left.set(xlabel="k", ylim=(0, None), title="A pass over k + 1 tokens, in decode steps")
left.legend()
for kind, colour in zip(costs, (BLUE, ORANGE), strict=True):
    alpha = estimate(rounds[kind, "copying"])
    ideal = [lab.speedup(alpha, k, costs[kind]) for k in ks]
    real = [lab.speedup(alpha, k, costs[kind], price[k]) for k in ks]
    right.plot(ks, ideal, "--", color=colour, label=f"{kind}, v = 1")
    right.plot(ks, real, "o-", color=colour, label=f"{kind}, measured v(k)")
right.axhline(1, color=QUIET, linewidth=1, linestyle=":")
right.set(xlabel="k", ylim=(0, 1.5 * right.get_ylim()[1]), title="Speed-up for copying, α and c as measured")
right.legend(fontsize=8, ncols=2)
right.grid(True)

# %% tags=["check"]
check("14.9")

# %% [markdown]
# ## 10 Trained heads
#
# The workbook brings heads that were trained for this model on text that it wrote itself, in four bits: a draft model
# of two layers, the heads of EAGLE and EAGLE-3, and a multi-token prediction module. A draft costs a small part of an
# early exit's, and all but the first read what the target already knows. Left, acceptance by workload; right, the
# formula against the rounds once more.

# %%
heads = {name: load_head(name, decoder) for name in ("draft", "eagle", "eagle3", "mtp")}
makers = {"EAGLE": ("eagle", lab.EagleHead), "EAGLE-3": ("eagle3", lab.Eagle3Head), "MTP": ("mtp", lab.MtpHead)}
trained = ("draft model", *makers)


def pair(kind: str, prompt: list[int]) -> tuple[object, object]:
    """A target and the drafter that reads its features; the draft model reads none."""
    capacity = len(prompt) + NEW_TOKENS
    if kind == "draft model":
        return target(prompt), lab.ModelDrafter(DraftModel(heads["draft"], capacity), greedy)
    name, head = makers[kind]
    own = heads[name]
    model = lab.FeatureModel(decoder, capacity, own.layers)
    return model, lab.FeatureDrafter(model, head(own.config, own.weights, own.target_ids), greedy)


for workload in WORKLOADS:
    for prompt in prompts(workload, tokenizer, TEXTS, CHARACTERS):
        for kind in trained:
            result = lab.speculate(*pair(kind, prompt), prompt, NEW_TOKENS, num_drafts=4)
            rounds.setdefault((kind, workload), []).extend(result.rounds)

left, right = panels(2, height=3.0)
for index, (kind, colour) in enumerate(zip(("n-gram", *trained), (BLUE, RED, GREEN, TEAL, PURPLE), strict=True)):
    alphas = [estimate(rounds[kind, workload]) for workload in WORKLOADS]
    left.bar(np.arange(3) + 0.16 * (index - 2), alphas, 0.16, color=colour, label=kind)
    for workload in WORKLOADS:
        those = rounds[kind, workload]
        foreseen = lab.predicted_tokens_per_round(those) if any(r.drafted for r in those) else 1.0
        right.plot(foreseen, lab.tokens_per_round(those), "o", color=colour)
left.set_xticks(range(3), WORKLOADS)
left.set(ylim=(0, 1), title="Acceptance, four drafts a round")
left.legend(fontsize=8, ncols=2)
most = max(lab.tokens_per_round(those) for those in rounds.values()) + 0.5
right.plot([1, most], [1, most], "--", color=QUIET)
right.set(xlabel="predicted", ylabel="measured", title="Tokens a round")
right.grid(True)

# %% [markdown]
# What company does to it. A pass over $k + 1$ tokens of one text is cheap where a decode step mostly reads weights; in
# a batch these are read once for all texts, and the drafts become real work. Left, the pass over $k + 1$ tokens of
# each text in plain steps of the same batch; right, what is left of the speed-up with EAGLE-3's acceptance when
# copying and the measured cost of its drafts. Where a line stays below the dotted one, nobody should draft.

# %%
def batch_prices(size: int) -> tuple[float, list[float]]:
    """The least processor time of a plain step of so many texts, and v(k) in such steps."""
    cached = BatchedPasses(whole, [code] * size)
    seconds = [[cached.seconds(k + 1, clock) for k in ks] for _ in range(REPEATS + 1)][1:]
    least = [min(row[k] for row in seconds) for k in ks]
    return least[0], [one / least[0] for one in least]


class BatchedPasses:
    """Passes over new tokens of several equal texts, each forgotten again."""

    def __init__(self, model: object, texts: list[list[int]]) -> None:
        from transformers import DynamicCache  # here, since the import is noisy before its warnings are filtered

        self.model, self.ids, self.cache = model, torch.tensor(texts), DynamicCache()
        self.seconds(self.ids.shape[1], clock, forget=False)

    def seconds(self, count: int, clock: Callable[[], float], forget: bool = True) -> float:
        """Processor time of one pass."""
        start = clock()
        with torch.no_grad():
            self.model(self.ids[:, :count], cache=self.cache, use_cache=True)
        end = clock()
        if forget:
            self.cache.crop(-count)
        return end - start


model, drafter = pair("EAGLE-3", code)
model.append(code[:-1])
drafter.propose(code, 1, [0.0])
start = clock()
for _ in range(REPEATS):
    drafter.propose(code, 4, [0.0] * 4)
draft_seconds = (clock() - start) / REPEATS / 4
alpha = estimate(rounds["EAGLE-3", "copying"])
left, right = panels(2, height=3.0)
for size, colour in zip(BATCHES, (BLUE, TEAL, ORANGE, RED), strict=False):
    plain_step, prices = batch_prices(size)
    left.plot(ks, prices, "o-", color=colour, label=f"{size} texts")
    # Each text's drafter takes its turn, while the pass is one for all.
    cost = draft_seconds * size / plain_step
    right.plot(ks, [lab.speedup(alpha, k, cost, prices[k]) for k in ks], "o-", color=colour, label=f"{size} texts")
left.set(xlabel="k", ylim=(0, None), title="A pass over k + 1 tokens of each text")
left.legend(fontsize=8)
right.axhline(1, color=QUIET, linewidth=1, linestyle=":")
right.set(xlabel="k", ylim=(0, None), title=f"Speed-up by EAGLE-3, α = {alpha:.2f}")
right.legend(fontsize=8)
right.grid(True)

# %% tags=["check"]
check("14.13")

# %% [markdown]
# ## Where you are

# %%
progress("14")
