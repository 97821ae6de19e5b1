"""What an update makes of one student's file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from grader.authoring.history import Repository
from grader.authoring.stub_merge import MergeRefused, has_conflict_markers, merge_stub
from grader.authoring.stubs import is_untouched, mark_of


class Outcome(Enum):
    """What becomes of a student's file."""

    CURRENT = "is up to date"
    NEW = "new"
    RENEWED = "was untouched, and is the new stub now"
    MERGED = "merged: the new stub's changes are in your file"
    CONFLICT = "merged with conflicts"
    KEPT = "kept as it is"


@dataclass(frozen=True)
class StubChange:
    """What becomes of one student's file.

    Args:
        path: relative to the workbook.
        outcome: in short.
        content: what is written, or None if nothing is.
        note: why it was kept and what to do, or nothing.
        edited: whether what lies there now is the student's work, so that it is copied before it is replaced.
    """

    path: str
    outcome: Outcome
    content: bytes | None = None
    note: str = ""
    edited: bool = False


def stub_change(
    root: Path, path: str, new: str, repository: Repository | None, revisions: tuple[str, ...]
) -> StubChange:
    """Works out what becomes of one student's file; writes nothing.

    Args:
        root: the workbook.
        path: of the file, relative to it.
        new: the new stub.
        repository: where older stubs are found, or None.
        revisions: in whose history to look, the likeliest first.
    """
    place = root / path
    if not os.path.lexists(place):
        return StubChange(path, Outcome.NEW, new.encode())
    if place.is_symlink() or not place.is_file():
        return StubChange(path, Outcome.KEPT, note="it is a link or no file; put a file there")
    try:
        raw = place.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return StubChange(path, Outcome.KEPT, note="it is no UTF-8 text; save it as UTF-8, then update again")
    mine = raw.replace("\r\n", "\n")
    if mine == new or mark_of(mine) == mark_of(new):
        return StubChange(path, Outcome.CURRENT)
    if is_untouched(mine):
        return StubChange(path, Outcome.RENEWED, new.encode())
    if has_conflict_markers(mine):
        return StubChange(path, Outcome.KEPT, note="an earlier conflict stands in it; resolve that, then update again")
    if mark_of(mine) is None:
        note = "its header is gone, which says which stub it began as; put the stub's first three lines back"
        return StubChange(path, Outcome.KEPT, note=note)
    base = _base(path, mine, repository, revisions)
    if base is None:
        note = f"the stub it began as was not found: {_why_no_base(repository, revisions[0], path)}"
        return StubChange(path, Outcome.KEPT, note=note)
    try:
        merge = merge_stub(base, mine, new)
    except MergeRefused as error:
        return StubChange(path, Outcome.KEPT, note=str(error))
    text = merge.text.replace("\n", "\r\n") if "\r\n" in raw else merge.text
    note = f"{merge.conflicts} place{'s' if merge.conflicts > 1 else ''}" if merge.conflicts else ""
    outcome = Outcome.CONFLICT if merge.conflicts else Outcome.MERGED
    return StubChange(path, outcome, text.encode(), note, edited=True)


def _base(path: str, mine: str, repository: Repository | None, revisions: tuple[str, ...]) -> str | None:
    """The stub that a file began as: the one in git's history with the digest that the file's header carries."""
    if repository is None:
        return None
    known = [revision for revision in revisions if repository.has(revision)]
    wanted = mark_of(mine)
    versions = repository.versions(path, known)
    return next((text for text in versions if mark_of(text) == wanted and is_untouched(text)), None)


def _why_no_base(repository: Repository | None, revision: str, path: str) -> str:
    if repository is None:
        return "this is no git checkout, so there is no history to look in"
    if repository.is_shallow():
        return "older commits were left out of this checkout; run git fetch --unshallow, then update again"
    return f"no commit has it; compare with what the course has: git show {revision}:{path}"
