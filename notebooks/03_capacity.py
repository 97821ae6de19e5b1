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
#     CASES: 1
#     CONTEXTS: [8]
#     FRAMES: 6
#     LOADS: [0.5]
#     OFFERED: [8.0]
#     QUEUED: 400
#     SHOWN: ['experts']
# ---

# %% [markdown]
# # Capacity planning, and what breaks the plan
#
# *Serve Llama-3-70B at 1,000 requests a second, 1,000 tokens in and 300 out, the first token within a second for 95 of
# 100. How many H100s, and what does a million tokens cost?* The first half answers it in steps, with nothing but
# arithmetic. The second half lets the engine's own scheduler run in simulated time and watches the plan fail: in each
# of the ways in which plans fail, with what helps.
#
# Every number of the first half is an estimate, and every assumption is written down. That is the method: the answer is
# worth as much as the list of what it takes for granted.

# %%
from __future__ import annotations

from dataclasses import replace

import numpy as np

from labkit.notebook import check_answer
from labkit.notebook.animation import animate
from labkit.notebook.palette import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, QUIET, RED
from labkit.notebook.pictures import Cell, draw_memory
from labkit.notebook.style import panels, use_style
from labkit.probing import machine_bounds
from solutions.engine import Engine, EngineConfig
from solutions.engine.scheduler import SchedulerConfig
from solutions.engine.step import Step
from solutions.planning.capacity import Assumptions, Load, plan
from solutions.planning.hardware import H100, RTX_5060
from solutions.planning.model_shape import KNOWN
from solutions.planning.roofline import Serving
from solutions.simulate.calibration import Grid, measure_steps
from solutions.simulate.fitting import fit
from solutions.simulate.lengths import Fixed, LogNormal, Uniform
from solutions.simulate.replica import Replica, ReplicaConfig
from solutions.simulate.report import SimulationReport
from solutions.simulate.routing import RefuseWhenFull, least_loaded
from solutions.simulate.scenarios import SCENARIOS, Role
from solutions.simulate.scenarios.scenario import replica_config, replicas
from solutions.simulate.simulation import simulate
from solutions.simulate.step_time import ConstantTime
from solutions.simulate.timeline import moments, timeline
from solutions.simulate.workload import Stream

use_style()
print(machine_bounds(quick=True).line())
ROLES = {Role.HEALTHY: GREEN, Role.FAILURE: RED, Role.REMEDY: BLUE}

# %% tags=["parameters"]
# How much is run; more is slower and smoother.
QUEUED = 20_000  # requests of the queue in section 3
LOADS = [0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95]  # its utilizations
OFFERED = [8.0, 14.0, 20.0, 24.0, 28.0, 36.0, 44.0]  # requests per second in section 9
SHOWN = ["prefix-mix", "cache-thrash", "hot-replica", "stragglers", "experts"]  # scenarios of section 8
CASES = 4  # of the scenarios in sections 7 and 8 that are drawn over time
FRAMES = 46  # of the animation in section 7
CONTEXTS = [16, 128]  # cached tokens in section 10

# %% [markdown]
# ## 1 The model and the load
#
# Three numbers come first: the bytes of the weights, the bytes of keys and values for each token, the memory of a
# card. Then the load, in tokens and not in requests: a million prompt tokens a second to read, three hundred thousand
# to write.

# %%
llama = KNOWN["llama-3-70b"]
load = Load(requests_per_second=1000, input_tokens=1000, output_tokens=300)
replica = Serving(llama, H100, num_gpus=8, mfu=0.5)
kv_room = replica.tokens_that_fit(0.1 * 8 * H100.memory)

left, right = panels(2, height=2.6, width_ratios=[1.3, 1])
parts = {
    "weights": replica.weight_bytes,
    "reserve": 0.1 * 8 * H100.memory,
    "keys and values": kv_room * replica.kv_bytes_per_token,
}
start = 0.0
for (name, size), colour in zip(parts.items(), (INK, FAINT, BLUE), strict=True):
    left.barh(0, size / 1e9, left=start / 1e9, color=colour)
    ink = INK if colour == FAINT else "white"
    left.text((start + size / 2) / 1e9, 0, f"{name}\n{size / 1e9:.0f} GB", ha="center", va="center", color=ink, size=8)
    start += size
