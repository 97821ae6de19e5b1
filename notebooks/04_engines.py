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
#     ANSWER: 6
#     SCORED: 12
#     USERS: 2
# ---

# %% [markdown]
# # Engines and formats
#
# An engine is chosen by what runs on your machine, and left again by what its files and its interface allow. So this
# notebook starts the workbook's engine as a server and talks to it with the official client, then with the same lines
# to llama.cpp; and it writes checkpoints that other engines read, and checks what these make of them.
#
# `xllamacpp` (llama.cpp as a wheel), `openai` and `compressed-tensors` come with the set-up.

# %%
from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import torch
from openai import OpenAI

from labkit.checkpoints import load_tokenizer
from labkit.checkpoints.bundled import bundled_gguf
from labkit.decoder import full_attention
from labkit.notebook import Digest, check_answer
from labkit.notebook.palette import BLUE, GREEN, LINES, ORANGE, QUIET
from labkit.notebook.style import panels, use_style
from labkit.probing import machine_bounds
from solutions.planning.hardware import RTX_5060
from solutions.planning.model_shape import BYTES, KNOWN
from solutions.quantization.loading import load_quantized

with contextlib.redirect_stderr(io.StringIO()):  # one of them misses a library for progress bars
    import transformers
    import xllamacpp

use_style()
work = Path(tempfile.mkdtemp(prefix="engines-"))
print(machine_bounds(quick=True).line())

# %% tags=["parameters"]
# How much is asked; more is slower.
ANSWER = 32  # tokens of an answer
USERS = 4  # who ask at once
SCORED = 60  # tokens that two readers of a file score

# %% [markdown]
# ## 1 One interface
#
# The server is a process of its own, as anyone would start it:
# `python -m solutions.engine serve --weights stored --port …`. Whoever speaks the OpenAI API can use it.


# %%
def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


port = free_port()
engine = subprocess.Popen(
    [sys.executable, "-m", "solutions.engine", "serve", "--weights", "stored", "--port", str(port)],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)  # fmt: skip
until = time.monotonic() + 300
while True:
    try:
        httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
        break
    except httpx.HTTPError:
        assert engine.poll() is None and time.monotonic() < until, "the server did not start"
        time.sleep(0.2)
ours = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

options = xllamacpp.CommonParams()
options.model.path = str(bundled_gguf())
options.port, options.n_parallel, options.n_ctx = free_port(), USERS, USERS * 512
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = torch.get_num_threads()
options.verbosity = 0
llama_cpp = xllamacpp.Server(options)
theirs = OpenAI(base_url=f"{llama_cpp.listening_address}/v1", api_key="none")
servers = {"the workbook's engine": ours, "llama.cpp": theirs}

QUESTIONS = ("Name three colours.", "Why is the sky blue?", "Write a line about rain.", "What is a prime number?")


def ask(client: OpenAI, question: str) -> tuple[str, list[float]]:
    """An answer, and when each of its pieces came, in seconds after the question."""
    start, text, times = time.perf_counter(), "", list[float]()
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=[{"role": "user", "content": question}],
        max_tokens=ANSWER, temperature=0, stream=True,
    )  # fmt: skip
    for piece in stream:
        if piece.choices and piece.choices[0].delta.content:
            text += piece.choices[0].delta.content
            times.append(time.perf_counter() - start)
    return text, times


answers = {}
for name, client in servers.items():
    with ThreadPoolExecutor(USERS) as pool:
        answers[name] = list(pool.map(lambda question, client=client: ask(client, question), QUESTIONS[:USERS]))
for row in range(USERS):
    print(QUESTIONS[row])
    for name, given in answers.items():
        print(f"  {name:22} {given[row][0]!r}")

# %%
both = panels(2, height=2.2, sharex=True, sharey=True)
for axes, (name, given) in zip(both, answers.items(), strict=True):
    for row, (_, times) in enumerate(given):
        axes.plot(times, [row] * len(times), "|", markersize=12, color=LINES[row])
    axes.set(yticks=range(USERS), xlabel="seconds after the question", title=f"{name}: every piece of four answers")
    axes.margins(y=0.3)

# %% [markdown]
# Both stream as they compute, both answer several at once. The texts begin alike and may part: llama.cpp rounds what
# enters a product to 8 bits, and one near tie decided differently makes another text (notebook 05, trap 8).
#
# An interface is more than a stream. What the engine takes from a schema it keeps, whatever the model would rather say:

