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
#     ANSWERS: [4, 1, 2, 1, 3]
#     CONVERSATIONS: 2
#     FRAMES: 6
#     LONG_PROMPT: 60
#     SYSTEM: 40
#     TOKENS: 4
# ---

# %% [markdown]
# # Serving mechanics
#
# Everything here is run for real: the workbook's engine on SmolLM2-135M. One rule does most of it. *Each step gives
# every request some tokens, so that what is computed catches up with what is known*, under a budget of tokens.
# Continuous batching, chunked prefill, prefix hits and resumption after preemption all follow from it, and so each
# section below changes one setting and looks at what comes of it.

# %%
from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes

from labkit.notebook import Digest, check_answer
from labkit.notebook.animation import animate
from labkit.notebook.palette import BLUE, GREEN, LINES, ORANGE, QUIET, RED
from labkit.notebook.pictures import Cell, draw_memory, draw_timeline
from labkit.notebook.style import panels, use_style
from labkit.probing import machine_bounds
from solutions.engine.engine import Engine, EngineConfig
from solutions.engine.grammar import Constraint
from solutions.engine.kv_manager import KVManager
from solutions.engine.models.loading import LoadedModel
from solutions.engine.request import FinishReason, Request
from solutions.engine.sampling_params import SamplingParams
from solutions.engine.scheduler import Scheduler, SchedulerConfig
from solutions.engine.weights.loading import load
from solutions.engine.weights.packing import Packing
from solutions.planning.hardware import H100
from solutions.planning.model_shape import KNOWN
from solutions.planning.roofline import Serving

use_style()
print(machine_bounds(quick=True).line())

# %% tags=["parameters"]
# How much is served; more is slower.
ANSWERS = [16, 4, 6, 3, 9, 5, 4, 8]  # tokens of each answer in the first section
TOKENS = 16  # of the other answers
CONVERSATIONS = 6  # that share a beginning
SYSTEM = 160  # tokens of that beginning, about
LONG_PROMPT = 400  # tokens of the prompt that arrives in between
FRAMES = 24  # of the animation

# %%
model: LoadedModel = load("smollm2", "fp32", Packing())
tokenizer = model.tokenizer
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def engine_with(scheduler: SchedulerConfig | None = None, **options: object) -> Engine:
    """An engine on the one model that is loaded."""
    return Engine(model, EngineConfig(scheduler=scheduler or SchedulerConfig(), **options))  # type: ignore[arg-type]


def words(count: int, about: str = "the sea") -> str:
    """A text of about so many tokens."""
    sentence = f"There is more to say about {about}, and it will be said here in plain words. "
    return sentence * max(1, round(count / len(tokenizer.encode(sentence))))


# %% [markdown]
# ## 1 Continuous batching
#
# Answers end when they end. A batch that is formed once waits for its longest, and the places of the others stand
# empty; a batch that is formed anew in every step hands a place on as soon as it is free. Three places, requests with
# answers of different lengths, both ways:


# %%
def timeline(continuous: bool) -> list[list[int | None]]:
    """Who had which of three places in each step of the engine."""
    engine = engine_with(SchedulerConfig(max_running=3, token_budget=512))
    places: list[int | None] = [None, None, None]
    waiting, steps = list(range(len(ANSWERS))), []
    while waiting or engine.has_work:
        if continuous or not engine.has_work:
            while waiting and (None in places if continuous else engine.num_running + engine.num_waiting < 3):
                number = waiting.pop(0)
                places[places.index(None)] = number
                engine.add_request(
                    "Tell me a story.", replace(GREEDY, max_tokens=ANSWERS[number]), request_id=str(number)
                )
        progress = engine.step()
        active = {int(one.request_id) for one in progress}
        steps.append([place if place in active else None for place in places])
        for one in progress:
            if one.completion is not None:
                places[places.index(int(one.request_id))] = None
    return steps


static, continuous = timeline(False), timeline(True)
both = panels(2, height=1.9)
for axes, steps, title in zip(both, (static, continuous), ("static batching", "continuous batching"), strict=True):
    used = np.mean([place is not None for step in steps for place in step])
    draw_timeline(axes, steps, f"{title}: {len(steps)} steps, {used:.0%} of the places used", steps=len(static))

# %% [markdown]
# **Exercise 1.** A batch of eight holds one answer of 2,000 tokens and seven of 50. Of all its places over its life,
# what share is used if the batch is formed once?
#
# <details><summary>Answer</summary>
#
# $(2000 + 7 · 50) / (8 · 2000) = 14.7\,\%$.
#
# </details>