left.set(yticks=[], xlabel="GB", title="A replica: 8 H100s as one")
context = np.linspace(500, 4000, 50)
right.plot(context, kv_room / context)
right.plot([load.decode_context], [kv_room / load.decode_context], "o", color=ORANGE)
right.annotate("this load", (load.decode_context, kv_room / load.decode_context), (8, 4), textcoords="offset points")
right.set(xlabel="cached tokens of a sequence", ylabel="sequences", ylim=0, title="How many fit at once")
right.grid(True)

# %% [markdown]
# **Exercise 1.** How many KiB does a token's keys and values take for Llama-3-70B if they are stored in FP8?
#
# <details><summary>Answer</summary>
#
# Two tensors, 80 layers, 8 KV heads of 128 numbers, one byte each: $2 \cdot 80 \cdot 8 \cdot 128 = 163{,}840$ bytes,
# which is 160 KiB. Half of bf16, and so twice the sequences in the same memory.
#
# </details>

# %% tags=["exercise"] solution="2 * 80 * 8 * 128 / 1024"
answer = None  # KiB
check_answer(
    "1", answer, llama.kv_bytes_per_token("fp8") / 1024, hint="2 · layers · KV heads · head dim · bytes of one"
)

# %% [markdown]
# ## 2 Prefill: arithmetic
#
# $2N$ FLOP for each prompt token, and half of the card's peak reached. The number of cards follows in one line; what
# one prompt takes on a replica is a few percent of the second that is allowed. So the time to the first token is not
# spent on computing. It is spent on waiting.

# %%
base = plan(Serving(llama, H100), load)
rates = np.linspace(200, 2000, 40)
left, right = panels(2, height=2.8)
for share, colour in ((0.4, QUIET), (0.5, BLUE), (0.6, QUIET)):
    gpus = [
        plan(Serving(llama, H100), replace(load, requests_per_second=rate), Assumptions(mfu=share)).prefill_gpus_at_peak
        for rate in rates
    ]
    left.plot(rates, gpus, color=colour)
    left.text(rates[-1], gpus[-1], f" {share:.0%}", va="center", color=colour, size=8)
left.plot([1000], [base.prefill_gpus_at_peak], "o", color=ORANGE)
left.set(xlabel="requests per second", ylabel="H100s", title="Prefill alone, by the share of the peak that is reached")
left.grid(True)
right.barh([0], [base.prompt_seconds], color=BLUE)
right.barh([0], [1 - base.prompt_seconds], left=[base.prompt_seconds], color=FAINT)
right.text(0.5, 0, "left for queueing", ha="center", va="center")
right.set(yticks=[], xlabel="seconds", title="The time to the first token that is allowed", ylim=(-1, 1))
right.grid(True, axis="x")

# %% [markdown]
# ## 3 Why a pool is not run at 100 %
#
# Take one server, requests that come when they like (Poisson), and service that always takes the same time. The theory
# of queues calls it M/D/1 and knows the mean wait: $\rho / (2 (1 - \rho))$ service times at utilization $\rho$. The
# points are the simulator, with the engine's scheduler and one place: it has to agree, or nothing below means
# anything. The upper curve is what the promise is about, the wait of the unlucky 5 %.
#
# Near full use the wait explodes. Between 80 and 90 % lies the knee; that is where the 80 % of the plan come from.

# %%
one_place = ReplicaConfig(SchedulerConfig(max_running=1, token_budget=1), prefix_cache="none")


def waits(load: float) -> list[float]:
    """Waits before service of a second each."""
    requests = Stream(load, Fixed(1), Fixed(1)).draw(QUEUED / load, seed=1)
    report = simulate([Replica(one_place, ConstantTime(1.0))], requests)
    return [one.ttft - 1.0 for one in report.outcomes]


