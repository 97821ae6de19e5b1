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
#     BATCHES: [1, 8]
#     DRAFTS: [1, 3]
#     LENGTHS: [16, 32]
#     ROWS: [1, 32]
#     RUNS: 4000
#     SECONDS: 0.1
#     STEPS: 5
#     WAYS: 1
# ---

# %% [markdown]
# # The interview traps
#
# Eight sentences that sound right. Each is half true, and each is refuted here by an experiment on this machine or by
# counting. Behind them stand the module's ten questions, as exercises that check themselves.

# %%
from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.checkpoints import load_tokenizer
from labkit.decoder import Decoder, full_attention
from labkit.launch import use_interpreter

# Before anything imports Triton: from here on kernels are interpreted.
use_interpreter()

from triton.runtime import interpreter  # noqa: E402

from labkit.instruments.recorder import Recorder  # noqa: E402
from labkit.notebook import Digest, check_answer, open_lab  # noqa: E402
from labkit.notebook.palette import BLUE, GREEN, LINES, ORANGE, QUIET, RED  # noqa: E402
from labkit.notebook.style import panels, use_style  # noqa: E402
from labkit.probing import machine_bounds  # noqa: E402
from labkit.probing.timing import Effort, clock_of, time_of  # noqa: E402
from labkit.specs import Checkpoint  # noqa: E402
from solutions.planning.hardware import H100  # noqa: E402
from solutions.planning.model_shape import KNOWN  # noqa: E402
from solutions.planning.roofline import Serving  # noqa: E402
from solutions.quantization.packed_linear import pack_linear  # noqa: E402
from solutions.quantization.quantized_model import QuantizedLinear  # noqa: E402
from solutions.quantization.uniform import quantize  # noqa: E402
from solutions.speculative.losslessness import speculate_many, total_variation, total_variation_limit  # noqa: E402
from solutions.speculative.speedup import expected_tokens, speedup  # noqa: E402

use_style()
model = Checkpoint("smollm2").build()
config = model.config
clock = clock_of("cpu")
print(machine_bounds("cpu", quick=True).line())

# %% tags=["parameters"]
# How much is measured; more is slower and smoother.
SECONDS = 0.4  # for one dot of a plot, about
BATCHES = [1, 2, 4, 8, 16, 32]  # sequences of a decode step
DRAFTS = [1, 3, 5, 7]  # that the target verifies at once
ROWS = [1, 2, 4, 8, 16, 32, 64, 128]  # tokens of a product
LENGTHS = [16, 32, 64, 96]  # tokens of interpreted attention
RUNS = 30000  # of speculation
STEPS = 60  # of tensor parallelism
WAYS = 4  # from one hidden state to another


# %%
def seconds(call: Callable[[], object]) -> float:
    """The median time of a call."""
    with torch.inference_mode():
        return time_of(call, clock, Effort(SECONDS, repeats=5)).median


def step_seconds(batch: int, new: int = 1, cached: int = 32) -> float:
    """A pass of the bundled model: `new` tokens for each sequence of the batch, behind `cached` ones."""
    tokens = torch.randint(config.vocab_size, (batch, new))
    kept = torch.randn(config.num_layers, 2, batch, config.num_kv_heads, cached + new, config.head_dim)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        kept[layer, 0, :, :, cached:], kept[layer, 1, :, :, cached:] = k, v
        return F.scaled_dot_product_attention(q, *kept[layer], enable_gqa=True)

    return seconds(lambda: model.forward(tokens, torch.arange(cached, cached + new), attend))


# %% [markdown]
# ## 1 "Decode is slow because it is sequential"
#
# If order were the reason, a step that gives 16 sequences their next tokens would take 16 times as long as a step for
# one. It takes little more, since what it waits for is the weights, and those it reads once.

# %%
steps = {batch: step_seconds(batch) for batch in BATCHES}
left, right = panels(2, height=2.8)
left.plot(BATCHES, [steps[b] / steps[1] for b in BATCHES], "o-", color=BLUE, label="measured")
left.plot(BATCHES, BATCHES, ":", color=QUIET, label="if each token took its time")
left.set(xscale="log", yscale="log", xlabel="sequences in the step", title="Time of a step, of a lonely one's")
left.legend()
right.plot(BATCHES, [b * steps[1] / steps[b] for b in BATCHES], "o-", color=ORANGE)
right.set(xscale="log", yscale="log", xlabel="sequences in the step", title="Tokens a second, of a lonely sequence's")
for panel in (left, right):
    panel.grid(True)