# %% tags=["exercise"] solution="sum([2000, *[50] * 7]) / (8 * 2000)"
answer = None  # a share, from 0 to 1
check_answer("1", answer, (2000 + 350) / 16000, hint="Tokens that somebody wanted, over places times steps.")

# %% [markdown]
# ## 2 Paged keys and values
#
# Nobody knows how long an answer will be, so whoever reserves for the longest wastes most of it. In blocks of 16 tokens
# at most one of each sequence is partly empty. The animation is the engine's scheduler at work in a pool of 48 blocks:
# a colour a request, the lighter part of a block not yet written. (Tokens are made up here: it is about memory.)

# %%
memory = KVManager(48, 16, "none")
scheduler = Scheduler(SchedulerConfig(max_running=8, token_budget=96, max_context=400), memory)
random = np.random.default_rng(5)
lives = []
for number in range(14):
    asked = SamplingParams(max_tokens=int(random.integers(4, 90)))
    prompt = tuple(int(token) for token in random.integers(0, 1000, int(random.integers(5, 120))))
    lives.append(Request(str(number), prompt, asked, memory.new_table()))
    scheduler.add(lives[-1])
snapshots, waste = [], []
while not scheduler.is_idle:
    step = scheduler.schedule()
    scheduler.commit(step, {work.request: [0] for work in step.work if work.gives_token})
    cells = [Cell(None)] * 48
    for number, one in enumerate(lives):
        for place, block in enumerate(one.table.blocks):
            cells[block] = Cell(number, min(1.0, (one.num_computed - 16 * place) / 16))
    snapshots.append(cells)
    held = [one for one in lives if one.table.blocks]
    waste.append(sum(16 * len(one.table.blocks) - one.num_computed for one in held) / (48 * 16))
    for one in held:
        if one.num_output >= one.params.max_tokens:
            scheduler.finish(one, FinishReason.LENGTH)


def frame(axes: Axes, number: int) -> None:
    """The pool after a step."""
    at = number * (len(snapshots) - 1) // max(1, FRAMES - 1)
    draw_memory(axes, snapshots[at], 16, f"step {at + 1}")


animate(frame, FRAMES, title="A pool of blocks, step by step", height=1.9)

# %%
lengths = np.array([len(one.prompt) + one.params.max_tokens for one in lives])
axes = panels(height=2.2, width=7)
shares = {"reserved for 400 tokens": 1 - lengths.mean() / 400, "in blocks of 16": float(np.mean(waste))}
axes.barh(list(shares), list(shares.values()), color=[ORANGE, BLUE], height=0.5)
axes.set(xlim=(0, 1), title="Share of the memory set aside and never used")
axes.grid(True, axis="x")

# %% [markdown]
# **Exercise 2.** In blocks of $b$ tokens, how many tokens does a sequence waste at most?
#
# <details><summary>Answer</summary>
#
# $b - 1$: its last block holds at least one token. Larger blocks waste more and make shorter tables.
#
# </details>

# %% tags=["exercise"] solution="lambda b: max(-length % b for length in range(1, 1000))"
answer = None  # a function of b
check_answer("2", answer, lambda b: b - 1, cases=[(1,), (16,), (64,)], hint="How full is the last block at least?")

# %% [markdown]
# ## 3 Prefix caching
#
# Conversations with one system prompt, asked one after another. What their prompts share is computed once, *if it
# stands first*: one changing word at the top, and nothing matches. A radix tree finds the common part to the token,
# hashes find whole blocks.


# %%
def hits(prompts: Sequence[str], cache: str) -> tuple[float, float]:
    """Share of prompt tokens that the cache had, and the median time to a first token."""
    engine = engine_with(prefix_cache=cache)
    for prompt in prompts:
        engine.generate(prompt, replace(GREEDY, max_tokens=2))
    return engine.metrics.cache_hit_rate, float(np.median([one.ttft for one in engine.metrics.served]))


system, questions = words(SYSTEM), [f"Question {number}: why?" for number in range(CONVERSATIONS)]
stable = [f"{system}{question}" for question in questions]
stamped = [f"{number:02}:00 o'clock. {system}{question}" for number, question in enumerate(questions)]
served = {
    "no cache": hits(stable, "none"), "hash": hits(stable, "hash"), "radix tree": hits(stable, "radix"),
    "hash, time first": hits(stamped, "hash"),
}  # fmt: skip
left, right = panels(2, height=2.3)
left.bar(list(served), [share for share, _ in served.values()], color=[QUIET, BLUE, GREEN, RED], width=0.55)
left.set(ylim=(0, 1), title="Prompt tokens that were in the cache")
slowest = served["no cache"][1]
right.bar(
    list(served), [seconds / slowest for _, seconds in served.values()], color=[QUIET, BLUE, GREEN, RED], width=0.55
)
right.set(title="Time to the first token, of no cache's")
for axes in (left, right):
    axes.tick_params(axis="x", labelsize=8)

