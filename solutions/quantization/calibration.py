"""Text to calibrate on, as token sequences of one length, and the check of what a model makes of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.texts import KINDS, documents
from labkit.tokenizer import Tokenizer


@dataclass(frozen=True)
class Calibration:
    """Sequences to run a model on.

    Args:
        name: where the text came from, for the record.
        tokens: `[sequences, tokens]` int64.
    """

    name: str
    tokens: Tensor

    @property
    def digest(self) -> str:
        """A fingerprint of the tokens: quantizing is resumed only with the same ones."""
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes()).hexdigest()[:16]


def calibration_text(source: str, tokenizer: Tokenizer, num_sequences: int, length: int) -> Calibration:
    """Cut text into sequences.

    Args:
        source: "prose" or "code", the texts that every machine has in their part for calibration; or the path of a
            UTF-8 text file.
        tokenizer: of the model.
        num_sequences: how many are wanted, at least 1; spread evenly over the text if there are more.
        length: tokens of each, at least 2.

    Raises:
        ValueError: no such file, one that is no text, or too little of it.
    """
    check_count("num_sequences", num_sequences, 1)
    check_count("length", length, 2)
    if source in KINDS:
        texts = list(documents(source, "calibration").values())
        name = f"{source} of this Python, part calibration"
    else:
        texts = [_read(Path(source))]
        name = Path(source).name
    # A few characters a token: no need to encode all of a collection for a few thousand tokens.
    share = None if len(texts) == 1 else 1 + 12 * num_sequences * length // len(texts)
    ids = [token for text in texts for token in tokenizer.encode(text[:share])]
    if len(ids) < length:
        raise ValueError(
            f"the calibration text {source} has {len(ids)} tokens, fewer than one sequence of {length}; give more text "
            f"or shorter sequences"
        )
    available = min(num_sequences, len(ids) // length)
    starts = [index * (len(ids) - length) // max(available - 1, 1) for index in range(available)]
    return Calibration(name, torch.tensor([ids[start : start + length] for start in starts]))


def check_activations(name: str, inputs: Tensor) -> None:
    """Refuse activations that are not finite: a scale or a Hessian made of them would spoil the layer silently.

    Raises:
        ValueError: NaN or infinity; the message names the layer.
    """
    finite = inputs.isfinite()
    if not bool(finite.all()):
        token, feature = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"calibration: {name} reads {float(inputs[token, feature])} at token {token}, feature {feature}; check the "
            f"model's weights, or load it in float32"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"calibration text {path} cannot be read ({error.strerror}); give a text file, or one of {', '.join(KINDS)}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"calibration text {path} is not UTF-8 text ({error.reason})") from error
