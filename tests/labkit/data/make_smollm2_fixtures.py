"""Make the fixtures of the bundled model from two other readers of the same GGUF file.

    python tests/labkit/data/make_smollm2_fixtures.py

Logits come from transformers' own GGUF loader (needs `accelerate`), token ids from llama.cpp (needs `xllamacpp`).
Neither package is needed to run the tests.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import torch
import transformers
import xllamacpp
from transformers import AutoModelForCausalLM

from labkit.checkpoints import bundled_gguf

HERE = Path(__file__).resolve().parent
TEXTS = [
    "", " ", "Hello world", "  two  spaces  ", "tab\tand\nnewline\r\n\r\n\n  indented", "a 12345 x", "3.14159 and  42",
    "x  1   2    3", "٣٤٥ ½² Ⅷ", "日本語と漢字、中文字符。", "한국어 텍스트", "Привет, мир!", "naïve café ﬁ",
    "emoji 😀👩‍👩‍👧‍👦🇫🇷 end", "def f(x):\n\treturn x**2  # it's", "we'll they're I'VE don't", "\x00\x07 control",
    "e\u0301 é", "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b", "<|im_start|> <|im_end|> x", "http://a.b/c?d=e&f=1",
]
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    if n <", "1, 2, 3, 4,",
           "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"]
CHECKED_IDS = list(range(0, 49152, 769))


def main() -> None:
    """Write both fixtures beside this script."""
    tokens = tokenize_with_llama_cpp(TEXTS + PROMPTS)
    write("smollm2_tokens.json", {"source": f"xllamacpp {xllamacpp.__version__}", "texts": [
        {"text": text, "plain": plain, "special": special}
        for text, (plain, special) in zip(TEXTS, tokens[:len(TEXTS)], strict=True)]})
    path = bundled_gguf()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    prompts = [special for _, special in tokens[len(TEXTS):]]
    write("smollm2_logits.json", {"source": f"transformers {transformers.__version__}, float32", "ids": CHECKED_IDS,
                                  "prompts": [logits_with_transformers(model, prompt) for prompt in prompts]})


def tokenize_with_llama_cpp(texts: list[str]) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each text, without and with control tokens recognised."""
    params = xllamacpp.CommonParams()
    params.model.path = str(bundled_gguf())
    params.n_ctx = 256
    params.warmup = False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        params.port = free.getsockname()[1]
    server = xllamacpp.Server(params)
    return [(ask(server, text, False), ask(server, text, True)) for text in texts]


def ask(server: Any, text: str, special: bool) -> list[int]:
    """Ask llama.cpp's server for the ids of a text."""
    body = json.dumps({"content": text, "add_special": False, "parse_special": special}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


def logits_with_transformers(model: torch.nn.Module, tokens: list[int]) -> dict[str, Any]:
    """Return for each position the logits of some ids, the best id and the log of the sum of exponentials."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    return {"tokens": tokens, "best": logits.argmax(-1).tolist(),
            "log_sum_exp": [round(value, 6) for value in logits.double().logsumexp(-1).tolist()],
            "logits": [[round(value, 5) for value in row] for row in logits[:, CHECKED_IDS].tolist()]}


def write(name: str, content: dict[str, Any]) -> None:
    """Write one fixture as JSON."""
    (HERE / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
