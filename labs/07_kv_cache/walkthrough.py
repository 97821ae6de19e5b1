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
#     ANSWERS: [3, 1, 2, 1, 2]
#     BATCH_SIZES: [1, 2]
#     CHUNK_SIZES: [8, 40]
#     LONG_PROMPT: 40
#     NEW_TOKENS: 3
#     REPEATS: 1
#     USERS: 2
# ---

# %% [markdown]
# # Lab 07 on a real model
#
# A walk through the tasks of the lab, with SmolLM2-135M on the CPU. Each section shows what a task is good for, then
# runs that task's tests on *your* file: `check("07.1")` reads it as it is on disk, so edit it beside this notebook and
# run the cell again.
#
# The cells call your code where it is written, and the reference where it is not. The table below says which; run its
# cell again after an edit. The derivations are in the [handout](README.md).

# %%
from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from labkit.checkpoints import load_tokenizer
from labkit.config import ModelConfig
from labkit.generation_request import GenerationRequest
from labkit.latent_config import LatentConfig
from labkit.notebook import check, open_lab, progress
from labkit.notebook.palette import BLUE, GREEN, ORANGE, QUIET, RED, owner_colour
from labkit.notebook.pictures import Cell, draw_mask, draw_memory, draw_steps, draw_timeline
from labkit.notebook.style import bare, panels, use_style
from labkit.paths import repo_root
from labkit.probing import machine_bounds
from labkit.protocols import CachedModel
from labkit.sampling_params import SamplingParams
from labkit.specs import Checkpoint, Recomputed, VocabularyBytes
from labkit.step_plan import StepPlan

use_style()
print(machine_bounds(quick=True).line())
# Processor time, so that whatever else the machine does leaves the curves alone.
clock = time.process_time
decoder = Checkpoint("smollm2").build()
tokenizer = load_tokenizer("smollm2")
# Text to read: the first section of this lab's handout.
handout = (repo_root() / "labs" / "07_kv_cache" / "README.md").read_text(encoding="utf-8").split("\n## ")[1]
reading = tokenizer.encode(handout)

lab = open_lab("07")
lab

# %% tags=["parameters"]
# How much is run; more is slower and smoother.
NEW_TOKENS = 40
LONG_PROMPT = 384
CHUNK_SIZES = [16, 32, 64, 128, 384]
BATCH_SIZES = [1, 2, 4, 8, 16]
REPEATS = 5
ANSWERS = [26, 4, 7, 3, 5, 18, 4, 9, 6, 3, 12, 5]
USERS = 6

# %% [markdown]
# ## 1 What a token costs in memory
#
# In each layer a token leaves one key and one value for each KV head, so its bytes are
# $2 \cdot L \cdot n_{kv} \cdot d_{head} \cdot b$, and a context's are that times its tokens: straight lines of slope 1
# below. The dashed line is Llama-3-8B as it would be if each of its 32 query heads had a K/V head of its own; sharing
# 8 among them moves the line down by a factor of 4.
#
# The right panel turns it around. A card of 8 GB holds Qwen2.5-1.5B (3.1 GB in bf16) and 1 GB of other things; what is
# left holds so many sequences of each length. *Tokens* are the currency: half the length, twice the users.

# %%
def shape(layers: int, kv_heads: int, head_dim: int) -> ModelConfig:
    """What of a model's configuration its cache depends on."""
    return replace(
        decoder.config, num_layers=layers, num_heads=kv_heads, num_kv_heads=kv_heads, head_dim=head_dim
    )


qwen = shape(28, 2, 128)
models = {
    "Llama-3-70B": (shape(80, 8, 128), "-"),
    "Llama-3-8B, 32 KV heads": (shape(32, 32, 128), "--"),
    "Llama-3-8B": (shape(32, 8, 128), "-"),
    "Qwen2.5-1.5B": (qwen, "-"),
    "SmolLM2-135M": (decoder.config, "-"),
}
contexts = [2**power for power in range(10, 18)]

left, right = panels(2, height=3.6)
for name, (config, line) in models.items():
    gib = [lab.kv_cache_bytes(config, tokens, 2) / 2**30 for tokens in contexts]
    left.plot(contexts, gib, line, label=name)
left.axhline(8e9 / 2**30, color=QUIET, linewidth=1, linestyle=":")
left.text(contexts[0], 8.3, "a card of 8 GB", color=QUIET, size=8)
left.set_title("Memory of one sequence, bf16")
left.set(xlabel="tokens of context", ylabel="GiB of keys and values")
left.legend(fontsize=8)

