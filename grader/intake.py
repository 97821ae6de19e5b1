"""Takes submissions in: copies the files that the manifest names, refuses what is unsafe, reports what it ignored.

Nothing in a submission is trusted: names, sizes, types of entries and the archive's own directory are checked before
anything is read, reading is capped, links are never followed, and the originals are opened for reading only.
"""

from __future__ import annotations

import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import IO

from grader.verdicts import clean_text
from labkit.manifest import Manifest
from labkit.submission import MAX_MODULE_BYTES, modules_sha256

MAX_ARCHIVE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 128 << 20
MAX_ENTRIES = 5_000
MAX_RATIO = 200
"""Unpacked bytes for each packed byte; source code reaches about 10."""
MAX_IGNORED_NAMES = 50

ARCHIVES = (".zip", ".tar.gz", ".tgz")


class Refused(Exception):
    """A submission that will not be graded; the text says why and what to hand in instead."""


@dataclass(frozen=True)
class Submission:
    """A submission that was taken in.

    Args:
        name: the student's: the entry's name without its suffix.
        folder: our copy of the lab's modules, or None if the submission was refused.
        sha256: hash of the copied files, empty if it was refused.
        ignored: names that were handed in and not copied.
        refusal: why it was refused, or None.
    """

    name: str
    folder: Path | None
    sha256: str = ""
    ignored: tuple[str, ...] = ()
    refusal: str | None = None


def find_entries(submissions: Path) -> dict[str, Path]:
    """The entries of a folder of submissions by the name that reports use, in order; hidden files are left out.

    Raises:
        ValueError: if the folder is missing, or holds nothing.
    """
    if not submissions.is_dir():
        raise ValueError(f"{submissions} is no folder; give a folder with one folder or archive for each student")
    paths = sorted(path for path in submissions.iterdir() if not path.name.startswith("."))
    if not paths:
        raise ValueError(f"{submissions} is empty; put one folder, .zip or .tar.gz for each student in it")
    short = [_short_name(path) for path in paths]
    # "ada" and "ada.zip" side by side keep their full names, so that no result hides another.
    entries: dict[str, Path] = {}
    for name, path in zip(short, paths, strict=True):
        shown = clean_text(path.name if short.count(name) > 1 else name, 200) or "unnamed"
        # Names may have become equal by losing what cannot be printed.
        same = sum(other == shown or other.startswith(f"{shown} (") for other in entries)
        entries[f"{shown} ({same + 1})" if shown in entries else shown] = path
    return entries


def take_in(name: str, entry: Path, manifest: Manifest, destination: Path) -> Submission:
    """Copies the modules of one submission.

    Args:
        name: the submission's name.
        entry: a folder, .zip or .tar.gz.
        manifest: names the modules.
        destination: an empty folder that the copies go to.

    Returns:
        What was copied; a submission that is unsafe or unreadable comes back with `refusal` set, never as an error.
    """
    try:
        files, ignored = _read(entry, manifest)
    except Refused as error:
        return Submission(name, None, refusal=clean_text(str(error)))
    except (OSError, zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError) as error:
        return Submission(name, None, refusal=clean_text(f"{entry.name} cannot be read: {error}"))
    modules = {module: files[module] for module in manifest.modules if module in files}
    for module, content in modules.items():
        (destination / f"{module}.py").write_bytes(content)
    names = [clean_text(text, 200) for text in sorted(ignored)]
    if len(names) > MAX_IGNORED_NAMES:
        names = [*names[:MAX_IGNORED_NAMES], f"and {len(names) - MAX_IGNORED_NAMES} more"]
    return Submission(name, destination, modules_sha256(modules), tuple(names))


def _short_name(path: Path) -> str:
    suffix = next((s for s in ARCHIVES if path.name.lower().endswith(s)), "")
    return path.name[: -len(suffix)] if suffix and not path.is_dir() else path.name


def _read(entry: Path, manifest: Manifest) -> tuple[dict[str, bytes], list[str]]:
    """Contents of the modules, and the names of everything else that was looked at."""
    mode = entry.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise Refused(f"{entry.name} is a link; hand in the folder or archive itself")
    if stat.S_ISDIR(mode):
        return _read_folder(entry, manifest)
    if not stat.S_ISREG(mode):
        raise Refused(f"{entry.name} is neither a folder nor a file; hand in a folder, a .zip or a .tar.gz")
    if entry.stat().st_size > MAX_ARCHIVE_BYTES:
        raise Refused(f"{entry.name} is larger than {MAX_ARCHIVE_BYTES >> 20} MiB; pack the lab's modules only")
    if entry.name.lower().endswith(".zip"):
        return _read_zip(entry, manifest)
    if entry.name.lower().endswith((".tar.gz", ".tgz")):
        return _read_tar(entry, manifest)
    raise Refused(f"{entry.name} is no folder, .zip or .tar.gz; `make submit LAB={manifest.id}` packs the right files")


