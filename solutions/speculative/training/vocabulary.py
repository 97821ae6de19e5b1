"""The draft vocabulary: the tokens that come up, since a head's output matrix is most of what a draft costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def draft_vocabulary(texts: Sequence[Tensor], vocab_size: int, size: int) -> Tensor:
    """The most frequent tokens of texts.

    Args:
        texts: token ids of each, int64.
        vocab_size: of the target.
        size: tokens wanted, from 1 to `vocab_size`.

    Returns:
        int64 `[size]`, rising. Of equally frequent tokens the lower ids.

    Raises:
        ValueError: `size` out of range.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"a draft vocabulary must have from 1 to the target's {vocab_size} tokens, got {size}")
    counts = torch.bincount(torch.cat(list(texts)), minlength=vocab_size)
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values
