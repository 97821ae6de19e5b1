"""Empties the folders that a sandbox lets a test write to, so that no test leaves a note for the next."""

from __future__ import annotations

import os
import time

FOLDERS = ("/tmp", "/dev/shm")
SECONDS = 2.0
"""Emptying takes microseconds; code that makes it take longer has its sandbox made anew."""


def empty(folder: str, seconds: float = SECONDS) -> None:
    """Removes everything in a folder. Links are removed, never followed.

    What lies in a subfolder is moved up before the subfolder goes, so that a tree of any depth needs no recursion and
    no long paths.

    Args:
        folder: stays, empty.
        seconds: after which it gives up.

    Raises:
        TimeoutError: if there is too much to remove.
        OSError: if something cannot be removed.
    """
    deadline = time.monotonic() + seconds
    # A name that what lies there cannot have been made to clash with.
    name, count = os.urandom(8).hex(), 0
    while entries := list(os.scandir(folder)):
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
