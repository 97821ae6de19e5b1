"""Errors that cross from lab code to its tests, and the words that mark a task as not attempted."""

from __future__ import annotations

import re
from collections.abc import Iterator

NOT_ATTEMPTED_MARKER = "not written yet"

CROSSING_TYPES: dict[str, type[Exception]] = {
    # The most special first: NotImplementedError is a RuntimeError, IndexError and KeyError are LookupErrors.
    "NotImplementedError": NotImplementedError,
    "IndexError": IndexError,
    "KeyError": KeyError,
    "ValueError": ValueError,
    "TypeError": TypeError,
}
"""Exceptions that reach a test as themselves; every other one arrives as `StudentError`."""


class StudentError(Exception):
    """An exception of the code under test that is none of `CROSSING_TYPES`.

    Args:
        type_name: name of the exception's class, e.g. "RuntimeError".
        message: its text.
        traceback_text: the traceback as the interpreter would print it, lab files only.
    """

    from_lab = True

    def __init__(self, type_name: str, message: str, traceback_text: str = "") -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.traceback_text = traceback_text


class OutOfViewWrite(StudentError):
    """The code under test wrote to memory beside the tensor that it was given."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(
            "OutOfViewWrite", f"{num_bytes} bytes outside the given tensors were overwritten; write only inside them"
        )


class ProtocolFault(Exception):
    """A message that breaks the rules of the wire: never the test's fault, never a crash of the grader."""


def not_attempted_message(lab: str, task: int, name: str, goal: str) -> str:
    """The text of a stub's NotImplementedError.

    Args:
        lab: two-digit lab number, e.g. "07".
        task: task number within the lab.
        name: the function or method to write.
        goal: one sentence of what it must do.
    """
    return (
        f"lab {lab} task {task}: {name} is {NOT_ATTEMPTED_MARKER}. {goal} "
        f"Stuck? make hint LAB={lab} TASK={task}"
    )


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception, then what caused it or was being handled when it was raised, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def not_attempted_text(error: BaseException) -> str | None:
    """The stub's own words if an exception comes from an untouched stub, however often it was wrapped since."""
    texts = [str(link) for link in exception_chain(error) if NOT_ATTEMPTED_MARKER in str(link)]
    # A compiler shows the line with the text in it before the text itself.
    return re.split(r"(?=lab \d\d task \d+: )", texts[-1])[-1] if texts else None


def is_not_attempted(error: BaseException) -> bool:
    """Whether an exception comes from an untouched stub."""
    return not_attempted_text(error) is not None