axes = panels(height=3.0, width=7)
measured = {rho: waits(rho) for rho in LOADS}
rho = np.linspace(0.1, 0.96, 200)
axes.plot(rho, rho / 2 / (1 - rho), color=BLUE, label="mean, theory")
axes.plot(LOADS, [np.mean(one) for one in measured.values()], "o", color=BLUE, label="mean, simulated")
axes.plot(LOADS, [np.quantile(one, 0.95) for one in measured.values()], "o--", color=ORANGE, label="95th percentile")
axes.axvline(0.8, color=QUIET, linewidth=1, linestyle=":")
axes.set(xlabel="utilization", ylabel="wait, in service times", ylim=(0, 20), title="The price of full use")
axes.legend()
axes.grid(True)

# %% [markdown]
# **Exercise 2.** At which utilization is the mean wait of M/D/1 as long as the service itself?
#
# <details><summary>Answer</summary>
#
# $\rho / (2 (1 - \rho)) = 1$ gives $\rho = 2 - 2 \rho$, so $\rho = 2/3$. A server that looks idle for a third of its
# time makes people wait as long as it serves them.
#
# </details>

# %% tags=["exercise"] solution="2 / 3"
answer = None  # between 0 and 1
check_answer("2", answer, 2 / 3, hint="Set ρ / (2 (1 − ρ)) equal to 1, since waits are in service times.")

# %% [markdown]
# ## 4 Decode: memory, until the batch is large
#
# A decode step reads the weights once for everybody and each sequence's keys and values for that one alone. More
# sequences a step cost little until the arithmetic takes longer than the reading; from there on they cost latency and
# bring nothing. The marks are the batches of the module's table.

# %%
batches = np.unique(np.geomspace(8, 1024, 60).astype(int))
steps = [replica.decode_step(int(batch), load.decode_context) for batch in batches]
left, right = panels(2, height=3.0)
left.plot(batches, [1e3 * step.memory for step in steps], color=BLUE, label="reading weights and cache")
left.plot(batches, [1e3 * step.compute for step in steps], color=ORANGE, label="arithmetic")
left.plot(batches, [1e3 * step.seconds * 4 / 3 for step in steps], color=INK, label="the longer, and a third")
left.set(xscale="log", xlabel="sequences", ylabel="ms", ylim=(0, 45), title="A decode step of a replica")
left.legend()
rates = [batch / (step.seconds * 4 / 3) for batch, step in zip(batches, steps, strict=True)]
right.plot([1e3 * step.seconds * 4 / 3 for step in steps], rates, color=INK)
for batch in (128, 256, 512):
    step = replica.decode_step(batch, load.decode_context)
    place = (1e3 * step.seconds * 4 / 3, batch / (step.seconds * 4 / 3))
    right.plot(*place, "o", color=ORANGE)
    right.annotate(str(batch), place, (4, -12), textcoords="offset points")
right.set(xlabel="ms from token to token", ylabel="tokens per second", title="What a slower token buys", ylim=0)
for axes in (left, right):
    axes.grid(True)

# %% [markdown]
# **Exercise 3.** Users want a token every 10 ms, so the batch must be 128. How many GPUs does decoding take then, at
# the plan's 80 % utilization?
#
# <details><summary>Answer</summary>
#
# `plan(…, Assumptions(batch=128))`: a step's floor is 7.1 ms, a third more makes 9.5 ms, so a replica gives about
# 13,500 tokens a second. 300,000 over that is 22.2, so 23 replicas of 8, and over 0.8 that makes 230 GPUs instead of
# 150. A fifth off the latency costs half as much again.
#
# </details>

# %% tags=["exercise"] solution="plan(Serving(llama, H100), load, Assumptions(batch=128)).decode_gpus"
answer = None  # GPUs
seconds = replica.decode_step(128, load.decode_context).seconds * 4 / 3
needed = np.ceil(load.decode_rate / (128 / seconds)) * 8 / 0.8
check_answer("3", answer, float(needed), hint="Tokens per second of a replica first; then whole replicas; then 80 %.")

# %% [markdown]
# ## 5 The bill, and the levers
#
# Add the pools, multiply by a price, divide by the tokens. Then pull the levers one at a time, and look at which of the
# two phases each acts on. Half of all prompt tokens in the cache halves prefill and leaves decode alone. FP8 acts on
# both. Speculation acts on decode alone, and the plan is generous to it: at a batch of 256 verification is not free.

