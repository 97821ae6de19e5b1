"""What git knows about a workbook: where new versions come from, and every version that a file has had."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FETCH_SECONDS = 120
REMOTES = ("upstream", "origin")
"""In this order: whoever works on a fork has the course's own repository as `upstream`."""

_UNFINISHED = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply")
_NEVER = {"..", ".git"}
"""Parts of paths that git itself never checks out, though a tree can be made to hold them."""
_REGULAR = {"100644": 0o644, "100755": 0o755}


class GitFault(RuntimeError):
    """Git refused; the text is its own."""


@dataclass(frozen=True)
class StoredFile:
    """A regular file in a commit.

    Args:
        path: relative to the workbook, with slashes.
        blob: the hash of its content.
        mode: as for `chmod`.
    """

    path: str
    blob: str
    mode: int


class Repository:
    """The git checkout that a workbook lies in. Nothing here changes the work tree, the index or a branch.

    Args:
        root: the workbook.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prefix = self._git("rev-parse", "--show-prefix").decode().strip()

    @classmethod
    def find(cls, root: Path) -> Repository | None:
        """The checkout of a workbook, or None if it is none or git is missing."""
        if shutil.which("git") is None:
            return None
        try:
            return cls(root)
        except GitFault:
            return None

    def unfinished(self) -> str | None:
        """The merge, rebase or the like that somebody has begun and not ended."""
        folder = self.root / self._git("rev-parse", "--git-dir").decode().strip()
        return next((name for name in _UNFINISHED if (folder / name).exists()), None)

    def remote(self) -> str | None:
        """The name of the remote that new versions come from."""
        names = self._git("remote").decode().split()
        return next((name for name in REMOTES if name in names), None)

    def fetch(self, remote: str) -> str | None:
        """Asks a remote for what is new; the reason if that fails."""
        try:
            self._git("fetch", "--quiet", "--no-tags", remote, seconds=FETCH_SECONDS)
        except GitFault as error:
            return str(error)
        return None

    def main_branch(self, remote: str) -> str | None:
        """The branch that a remote is read at: its own choice, or main or master. None if nothing was fetched yet."""
        for name in (f"{remote}/HEAD", f"{remote}/main", f"{remote}/master"):
            if self.has(f"refs/remotes/{name}"):
                return self._git("rev-parse", "--abbrev-ref", f"refs/remotes/{name}").decode().strip()
        return None

    def has(self, revision: str) -> bool:
        """Whether a revision exists."""
        try:
            self._git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        except GitFault:
            return False
        return True

    def contains(self, revision: str) -> bool:
        """Whether the current branch already has everything of a revision."""
        try:
            self._git("merge-base", "--is-ancestor", revision, "HEAD")
        except GitFault:
            return False
        return True

    def common(self, revision: str) -> str | None:
        """The last commit that the current branch shares with a revision."""
        try:
            return self._git("merge-base", "HEAD", revision).decode().strip()
        except GitFault:
            return None

    def files(self, revision: str) -> dict[str, StoredFile]:
        """The regular files of a revision, by path; only those of the workbook."""
        found = {}
        for entry in self._git("ls-tree", "-r", "-z", revision, "--", ".").decode(errors="surrogateescape").split("\0"):
            if entry:
                facts, _, path = entry.partition("\t")
                mode, _, blob = facts.split()
                if mode in _REGULAR and not _NEVER & set(path.lower().split("/")):
                    found[path] = StoredFile(path, blob, _REGULAR[mode])
        return found

    def deleted(self, revision: str) -> set[str]:
        """Paths that the history of a revision has deleted at some time, and that it does not have now."""
        command = ("log", "--diff-filter=D", "--no-renames", "--name-only", "--format=", "-z", "--relative", revision)
        listed = self._git(*command).decode(errors="surrogateescape")
        return {name for name in listed.split("\0") if name} - set(self.files(revision))

    def known_blobs(self, revision: str) -> set[str]:
        """Hashes of every content that any file has had in the history of a revision."""
        listed = self._git("rev-list", "--objects", revision).decode(errors="surrogateescape")
        return {line.partition(" ")[0] for line in listed.splitlines()}

    def hash_of(self, paths: Iterable[str]) -> dict[str, str]:
        """The hashes that files of the work tree would be stored under, by path."""
        names = list(paths)
        if not names:
            return {}
        lines = "\n".join(f"{self._prefix}{name}" for name in names)
        hashes = self._git("hash-object", "--stdin-paths", given=lines.encode(errors="surrogateescape"))
        return dict(zip(names, hashes.decode().split(), strict=True))

    def content(self, revision: str, path: str) -> bytes:
        """A file of a revision as it would be checked out."""
        return self._git("cat-file", "--filters", f"{revision}:{self._prefix}{path}")

    def versions(self, path: str, revisions: Iterable[str]) -> Iterator[str]:
        """The texts that a file has had in the history of some revisions, those of the first one first."""
        for revision in revisions:
            commits = self._git("rev-list", "--full-history", revision, "--", path).decode().split()
            for commit in commits:
                try:
                    yield self._git("cat-file", "blob", f"{commit}:{self._prefix}{path}").decode("utf-8")
                except (GitFault, UnicodeDecodeError):
                    continue  # deleted there, or no text

    def is_shallow(self) -> bool:
        """Whether older commits were left out when this checkout was made."""
        return self._git("rev-parse", "--is-shallow-repository").decode().strip() == "true"

    def _git(self, *arguments: str, given: bytes = b"", seconds: float | None = None) -> bytes:
        # Variables of a surrounding git command would point it at another repository.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        try:
            ended = subprocess.run(
                ["git", *arguments], cwd=self.root, env=environment, input=given, capture_output=True, check=False,
                timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise GitFault(f"git {arguments[0]} did not end within {seconds:.0f} s") from error
        if ended.returncode != 0:
            said = ended.stderr.decode(errors="replace").strip() or f"exit code {ended.returncode}"
            raise GitFault(f"git {arguments[0]}: {said}")
        return ended.stdout
