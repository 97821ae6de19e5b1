"""Task 5: a long prompt read in chunks, so that nothing else has to wait for all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.protocols import CachedModel


def prefill_chunks(model: CachedModel, prompt: Sequence[int], chunk_size: int) -> Iterator[Tensor]:
    """Read a prompt chunk by chunk; the caller decides when the next chunk runs.

    Every chunk but the last has exactly `chunk_size` tokens, and a chunk runs only when its logits are asked for:
    between two chunks a scheduler can let other requests decode. An iterator that is left early leaves the model
    with the chunks that ran.

    Args:
        model: continues from what it remembers already; it may be empty or not.
        prompt: token ids to read.
        chunk_size: the most tokens in one call of the model; may be larger than the prompt.

    Returns:
        An iterator over the logits of each chunk `[tokens of the chunk, vocab_size]`.

    Raises:
        ValueError: the prompt is empty or has an id outside the vocabulary, `chunk_size` is not an int of at
            least 1, or the *whole* prompt doesn't fit behind what the model remembers. Raised before the model
            runs, by this call or by the first step of its iterator.

    Source: Agrawal et al. 2024 (2403.02310); module section 2.4.
    """
    check_tokens("prompt", prompt, model.vocab_size)
    check_count("chunk_size", chunk_size, 1)
    # BEGIN SOLUTION
    ids = list(prompt)
    if model.length + len(ids) > model.capacity:
        raise ValueError(
            f"{model.length} tokens are remembered and a prompt of {len(ids)} exceeds the capacity of "
            f"{model.capacity}; shorten the prompt"
        )
    return (model.append(ids[start : start + chunk_size]) for start in range(0, len(ids), chunk_size))
    # END SOLUTION


def prefill(model: CachedModel, prompt: Sequence[int], chunk_size: int) -> Tensor:
    """Read a whole prompt in chunks; the logits are those of reading it at once.

    Args:
        model: continues from what it remembers already; it may be empty or not.
        prompt: token ids to read.
        chunk_size: the most tokens in one call of the model; may be larger than the prompt.

    Returns:
        Logits `[len(prompt), vocab_size]`: row i scores the token that follows `prompt[i]`.

    Raises:
        ValueError: as `prefill_chunks`. If a chunk fails in the model, the model is truncated to the length it
            had before the call, and the error goes on to the caller.
    """
    # BEGIN SOLUTION
    start = model.length
    chunks = prefill_chunks(model, prompt, chunk_size)
    try:
        return torch.cat(list(chunks))
    except BaseException:
        # The chunks before the failing one are in the model already; without this a retry would read them twice.
        if model.length != start:
            model.truncate(start)
        raise
    # END SOLUTION