# %% [markdown]
# **Exercise 3.** A prompt of 1,000 tokens has 870 in common with an earlier one. With hashes of blocks of 16, how many
# tokens need not be computed?
#
# <details><summary>Answer</summary>
#
# Whole blocks only: $16 · ⌊870 / 16⌋ = 864$.
#
# </details>

# %% tags=["exercise"] solution="870 // 16 * 16"
answer = None  # tokens
check_answer("3", answer, Digest("ef618af0c7dae0c1"), hint="A block's hash covers all of its tokens.")

# %% [markdown]
# ## 4 Chunked prefill
#
# Three answers are being written when a long prompt arrives. Computed whole it makes everyone wait for one long step;
# in chunks it fills what is left of each step's budget. Both ways give the same tokens. The price: the prompt's own
# first token comes later, and its earlier chunks are read again by each later one.


# %%
def stall(max_chunk: int | None) -> tuple[list[list[float]], float, list[tuple[int, ...]]]:
    """When each token of the running answers came, the long prompt's time to first token, and all tokens."""
    engine = engine_with(SchedulerConfig(max_chunk=max_chunk), prefix_cache="none")
    running = [engine.add_request(f"Story {i}.", replace(GREEDY, max_tokens=3 * TOKENS)) for i in range(3)]
    long, came, texts = "", {name: list[float]() for name in running}, dict[str, tuple[int, ...]]()
    arrived = first = 0.0
    start = time.perf_counter()
    while engine.has_work:
        if not long and all(len(times) >= TOKENS // 2 for times in came.values()):
            long, arrived = engine.add_request(words(LONG_PROMPT), replace(GREEDY, max_tokens=4)), time.perf_counter()
        for one in engine.step():
            now = time.perf_counter()
            if one.request_id == long:
                first = first or now - arrived
            else:
                came[one.request_id].append(now - start)
            if one.completion is not None:
                texts[one.request_id] = one.completion.tokens
    return list(came.values()), first, [texts[name] for name in sorted(texts)]


whole, chunked = stall(None), stall(32)
print("the same tokens:", whole[2] == chunked[2])
left, right = panels(2, height=2.4, width_ratios=[2.2, 1])
for (times, _, _), label, colour in ((whole, "whole", ORANGE), (chunked, "chunks of 32", BLUE)):
    gaps = np.diff(times[0])
    left.plot(gaps / np.median(gaps), "o-", color=colour, label=label)
left.set(xlabel="token of a running answer", title="Time between two tokens, of the median")
left.legend()
right.bar(["whole", "chunks"], [1, chunked[1] / whole[1]], color=[ORANGE, BLUE], width=0.5)
right.set(title="Time to first token of the prompt")
right.grid(True, axis="y")

# %% [markdown]
# **Exercise 4.** A prompt of $n$ chunks of $c$ tokens: each chunk reads the keys and values of all before it. How many
# cached tokens are read in total that a whole prefill would not have read?
#
# <details><summary>Answer</summary>
#
# Chunk $i$ reads $i · c$ tokens of earlier ones: $c · n (n - 1) / 2$.
#
# </details>

# %% tags=["exercise"] solution="lambda n, c: sum(i * c for i in range(n))"
answer = None  # a function of n and c
check_answer("4", answer, lambda n, c: c * n * (n - 1) / 2, cases=[(1, 64), (4, 64), (16, 512)],
             hint="What does the second chunk read, what the third?")  # fmt: skip

# %% [markdown]
# ## 5 When blocks run out
#
# The same requests in a pool that holds them all and in one that doesn't. The least urgent one loses its blocks and
# comes back later: what it had is computed again, or was swapped to host memory and returns. Nobody's text changes.


# %%
def pressed(num_blocks: int, preemption: str) -> tuple[Engine, list[tuple[int, ...]]]:
    """An engine that has served five requests, and their tokens."""
    engine = engine_with(
        SchedulerConfig(preemption=preemption, max_running=5), num_blocks=num_blocks, block_size=4, num_host_blocks=64,
        prefix_cache="none",
    )  # fmt: skip
    prompts = [f"{words(20, about)} Well:" for about in ("rain", "bread", "iron", "maps", "bees")]
    return engine, [answers[0].tokens for answers in engine.generate(prompts, replace(GREEDY, max_tokens=2 * TOKENS))]


longest = len(tokenizer.encode(f"{words(20, 'bread')} Well:")) + 2 * TOKENS
small = 2 * (longest // 4 + 1)
roomy, again, swapped = pressed(400, "recompute"), pressed(small, "recompute"), pressed(small, "swap")
print("the same tokens:", roomy[1] == again[1] == swapped[1])
left, right = panels(2, height=2.2)
names = ["all fit", "recompute", "swap"]
engines = [roomy[0], again[0], swapped[0]]
left.bar(names, [one.metrics.num_preemptions for one in engines], color=[QUIET, ORANGE, BLUE], width=0.5)
left.set(title="Preemptions")
base = engines[0].metrics.num_computed_tokens
right.bar(names, [one.metrics.num_computed_tokens / base for one in engines], color=[QUIET, ORANGE, BLUE], width=0.5)
right.set(title="Tokens computed, of those with room for all")
right.grid(True, axis="y")

# %% [markdown]
# ## 6 Several samples of one prompt
#
# Four samples share the prompt's blocks, counted by references. The one that first writes into a shared, half-filled
# block gets a copy of it.

# %%
prompt = words(60, "lighthouses")
warm = replace(GREEDY, temperature=0.8, seed=3)
together, apart = engine_with(prefix_cache="none"), engine_with(prefix_cache="none")
samples = together.generate(prompt, replace(warm, n=4))[0]
singles = apart.generate([prompt] * 4, [replace(warm, seed=3 + index) for index in range(4)])
print("the same samples:", [one.tokens for one in samples] == [answers[0].tokens for answers in singles])
counts = [one.metrics.num_computed_tokens for one in (together, apart)]
print(f"computed tokens: {counts[0]} together, {counts[1]} as four requests")

# %% [markdown]
# ## 7 Structured output
#
# A grammar says which tokens may follow, and a mask forbids the others, so whatever comes out parses. The masks are
# computed while the model's pass runs: the step of a constrained request takes about as long as a free one's.

# %%
schema = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Lima", "Pune"]},
        "visits": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "visits"],
    "additionalProperties": False,
}
engine = engine_with()
for number in range(4):
    engine.add_request(
        "Where have you been?", SamplingParams(temperature=1.0, seed=number, max_tokens=40), request_id=str(number),
        constraint=Constraint.json_schema(schema),
    )  # fmt: skip