def _choose(names: list[str], manifest: Manifest) -> dict[str, str]:
    """Where the modules lie among the names: at the top, in labs/<lab>/, or either of these in one wrapping folder."""
    tops = {PurePosixPath(name).parts[0] for name in names}
    nested = f"labs/{manifest.folder.name}/"
    prefixes = ["", nested]
    if len(tops) == 1:
        prefixes += [f"{(wrap := next(iter(tops)))}/", f"{wrap}/{nested}"]
    known = set(names)
    for prefix in prefixes:
        found = {m: f"{prefix}{m}.py" for m in manifest.modules if f"{prefix}{m}.py" in known}
        if found:
            return found
    return {}


# Folders ----------------------------------------------------------------------------------------------------------


def _read_folder(folder: Path, manifest: Manifest) -> tuple[dict[str, bytes], list[str]]:
    """Reads by directory descriptors, so that nothing can be swapped for a link between a look and a read."""
    files, ignored = _look(folder, (), manifest)
    if files:
        return files, ignored
    deeper: list[tuple[str, ...]] = [("labs", manifest.folder.name)]
    if len(inside := _folders(folder)) == 1:
        deeper += [(inside[0],), (inside[0], "labs", manifest.folder.name)]
    for parts in deeper:
        files, others = _look(folder, parts, manifest)
        if files:
            return files, [name for name in (*ignored, *others) if name not in parts[:1]]
    return {}, ignored


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]


def _look(folder: Path, parts: tuple[str, ...], manifest: Manifest) -> tuple[dict[str, bytes], list[str]]:
    """Modules that lie directly in one folder below the submission, and the names beside them."""
    wanted = {f"{module}.py": module for module in manifest.modules}
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for part in parts:
            try:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            except FileNotFoundError:
                return {}, []
            except OSError as error:
                raise Refused(f"{part} is a link or no folder; hand in the modules themselves") from error
            os.close(descriptor)
            descriptor = below
        names = os.listdir(descriptor)
        if len(names) > MAX_ENTRIES:
            raise Refused(f"more than {MAX_ENTRIES} entries; hand in the lab's modules only")
        _refuse_case_duplicates(names, wanted)
        files = {wanted[name]: _read_regular(name, descriptor) for name in names if name in wanted}
        prefix = "/".join(parts)
        ignored = [f"{prefix}/{name}" if prefix else name for name in names if name not in wanted and name != "labs"]
        return files, ignored
    finally:
        os.close(descriptor)


def _read_regular(name: str, directory: int) -> bytes:
    try:
        # Non-blocking, so that opening a pipe does not wait for its writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except OSError as error:
        raise Refused(f"{name} is a link or cannot be opened ({error.strerror}); hand in the file itself") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Refused(f"{name} is no regular file; hand in the module's text")
        return _capped(name, file)


# Archives ---------------------------------------------------------------------------------------------------------


def _read_zip(entry: Path, manifest: Manifest) -> tuple[dict[str, bytes], list[str]]:
    if not zipfile.is_zipfile(entry):
        raise Refused(f"{entry.name} is not a zip file, whatever its name says; pack it again")
    with zipfile.ZipFile(entry) as archive:
        infos = archive.infolist()
        packed = max(1, entry.stat().st_size)
        _refuse_bomb(len(infos), sum(info.file_size for info in infos), packed)
        members: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise Refused(f"{info.filename} is a link or a device; archives may hold files and folders only")
            if info.flag_bits & 1:
                raise Refused(f"{info.filename} is encrypted; pack it without a password")
            name = _safe_name(info.filename)
            if not info.is_dir():
                members[_unique(name, members)] = info
        _refuse_case_duplicates(list(members))
        chosen = _choose(list(members), manifest)
        files = {}
        for module, name in chosen.items():
            with archive.open(members[name]) as file:
                files[module] = _capped(name, file)
        return files, [name for name in members if name not in chosen.values()]