# %%
fp8 = Serving(llama, H100, weights="fp8", compute="fp8")
plans = {
    "bf16": base,
    "FP8": plan(fp8, load),
    "half of the prompts cached": plan(Serving(llama, H100), replace(load, prefix_hit_rate=0.5)),
    "speculation, 0.7 kept": plan(Serving(llama, H100), load, Assumptions(acceptance_rate=0.7)),
    "FP8 and half cached": plan(fp8, replace(load, prefix_hit_rate=0.5)),
}
axes = panels(height=2.8)
names = list(plans)[::-1]
prefill = [plans[name].prefill_gpus for name in names]
decode = [plans[name].decode_gpus for name in names]
axes.barh(names, prefill, color=ORANGE, label="prefill")
axes.barh(names, decode, left=prefill, color=BLUE, label="decode")
for row, name in enumerate(names):
    cost = f"  ${plans[name].dollars_per_million_output:.2f} a million output tokens"
    axes.text(plans[name].gpus, row, cost, va="center", size=8)
axes.set(xlabel="H100s", xlim=(0, 720), title="The same load, by lever")
axes.legend(loc="lower right")
axes.grid(True, axis="x")

# %% [markdown]
# **Exercise 4.** With FP8, half of the prompt tokens cached and a price of $2.00 for a GPU and hour: what does a
# million *output* tokens cost?
#
# <details><summary>Answer</summary>
#
# The plan's number times 2.0 / 2.5, since the price enters once and linearly. By hand: prefill is halved twice, to
# about 89 GPUs, decode has 10 replicas, so 100 GPUs; 189 · $2 an hour, over 1,080 million tokens an hour, is 35 cents.
#
# </details>

# %% tags=["exercise"] solution="(1e6 * 0.5 * 141.2e9 / (0.5 * 1979e12) / 0.8 + 10 * 8 / 0.8) * 2.0 / 1080"
answer = None  # dollars
cheap = plan(fp8, replace(load, prefix_hit_rate=0.5), Assumptions(price_per_gpu_hour=2.0))
check_answer(
    "4", answer, cheap.dollars_per_million_output, hint="Prefill and decode first, each over 0.8; then dollars."
)

# %% [markdown]
# ## 6 The same on a card for a student
#
# Qwen2.5-1.5B on an RTX 5060: one card instead of five hundred, and the same three numbers. Where its arithmetic peak
# is known (`tools/measure_gpu.py` measures it), the orange line can be drawn as well; here it is asked for in an
# exercise.

# %%
laptop = Serving(KNOWN["qwen2.5-1.5b"], RTX_5060)
left, right = panels(2, height=2.8)
lengths = np.array([512, 1024, 2048, 4096, 8192])
for reserved, style in ((0.5e9, "--"), (1.0e9, "-")):
    fits = [laptop.tokens_that_fit(reserved) / length for length in lengths]
    left.plot(lengths, fits, style, color=BLUE, label=f"{reserved / 1e9:g} GB kept free")
left.set(xscale="log", yscale="log", xlabel="tokens of a chat", ylabel="chats at once", title="What 8 GB hold")
left.set_xticks(lengths, [str(length) for length in lengths])
left.minorticks_off()
left.legend()
some = np.arange(1, 65)
right.plot(some, [1e3 * laptop.decode_step(int(batch), 2048).memory for batch in some], color=BLUE)
right.set(xlabel="sequences of 2,048 cached tokens", ylabel="ms", ylim=0, title="A decode step at least: the reading")
for axes in (left, right):
    axes.grid(True)

# %% [markdown]
# **Exercise 5.** A decode step of 32 sequences with 2,048 cached tokens each: up to how many TFLOP/s of measured peak
# would the card be compute-bound?
#
# <details><summary>Answer</summary>
#
# The arithmetic is $2 \cdot 1.544 \cdot 10^9 \cdot 32 \approx 99$ GFLOP, the reading takes about 11 ms. The two are
# equal at $99 / 11 \approx 9$ TFLOP/s. Any recent card has several times that in bf16: batch 32 is memory-bound, as it
# is on the H100.
#
# </details>