said = {}
while engine.has_work:
    said.update({one.request_id: one.completion.text for one in engine.step() if one.completion is not None})
for name in sorted(said):
    print(json.loads(said[name]))


def seconds_a_step(constraint: Constraint | None) -> float:
    """The median time of a decode step of four requests."""
    engine = engine_with()
    for number in range(4):
        engine.add_request("Count.", replace(GREEDY, seed=number), request_id=str(number), constraint=constraint)
    times = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


seconds_a_step(Constraint("regex", "[0-9 ]+"))  # the first constraint makes the vocabulary ready
free, bound = seconds_a_step(None), seconds_a_step(Constraint("regex", "[0-9 ]+"))
axes = panels(height=1.6, width=6)
axes.barh(["constrained", "free"], [bound / free, 1], color=[BLUE, QUIET], height=0.5)
axes.set(title="Time of a decode step, of a free one's")
axes.grid(True, axis="x")

# %% [markdown]
# ## 8 Graphs by batch size
#
# A small model's decode step is hundreds of short kernels, and launching each takes the CPU microseconds, in which the
# GPU waits. A CUDA graph records the step and replays it with one launch, for one size of batch; so there is a graph
# for 1, 2, 4, 8, … sequences, and a batch is padded to the next. (`make measure` prints what a launch costs on your
# card, with a graph and without.) What the padding costs:

# %%
batches = np.arange(1, 65)
buckets = 2 ** np.ceil(np.log2(batches)).astype(int)
axes = panels(height=2.2, width=7)
axes.step(batches, 1 - batches / buckets, where="mid", color=BLUE)
axes.set(xlabel="sequences", ylim=(0, 1), title="Share of a replayed step's rows that are padding")
axes.grid(True)

# %% [markdown]
# Rows of padding write nowhere and read nothing; while the step waits for the weights they cost next to nothing,
# either.
#
# **Exercise 5.** How large can that share get, at most, with powers of two?
#
# <details><summary>Answer</summary>
#
# One sequence more than a power of two $m$: $1 - (m + 1) / 2m$, always below a half.
#
# </details>

# %% tags=["exercise"] solution="max(1 - n / (1 << (n - 1).bit_length()) for n in range(2, 10**5))"
answer = None  # a share
check_answer("5", answer, 0.5, within=0.02, hint="One more than a power of two.")

