"""What llama.cpp makes of a GGUF file, token by token, through the server that xllamacpp runs in this process.

Its completions give no logits. So each token of the text is asked for by itself: all tokens before it are the prompt
(kept in the server's cache from call to call), a bias of 10,000 makes the sampler take the token wanted, and the
answer's own log-probability is that of the softmax *before* sampling, without the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def log_probabilities(gguf: Path, tokens: Sequence[int]) -> Tensor:
    """ln p of tokens 1, 2, … each after all before it, `[tokens − 1]` float64.

    Args:
        gguf: the file.
        tokens: ids of a text; none a control token, and none that ends within a character.
    """
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(gguf)
    options.n_ctx = max(256, len(tokens) + 8)
    options.n_parallel = 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.warmup = False
    options.verbosity = 0
    server = xllamacpp.Server(options)
    found = []
    for index in range(1, len(tokens)):
        answer = server.handle_completions({
            "prompt": list(tokens[:index]), "n_predict": 1, "logprobs": 1, "temperature": 0.0, "cache_prompt": True,
            "logit_bias": [[int(tokens[index]), 10_000.0]],
        })  # fmt: skip
        chosen = answer["choices"][0]["logprobs"]["content"][0]
        assert chosen["id"] == tokens[index], f"llama.cpp took {chosen}, asked for {tokens[index]}"
        found.append(chosen["logprob"])
    return torch.tensor(found, dtype=torch.float64)


def plain_text_ids(ids: Sequence[int], count: int) -> list[int]:
    """The first tokens of a text, which must be ASCII so that no token ends within a character."""
    assert len(ids) >= count, f"the text has only {len(ids)} tokens"
    return [int(index) for index in ids[:count]]
