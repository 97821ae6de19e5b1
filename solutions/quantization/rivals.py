"""Another model on the same text: a quantized large model has to beat a small one that takes as much memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from labkit.checkpoints import Model
from labkit.decoder import Decoder
from labkit.texts import KINDS
from labkit.tokenizer import Tokenizer
from solutions.quantization.perplexity import bits_per_byte

Texts = Mapping[str, Sequence[Sequence[int]]]
"""Token ids of each document, by kind of text."""
Losses = Mapping[str, Sequence[Tensor]]
"""Losses of each document's tokens but the first, by kind of text."""
Score = Callable[[Decoder, Texts], Losses]


def beside_another(
    name: str, other: Model, given: Tokenizer, texts: Texts, rows: Mapping[str, tuple[float, Losses]], score: Score
) -> list[str]:
    """A table in bits a byte, which models with different tokenizers share.

    Args:
        name: of the other model.
        other: that model, counted in 16 bits.
        given: tokenizer of the quantized model.
        texts: what was scored, in its tokens.
        rows: bytes and losses of each method.
        score: gives a model's losses on texts in its own tokens.

    Returns:
        Lines of markdown, the smallest model first.

    Raises:
        ValueError: a document of which the other model's tokenizer makes less than two tokens.
    """
    own = {kind: [_retold(ids, given, other.tokenizer) for ids in texts[kind]] for kind in KINDS}
    num_bytes = 2.0 * sum(weight.numel() for weight in other.decoder.weights.values())
    table = [(num_bytes, name, _by_byte(score(other.decoder, own), own, other.tokenizer))]
    table += [(size, method, _by_byte(losses, texts, given)) for method, (size, losses) in rows.items()]
    lines = ["", f"Beside {name} in 16 bits, by the memory they take, in bits a byte of text (less is better):", "",
             "| model | MB | prose | code |", "|---|---|---|---|"]  # fmt: skip
    for size, method, bits in sorted(table, key=lambda entry: (entry[0], entry[1])):
        lines.append(f"| {method} | {size / 1e6:.1f} | {' | '.join(f'{bits[kind]:.4f}' for kind in KINDS)} |")
    return lines


def _retold(ids: Sequence[int], given: Tokenizer, other: Tokenizer) -> list[int]:
    """The same text in the other model's tokens."""
    text = b"".join(given.token_bytes(token) for token in ids).decode("utf-8", errors="ignore")
    retold = other.encode(text)
    if len(retold) < 2:
        raise ValueError(f"the other model's tokenizer makes {len(retold)} tokens of {text[:40]!r}; give longer texts")
    return retold


def _by_byte(losses: Losses, texts: Texts, tokenizer: Tokenizer) -> dict[str, float]:
    """The first token of a document is read and not scored, so its bytes don't count."""
    return {
        kind: bits_per_byte(
            losses[kind], sum(len(tokenizer.token_bytes(token)) for ids in texts[kind] for token in ids[1:])
        )
        for kind in KINDS
    }