# %% tags=["exercise"] solution="2 * 1.544e9 * 32 / ((3.088e9 + 32 * 2048 * 28 * 1024) / 448e9) / 1e12"
answer = None  # TFLOP/s
step = laptop.decode_step(32, 2048)
check_answer(
    "5", answer, laptop.model.flops_per_token() * 32 / step.memory / 1e12, hint="FLOP over the time of the reading"
)

# %% [markdown]
# ## 7 What breaks the plan: answers have a tail
#
# From here on requests are served, one by one, by the scheduler of `solutions/engine`, the very code that serves the
# real model. Only the model is replaced, by the time that a step would take.
#
# The plan counted on sequences of average length. Below, a small pool serves answers with a tail. Each cell is a block
# of the pool, each colour a request. Watch the pool fill up, and a request lose all its blocks at once (the red
# count): it was preempted for the sake of an older one, and all that it held has to be computed again.

# %%
frames: list[tuple[dict[int, int], int]] = []


def watch(step: Step) -> float:
    """A step takes a second; who holds which block in it is written down."""
    # A dozen run at once, and a dozen colours can be told apart.
    owners = {block: int(work.request.request_id) % 12 for work in step.work for block in work.blocks}
    before = frames[-1][1] if frames else 0
    frames.append((owners, before + len(step.preempted)))
    return 1.0


BLOCKS = 48
tight = ReplicaConfig(
    SchedulerConfig(max_running=12, token_budget=64), num_blocks=BLOCKS, block_size=4, prefix_cache="none"
)
answers = Stream(0.5, Fixed(8), LogNormal(mean=16, p95=50, longest=60)).draw(60.0, seed=4)
simulate([Replica(tight, watch)], answers)
shown = np.linspace(0, len(frames) - 1, FRAMES).astype(int)


def draw_frame(axes, number: int) -> None:
    """One frame: the pool, and how often somebody has lost it all."""
    owners, preemptions = frames[shown[number]]
    draw_memory(axes, [Cell(owners.get(block)) for block in range(BLOCKS)], 16, "")
    axes.set_title(f"{len(owners)} of {BLOCKS} blocks held", color=INK)
    axes.text(16, -0.18, f"preempted so far: {preemptions}", ha="right", color=RED if preemptions else QUIET)


animate(
    draw_frame,
    FRAMES,
    title="A pool of blocks fills with growing answers; requests are preempted.",
    height=1.8,
    seconds=0.25,
)

# %% [markdown]
# The scenario `output-tails` at full size: a pool for 64 answers of average length on an H100. That average is the
# wrong one. Long answers stay longer, so who looks at a random moment meets them more often: the mean length of those
# that run is $E[n^2] / E[n]$ (the bus that you wait for is later than the average bus, for the same reason).
#
# The left panel shows the pool: at its limit all the time, or with room to spare. The right panel shows what readers
# see: the longest pause within an answer, one point for each request. Fewer at once protects them as well as more
# memory, but somebody has to pay: the wait moves from the middle of the answer to its beginning.


# %%
def first_cases(scenario: str, count: int) -> dict[str, SimulationReport]:
    """The first cases of a scenario, served; the failure in any case."""
    return {case.name: case.run(0) for case in SCENARIOS[scenario].cases[: max(1, count)]}


def draw_cases(axes, reports: dict[str, SimulationReport], x, y, *, dots: bool = False) -> None:
    """A curve or a cloud for each case of a scenario; the failure, which comes first, in red."""
    for colour, (name, report) in zip((RED, BLUE, ORANGE, PURPLE), reports.items(), strict=False):
        axes.plot(x(report), y(report), "." if dots else "-", color=colour, label=name, markersize=4)


tails = first_cases("output-tails", CASES - 1)
left, right = panels(2, height=3.2)
draw_cases(left, tails, lambda one: moments(one, 120), lambda one: timeline(one, "occupancy", 120))
left.set(xlabel="seconds", ylabel="share of the pool that is held", ylim=(0, 1.02), title="Memory")
draw_cases(
    right, tails, lambda one: [max(o.ttft, 1e-2) for o in one.outcomes],
    lambda one: [o.longest_gap for o in one.outcomes], dots=True,
)  # fmt: skip
right.set(xscale="log", yscale="log", xlabel="seconds to the first token", ylabel="longest pause, seconds")
right.set_title("What a reader waits for")
right.legend(fontsize=8)
for axes in (left, right):
    axes.grid(True)