# %%
schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
reply = ours.chat.completions.create(
    model=ours.models.list().data[0].id, messages=[{"role": "user", "content": "Describe a person."}], max_tokens=64,
    temperature=0, response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
)  # fmt: skip
print(json.loads(reply.choices[0].message.content or ""))
metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
print(*[line for line in metrics.splitlines() if line.startswith("engine_") and "bucket" not in line][:8], sep="\n")
engine.terminate()
stopped = engine.wait()

# %% [markdown]
# ## 2 One file, several readers
#
# A checkpoint is only as good as what others read from it. Below the bundled model is rounded to 4 bits twice: into
# `compressed-tensors`, which vLLM and transformers load, and into GGUF, which llama.cpp and whatever builds on it load.
# Each file is then read by its own engine, and the probabilities of a text compared with those of our dequantized
# numbers.


# %%
def written(*arguments: str) -> Path:
    """A checkpoint made by the command line."""
    folder = work / arguments[1]
    command = [sys.executable, "-m", "solutions.quantization", "quantize", "smollm2", "--out", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True)
    return folder


folders = {
    "compressed-tensors": written("--method", "rtn", "--group-size", "64"),
    "GGUF": written("--method", "q4_1", "--format", "gguf"),
}
for name, folder in folders.items():
    print(
        name, *sorted(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in folder.iterdir() if path.is_file())
    )

# %%
tokenizer = load_tokenizer("smollm2")
words = (
    "The memory of a computer is a row of boxes. Each box has a number, and each holds one small thing. To find a "
    "thing you need only its number, and so a program is mostly a list of numbers and of what to do with them."
)
ids = torch.tensor([tokenizer.encode(words)[: SCORED + 1]])


def scored(logits: torch.Tensor) -> torch.Tensor:
    """ln p of each token after the first."""
    return logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def ours_of(path: Path) -> torch.Tensor:
    """What our dequantized numbers say."""
    with torch.inference_mode():
        return scored(load_quantized(path).decoder()(ids, torch.arange(ids.shape[1]), full_attention))


def by_transformers(path: Path) -> torch.Tensor:
    """What transformers says, which unpacks the file with compressed-tensors."""
    with contextlib.redirect_stderr(io.StringIO()), torch.inference_mode():  # it draws progress bars
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return scored(model(ids).logits)


def by_llama_cpp(path: Path) -> torch.Tensor:
    """What llama.cpp says: each token is asked for by itself, forced by a bias that its own probability is free of."""
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.verbosity = str(path), 512, 1, 0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = torch.get_num_threads()
    server, found = xllamacpp.Server(options), []
    for place in range(1, ids.shape[1]):
        reply = server.handle_completions({
            "prompt": ids[0, :place].tolist(), "n_predict": 1, "logprobs": 1, "temperature": 0.0, "cache_prompt": True,
            "logit_bias": [[int(ids[0, place]), 10_000.0]],
        })  # fmt: skip
        found.append(reply["choices"][0]["logprobs"]["content"][0]["logprob"])
    return torch.tensor(found, dtype=torch.float64)


readers = {
    "compressed-tensors": ("transformers", by_transformers, ""),
    "GGUF": ("llama.cpp", by_llama_cpp, "model.gguf"),
}
both = panels(2, height=3.2)
for axes, (name, (reader, read, file)), colour in zip(both, readers.items(), (BLUE, ORANGE), strict=True):
    path = folders[name] / file
    own, other = ours_of(path), read(path)
    axes.plot([-14, 0], [-14, 0], ":", color=QUIET)
    axes.plot(own, other, "o", color=colour, alpha=0.7)
    axes.set(xlabel="ln p by our dequantized numbers", ylabel=f"ln p by {reader}")
    axes.set_title(f"{name}: perplexity {float((-other).mean().exp() / (-own).mean().exp()):.4f} of ours")

# %% [markdown]
# transformers computes the very numbers; llama.cpp's scatter is its rounding of activations, not the file's.
#
# **Exercise 1.** A block of GGUF's Q4_1 holds 32 codes of 4 bits, a scale and a minimum of 16 bits each. How many bits
# does a weight take?
#
# <details><summary>Answer</summary>
#
# $(32 · 4 + 2 · 16) / 32 = 5$. Symmetric groups of 128 with one 16-bit scale take 4.125.
#
# </details>