def _read_tar(entry: Path, manifest: Manifest) -> tuple[dict[str, bytes], list[str]]:
    """In one pass, since a gzip stream has no directory: every possible module is kept until the names are known."""
    wanted = {f"{module}.py" for module in manifest.modules}
    seen: dict[str, bytes | None] = {}
    with entry.open("rb") as raw:
        stream = _Unpacked(raw, entry.stat().st_size)
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for count, member in enumerate(archive, start=1):
                _refuse_bomb(count, member.size, max(1, entry.stat().st_size))
                if not (member.isreg() or member.isdir()):
                    raise Refused(f"{member.name} is a link or a device; archives may hold files and folders only")
                name = _safe_name(member.name)
                if member.isdir():
                    continue
                _unique(name, seen)
                file = archive.extractfile(member) if PurePosixPath(name).name in wanted else None
                seen[name] = _capped(name, file) if file is not None else None
    if not seen and stream.total == 0:
        raise Refused(f"{entry.name} holds nothing")
    _refuse_case_duplicates(list(seen))
    chosen = _choose(list(seen), manifest)
    files = {module: content for module, name in chosen.items() if (content := seen[name]) is not None}
    return files, [name for name in seen if name not in chosen.values()]


class _Unpacked(BufferedIOBase):
    """A gzip file as a stream of unpacked bytes that stops a bomb while it is being unpacked."""

    def __init__(self, raw: IO[bytes], packed: int) -> None:
        self.total = 0
        self._packed = max(1, packed)
        self._chunks = self._unpack(raw)
        self._rest = b""

    def read(self, size: int | None = -1, /) -> bytes:
        """Up to `size` unpacked bytes."""
        wanted = MAX_TOTAL_BYTES if size is None or size < 0 else size
        parts, have = [], 0
        while have < wanted:
            if not self._rest:
                self._rest = next(self._chunks, b"")
                if not self._rest:
                    break
            part, self._rest = self._rest[: wanted - have], self._rest[wanted - have :]
            parts.append(part)
            have += len(part)
        return b"".join(parts)

    def _unpack(self, raw: IO[bytes]) -> Iterator[bytes]:
        inflate = zlib.decompressobj(wbits=31)
        while (chunk := raw.read(1 << 16)) and not inflate.eof:
            while chunk:
                out = inflate.decompress(chunk, 1 << 20)
                self.total += len(out)
                _refuse_bomb(0, self.total, self._packed)
                if out:
                    yield out
                chunk = inflate.unconsumed_tail
        if not inflate.eof:
            raise Refused("the archive ends too early; pack it again")


def _refuse_bomb(entries: int, unpacked: int, packed: int) -> None:
    if entries > MAX_ENTRIES:
        raise Refused(f"more than {MAX_ENTRIES} entries; pack the lab's modules only")
    # Small archives may be mostly zeros and padding (a tar's blocks); a bomb is never small when unpacked.
    if unpacked > MAX_TOTAL_BYTES or (unpacked > 4 << 20 and unpacked > MAX_RATIO * packed):
        raise Refused(
            f"it unpacks from {packed} to at least {unpacked} bytes; at most {MAX_TOTAL_BYTES >> 20} MiB, and "
            f"{MAX_RATIO} times the archive's size, are allowed"
        )


def _safe_name(name: str) -> str:
    path = PurePosixPath(name)
    if not name or name.startswith(("/", "\\")) or ".." in path.parts or "\\" in name or "\0" in name or ":" in name:
        raise Refused(f"{name!r} is no name for a file in a submission; relative names without .. are allowed")
    if not path.parts:
        return "."
    return str(path)


def _unique(name: str, seen: dict[str, zipfile.ZipInfo] | dict[str, bytes | None]) -> str:
    if name in seen:
        raise Refused(f"{name} stands in the archive twice; which one is meant?")
    return name


def _refuse_case_duplicates(names: list[str], wanted: dict[str, str] | None = None) -> None:
    """Refuses names that differ in case only, since which one is graded would depend on the machine."""
    folded: dict[str, str] = {}
    for name in names:
        other = folded.setdefault(name.casefold(), name)
        if other != name and (wanted is None or name in wanted or other in wanted):
            raise Refused(f"{other} and {name} differ in case only; which one is meant?")


def _capped(name: str, file: IO[bytes]) -> bytes:
    content = file.read(MAX_MODULE_BYTES + 1)
    if len(content) > MAX_MODULE_BYTES:
        raise Refused(f"{name} is larger than {MAX_MODULE_BYTES >> 20} MiB; a module of this lab is a few kB")
    return content