# %% [markdown]
# **Exercise 6.** Nine of ten answers have 100 tokens, one of ten has 1,100. The mean is 200. How long, on average, is
# an answer that you find running at a random moment (by its final length)?
#
# <details><summary>Answer</summary>
#
# $E[n^2] / E[n] = (0.9 \cdot 100^2 + 0.1 \cdot 1100^2) / 200 = 130{,}000 / 200 = 650$ tokens. More than half of those
# that run at any moment are long ones, though only one in ten is.
#
# </details>

# %% tags=["exercise"] solution="(0.9 * 100**2 + 0.1 * 1100**2) / 200"
answer = None  # tokens
check_answer("6", answer, 650, hint="An answer of n tokens is met in proportion to n: weigh each length by itself.")

# %% [markdown]
# ## 8 What breaks the plan: long prompts, cold caches, slow neighbours
#
# **A long prompt among chats.** Below, each point is a chat, placed at its arrival; its height is the longest pause
# within the answer on the left, the wait for the first token on the right. Three prompts of 60,000 tokens arrive.
# Whole, each stops every reader on its replica for seconds. In chunks, nobody who reads is stopped, but whoever
# *arrives* still waits: the long prompt takes what is left of each step's budget. A cap on one prompt's chunk gives
# the others a share, and a replica of their own takes long prompts out of the way.

# %%
prompts = first_cases("long-prompts", CASES)
chats = {name: report.only("chat") for name, report in prompts.items()}
left, right = panels(2, height=3.0, sharey=True)
for axes, name in ((left, "longest_gap"), (right, "ttft")):
    draw_cases(
        axes, chats, lambda one: [o.arrived for o in one.outcomes],
        lambda one, name=name: [max(getattr(o, name), 1e-3) for o in one.outcomes], dots=True,
    )  # fmt: skip
    axes.set(yscale="log", xlabel="arrival of a chat, seconds")
left.set(ylabel="seconds", title="Longest pause within the answer")
right.set_title("Wait for the first token")
left.figure.legend(handles=left.lines, loc="outside lower center", ncols=4, fontsize=8)
for axes in (left, right):
    axes.grid(True)

# %% [markdown]
# **A link that is too small.** Prefill and decode in two pools: 320 KiB of keys and values for each prompt token have
# to cross. Where the link carries less than arrives, the wait for the *second* token grows as long as the load lasts,
# and no GPU is busy with it.

# %%
transfer = first_cases("kv-transfer", CASES)
axes = panels(height=2.6, width=7)
draw_cases(
    axes, transfer, lambda one: [o.arrived for o in one.outcomes],
    lambda one: [o.longest_gap for o in one.outcomes],
)  # fmt: skip
axes.set(yscale="log", xlabel="arrival, seconds", ylabel="seconds", title="Wait for the second token")
axes.legend(fontsize=8)
axes.grid(True)

# %% [markdown]
# **The others**, each with the number that gives it away: a time stamp in front of the system prompt; documents that
# four caches can hold only if each keeps its own; a document in fashion, whose replica drowns; one GPU of sixteen at
# half its clock; experts that most tokens want. Green is how it was planned, red how it failed, blue what helps. The
# reasons stand in `python -m solutions.simulate scenarios`, with more columns.

# %%
TOLD_BY = {"prefix-mix": 2, "cache-thrash": 2, "hot-replica": 3, "stragglers": 1, "experts": 0}
drawn = panels(1, len(SHOWN), height=1.25, width=8, squeeze=False)[:, 0]
for axes, name in zip(drawn, SHOWN, strict=True):
    scenario, column = SCENARIOS[name], SCENARIOS[name].columns[TOLD_BY[name]]
    reports = scenario.run()
    cases = scenario.cases[::-1]
    values = [column.value(reports[case.name]) for case in cases]
    axes.barh([case.name for case in cases], values, color=[ROLES[case.role] for case in cases])
    axes.set_title(f"{scenario.title}: {column.title}", size=9)
    axes.tick_params(labelsize=8)

