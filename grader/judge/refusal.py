"""Checks that bad input is refused with a message, and nothing else."""

from __future__ import annotations

from collections.abc import Callable


def check_refused(what: str, call: Callable[[], object], *, mentions: str = "") -> None:
    """Fail unless a call raises ValueError with a message of the code under test.

    Make a good call of the same function first: code that always raises must not pass for careful code.

    Args:
        what: the bad input, in words; starts every message.
        call: makes the bad call.
        mentions: text that the error's message must hold, such as the number of the bad row.

    Raises:
        AssertionError: the call succeeds, raises something else, or its message lacks what it must name.
    """
    try:
        result = call()
    except NotImplementedError:
        raise
    except ValueError as error:
        text = str(error)
        if not text or mentions not in text:
            raise AssertionError(f"{what}: the ValueError should mention {mentions!r}; it says {text!r}") from error
        return
    except Exception as error:
        raise AssertionError(f"{what} must raise ValueError, but {type(error).__name__} came: {error}") from error
    shown = repr(result)
    raise AssertionError(f"{what} must raise ValueError, but the call returned {shown[:100]}")