# %% tags=["exercise"] solution="4 + 32 / 32"
answer = None  # bits
check_answer("1", answer, (32 * 4 + 2 * 16) / 32, hint="All bits of a block, over its weights.")

# %% [markdown]
# ## 3 Which engine
#
# As of September 2026; engines change monthly, so read the release notes before you rely on a feature.
#
# | engine | what it is known for | where one meets it |
# |---|---|---|
# | vLLM | PagedAttention began here; models and hardware of all kinds; disaggregation | most servers; RL rollouts |
# | SGLang | RadixAttention; fast structured output; many turns and agents | production; RL rollouts |
# | TensorRT-LLM | NVIDIA's own kernels, FP8 and FP4; Dynamo spreads it over a data centre | where all is NVIDIA's |
# | llama.cpp | GGUF, k-quants; CPU, Apple silicon, consumer GPUs; few dependencies; Ollama's base | laptops, the edge |
# | MLC LLM | a compiler; phones, and browsers by WebGPU | on the device |
# | this workbook's | short enough to be read; every part is one of the labs' | here |
#
# On a card of 8 GB the first question is what fits. Below, weights and what is left for keys and values, with 1.5 GB
# kept for activations and the rest of the system.

# %%
choices = [
    ("qwen2.5-0.5b", "bf16"), ("qwen2.5-1.5b", "bf16"), ("qwen2.5-1.5b", "int8"), ("llama-3-8b", "bf16"),
    ("llama-3-8b", "int8"), ("llama-3-8b", "int4"),
]  # fmt: skip
room = RTX_5060.memory / 1e9 - 1.5
axes = panels(height=3.0, width=8)
for row, (name, dtype) in enumerate(choices):
    weights = KNOWN[name].weight_bytes(dtype) / 1e9
    fits = weights < room
    axes.barh(row, weights, color=BLUE if fits else QUIET, height=0.6)
    if fits:
        axes.barh(row, room - weights, left=weights, color=GREEN, alpha=0.4, height=0.6)
        tokens = 1e9 * (room - weights) / KNOWN[name].kv_bytes_per_token("bf16")
        axes.text(room + 0.1, row, f"{tokens / 1000:.0f}k tokens", va="center", size=8)
axes.axvline(room, color=ORANGE, linestyle=":")
axes.set(yticks=range(len(choices)), yticklabels=[f"{name}, {dtype}" for name, dtype in choices], xlabel="GB")
axes.set_title("Weights (blue), keys and values (green) on an RTX 5060; grey: too large")
axes.invert_yaxis()

# %% [markdown]
# **Exercise 2.** How many GB do 8.03 B parameters take in groups of 128 with one 16-bit scale, 4.125 bits each?
#
# <details><summary>Answer</summary>
#
# 8.03 · 4.125 / 8 = 4.1 GB: the only way for an 8 B model onto such a card.
#
# </details>

# %% tags=["exercise"] solution="8.03 * 4.125 / 8"
answer = None  # GB
check_answer("2", answer, KNOWN["llama-3-8b"].parameters * BYTES["int4"] / 1e9, hint="Bits to bytes.")

# %% [markdown]
# **Exercise 3.** An 8 B model at 4 bits, on a laptop with an 8 GB card of the newest kind and nothing else: which row
# of the table would you try first? Give its name as the table does.
#
# <details><summary>Answer</summary>
#
# llama.cpp: 4-bit files of about 5 GB, and it needs almost nothing besides. vLLM or SGLang serve models up to about 3 B
# in bf16 on such a card, where their build knows it (sm_120).
#
# </details>

# %% tags=["exercise"] solution="'llama.cpp'"
answer = None  # a name
check_answer(
    "3", answer, Digest("ac7164d03669aec0"), hint="Which of them is at home in 4-bit files and on consumer cards?"
)

# %% [markdown]
# **Exercise 4.** What will you lose by a 4-bit 8 B model instead of an 8-bit one? Nothing in the files tells: evaluate
# on your own task. But its decode on one card will be faster. How many times at most, by the bytes of the weights alone
# (4.125 bits against 8.125)?
#
# <details><summary>Answer</summary>
#
# 8.125 / 4.125 ≈ 1.97. Prefill will not be faster at all: notebook 05, trap 2.
#
# </details>

# %% tags=["exercise"] solution="(8 + 16 / 128) / (4 + 16 / 128)"
answer = None  # times
check_answer("4", answer, 8.125 / 4.125, hint="A lonely decode step takes as long as its bytes.")