# %% [markdown]
# **Exercise 7.** Each replica has a prefix cache that keeps the 15 documents used last. There are 32, all asked for
# alike, and four replicas. With requests dealt in turn a replica finds about 15 of 32 documents. Write a function: the
# expected hit rate for $d$ documents, $r$ replicas and room for $c$ of them in each, if requests are routed by
# document (and the documents are spread evenly).
#
# <details><summary>Answer</summary>
#
# Each replica meets only $d / r$ documents and keeps $c$ of them, so it finds $\min(1, c r / d)$. Routing turns four
# caches of 15 into one of 60.
#
# </details>

# %% tags=["exercise"] solution="lambda documents, replicas, room: min(1.0, room * replicas / documents)"
answer = None  # a function of documents, replicas, room
check_answer(
    "7", answer, lambda documents, replicas, room: min(1.0, room / (documents / replicas)),
    cases=[(32, 4, 15), (100, 4, 15), (100, 1, 15), (30, 2, 10)], hint="How many documents does one replica ever meet?",
)  # fmt: skip

# %% [markdown]
# ## 9 Throughput is not goodput
#
# Offer more and more requests to one replica. Throughput rises and stays: the machine is never idle. Goodput, which
# counts only who was served in time, falls to nothing, because everybody stands in the same long line. A replica that
# says *no* to those who would be late keeps its goodput: it serves some in time instead of all too late.

# %%
LIMITS = dict(ttft=1.0, tpot=0.1)
routers = {"everybody is let in": (least_loaded, RED), "refused when 16 wait": (RefuseWhenFull(16), BLUE)}
left, right = panels(2, height=3.0)
for name, (router, colour) in routers.items():
    reports = []
    for rate in OFFERED:
        requests = Stream(rate, Uniform(1000, 1400), Uniform(20, 60)).draw(8.0, seed=2)
        reports.append(simulate(replicas(1, replica_config(100_000)), requests, router))
    left.plot(OFFERED, [one.throughput for one in reports], "o--", color=colour, markersize=3)
    left.plot(OFFERED, [one.goodput(**LIMITS) for one in reports], "o-", color=colour, label=name)
    right.plot(OFFERED, [one.percentile("ttft", 0.95) for one in reports], "o-", color=colour)
left.set(xlabel="requests per second", ylabel="output tokens per second", ylim=0)
left.set_title("In time (solid), and in all (dashed)")
left.legend(fontsize=8)
right.axhline(1.0, color=QUIET, linewidth=1, linestyle=":")
right.set(xlabel="requests per second", ylabel="seconds", title="Time to the first token, 95th percentile")
for axes in (left, right):
    axes.grid(True)

# %% [markdown]
# ## 10 Is the simulator right about this machine?
#
# What it decides it cannot get wrong: it *is* the engine's scheduler, and a test compares the two step by step. What
# it assumes is the time of a step. Below, steps of the real engine with the bundled model are timed, and a sum of six
# parts is fitted: so much for a step, for a token up to a knee and beyond it, for a sequence, for what is read from
# the cache, for each query and key. On the diagonal it is right. `python -m solutions.simulate calibrate` goes on to
# foretell a whole workload, serve it, and print the error.

# %%
engine = Engine("smollm2", EngineConfig(SchedulerConfig(max_running=8, token_budget=160), num_blocks=256))
grid = Grid(prefills=(0, 8, 32, 128), decodes=(4, 2, 1, 0), contexts=tuple(CONTEXTS), repeats=1)
demands, seconds = measure_steps(engine, grid)
times = fit(demands, seconds)
axes = panels(height=3.2, width=4.4)
measured_ms = [1e3 * one for one in seconds]
axes.plot([min(measured_ms), max(measured_ms)], [min(measured_ms), max(measured_ms)], color=FAINT)
tokens = [one.tokens for one in demands]
dots = axes.scatter(measured_ms, [1e3 * times.seconds(one) for one in demands], c=np.log2(tokens), cmap="viridis", s=18)
axes.figure.colorbar(dots, label="log₂ of the step's tokens")
axes.set(xscale="log", yscale="log", xlabel="ms, measured", ylabel="ms, fitted", title="Steps of the engine, here")
axes.minorticks_off()
axes.grid(True)
