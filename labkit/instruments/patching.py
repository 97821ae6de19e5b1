"""An attribute that is another one for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute within the context; one that the object had from its class only is taken away again."""
    own = vars(target).get(name, _ABSENT)
    setattr(target, name, value)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(target, name)
        else:
            setattr(target, name, own)
