"""Checks of arguments that many functions share; each names what was given and what is allowed."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def check_count(name: str, value: int, least: int) -> None:
    """Refuses anything but an int of at least `least`; True and False are no numbers here.

    Args:
        name: of the argument, for the message.
        value: what was given.
        least: the smallest value allowed.

    Raises:
        ValueError: if it is no int, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")


def is_finite_number(value: object) -> bool:
    """Whether a value is an int or a float, and finite as a float; True and False are no numbers here."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int | None = None) -> list[int]:
    """The token ids as a list.

    Args:
        name: of the argument, for the message.
        tokens: at least one id.
        vocab_size: ids must lie below it; None means that any id of at least 0 will do.

    Raises:
        ValueError: if there is none, or one is outside the vocabulary.
    """
    ids = list(tokens)
    if not ids:
        raise ValueError(f"{name} must hold at least one token id, got none")
    allowed = "at least 0" if vocab_size is None else f"0 to {vocab_size - 1}"
    for index, token in enumerate(ids):
        is_id = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        if not is_id or (vocab_size is not None and token >= vocab_size):
            raise ValueError(f"{name}[{index}] must be an int of {allowed}, got {token!r}")
    return ids