# %% [markdown]
# Sequence is why the answer is to batch across users and not within one text. Speculation, trap 5, does the latter
# after all, by guessing.
#
# **Exercise 1.** *Why is prefill compute-bound and decode memory-bound, in one equation each?* Write the arithmetic
# intensity of a pass in FLOP per byte for $N$ parameters of 2 bytes: `new` tokens in all, whose `sequences` have
# `context` cached tokens each, of `kv` bytes.
#
# <details><summary>Answer</summary>
#
# `lambda N, new, sequences, context, kv: 2 * N * new / (2 * N + sequences * context * kv)`. A prompt of $P$ tokens has
# no context yet: intensity $P$. A decode step has one new token a sequence: at most $B$, and less with every cached
# token.
#
# </details>

# %% tags=["exercise"] solution="lambda N, new, sequences, context, kv: new / (1 + sequences * context * kv / (2 * N))"
answer = None  # a function of N, new, sequences, context, kv
check_answer(
    "1", answer, lambda N, new, sequences, context, kv: 2 * N * new / (2 * N + sequences * context * kv),
    cases=[(8e9, 1000, 1, 0, 131072), (8e9, 1, 1, 0, 131072), (8e9, 64, 64, 2048, 131072)],
    hint="2 FLOP for each parameter and token; which bytes are read once, which for each sequence?",
)  # fmt: skip

# %% [markdown]
# **Exercise 2.** *Batch-1 decode bound for Llama-3-8B in bf16 on an H100? On an RTX 5060 with a 4-bit 8 B model?* Both
# in tokens per second: 16 GB at 3.35 TB/s, and 4.1 GB at 448 GB/s.
#
# <details><summary>Answer</summary>
#
# 3350 / 16 ≈ 210, and 448 / 4.1 ≈ 110, before keys, values and overheads.
#
# </details>

# %% tags=["exercise"] solution="[1 / (16 / 3350), 1 / (4.1 / 448)]"
answer = None  # two numbers
check_answer("2", answer, [3350 / 16, 448 / 4.1], hint="Each token reads every weight once.")

# %% [markdown]
# ## 2 "Quantizing to INT4 makes everything 4 times faster"
#
# One projection of every layer, in fp32 and packed to 4 bits, for ever more tokens at once. The packed product is used
# throughout; a good engine changes over where the gain falls to one.

# %%
weights = [model.weights[f"model.layers.{layer}.mlp.gate_proj.weight"] for layer in range(config.num_layers)]
packed = [pack_linear(QuantizedLinear(quantize(one, 4, group_size=32)), max(ROWS)) for one in weights]


def gain(rows: int) -> float:
    """How many times faster the packed products are; all layers' in turn, so that none waits in a cache."""
    inputs = torch.randn(rows, weights[0].shape[1])
    wide = seconds(lambda: [F.linear(inputs, one) for one in weights])
    return wide / seconds(lambda: [one(inputs) for one in packed])


gains = {rows: gain(rows) for rows in ROWS}
axes = panels(height=2.8, width=7)
axes.plot(ROWS, [gains[rows] for rows in ROWS], "o-", color=BLUE)
axes.axhline(1, color=QUIET, linestyle=":")
axes.axvspan(min(16, max(ROWS)), max(ROWS), color=QUIET, alpha=0.1)
axes.set(
    xscale="log", yscale="log", xlabel="tokens at once", title="How much faster 4 bits are than fp32; grey: a prompt"
)
axes.grid(True)

# %% [markdown]
# Few tokens wait for bytes, and there are an eighth of them (a quarter of bf16's). Many tokens wait for arithmetic,
# which is done in the wide type all the same, behind an unpacking that costs extra.
#
# **Exercise 3.** *Why does weight-only INT4 not speed up prefill?* Which of a pass's floors does it lower: `"memory"`,
# `"compute"` or `"both"`?
#
# <details><summary>Answer</summary>
#
# Memory alone. W4A16 multiplies in bf16 after dequantizing, so the rate of arithmetic is unchanged. Only W8A8, FP8 or
# FP4 products raise that roof.
#
# </details>

