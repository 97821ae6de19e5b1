"""`make update`: new stubs, and what else the course has changed, without losing a student's edits.

The new version comes from the course's repository where git knows one, otherwise from this folder itself, whose
reference may be newer than the stubs that a student has begun. Everything is worked out before anything is written.
Only files of the work tree are written: no commit is made, and branch and index stay as they are.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from grader.authoring.history import Repository, StoredFile
from grader.authoring.stub_update import Outcome, StubChange, stub_change
from grader.authoring.stubs import generate_stub, is_untouched
from labkit.manifest import available_labs, load_manifest

BACKUPS = ".backup"


class UpdateRefused(ValueError):
    """Nothing was changed; the text says why and what to do first."""


@dataclass(frozen=True)
class Plan:
    """Everything that an update will do.

    Args:
        source: where the new version comes from, in words.
        stubs: the students' files.
        written: other files of the course to write, with their mode.
        removed: other files that the course no longer has.
        kept: other files that both sides changed.
        revision: of the new version in git, or None.
    """

    source: str
    stubs: tuple[StubChange, ...] = ()
    written: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    revision: str | None = None

    @property
    def conflicts(self) -> list[StubChange]:
        """Files that wait for their author."""
        return [change for change in self.stubs if change.outcome is Outcome.CONFLICT]

    @property
    def stuck(self) -> list[StubChange]:
        """Files that could not be brought up to date."""
        return [change for change in self.stubs if change.outcome is Outcome.KEPT]


def plan_update(root: Path, *, fetch: bool = True) -> Plan:
    """Works out an update; nothing is written, save what `git fetch` stores.

    Args:
        root: the workbook.
        fetch: ask the remote for what is new.

    Raises:
        UpdateRefused: if somebody's merge or rebase is under way.
    """
    repository = Repository.find(root)
    if repository is None:
        return _plan_from_here(root, None, "this folder (no git checkout, so no remote to ask)")
    if begun := repository.unfinished():
        raise UpdateRefused(f"git has something unfinished here ({begun}): end it with git, then update")
    remote = repository.remote()
    if remote is None:
        return _plan_from_here(root, repository, "this folder (git knows no remote named upstream or origin)")
    fault = repository.fetch(remote) if fetch else None
    late = f"; what is new there could not be fetched: {fault}" if fault else ""
    revision = repository.main_branch(remote)
    if revision is None:
        return _plan_from_here(root, repository, f"this folder (nothing of {remote} is here{late})")
    if repository.contains(revision):
        return _plan_from_here(root, repository, f"this folder, which already has everything of {revision}{late}")
    return _plan_from_remote(root, repository, revision, f"{revision}{late}")


def apply_update(root: Path, plan: Plan, now: datetime | None = None) -> Path | None:
    """Writes what a plan says; each edited file is copied first, all of them before the first one is replaced.

    Args:
        root: the workbook.
        plan: from `plan_update`.
        now: names the folder of copies.

    Returns:
        The folder of copies, or None if nothing had to be copied.
    """
    replaced = [change.path for change in plan.stubs if change.edited and change.content is not None]
    folder = _copy(root, replaced, now or datetime.now()) if replaced else None
    for change in plan.stubs:
        if change.content is not None:
            _write(root / change.path, change.content, None)
    for path, (content, mode) in plan.written.items():
        _write(root / path, content, mode)
    for path in plan.removed:
        (root / path).unlink(missing_ok=True)
    return folder


def _plan_from_here(root: Path, repository: Repository | None, source: str) -> Plan:
    """New stubs from the reference in this folder, if it is there."""
    changes: list[StubChange] = []
    without: list[str] = []
    for lab_id in available_labs(root):
        manifest = load_manifest(lab_id, root)
        for module in manifest.modules:
            path = f"labs/{manifest.folder.name}/{module}.py"
            try:
                new = generate_stub(manifest, module)
            except ValueError:
                without.append(path)
                continue
            changes.append(stub_change(root, path, new, repository, ("HEAD",)))
    if without:
        source += f"; it holds no reference, so nothing new for {', '.join(without)}"
    return Plan(source, tuple(changes))


def _plan_from_remote(root: Path, repository: Repository, revision: str, source: str) -> Plan:
    """Stubs and all other files of the course from a revision that git has."""
    files = repository.files(revision)
    stubs = set(_modules(repository, revision, files))
    changes = []
    for path in sorted(stubs):
        new = repository.content(revision, path).decode("utf-8").replace("\r\n", "\n")
        if is_untouched(new):
            changes.append(stub_change(root, path, new, repository, (revision, "HEAD")))
        else:
            note = f"what {revision} has there is somebody's work and no stub"
            changes.append(StubChange(path, Outcome.KEPT, note=note))
    course = {path: file for path, file in files.items() if path not in stubs}
    known = repository.known_blobs(revision)
    gone = repository.deleted(revision)
    here = repository.hash_of(path for path in {*course, *gone} if (root / path).is_file())
    before = repository.files(base) if (base := repository.common(revision)) else {}
    written, kept = {}, []
    for path, file in course.items():
        if here.get(path) == file.blob:
            continue
        free = not os.path.lexists(root / path) and not _under_a_file(root, path)
        if free or here.get(path) in known:
            written[path] = (repository.content(revision, path), file.mode)
        elif path not in before or before[path].blob != file.blob:
            kept.append(path)
    removed = [path for path in sorted(gone) if here.get(path) in known]
    return Plan(source, tuple(changes), written, tuple(removed), tuple(kept), revision)


def _under_a_file(root: Path, path: str) -> bool:
    """Whether a file lies where a path needs a folder."""
    parents = list((root / path).relative_to(root).parents)[:-1]
    return any(os.path.lexists(root / parent) and not (root / parent).is_dir() for parent in parents)


def _modules(repository: Repository, revision: str, files: dict[str, StoredFile]) -> list[str]:
    """Paths of the students' files that a revision has, by its labs' manifests."""
    found = []
    for path in files:
        folder, _, name = path.rpartition("/")
        if name == "lab.toml" and folder.startswith("labs/"):
            modules = tomllib.loads(repository.content(revision, path).decode("utf-8"))["lab"]["modules"]
            found += [stub for module in modules if (stub := f"{folder}/{module}.py") in files]
    return found


def _copy(root: Path, paths: list[str], now: datetime) -> Path:
    """Copies files into a folder of their own, which is named after the time and never reused."""
    name = now.strftime("%Y-%m-%d-%H%M%S")
    for attempt in range(1000):
        folder = root / BACKUPS / (f"{name}-{attempt}" if attempt else name)
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    else:
        raise UpdateRefused(f"{root / BACKUPS} has a thousand copies of this second; remove some")
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes((root / path).read_bytes())
    return folder


def _write(path: Path, content: bytes, mode: int | None) -> None:
    """Writes a file so that it is either the old or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    if mode is not None:
        temporary.chmod(mode)
    elif path.exists():
        temporary.chmod(path.stat().st_mode & 0o777)
    temporary.replace(path)
