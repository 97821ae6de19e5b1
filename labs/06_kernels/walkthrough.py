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
#     LENGTHS: [16, 32]
#     ROWS: 4
# ---

# %% [markdown]
# # Lab 06: what kernels move
#
# A walk through the lab by the bytes. A laptop cannot tell how long a kernel takes on a GPU, but Triton's interpreter
# sees every load and every store, and on a GPU most of these kernels take as long as their bytes do. So each section
# *counts*, and draws what was counted.
#
# `check("06.2")` runs that task's tests on *your* file as it is on disk. Cells call your code where it is written, and
# the reference where it is not; the table below says which. The derivations are in the [handout](README.md).

# %%
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.colors import to_rgb
from torch import Tensor

from labkit.launch import use_interpreter

# Before anything imports Triton: from here on kernels are interpreted.
use_interpreter()

from labkit.instruments.recorder import Access, Recorder  # noqa: E402
from labkit.notebook import check, open_lab, progress  # noqa: E402
from labkit.notebook.palette import BLUE, FAINT, GREEN, ORANGE, QUIET, RED, owner_colour  # noqa: E402
from labkit.notebook.style import bare, panels, use_style  # noqa: E402
from labkit.probing import machine_bounds  # noqa: E402

use_style()
print(machine_bounds(quick=True).line())
lab = open_lab("06")
lab

# %% tags=["parameters"]
# How much is interpreted.
LENGTHS = [16, 32, 64, 128, 192]
ROWS = 8


# %%
def counted(call: Any) -> tuple[int, int]:
    """Bytes that a call's kernels load and store."""
    with Recorder(strict=False) as recorder:
        call()
    log = recorder.log()
    return log.bytes_loaded, log.bytes_stored


def accesses(call: Any) -> list[Access]:
    """Every load and store of a call, in the order in which the interpreter ran them."""
    seen: list[Access] = []
    with Recorder(strict=False, on_access=seen.append):
        call()
    return seen


