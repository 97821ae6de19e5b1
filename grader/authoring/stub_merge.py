"""Three-way merge of a student's file with a new stub; the base is the stub as the student got it.

What a student wrote is never dropped: an overlap of their edits with the new stub's becomes a conflict that shows both,
and a merge in which a line of theirs is missing is refused.
"""

from __future__ import annotations

import ast
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grader.authoring.stubs import split_header
from labkit.errors import NOT_ATTEMPTED_MARKER

LABELS = ("your file", "the stub as you got it", "the new stub")
_MARKERS = ("<<<<<<< ", ">>>>>>> ")
_MOST_CONFLICTS = 127


class MergeRefused(ValueError):
    """The files cannot be merged safely; the text says why."""


@dataclass(frozen=True)
class Merge:
    """A merged file and the number of places where both sides changed the same lines."""

    text: str
    conflicts: int


def merge_stub(base: str, mine: str, new: str) -> Merge:
    """Brings a new stub's changes into a student's file.

    Args:
        base: the stub that the student began with.
        mine: the student's file.
        new: the stub as it is now.

    Raises:
        MergeRefused: if a line that the student wrote would be missing from the result.
    """
    (base_header, base_body), (my_header, my_body), (new_header, new_body) = map(split_header, (base, mine, new))
    # The header is not merged: its digest changes each time and would clash with edits in the lines below it.
    known = base_header.splitlines()
    own_comments = "".join(line for line in my_header.splitlines(keepends=True) if line.rstrip("\n") not in known)
    merged = _merge_file(my_body, base_body, _settle_placeholders(base_body, my_body, new_body))
    text = f"{own_comments}{new_header}{merged.text}"
    if lost := _added(base, mine) - Counter(text.splitlines()):
        raise MergeRefused(f"this line of yours would be lost: {next(iter(lost)).strip()!r}")
    return Merge(text, merged.conflicts)


def has_conflict_markers(text: str) -> bool:
    """Whether a conflict of an earlier merge still stands in a file."""
    return all(any(line.startswith(marker) for line in text.splitlines()) for marker in _MARKERS)


def _added(base: str, mine: str) -> Counter[str]:
    """Lines that the student's file has and its stub has not, or has less often; empty ones do not count."""
    added = Counter(mine.splitlines()) - Counter(base.splitlines())
    return Counter({line: count for line, count in added.items() if line.strip()})


def _merge_file(mine: str, base: str, new: str) -> Merge:
    """Git's merge of three texts."""
    with tempfile.TemporaryDirectory(prefix="merge-") as scratch:
        paths = [Path(scratch) / name for name in ("mine", "base", "new")]
        for path, text in zip(paths, (mine, base, new), strict=True):
            path.write_text(text, encoding="utf-8", newline="")
        labels = [part for label in LABELS for part in ("-L", label)]
        command = ["git", "merge-file", "--stdout", *labels, *map(str, paths)]
        ended = subprocess.run(command, capture_output=True, check=False)
    if not 0 <= ended.returncode <= _MOST_CONFLICTS:
        raise MergeRefused(f"git could not merge: {ended.stderr.decode(errors='replace').strip()}")
    return Merge(ended.stdout.decode("utf-8"), ended.returncode)


def _settle_placeholders(base: str, mine: str, new: str) -> str:
    """The new stub with the old words in every NotImplementedError that the student has replaced.

    A new message for a function that is written already concerns nobody, but would clash with the code in its place.
    """
    old = {name: lines for name, _, lines in _placeholders(base)}
    lines = new.splitlines()
    for name, first, words in reversed(list(_placeholders(new))):
        before = old.get(name)
        if before is not None and "\n".join(before) not in mine:
            lines[first : first + len(words)] = before
    return "\n".join(lines) + "\n"


def _placeholders(stub: str) -> Iterator[tuple[str, int, list[str]]]:
    """What stands for missing code: the function's full name, the place of its first line, and its lines."""
    lines = stub.splitlines()

    def walk(node: ast.AST, path: str) -> Iterator[tuple[str, int, list[str]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from walk(child, f"{path}.{child.name}")
            elif isinstance(child, (ast.Raise, ast.Expr)) and _mentions_marker(child):
                yield path, child.lineno - 1, lines[child.lineno - 1 : child.end_lineno]
            else:
                yield from walk(child, path)

    return walk(ast.parse(stub), "")


def _mentions_marker(statement: ast.Raise | ast.Expr) -> bool:
    """Whether it raises, or asserts in a kernel, that something is not written yet; a docstring does neither."""
    value = statement.exc if isinstance(statement, ast.Raise) else statement.value
    if not isinstance(value, ast.Call):
        return False
    texts = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return any(NOT_ATTEMPTED_MARKER in text for text in texts)
