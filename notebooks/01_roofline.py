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
#     BATCHES: [1, 64]
# ---

# %% [markdown]
# # Two phases and the roofline
#
# A prompt is read in one pass, an answer is written a token a pass. The two phases run the same weights, and yet one
# waits for arithmetic and the other for memory.

# %%
from __future__ import annotations

from labkit.notebook import check_answer
from labkit.notebook.palette import BLUE
from labkit.notebook.style import panels, use_style
from solutions.planning.hardware import H100
from solutions.planning.model_shape import KNOWN
from solutions.planning.roofline import Serving

use_style()

# %% tags=["parameters"]
BATCHES = [1, 4, 16, 64, 256]  # sequences of a decode step

# %% [markdown]
# ## 1 The floor of a decode step

# %%
llama = Serving(KNOWN["llama-3-8b"], H100)
axes = panels(height=2.8)
axes.plot(BATCHES, [1e3 * llama.decode_step(batch, 2048).seconds for batch in BATCHES], "o-", color=BLUE)
axes.set(xscale="log", xlabel="sequences of a step", ylabel="ms", title="Llama-3-8B on an H100: a decode step at least")
axes.grid(True)

# %% [markdown]
# **Exercise 1.** How many milliseconds does a decode step of one sequence take at least if the weights are FP8, with
# hardly any context?
#
# <details><summary>Answer</summary>
#
# Half the bytes, so half the time: 8.03 GB over 3.35 TB/s.
#
# </details>

# %% tags=["exercise"] solution="8.03e9 / 3.35e12 * 1e3"
answer = None  # milliseconds
check_answer("1", answer, 1e3 * llama.decode_step(1).seconds / 2, hint="Which bytes does a step read, and how often?")