def random(*shape: int) -> Tensor:
    """fp16 numbers of both signs, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).half()


# %% [markdown]
# ## 1 A softmax that changes its mind
#
# A row of 64 scores, read in blocks of 8. The state after each block: the largest score so far (left), and the sum of
# exponentials *relative to it* (right). Whenever the maximum rises the sum is scaled down, by exactly what was counted
# too much. At the end it equals the sum of the whole row under the true maximum, the dotted line.

# %%
scores = torch.randn(1, 64, generator=torch.Generator().manual_seed(4)) * 2 + torch.linspace(-2, 3, 64)
blocks = scores.split(8, dim=1)
states = [lab.block_state(block, torch.ones(block.shape[1], 1)) for block in blocks]
running = [states[0]]
for state in states[1:]:
    running.append(lab.merge_states(running[-1], state))

left, right = panels(2, height=2.6)
left.plot(scores[0], ".", color=QUIET)
left.step([8 * i for i in range(9)], [float(state[0]) for state in [*running, running[-1]]], where="post", color=BLUE)
left.set(title="scores, and the maximum so far", xlabel="column")
right.bar(range(1, 9), [float(state[1]) for state in running], color=BLUE, label="merged")
right.plot(range(1, 9), np.cumsum([float(state[1]) for state in states]), "o-", color=RED, label="without rescaling")
whole = (scores - scores.max()).exp().sum()
right.axhline(float(whole), color=QUIET, linestyle=":", label="the whole row at once")
right.set(title="total after each block", xlabel="blocks read")
right.legend()
for panel in (left, right):
    panel.grid(True)

# %% tags=["check"]
check("06.1")

# %% [markdown]
# ## 2 A kernel's accesses
#
# The softmax kernel on rows of 40 scores. Each picture is the input, one cell a number, and its colour says which
# *program* loaded it. In a tile of 64 the row is loaded once. In tiles of 16 it is loaded twice, which the darker cells
# show; the number in the title is what the recorder counted. The lanes of the last tile that lie beyond the row are
# masked off: they touch nothing and cost nothing.

# %%
def draw_loads(axes: Any, seen: list[Access], tensor: str, shape: tuple[int, int], title: str) -> None:
    """Who loaded each element of a contiguous matrix, darker where it was loaded again."""
    image = np.full((*shape, 3), to_rgb(FAINT))
    times = np.zeros(shape, dtype=int)
    for access in seen:
        if access.tensor == tensor and access.operation == "load":
            rows, columns = np.divmod(access.offsets, shape[1])
            times[rows, columns] += 1
            image[rows, columns] = np.array(to_rgb(owner_colour(access.program_id[0])))
    image *= np.where(times > 1, 0.72, 1.0)[..., None]
    axes.imshow(image, aspect="auto", interpolation="nearest")
    axes.set_xticks(np.arange(shape[1] + 1) - 0.5, [], minor=True)
    axes.set_yticks(np.arange(shape[0] + 1) - 0.5, [], minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    bare(axes, title).tick_params(which="minor", length=0)


x = random(ROWS, 40)
for panel, block_size in zip(panels(2, height=1.9), (64, 16), strict=True):
    loaded, stored = counted(lambda size=block_size: lab.fused_softmax(x, block_size=size))
    seen = accesses(lambda size=block_size: lab.fused_softmax(x, block_size=size))
    draw_loads(panel, seen, "x_ptr", (ROWS, 40), f"tiles of {block_size}: {loaded} bytes in, {stored} out")

# %% tags=["check"]
check("06.2")

# %% [markdown]
# ## 3 What fusion saves
#
# The same four computations as a chain of torch operators, each of which reads its inputs from memory and writes its
# result back, and as one kernel. Bytes of the chain follow from its operators; those of the kernels are counted. Beside
# the bars: how many kernels are launched. In a decode step, where tensors are small, launches are what takes the time.

# %%
TOKENS, HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM = 16, 576, 1536, 9, 3, 64
probs, rows, gate = random(TOKENS, HIDDEN), random(TOKENS, HIDDEN), random(TOKENS, WIDE)
weight = random(HIDDEN)
q, k = random(1, HEADS, TOKENS, HEAD_DIM), random(1, KV_HEADS, TOKENS, HEAD_DIM)
cos, sin = lab.rope_tables(TOKENS, HEAD_DIM)
positions = torch.arange(TOKENS).unsqueeze(0)
turned = q.numel() + k.numel()

# Numbers moved and kernels launched when each operator is one; x·cos + rotate_half(x)·sin are four for each tensor.
chains = {
    "softmax": (8 * probs.numel(), 5),
    "residual + RMSNorm": (5 * rows.numel() + HIDDEN, 2),
    "RoPE on q and k": (9 * turned, 8),
    "SwiGLU": (5 * gate.numel(), 2),
}
fused = {
    "softmax": lambda: lab.fused_softmax(probs),
    "residual + RMSNorm": lambda: lab.add_rms_norm(rows, rows.flip(0), weight, block_rows=16),
    "RoPE on q and k": lambda: lab.apply_rope(q, k, cos, sin, positions),
    "SwiGLU": lambda: lab.swiglu(gate, gate.flip(0)),
}
axes = panels(1, height=2.4)
axes.set(title=f"Bytes moved for {TOKENS} tokens of SmolLM2's widths, fp16", xlabel="KiB", xlim=(0, 300))
axes.set_yticks(range(len(chains)), list(chains))
axes.invert_yaxis()
for line, (name, (numbers, launches)) in enumerate(chains.items()):
    apart, together = 2 * numbers / 1024, sum(counted(fused[name])) / 1024
    axes.barh(line - 0.2, apart, 0.36, color=FAINT)
    axes.barh(line + 0.2, together, 0.36, color=BLUE)
    axes.text(apart, line - 0.2, f"  {launches} kernels, {apart:.0f} KiB", va="center", size=8, color=QUIET)
    axes.text(together, line + 0.2, f"  1 kernel, {together:.0f} KiB", va="center", size=8)

# %% tags=["check"]
check("06.3")

# %% tags=["check"]
check("06.4")

# %% tags=["check"]
check("06.5")

# %% [markdown]
# ## 4 Attention: the argument in one plot
#
# Left: bytes against context length for one head of 64 channels. Lines are predictions, dots were counted by the
# recorder on small tensors. The standard operators move the $T \times T$ scores four times. FlashAttention has a $T^2$
# as well, but divided by the query tile: $b(2Td + \lceil T/B_q\rceil \cdot 2Td) + 4T$.
#
# Right: the same at 8,192 tokens against the tile, in units of the standard's bytes, for three head dims. Doubling the
# tile halves the cost of keys and values. And a tile *below* $d/2$ moves more than the standard does: tiles win by
# being large.

# %%
D = 64
left, right = panels(2, height=3.4)
contexts = [2**power for power in range(4, 15)]
standard = [sum(lab.standard_attention_traffic(1, 1, T, D, 2)) for T in contexts]
left.plot(contexts, standard, color=RED, label="standard operators")
for block_q, colour in ((16, ORANGE), (64, BLUE)):
    flash = [sum(lab.flash_attention_traffic(1, 1, T, T, D, 2, block_q, 16)) for T in contexts]
    left.plot(contexts, flash, color=colour, label=f"FlashAttention, tiles of {block_q}")
    for tokens in LENGTHS:
        one = random(1, 1, tokens, D)
        moved = sum(counted(lambda x=one, b=block_q: lab.flash_attention_forward(x, x, x, block_q=b, block_k=16)))
        left.plot(tokens, moved, "o", color=colour)
left.set_xscale("log", base=2)
left.set_yscale("log", base=2)
left.set(title="Bytes of one head, fp16", xlabel="tokens of context", ylabel="bytes")
left.legend()
left.grid(True)

tiles = [16, 32, 64, 128, 256]
for head_dim, colour in ((64, BLUE), (128, GREEN), (256, ORANGE)):
    whole_bytes = sum(lab.standard_attention_traffic(1, 1, 8192, head_dim, 2))
    shares = [sum(lab.flash_attention_traffic(1, 1, 8192, 8192, head_dim, 2, b, 16)) / whole_bytes for b in tiles]
    right.plot(tiles, shares, "o-", color=colour, label=f"d = {head_dim}")
    right.plot(head_dim // 2, 1.0, "x", color=colour)
right.axhline(1.0, color=RED, linewidth=1)
right.set_xscale("log", base=2)
right.set_yscale("log", base=2)
right.set_xticks(tiles, [str(tile) for tile in tiles])
right.set(title="FlashAttention over standard, T = 8,192", xlabel="queries in a tile")
right.legend()
right.grid(True)

# %% [markdown]
# Why the tile matters is best seen in the accesses themselves. Below, 64 queries and keys with a causal mask, time from
# left to right, one column for each load of a tile of keys; the colour is the program that loads. Every program walks
# through the keys from the start to its own diagonal. With query tiles of 16 there are four walks, with 32 two. The
# mask leaves ten of sixteen loads in one case and six of eight in the other: small tiles follow the diagonal more
# closely, and still load more.

# %%
def draw_walks(axes: Any, block_q: int) -> None:
    """Which keys each program loads, in the order of the loads."""
    tokens = 64
    one = random(1, 1, tokens, D)
    seen = accesses(
        lambda: lab.flash_attention_forward(one, one.clone(), one.flip(2), causal=True, block_q=block_q, block_k=16)
    )
    loads = [access for access in seen if access.tensor == "k_ptr" and access.operation == "load"]
    image = np.full((tokens, len(loads), 3), to_rgb(FAINT))
    for column, access in enumerate(loads):
        image[np.unique(access.offsets // D), column] = to_rgb(owner_colour(access.program_id[0]))
    axes.imshow(image, aspect="auto", interpolation="nearest")
    axes.set(title=f"query tiles of {block_q}: {len(loads)} tiles of keys loaded", xlabel="loads →", ylabel="keys")
    axes.set(xticks=[], yticks=[0, 16, 32, 48])


for panel, block_q in zip(panels(2, height=2.4, width_ratios=[10, 6]), (16, 32), strict=True):
    draw_walks(panel, block_q)

# %% tags=["check"]
check("06.6")

# %% tags=["check"]
check("06.7")

# %% [markdown]
# ## 5 Decode: one query, many keys
#
# A decode step has a single query a head, so there is nothing to tile, and one program a head would leave most of a GPU
# idle. FlashDecoding cuts the *keys*: each split is a program of its own and leaves a state, and a second small kernel
# merges. The keys and values are read once whatever the number of splits; the states are what it costs.

# %%
queries, keys = random(1, HEADS, D), random(1, KV_HEADS, 256, D)
splits = [1, 2, 4, 8, 16]
moved = [sum(counted(lambda n=n: lab.flash_decoding(queries, keys, keys, num_splits=n, block_k=16))) for n in splits]
left, right = panels(2, height=2.4)
left.bar(range(len(splits)), np.array(moved) / 1024, color=BLUE)
left.set_xticks(range(len(splits)), [str(n) for n in splits])
left.set(title="Bytes of a step over 256 keys", xlabel="splits", ylabel="KiB")
right.plot(splits, [n * KV_HEADS for n in splits], "o-")
right.axhline(132, color=QUIET, linestyle=":", label="multiprocessors of an H100")
right.set(title="Programs that work side by side", xlabel="splits", yscale="log")
right.legend()
for panel in (left, right):
    panel.grid(True, axis="y")

# %% tags=["check"]
check("06.8")

# %% tags=["check"]
check("06.9")

# %% [markdown]
# ## 6 Four bits a weight
#
# Bytes of one product with a 576 × 1,536 matrix, against the number of rows. While rows are few the weights are nearly
# all that moves, and packing them saves almost four times. With many rows the activations catch up, and by then the
# arithmetic, which packing does not change, has long been the limit.

# %%
counts = [2**power for power in range(12)]
left, right = panels(2, height=2.8)
packed = [sum(lab.w4a16_traffic(m, 576, 1536, 64, 2, 2, False, 64, 64, 64)) for m in counts]
half = [2 * (-(-m // 64) * 576 * 1536 + -(-576 // 64) * m * 1536 + m * 576) for m in counts]
left.plot(counts, np.array(half) / 2**20, label="fp16 weights", color=RED)
left.plot(counts, np.array(packed) / 2**20, label="4 bits, groups of 64", color=BLUE)
left.set_yscale("log", base=2)
left.set_title("MiB moved, tiles of 64 × 64")
left.legend()
right.plot(counts, np.array(half) / np.array(packed), "o-")
right.axhline(1, color=QUIET, linestyle=":")
right.set(title="times fewer bytes", ylim=(0, 4))
for panel in (left, right):
    panel.set_xscale("log", base=2)
    panel.set_xlabel("rows")
    panel.grid(True)

# %% tags=["check"]
check("06.10")

# %% tags=["check"]
check("06.11")

# %% [markdown]
# ## 7 What is left
#
# Every task of the lab, and how far your files are.

# %%
progress("06")