# %% tags=["exercise"] solution="'memory'"
answer = None  # a word
check_answer("3", answer, Digest("a4245e019d53bc05"), hint="In which type does W4A16 multiply?")

# %% [markdown]
# ## 3 "FlashAttention reduces FLOPs"
#
# Lab 06's kernels, interpreted: every product of tiles is counted, and every byte to or from global memory. Beside them
# the plain formula, whose products and bytes are known: forward $4T^2d$, backward twice that; the score matrix is
# written once and read three times.

# %%
Builder = interpreter.InterpreterBuilder
create_dot = Builder.create_dot


def cost_of(call: Callable[[], object]) -> tuple[float, float]:
    """FLOP of all products of tiles, and bytes that the kernels load and store."""
    flops = 0.0

    def counted(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        nonlocal flops
        flops += 2.0 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return create_dot(builder, a, b, *rest)

    Builder.create_dot = counted
    try:
        with Recorder(strict=False) as recorder:
            call()
    finally:
        Builder.create_dot = create_dot
    log = recorder.log()
    return flops, log.bytes_loaded + log.bytes_stored


lab06 = open_lab("06")
width, TILES = 16, {"block_q": 16, "block_k": 16}


def both_ways(*inputs: Tensor) -> None:
    """Attention and its gradients."""
    lab06.flash_attention(*(one.clone().requires_grad_() for one in inputs), **TILES).sum().backward()


flash: dict[str, list[tuple[float, float]]] = {"forward": [], "with backward": []}
for length in LENGTHS:
    q, k, v = (torch.randn(1, 1, length, width) for _ in range(3))
    flash["forward"].append(cost_of(partial(lab06.flash_attention, q, k, v, **TILES)))
    flash["with backward"].append(cost_of(partial(both_ways, q, k, v)))

plain_flops = {"forward": 4, "with backward": 12}
plain_bytes = {"forward": (4, 4), "with backward": (11, 10)}  # × T·d and × T², of 4 bytes
left, right = panels(2, height=2.9)
for (name, costs), colour in zip(flash.items(), (BLUE, ORANGE), strict=True):
    flops = [cost[0] / (plain_flops[name] * t * t * width) for cost, t in zip(costs, LENGTHS, strict=True)]
    left.plot(LENGTHS, flops, "o-", color=colour, label=name)
    linear, square = plain_bytes[name]
    moved = [cost[1] / (4 * (linear * t * width + square * t * t)) for cost, t in zip(costs, LENGTHS, strict=True)]
    right.plot(LENGTHS, moved, "o-", color=colour, label=name)
left.set(title="FLOP, of plain attention's", xlabel="tokens", ylim=(0, None))
right.set(title="Bytes, of plain attention's", xlabel="tokens", ylim=(0, None))
for panel in (left, right):
    panel.axhline(1, color=QUIET, linestyle=":")
    panel.legend()

# %% [markdown]
# Forward does exactly the arithmetic of the formula; backward computes the scores again, and so does more. What shrinks
# is the traffic, the more the larger the tiles are: here they are tiny, for the interpreter's sake.
#
# **Exercise 4.** *Why does batch-1 decode attention need FlashDecoding?* A kernel starts one block for each sequence
# and head. With 32 heads, batch 1 and 132 multiprocessors: into how many chunks must the context be split, at least, to
# give each multiprocessor a block?
#
# <details><summary>Answer</summary>
#
# ⌈132 / 32⌉ = 5. Without splitting three quarters of the chip idle while each block walks the whole context.
#
# </details>

# %% tags=["exercise"] solution="-(-132 // 32)"
answer = None  # chunks
check_answer(
    "4", answer, Digest("a7acaccb094e2dd8"), hint="Heads times chunks must reach the number of multiprocessors."
)

# %% [markdown]
# ## 4 "Speculative decoding changes the output distribution a little"
#
# A vocabulary of six, a drafter that is often wrong, and very many runs. The distance between what came out and the
# target's law is compared with what chance alone leaves a right sampler. Beside the rule stands the shortcut that is
# exact for greedy decoding alone: keep the draft if it is the target's likeliest token.

# %%
generator = torch.Generator().manual_seed(7)
target = torch.randn(6, 6, generator=generator, dtype=torch.float64).mul(1.2).softmax(-1)
drafter = (target.log() + torch.randn(6, 6, generator=generator, dtype=torch.float64)).softmax(-1)
first = torch.zeros(RUNS, dtype=torch.int64)
texts = speculate_many(target, drafter, first, 4, 3, torch.rand(RUNS, 4, 3, generator=generator, dtype=torch.float64))

likeliest = int(target[0].argmax())
drafts = torch.multinomial(drafter[0], RUNS, replacement=True, generator=generator)
own = torch.multinomial(target[0], RUNS, replacement=True, generator=generator)
shortcut = torch.where(drafts == likeliest, drafts, own)

law, laws = torch.eye(6, dtype=torch.float64)[0], []
for _ in range(4):
    law = law @ target
    laws.append(law)
allowed = [total_variation_limit(one, RUNS, 1e-3) for one in laws]
axes = panels(height=2.8, width=7)
places = range(1, 5)
axes.bar(places, allowed, color=QUIET, alpha=0.3, label="what chance leaves, but once in 1,000")
distances = [total_variation(texts[:, i], one) for i, one in enumerate(laws)]
axes.plot(places, distances, "o", color=GREEN, label="the rejection rule")
axes.plot([1], [total_variation(shortcut, laws[0])], "X", color=RED, markersize=9, label="keep what is likeliest")
axes.set(yscale="log", xticks=list(places), xlabel="place in the text", title="Distance from the target's law")
axes.legend()
axes.grid(True, axis="y")

# %% [markdown]
# **Exercise 5.** *Prove speculative decoding lossless for one token.* Write the probability that token $x$ comes out,
# from $p(x)$, $q(x)$ and the acceptance $\alpha$. It must equal $p(x)$.
#
# <details><summary>Answer</summary>
#
# `lambda p, q, alpha: q * min(1, p / q) + (1 - alpha) * max(0, p - q) / (1 - alpha)`: drafted and kept, or rejected and
# drawn from the residual, whose total is $1 - \alpha$. The sum is $\min(p, q) + \max(0, p - q) = p$.
#
# </details>

# %% tags=["exercise"] solution="lambda p, q, alpha: q * min(1, p / q) + (1 - alpha) * max(0, p - q) / (1 - alpha)"
answer = None  # a function of p, q, alpha
check_answer(
    "5", answer, lambda p, q, alpha: p, cases=[(0.5, 0.2, 0.6), (0.1, 0.4, 0.6), (0.25, 0.25, 0.9)],
    hint="Two ways lead to x: it was drafted and kept, or something was rejected and x was drawn.",
)  # fmt: skip

# %% [markdown]
# **Exercise 6.** *α = 0.8, k = 4, a draft costs 5 % of a step of the target.* Expected tokens a round, and speed-up?
#
# <details><summary>Answer</summary>
#
# $(1 - 0.8^5) / 0.2 = 3.36$ tokens, at a cost of $1 + 4 · 0.05$ steps: 2.8 times.
#
# </details>

# %% tags=["exercise"] solution="[sum(0.8**i for i in range(5)), sum(0.8**i for i in range(5)) / 1.2]"
answer = None  # two numbers
check_answer(
    "6", answer, [float(expected_tokens(0.8, 4)), float(speedup(0.8, 4, 0.05))],
    hint="At least i drafts are kept with probability α to the i; a round is k drafts and one pass.",
)  # fmt: skip

# %% [markdown]
# ## 5 "Speculative decoding always helps"
#
# Verifying $k + 1$ tokens costs a step, as long as the step waits for memory. Left, what it costs on this machine, by
# the number of sequences; right, what is then left of the speed-up with an acceptance of 0.8 and drafts for nothing.

# %%
verify = {batch: [step_seconds(batch, k + 1) / steps[batch] for k in DRAFTS] for batch in BATCHES[:4]}
left, right = panels(2, height=2.9)
for (batch, costs), colour in zip(verify.items(), LINES, strict=False):
    left.plot(DRAFTS, costs, "o-", color=colour, label=f"batch {batch}")
    worth = [float(speedup(0.8, k, 0.0, cost)) for k, cost in zip(DRAFTS, costs, strict=True)]
    right.plot(DRAFTS, worth, "o-", color=colour)
left.set(xlabel="drafts", title="Cost of verifying, in steps", ylim=(0, None))
right.axhline(1, color=QUIET, linestyle=":")
right.set(xlabel="drafts", title="Speed-up, drafts for nothing", ylim=(0, None))
left.legend(fontsize=8)
right.grid(True, axis="y")

# %% [markdown]
# Under load a step waits for arithmetic already, and every rejected draft is arithmetic for nothing. Engines draft less
# then, or not at all.
#
# **Exercise 7.** *Chunked prefill or disaggregation?* For a single 8-GPU node with mixed chat traffic, and for a large
# fleet with strict TTFT and TPOT. Answer with a list of two words, `"chunked"` or `"disaggregated"`.
#
# <details><summary>Answer</summary>
#
# `["chunked", "disaggregated"]`. On one node chunks protect the decodes and no cache has to move. In a fleet each pool
# is tuned for its phase and the two never interfere, if you can pay for the transfer: 328 MB for a prompt of 1,000
# tokens of Llama-3-70B.
#
# </details>

# %% tags=["exercise"] solution="['chunked', 'disaggregated']"
answer = None  # two words
check_answer(
    "7", answer, Digest("d404dd1a9f99d0d6"), hint="Which of the two has to move the cache, and who can afford that?"
)

# %% [markdown]
# ## 6 "More GPUs per replica means more throughput"
#
# Two processes and a stack of layers. As one replica each holds half of every matrix, and after each pair of products
# the halves are added across the processes, as tensor parallelism does. As two replicas each holds everything, and
# nobody waits for anybody. Compared are tokens per second of both processes together, and the time of one step.

# %%
PAIR = """
import json, os, sys, time
import torch, torch.distributed as dist
rank, port, steps, *batches = map(int, sys.argv[1:])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=2)
hidden, inner, layers = 576, 1536, 24
def stack(share):
    return [(torch.randn(inner // share, hidden) / 24, torch.randn(hidden, inner // share) / 40) for _ in range(layers)]
def step(x, weights, together):
    for up, down in weights:
        y = torch.relu(x @ up.T) @ down.T
        if together:
            dist.all_reduce(y)
        x = x + y
    return x
def median_of(weights, batch, together):
    x, times = torch.randn(batch, hidden), []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step(x, weights, together)
        times.append(time.perf_counter() - start)
    return sorted(times)[steps // 2]
result = {}
for name, share in (("replica", 1), ("tensor parallel", 2)):
    weights = stack(share)
    result[name] = [median_of(weights, batch, share == 2) for batch in batches]
if rank == 0:
    print(json.dumps(result))
dist.destroy_process_group()
"""


def free_port() -> int:
    """A port that nobody listens on."""
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


batches = [1, 8, 64]
port = free_port()
both = [
    subprocess.Popen(
        [sys.executable, "-c", PAIR, *map(str, [rank, port, STEPS, *batches])], stdout=subprocess.PIPE, text=True
    )
    for rank in range(2)
]
said = [process.communicate()[0] for process in both]
pair = json.loads(said[0])
shorter = [shared / alone for shared, alone in zip(pair["tensor parallel"], pair["replica"], strict=True)]

left, right = panels(2, height=2.8)
sizes = [str(batch) for batch in batches]
left.bar(sizes, shorter, color=BLUE, width=0.5)
left.set(xlabel="sequences", title="Time of a step: one replica of two, of a single one's")
right.bar(sizes, [0.5 / one for one in shorter], color=ORANGE, width=0.5)
right.set(xlabel="sequences", title="Tokens a second: one replica of two, of two replicas'")
for panel in (left, right):
    panel.axhline(1, color=QUIET, linestyle=":")

# %% [markdown]
# Two replicas give two processes' worth of tokens. One replica of two may shorten the step, never to a half, since the
# sums have to travel: so it is for latency, and for weights that don't fit otherwise.
#
# The same in the planner, for Llama-3-8B on eight H100s with 1,000 tokens of context. In each layer two sums of the
# batch's activations go round the GPUs of a replica, at 450 GB/s and 10 µs each.

# %%
llama = KNOWN["llama-3-8b"]
axes = panels(height=2.8, width=7)
for sequences, colour in ((64, BLUE), (512, ORANGE), (3500, GREEN)):
    rates = []
    for gpus in (1, 2, 4, 8):
        batch = sequences * gpus / 8
        travelling = 2 * (gpus - 1) / gpus * batch * 4096 * 2 / 450e9 + (10e-6 if gpus > 1 else 0.0)
        replica = Serving(llama, H100, gpus, overhead=2 * llama.num_layers * travelling)
        rates.append(8 / gpus * replica.decode_rate(batch, 1000))
    axes.plot([1, 2, 4, 8], [rate / rates[0] for rate in rates], "o-", color=colour, label=f"{sequences} sequences")
axes.axhline(1, color=QUIET, linestyle=":")
axes.set(xticks=[1, 2, 4, 8], xlabel="GPUs of a replica", title="Tokens a second of eight GPUs, of eight replicas'")
axes.legend(fontsize=8)
axes.grid(True)

# %% [markdown]
# When the GPUs are full the sums only cost. When they are not, eight small replicas each read all weights for a few
# tokens, and sharing wins: it is the sequences *of a replica* that decide, so measure at the load that you expect.
#
# **Exercise 8.** *What do CUDA graphs remove, and why is there one per batch size?* A step launches 300 kernels at 5 µs
# each; replayed as a graph it is one launch. Buckets are 1, 2, 4, 8, 16. How many microseconds of launching are saved,
# and how many rows of the step for 9 sequences are padding?
#
# <details><summary>Answer</summary>
#
# 299 · 5 = 1,495 µs, and 16 − 9 = 7 rows. A graph fixes shapes and addresses when it is captured, so each size needs
# its own, and the batch is padded to the next.
#
# </details>

# %% tags=["exercise"] solution="[300 * 5 - 5, 2 ** 4 - 9]"
answer = None  # two whole numbers
check_answer("8", answer, Digest("b960813e8ce45a7c"), hint="One launch is left; and the next bucket above 9?")

# %% [markdown]
# ## 7 "KV cache memory is small next to the weights"
#
# Where the two lines cross the cache is as large as the weights, in bf16.

# %%
axes = panels(height=2.9, width=7.5)
for name, colour in zip(("smollm2", "qwen2.5-1.5b", "llama-3-8b", "llama-3-70b"), LINES, strict=False):
    shape = KNOWN[name]
    kv = [batch * 2048 * shape.kv_bytes_per_token("bf16") / shape.weight_bytes("bf16") for batch in (1, 8, 64, 256)]
    axes.plot([1, 8, 64, 256], kv, "o-", color=colour, label=name)
axes.axhline(1, color=QUIET, linestyle=":")
axes.set(xscale="log", yscale="log", xlabel="sequences of 2,048 tokens", title="Keys and values, of the weights")
axes.legend(fontsize=8)
axes.grid(True)

# %% [markdown]
# **Exercise 9.** *What does PagedAttention fix, and what does it cost?* Three answers end at 37, 5 and 300 tokens. How
# many tokens' worth of memory is wasted if each reserves 2,048 at once, and how many in blocks of 16?
#
# <details><summary>Answer</summary>
#
# 3 · 2048 − 342 = 5,802, and 11 + 11 + 4 = 26: at most one block of each is partly empty. The cost is an indirection,
# an allocator, and a rule for when blocks run out.
#
# </details>

# %% tags=["exercise"] solution="[3 * 2048 - (37 + 5 + 300), sum(-n % 16 for n in (37, 5, 300))]"
answer = None  # two whole numbers
check_answer(
    "9", answer, Digest("0157e301c7573c1f"), hint="In blocks, only the last one of each answer has empty places."
)

# %% [markdown]
# **Exercise 10.** *Your plan used the mean output length. What breaks?* Lengths are log-normal with a median of 100 and
# $\sigma = 1$: their mean is $100\,e^{1/2}$, their 95th percentile $100\,e^{1.645}$. By which factor does memory for
# the mean fall short of one that holds the 95th percentile?
#
# <details><summary>Answer</summary>
#
# $e^{1.645 - 0.5} ≈ 3.1$. With memory for the mean the scheduler preempts and computes again, throughput drops and
# latency spikes. Plan for p95 or p99, and let admission control keep the rest out.
#
# </details>

# %% tags=["exercise"] solution="(100 * math.exp(1.645)) / (100 * math.exp(0.5))"
answer = None  # a factor
check_answer("10", answer, math.exp(1.645 - 0.5), hint="The ratio of the percentile to the mean.")

# %% [markdown]
# ## 8 "Temperature 0 means deterministic output"
#
# The head of the model on one hidden state: alone, and as one row of a larger batch. The sums are the same, their order
# is not, and floating-point sums depend on it.


# %%
class Listening(Decoder):
    """Keeps what its head was given."""

    def head(self, hidden: Tensor) -> Tensor:
        self.heard = hidden[0]
        return super().head(hidden)


words = (
    "Serving a model is a matter of moving bytes. A step reads every weight once, for one sequence or for a hundred. "
)
text = torch.tensor([load_tokenizer("smollm2").encode(2 * words)])
listening = Listening(config, model.weights)
with torch.inference_mode():
    listening.forward(text, torch.arange(text.shape[1]), full_attention)
rows = listening.heard


def logits_in_batch_of(size: int, row: Tensor) -> Tensor:
    """The logits of a row that shares its product with others."""
    with torch.inference_mode():
        return model.head(torch.cat([row[None], rows[: size - 1]]))[0]


sizes = [1, 2, 3, 4, 8, 32]
changed = {
    size: max(float((logits_in_batch_of(size, row) - logits_in_batch_of(1, row)).abs().max()) for row in rows[:8])
    for size in sizes
}
axes = panels(height=2.5, width=7)
axes.bar([str(size) for size in sizes], [value + 1e-9 for value in changed.values()], color=BLUE, width=0.5)
axes.set(yscale="log", xlabel="rows in the product", title="Largest change of a logit, against the row alone")
axes.grid(True, axis="y")


# %% [markdown]
# So much moves only a near tie, and those exist. Between two hidden states whose likeliest tokens differ lies a place
# where the two are level; halving the way finds it. There the batch decides which token comes out, at temperature 0.


# %%
def winners(row: Tensor) -> list[int]:
    """The likeliest token of a row, alone and in a batch of four."""
    return [int(logits_in_batch_of(size, row).argmax()) for size in (1, 4)]


def batch_decides(one: Tensor, other: Tensor) -> list[int] | None:
    """The two tokens that come out at one place between two states, if halving the way finds such a place."""
    start, low, high = winners(one)[0], 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        seen = winners(torch.lerp(one, other, middle))
        if seen[0] != seen[1]:
            return seen
        low, high = (middle, high) if seen[0] == start else (low, middle)
    return None


found = [batch_decides(rows[2 * i], rows[2 * i + 1]) for i in range(WAYS)]
flips = [one for one in found if one is not None]
for alone, shared in flips:
    print(f"the same numbers: alone token {alone}, in a batch of four token {shared}")
print(f"{len(flips)} of {WAYS} ways from one state to another lead past a place where the batch decides")

# %% [markdown]
# One such token, and the rest of the text is another one. An engine that promises equal answers computes every row in
# an order that doesn't depend on its neighbours (batch-invariant kernels), and pays for it in speed.
#
# ## Further reading
#
# - Aleksa Gordić, *Inside vLLM: Anatomy of a High-Throughput LLM Inference System*: the path of a request through a
#   real engine, drawn.
# - The vLLM team, *Easy, Fast, and Cheap LLM Serving with PagedAttention*: the block table, animated.
# - Maarten Grootendorst, *A Visual Guide to Quantization*.
# - Tri Dao and others, *Flash-Decoding for long-context inference*: the split context, animated.
# - Horace He, *Making Deep Learning Go Brrrr From First Principles*: the three regimes.
# - kipply, *Transformer Inference Arithmetic*: latency and KV on one page.
# - Google DeepMind, *How to Scale Your Model*, its chapter on transformer inference: the same rooflines, rigorously.