budget = int(8e9 - 3.1e9 - 1e9)
fitting = [lab.tokens_that_fit(qwen, budget, 2) // tokens for tokens in contexts]
right.plot(contexts, fitting, "o-")
for tokens, sequences in zip(contexts, fitting, strict=True):
    right.annotate(str(sequences), (tokens, sequences), (4, 4), textcoords="offset points", size=8)
right.set_title("Sequences that fit beside Qwen2.5-1.5B on 8 GB")
right.set(xlabel="tokens of each", ylabel="sequences")
for axes in (left, right):
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{tokens // 1024}k" for tokens in contexts])
    axes.grid(True)

# %% [markdown]
# The formula is a promise about tensors. A `KVCache` of the real model, measured:

# %%
cache = lab.KVCache(decoder.config, capacity=1024)
promised = lab.kv_cache_bytes(decoder.config, 1024, 4)
print(f"promised {promised:,} bytes, set aside {cache.num_bytes:,}, tokens held {cache.length}")

# %% tags=["check"]
check("07.1")

# %% [markdown]
# ## 2 Who sees whom
#
# The new tokens are the *last* ones, so the triangle of the causal mask sits in the lower right corner. A prompt, a
# piece of a prompt and a decode step are one case with three shapes. The last panel is the mask that `tril` gives:
# right for whole prompts, and wrong as soon as the past is longer than the present.

# %%
axes = panels(4, height=2.2, width_ratios=[6, 8, 8, 8])
draw_mask(axes[0], lab.causal_mask(6, 6).numpy(), "a prompt")
draw_mask(axes[1], lab.causal_mask(3, 8).numpy(), "3 new tokens on 5")
draw_mask(axes[2], lab.causal_mask(1, 8).numpy(), "a decode step")
draw_mask(axes[3], torch.ones(3, 8).tril().bool().numpy(), "upper left: wrong", colours=[RED] * 3)

# %% [markdown]
# Now the real thing. Attention returns $\sum_j w_j v_j$; put the unit vectors in the place of the values, and what
# comes back are the weights themselves. Three query heads of SmolLM2 share one KV head, three different questions to
# one memory. Below, the three heads of one group, over the same keys: the middle one has learnt to look at the token
# just before, its neighbours look further back. The white triangle is the mask.

# %%
sentence = tokenizer.encode("The cat sat on the mat because the cat was tired.")
captured: dict[int, tuple[Tensor, Tensor]] = {}


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Attention that keeps queries and keys for us to look at."""
    captured[layer] = q, k
    return lab.cached_attention(q, k, v)


with torch.no_grad():
    decoder(torch.tensor([sentence]), torch.arange(len(sentence)), attend)

LAYER, GROUP = 11, 0
q, k = captured[LAYER]
unit_vectors = torch.eye(len(sentence), k.shape[-1]).expand_as(k)
weights = lab.cached_attention(q, k, unit_vectors)[0, :, :, : len(sentence)]
heads = range(3 * GROUP, 3 * GROUP + 3)
words = [tokenizer.decode([token]) for token in sentence]
axes = panels(3, height=3.3)
for head, panel in zip(heads, axes, strict=True):
    visible = np.where(lab.causal_mask(len(sentence), len(sentence)).numpy(), weights[head].numpy(), np.nan)
    panel.imshow(visible, cmap="Blues", vmin=0, vmax=0.8)
    bare(panel, f"query head {head} on KV head {head // 3}")
    panel.set_xticks(range(len(words)), words, rotation=90, size=7)
    panel.set_yticks(range(len(words)), words, size=7)
    panel.tick_params(length=0)

# %% tags=["check"]
check("07.2")

# %% [markdown]
# ## 3 The cache, and what it saves
#
# The same question twice: once with a cache, once with a model that reads the whole sequence again for every token. The
# tokens must be the same. The work is not: without a cache, token *s* costs a pass over $P + s$ tokens, so the line
# rises; with it every step is a pass over one. What remains is the time to read all weights from memory, once a step:
# that floor does not know how long the context is.

# %%
question = "Why is the sky blue, why is a sunset red, and why is a cloud white? Answer each question in two sentences."
prompt = tokenizer.chat([{"role": "user", "content": question}])
capacity = len(prompt) + NEW_TOKENS


def timed(model: CachedModel) -> tuple[list[int], list[float]]:
    """The tokens of an answer, and the seconds that each took."""
    tokens, seconds, start = [], [], clock()
    for token in lab.stream(model, prompt, NEW_TOKENS):
        tokens.append(token)
        now = clock()
        seconds.append(now - start)
        start = now
    return tokens, seconds


with_cache, cached_seconds = timed(lab.CachedDecoder(decoder, lab.KVCache(decoder.config, capacity)))
without, uncached_seconds = timed(Recomputed(Checkpoint("smollm2"), capacity).build())
print(f"the same tokens: {with_cache == without}")
print(tokenizer.decode(with_cache), "…")

# %%
left, right = panels(2, height=3.2)
steps = np.arange(1, NEW_TOKENS)
for name, seconds, colour in (("recomputed", uncached_seconds, RED), ("cached", cached_seconds, BLUE)):
    left.plot(steps, np.array(seconds[1:]) * 1e3, "o-", color=colour, label=name)
    right.plot(range(1, NEW_TOKENS + 1), np.cumsum(seconds), color=colour, label=name)
left.set_title("Time of each token after the first")
left.set(xlabel="token", ylabel="ms of processor time", ylim=(0, None))
right.set_title("Time since the question")
right.set(xlabel="tokens handed over", ylabel="s of processor time", ylim=(0, None))
for panel in (left, right):
    panel.grid(True)
    panel.legend()

# %% tags=["check"]
check("07.3")

# %% [markdown]
# ## 4 Who survives
#
# The next-token distributions of two prompts: after the first the model is nearly sure, after the second anything goes.
# Each column applies one filter to the same probabilities; green bars survive (and are then divided by their sum), grey
# ones are gone.
#
# * **top-k** keeps a number. Where the model is sure, that keeps junk; where it isn't, it cuts through equals.
# * **top-p** keeps a mass, so the number follows the model's doubt.
# * **min-p** keeps what is not much less likely than the best: the bar (dotted) moves with the best.

# %%
prompts = ["The capital of France is", "My favourite animal is the"]
SHOWN, GONE = 22, "#c3cad2"


def next_logits(text: str) -> Tensor:
    """Logits `[1, vocab]` of the token after a text."""
    ids = tokenizer.encode(text)
    return lab.CachedDecoder(decoder, lab.KVCache(decoder.config, len(ids))).append(ids)[-1:]


axes = panels(3, 2, height=2.3, sharey="row")
for row, text in zip(axes, prompts, strict=True):
    probs = lab.apply_temperature(next_logits(text), [1.0])
    order = probs[0].argsort(descending=True, stable=True)[:SHOWN]
    filters = {
        "top-k, k = 8": lab.keep_top_k(probs, [8]),
        "top-p, p = 0.8": lab.keep_top_p(probs, [0.8]),
        "min-p, m = 0.1": lab.keep_min_p(probs, [0.1]),
    }
    for panel, (name, kept) in zip(row, filters.items(), strict=True):
        survivors = int((kept[0] > 0).sum())
        colours = [GREEN if kept[0, token] > 0 else GONE for token in order]
        panel.bar(range(SHOWN), probs[0, order], color=colours)
        if name.startswith("min-p"):
            panel.axhline(0.1 * probs.max(), color=QUIET, linestyle=":", linewidth=1)
        labels = [tokenizer.decode([int(token)]).strip() or "␣" for token in order]
        panel.set_xticks(range(SHOWN), labels, rotation=90, size=7)
        panel.set_title(f"{name}: {survivors} survive", size=9)
    row[0].set_ylabel(f"“{text} …”", size=8)

# %% [markdown]
# Temperature comes before all of them, and decides what they see. The draw comes last: its random number is a function
# of seed and step alone, so a request gets the same text in any company. Equal seeds, equal text.

# %%
text = "Once upon a time there was a"
logits = next_logits(text)
left, right = panels(2, height=2.4, width_ratios=[1, 1])
for temperature in (0.5, 1.0, 1.5):
    probs = lab.apply_temperature(logits, [temperature])[0].sort(descending=True).values[:25]
    left.plot(range(1, 26), probs, "o-", label=f"T = {temperature}")
left.set_title(f"“{text} …”")
left.set(xlabel="rank", ylabel="probability", yscale="log")
left.legend()
left.grid(True)
bare(right, "three seeds, the first one twice")
for line, seed in enumerate((1, 2, 3, 1)):
    ids = tokenizer.encode(text)
    sampler = lab.Sampler(SamplingParams(temperature=0.9, top_p=0.9, seed=seed))
    model = lab.CachedDecoder(decoder, lab.KVCache(decoder.config, len(ids) + 12))
    drawn = tokenizer.decode(lab.generate(model, ids, min(10, NEW_TOKENS), sampler)).replace("\n", " ")
    right.text(0, 0.8 - 0.2 * line, f"{seed}  … {drawn}", color=owner_colour(seed), size=9)

# %% tags=["check"]
check("07.4")

# %% [markdown]
# ## 5 A prompt in pieces
#
# Row *i* of the mask needs the keys up to *i*, and nothing else of the rows before it. So the rows may be computed in
# any number of passes; each colour below is one. That it changes nothing is measured in the middle: the largest
# difference of any logit from those of one whole pass, beside the size of the logits themselves.
#
# On the right is what it buys and costs. Between two chunks others get their turn, so they wait for the longest *chunk*
# and no longer for the whole prompt; in return all chunks together take somewhat longer than one pass, since small
# matrix products use the machine less well and each chunk reads the earlier keys again.

# %%
left, middle, right = panels(3, height=3.0)
chunk_of = [index // 7 for index in range(24)]
draw_mask(left, lab.causal_mask(24, 24).numpy(), "24 tokens in chunks of 7", colours=[*map(owner_colour, chunk_of)])

prompt = reading[:LONG_PROMPT]
whole, differences, longest, total = None, [], [], []
for chunk_size in reversed(CHUNK_SIZES):
    model = lab.CachedDecoder(decoder, lab.KVCache(decoder.config, LONG_PROMPT))
    chunks, seconds, start = [], [], clock()
    for logits in lab.prefill_chunks(model, prompt, chunk_size):
        chunks.append(logits)
        now = clock()
        seconds.append(now - start)
        start = now
    rows = torch.cat(chunks)
    whole = rows if whole is None else whole
    differences.insert(0, float((rows - whole).abs().max()))
    longest.insert(0, max(seconds))
    total.insert(0, sum(seconds))

middle.plot(CHUNK_SIZES[:-1], differences[:-1], "o", label="largest difference")
middle.axhline(float(whole.abs().max()), color=QUIET, linestyle=":", label="largest logit")
middle.set_title("Logits, chunked against whole")
middle.set(xlabel="chunk size", yscale="log")
right.plot(CHUNK_SIZES, np.array(longest) / total[-1], "o-", label="longest wait of others")
right.plot(CHUNK_SIZES, np.array(total) / total[-1], "o-", label="whole prompt")
right.set_title("Time, in whole passes")
right.set(xlabel="chunk size", ylim=(0, None))
for panel in (middle, right):
    panel.set_xscale("log", base=2)
    panel.set_xticks(CHUNK_SIZES, [str(size) for size in CHUNK_SIZES])
    panel.grid(True)
    panel.legend(fontsize=8)

# %% tags=["check"]
check("07.5")

# %% [markdown]
# ## 6 Many sequences, one pass
#
# A decode step reads every weight to make one token. With several sequences in the step the weights are read once for
# all of them. If reading were all, the dashed line would be reached; arithmetic takes its share, so the gain flattens.

# %%
def step_seconds(batch: int) -> float:
    """The median time of a decode step of so many sequences, each with 16 tokens in its cache."""
    stores = [lab.KVCache(decoder.config, 17 + REPEATS) for _ in range(batch)]
    lab.ragged_step(decoder, stores, [reading[:16]] * batch)
    seconds = []
    for _ in range(REPEATS + 1):
        start = clock()
        lab.ragged_step(decoder, stores, [[17]] * batch)
        seconds.append(clock() - start)
    return float(np.median(seconds[1:]))


times = [step_seconds(batch) for batch in BATCH_SIZES]
left, right = panels(2, height=2.8)
left.plot(BATCH_SIZES, np.array(times) / times[0], "o-")
left.set_title("Time of a step, in steps of one sequence")
right.plot(BATCH_SIZES, [batch * times[0] / t for batch, t in zip(BATCH_SIZES, times, strict=True)], "o-")
right.plot(BATCH_SIZES, BATCH_SIZES, "--", color=QUIET, label="if only reading weights counted")
right.set_title("Tokens per second, one sequence = 1")
right.legend()
for panel in (left, right):
    panel.set(xlabel="sequences in the step", ylim=(0, None))
    panel.set_xticks(BATCH_SIZES)
    panel.grid(True)

# %% [markdown]
# So the slots should be full. Twelve requests with answers of different lengths, four slots, the real model: a static
# batch holds its slots until the slowest is done; a continuous one fills a slot in the very next step. The answers are
# the same, token for token. Grey is idle.

# %%
questions = ["Name a colour.", "What is 2 + 2?", "Who wrote Hamlet?", "Say hello in French."]
requests = [
    GenerationRequest(tuple(tokenizer.chat([{"role": "user", "content": questions[i % len(questions)]}])), length)
    for i, length in enumerate(ANSWERS)
]


def served(scheduler: object) -> tuple[list[list[int]], list[list[int | None]]]:
    """Answers of the real model to all requests, and who ran when."""
    stores: dict[int, object] = {}

    def run(ids: list[int], tokens: list[list[int]]) -> list[Tensor]:
        for i in ids:
            stores.setdefault(i, lab.KVCache(decoder.config, len(requests[i].prompt) + requests[i].max_new_tokens))
        return [logits[-1] for logits in lab.ragged_step(decoder, [stores[i] for i in ids], tokens)]

    return lab.serve(scheduler, requests, run)


static_answers, static = served(lab.StaticBatching(4))
continuous_answers, continuous = served(lab.ContinuousBatching(4))
print(f"the same answers: {static_answers == continuous_answers}")

axes = panels(1, 2, height=1.6)
for panel, name, timeline in zip(axes, ("static", "continuous"), (static, continuous), strict=True):
    title = f"{name}: {len(timeline)} steps, {lab.slot_utilisation(timeline):.0%} of the slots busy"
    draw_timeline(panel, timeline, title, steps=len(static))

# %% tags=["check"]
check("07.6")

# %% [markdown]
# ## 7 Memory in blocks
#
# The same memory twice, 96 blocks of 8 tokens. Above, each sequence gets what the longest possible answer would need,
# 12 blocks in a row: 8 sequences fit, and most of what they hold is tint, set aside and empty. Below, blocks are given
# out one at a time, as tokens come; sequences that end give theirs back, and later ones take them, wherever they lie.
# Only the last block of each sequence has a tint.

# %%
BLOCK, BLOCKS, LONGEST = 8, 96, 96
lengths = [int(n) for n in np.clip(np.random.default_rng(3).lognormal(3.3, 0.6, 60), 4, LONGEST)]

per_sequence = LONGEST // BLOCK
contiguous = [
    Cell(owner, float(np.clip((lengths[owner] - BLOCK * index) / BLOCK, 0, 1)))
    for owner in range(BLOCKS // per_sequence)
    for index in range(per_sequence)
]

pool = lab.BlockAllocator(BLOCKS)
tables: dict[int, object] = {}
newcomers = iter(range(len(lengths)))
for step in range(140):
    if step % 3 == 0 and pool.num_free >= per_sequence:
        tables[next(newcomers)] = lab.BlockTable(pool, BLOCK)
    for owner, table in list(tables.items()):
        if table.length < lengths[owner]:
            table.append(1)
        elif step < 110:
            table.free()
            del tables[owner]

paged = [Cell(None)] * BLOCKS
for owner, table in tables.items():
    for index, block in enumerate(table.blocks):
        paged[block] = Cell(owner, min(1.0, (table.length - BLOCK * index) / BLOCK))


def occupancy(cells: Sequence[Cell]) -> str:
    """Sequences, and the share of what is set aside that holds tokens."""
    taken = [cell.used for cell in cells if cell.owner is not None]
    owners = {cell.owner for cell in cells} - {None}
    return f"{len(owners)} sequences, {1 - sum(taken) / len(taken):.0%} of their memory empty"


axes = panels(1, 2, height=1.5)
draw_memory(axes[0], contiguous, 36, f"contiguous: {occupancy(contiguous)}")
draw_memory(axes[1], paged, 36, f"paged: {occupancy(paged)}")

# %% [markdown]
# A fork shares every block with its parent; a row below is a block table, a colour a physical block. After the fork all
# four read the same three blocks. Then each appends a token: the last block has room *and* other owners, so three of
# the four copy it first. The last one to write is its only owner by then, and keeps it.

# %%
pool = lab.BlockAllocator(12)
parent = lab.BlockTable(pool, 4)
parent.append(10)
family = [parent, *(parent.fork() for _ in range(3))]


def table_cells(tables: Iterable[object]) -> list[Cell]:
    """A cell for each entry of the tables, all of equally many blocks, coloured by its physical block."""
    return [
        Cell(block, min(1.0, (table.length - 4 * index) / 4), f"block {block}")
        for table in tables
        for index, block in enumerate(table.blocks)
    ]


left, right = panels(2, height=1.8, width=7)
before = table_cells(family)
used = len({cell.owner for cell in before})
draw_memory(left, before, 3, f"forked: 4 sequences, {used} blocks")
for table in family:
    table.append(1)
after = table_cells(family)
used = len({cell.owner for cell in after})
draw_memory(right, after, 3, f"one token later: {used} blocks")

# %% [markdown]
# The decoder does not notice: `PagedSequence` stands where the plain cache stood, and the tokens are those of
# section 3.

# %%
prompt = tokenizer.chat([{"role": "user", "content": question}])
memory = lab.PagedMemory(decoder.config, num_blocks=32, block_size=16)
sequence = lab.PagedSequence(memory, lab.BlockAllocator(32))
print(f"the same tokens: {lab.generate(lab.CachedDecoder(decoder, sequence), prompt, NEW_TOKENS) == with_cache}")

# %% tags=["check"]
check("07.7")

# %% [markdown]
# ## 8 The same prefix twice
#
# Several users, one system prompt. A block's name depends on its tokens and on all before it, so the longest cached
# prefix is found by one walk from the front. Green blocks were found, orange ones had to be computed; the last tokens
# of a prompt are always computed, since without them there are no logits to go on from.
#
# The bars below are times to the first token, that of a prompt of which nothing is found being 1.
#
# Then somebody puts the time of day at the *top* of the system prompt. Every request now differs in its first block,
# hence in the name of every block: nothing is found, ever. The same line at the *bottom* of the system prompt costs
# only what comes after it.

# %%
system = (
    "You are the assistant of a small town library. Answer in plain words and at most three sentences. The library is "
    "open from nine to six on weekdays and from ten to two on Saturdays. Members may borrow eight books for four weeks "
    "and two films for one week. A book that somebody waits for can't be renewed. Rooms are booked at the desk. When "
    "you don't know an answer, say so and give the number of the desk. Never promise a book that is not on the shelf."
)
asked = ["When do you open?", "May I renew?", "How many films?", "Is Emma in?", "I need a room.", "Open on Sunday?"]


def conversation(user: int, where: str) -> list[int]:
    """The prompt of a user, with the time at the top of the system prompt, at its bottom, or nowhere."""
    clock = f"It is 14:{7 + 3 * user:02}."
    text = {"nowhere": system, "top": f"{clock} {system}", "bottom": f"{system} {clock}"}[where]
    return tokenizer.chat([{"role": "system", "content": text}, {"role": "user", "content": asked[user]}])


def visit(where: str) -> tuple[list[tuple[int, int]], list[float]]:
    """For each user the blocks found and the blocks needed; and the seconds until the first logits."""
    memory = lab.PagedMemory(decoder.config, num_blocks=96, block_size=16)
    prefixes = lab.PrefixCache(lab.BlockAllocator(96), 16)
    blocks, seconds = [], []
    for user in range(USERS):
        ids = conversation(user, where)
        found = prefixes.match(ids)
        sequence = lab.PagedSequence(memory, prefixes, found)
        model = lab.CachedDecoder(decoder, sequence)
        start = clock()
        model.append(ids[sequence.length :])
        seconds.append(clock() - start)
        prefixes.insert(ids, sequence.blocks)
        blocks.append((len(found), len(sequence.blocks)))
        sequence.free()
    return blocks, seconds


places = {"nowhere": "no time in it", "top": "time at the top", "bottom": "time at the bottom"}
visits = {where: visit(where) for where in places}
one_miss = np.median(visits["top"][1])

axes = panels(3, 2, height=1.9, sharey="row")
for (above, below), (where, name) in zip(axes.T, places.items(), strict=True):
    blocks, seconds = visits[where]
    for user, (found, needed) in enumerate(blocks):
        colours = [GREEN] * found + [ORANGE] * (needed - found)
        above.barh([user] * needed, 0.9, left=range(needed), height=0.8, color=colours)
    hits, needs = (sum(counts) for counts in zip(*blocks, strict=True))
    bare(above, f"{name}: {hits / needs:.0%} found").invert_yaxis()
    above.set(xlabel="blocks of the prompt →", ylabel="users")
    below.bar(range(1, USERS + 1), np.array(seconds) / one_miss, color=BLUE)
    below.set(xlabel="user", ylabel="time to first token", xticks=range(1, USERS + 1))

# %% tags=["check"]
check("07.8")

# %% [markdown]
# ## 9 and 10 Too little memory, too long a prompt
#
# *Too little memory.* Four requests in a pool that can't hold them all to their end. A column is a step, a cell one
# request's pass in it; the number says how many tokens it computed, and plain cells are decodes, one token. When blocks
# run out, the request that came last gives its blocks up and waits. Back again, it reads in one pass all that it knew:
# a second number in its row is the price of recompute. Its answer is the same.

# %%
def run_in_pages(scheduler: object, requests: Sequence[GenerationRequest]) -> tuple[list[list[int]], list[StepPlan]]:
    """Answers of the real model, and the plan of each step."""
    memory = lab.PagedMemory(decoder.config, num_blocks=128, block_size=4)

    def run(plan: StepPlan) -> list[Tensor]:
        return [logits[-1] for logits in lab.paged_step(decoder, memory, plan.chunks)]

    return lab.serve_paged(scheduler, requests, run)


def tokens_by_step(plans: Sequence[StepPlan]) -> list[dict[int, int]]:
    """For each step how many tokens of each request it computed."""
    return [{chunk.request_id: len(chunk.tokens) for chunk in plan.chunks} for plan in plans]


BEGINNINGS = ["The sea is", "Once upon a time", "A good book", "My town has"]
crowd = [GenerationRequest(tuple(tokenizer.encode(text)), 4 * NEW_TOKENS // 10) for text in BEGINNINGS]
roomy_answers, _ = run_in_pages(lab.PreemptiveScheduler(lab.BlockAllocator(128), 4), crowd)
tight_answers, plans = run_in_pages(lab.PreemptiveScheduler(lab.BlockAllocator(14), 4), crowd)
print(f"the same answers as with memory for all: {roomy_answers == tight_answers}")
draw_steps(panels(height=1.8), tokens_by_step(plans), "14 blocks of 4 tokens for four requests")

# %% tags=["check"]
check("07.9")

# %% [markdown]
# *Too long a prompt.* Three requests are being answered when a long prompt arrives. Height is the number of tokens in a
# step, and so, roughly, its time: how long the three wait for their next token. Without a budget one step towers over
# all. With one, decodes get theirs first and the prompt gets what is left: the rule is only that in each step what is
# computed catches up with what is known.

# %%
chatting = [GenerationRequest(request.prompt, 4 * NEW_TOKENS // 10) for request in crowd[:3]]
arriving = GenerationRequest(tuple(reading[: LONG_PROMPT // 8]), 3, arrival=3)
axes = panels(2, height=2.4, sharex=True, sharey=True)
schedulers = {
    "everything at once": lab.PreemptiveScheduler(lab.BlockAllocator(128), 4),
    "a budget of 16 tokens a step": lab.TokenBudgetScheduler(lab.BlockAllocator(128), 4, token_budget=16),
}
for panel, (name, scheduler) in zip(axes, schedulers.items(), strict=True):
    _, plans = run_in_pages(scheduler, [*chatting, arriving])
    for step, counts in enumerate(tokens_by_step(plans)):
        tops = np.cumsum([0, *counts.values()])
        panel.bar([step] * len(counts), [*counts.values()], bottom=tops[:-1], color=[*map(owner_colour, counts)])
    panel.set_title(name)
    panel.set(xlabel="step", ylabel="tokens")

# %% tags=["check"]
check("07.10")

# %% [markdown]
# ## 11 Hits to the token
#
# A block's hash finds whole blocks or nothing. A radix tree over tokens finds the longest common beginning, wherever it
# ends. The same users as in section 8, with their system prompt first and nothing else in common: what is left to
# compute with each cache. The difference is at most a block a request; with larger blocks it is larger.

# %%
def left_to_compute(block_size: int, radix: bool) -> list[int]:
    """For each user the tokens of the prompt that no cache had."""
    cache = (lab.RadixCache if radix else lab.PrefixCache)(lab.BlockAllocator(256), block_size)
    left = []
    for user in range(len(asked)):
        ids = conversation(user, "nowhere")
        table = lab.BlockTable(cache, block_size)
        if radix:
            blocks, length = cache.match(ids)
            table.adopt(blocks)
            table.truncate(length)
        else:
            table.adopt(cache.match(ids))
        left.append(len(ids) - table.length)
        table.append(left[-1])
        cache.insert(ids, table.blocks)
        table.free()
    return left


axes = panels(3, height=2.2, sharey=True)
for panel, block_size in zip(axes, (16, 32, 64), strict=True):
    users = np.arange(1, len(asked))
    panel.bar(users - 0.2, left_to_compute(block_size, radix=False)[1:], 0.4, color=ORANGE, label="by block hash")
    panel.bar(users + 0.2, left_to_compute(block_size, radix=True)[1:], 0.4, color=GREEN, label="by radix tree")
    panel.set_title(f"blocks of {block_size}")
    panel.set(xlabel="user after the first", ylabel="tokens left to compute", xticks=users)
    if panel is axes[0]:
        panel.legend(fontsize=8)

# %% tags=["check"]
check("07.11")

# %% [markdown]
# ## 12 Storing less for each token
#
# A model of Llama-3-8B's size, 32 layers of 32 heads, and what its cache would weigh by design. Sharing K/V heads
# lowers the line. MLA stores one latent of 512 numbers and a rotated part of 64 in place of all heads, and makes keys
# and values from them. A sliding window bends the line: once it is full, a new token takes the place of the oldest.
# Where every fourth layer sees everything, the line goes on rising, by a quarter of GQA's bytes a token.

# %%
windows = lab.layer_windows(32, 4096)
some_full = lab.layer_windows(32, 4096, full_every=4)
gqa, latent = shape(32, 8, 128), LatentConfig(num_layers=32, num_heads=32)
designs = {
    "32 KV heads": lambda tokens: lab.kv_cache_bytes(shape(32, 32, 128), tokens, 2),
    "8 KV heads (GQA)": lambda tokens: lab.kv_cache_bytes(gqa, tokens, 2),
    "1 KV head (MQA)": lambda tokens: lab.kv_cache_bytes(shape(32, 1, 128), tokens, 2),
    "MLA": lambda tokens: lab.latent_cache_bytes(latent, tokens, 2),
    "GQA, window 4096": lambda tokens: lab.windowed_kv_bytes(gqa, windows, tokens, 2),
    "GQA, window 4096 in 3 of 4 layers": lambda tokens: lab.windowed_kv_bytes(gqa, some_full, tokens, 2),
}
left, right = panels(2, height=3.4, width_ratios=[3, 1.4])
for name, size in designs.items():
    left.plot(contexts, [size(tokens) / 2**30 for tokens in contexts], "--" if "window" in name else "-", label=name)
left.set_xscale("log", base=2)
left.set_yscale("log")
left.set_xticks(contexts, [f"{tokens // 1024}k" for tokens in contexts])
left.set_title("Memory of one sequence, bf16")
left.set(xlabel="tokens of context", ylabel="GiB", ylim=(None, 1000))
left.grid(True)
left.legend(fontsize=8, loc="upper left", ncols=2)
draw_mask(right, lab.sliding_window_mask(12, 12, 4).numpy(), "a window of 4")

# %% tags=["check"]
check("07.12")

# %% [markdown]
# ## 13 Only what the grammar allows
#
# The same question twice, greedily: once free, once with every token masked that could not lead to an object with a
# city and a country. Each bar says how many of the 49,152 tokens were allowed in that step, the label which was chosen.
# Where the grammar leaves no choice the bar is one token high, or a few, since a piece of text can often be cut into
# tokens in several ways; within a name thousands are allowed, and there the model speaks.

# %%
ask = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
masks = lab.TokenMasks(
    lab.TokenTrie(VocabularyBytes("smollm2").build()),
    lab.build_automaton(lab.parse_regex(r'\{"city": "[A-Z][a-z]+", "country": "[A-Z][a-z]+"\}')),
    tokenizer.stop_ids,
)
allowed: list[int] = []


class Counting(lab.TokenConstraint):
    """A constraint that notes how many tokens it allows."""

    def mask(self) -> Tensor:
        """The tokens that may come next."""
        mask = super().mask()
        allowed.append(int(mask.sum()))
        return mask


def answer(choose: object) -> list[int]:
    """At most 28 tokens."""
    model = lab.CachedDecoder(decoder, lab.KVCache(decoder.config, len(ask) + 28))
    return lab.generate(model, ask, 28, choose, tokenizer.stop_ids)


free, bound = answer(lab.greedy), answer(lab.ConstrainedSampler(lab.greedy, Counting(masks)))
print("free: ", tokenizer.decode(free))
print("bound:", tokenizer.decode(bound))
axes = panels(height=2.2)
axes.bar(range(len(allowed)), allowed, color=BLUE)
axes.set_xticks(range(len(bound)), [tokenizer.decode([token]) or "end" for token in bound], rotation=90)
axes.set_title("Tokens allowed in each step")
axes.set(yscale="log", xlabel="token chosen")
axes.grid(True, axis="y")

# %% tags=["check"]
check("07.13")

# %% [markdown]
# ## Where you are

# %%
progress("07")
