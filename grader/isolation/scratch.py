"""Empties the folders that a sandbox lets a test write to, so that no test leaves a note for the next."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from pathlib import Path

FOLDERS = ("/tmp", "/dev/shm")
SECONDS = 2.0
"""Emptying takes microseconds; code that makes it take longer has its sandbox made anew."""


def kept_names(mountinfo: str, folders: tuple[str, ...] = FOLDERS) -> dict[str, frozenset[str]]:
    """What has to be emptied, and which names in it must stay because something is mounted there or below.

    A workbook that lies under /tmp itself, or one whose environment does, is mounted into the sandbox's own /tmp.

    Args:
        mountinfo: text of `/proc/self/mountinfo`, before any test ran.
        folders: that a test may write to.

    Returns:
        The folders, and those below that lead to a mount point; for each the names to keep.
    """
    kept: dict[str, set[str]] = defaultdict(set, {folder: set() for folder in folders})
    for line in mountinfo.splitlines():
        # Blanks in a path are written as octal numbers.
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), line.split()[4]))
        for folder in folders:
            if Path(folder) in point.parents:
                for above in (point, *point.parents):
                    if str(above) == folder:
                        break
                    kept[str(above.parent)].add(above.name)
    return {folder: frozenset(names) for folder, names in kept.items()}


def empty(folder: str, keep: frozenset[str] = frozenset(), seconds: float = SECONDS) -> None:
    """Removes everything in a folder but the names to keep. Links are removed, never followed.

    What lies in a subfolder is moved up before the subfolder goes, so that a tree of any depth needs no recursion and
    no long paths.

    Args:
        folder: stays.
        keep: names that are left alone.
        seconds: after which it gives up.

    Raises:
        TimeoutError: if there is too much to remove.
        OSError: if something cannot be removed.
    """
    deadline = time.monotonic() + seconds
    # A name that what lies there cannot have been made to clash with.
    name, count = os.urandom(8).hex(), 0
    while entries := [entry for entry in os.scandir(folder) if entry.name not in keep]:
        for entry in entries:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{folder} could not be emptied within {seconds:g} seconds")
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for child in list(os.scandir(entry.path)):
                if child.is_dir(follow_symlinks=False):
                    os.chmod(child.path, 0o700)  # a folder can only be moved by someone who may write in it
                os.rename(child.path, f"{folder}/{name}-{count}")
                count += 1
            os.rmdir(entry.path)