# %% [markdown]
# ## 9 Disaggregation and parallelism, sized
#
# Prefill and decode in pools of their own never disturb each other, at the price of moving the cache of every prompt.
# Before choosing it, size that:

# %%
llama = KNOWN["llama-3-70b"]
prompt_bytes = 1000 * llama.kv_bytes_per_token("bf16")
rates = np.geomspace(1, 2000, 40)
left, right = panels(2, height=2.6)
left.plot(rates, rates * prompt_bytes / 1e9, color=BLUE)
left.axhline(50, color=QUIET, linestyle=":")
left.text(1.2, 60, "one InfiniBand NDR port", size=8, color=QUIET)
left.set(xscale="log", yscale="log", xlabel="requests of 1,000 tokens a second", title="KV between the pools, GB/s")
for gpus, colour in zip((2, 4, 8), LINES, strict=False):
    times = [Serving(llama, H100, gpus).decode_step(batch, 1000) for batch in (1, 4, 16, 64, 256)]
    right.plot([1, 4, 16, 64, 256], [1e3 * one.seconds for one in times], "o-", color=colour, label=f"TP {gpus}")
right.set(xscale="log", xlabel="sequences", title="Floor of a decode step, Llama-3-70B on H100s, ms", ylim=(0, None))
right.legend(fontsize=8)
for axes in (left, right):
    axes.grid(True)

# %% [markdown]
# **Exercise 6.** *A prompt of 1,000 tokens of Llama-3-70B (80 layers, 8 KV heads of 128, bf16): how many MB of keys and
# values, and how many GB/s at 1,000 requests a second?*
#
# <details><summary>Answer</summary>
#
# 320 KiB a token: 328 MB, and about 330 GB/s: seven ports of 50 GB/s.
#
# </details>

# %% tags=["exercise"] solution="[2 * 80 * 8 * 128 * 2 * 1000 / 1e6, 2 * 80 * 8 * 128 * 2 * 1000 / 1e6]"
answer = None  # MB, GB/s
check_answer(
    "6", answer, [prompt_bytes / 1e6, 1000 * prompt_bytes / 1e9], hint="2 · layers · KV heads · head dim · bytes."
)

# %% [markdown]
# **Exercise 7.** Tensor parallelism adds up the shares of its GPUs after attention and after the MLP. How many
# all-reduces does a decode step of Llama-3-70B make?
#
# <details><summary>Answer</summary>
#
# Two a layer: 160. Each takes microseconds at least, however little it adds up; that is the price of the shorter step.
#
# </details>

# %% tags=["exercise"] solution="2 * 80"
answer = None  # all-reduces
check_answer("7", answer, Digest("61050a1b357f8852"), hint="How many layers, and how many sums in each?")

# %% [markdown]
# ## 10 Caches that store less
#
# What a token costs is a choice of the model's makers, long before any engine: fewer KV heads (GQA), one latent for all
# heads (MLA: 512 numbers, and 64 for positions), or layers that see only a window of the newest tokens.

# %%
stored = {  # numbers in bf16, of a layer with 32 heads of 128
    "MHA, 32 heads": 2 * 32 * 128, "GQA, 8": 2 * 8 * 128, "MQA, 1": 2 * 128, "MLA": 512 + 64,
}  # fmt: skip
left, right = panels(2, height=2.4)
left.barh(list(stored), [2 * numbers / 1024 for numbers in stored.values()], color=LINES[: len(stored)], height=0.55)
left.invert_yaxis()
left.set(title="KiB of a token in one layer")
contexts = np.arange(0, 16385, 64)
for share, colour in ((0.0, QUIET), (0.5, ORANGE), (5 / 6, BLUE)):
    resident = (1 - share) * contexts + share * np.minimum(contexts, 1024)
    right.plot(contexts, resident, color=colour, label=f"{share:.0%} of the layers")
right.set(xlabel="tokens of the text", title="Tokens kept, by layers with a window of 1,024")
right.legend(fontsize=8)
for axes in (left, right):
    axes.grid(True)

# %% [markdown]
# **Exercise 8.** DeepSeek-V2's MLA stores 576 numbers a layer, where 128 heads of 128 with keys and values of their own
# would store how many times as many?
#
# <details><summary>Answer</summary>
#
# $2 · 128 · 128 / 576 ≈ 57$.
#
# </details>

# %% tags=["exercise"] solution="2 * 128 * 128 / (512 + 64)"
answer = None  # times
check_answer("8", answer, 32768 / 576, hint="Keys and values, heads times their width.")
