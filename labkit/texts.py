"""Text that every machine has: Python's own documentation and the sources of its standard library.

Each document belongs to one part for good, by a checksum of its name, so that what a method was calibrated or trained
on is never what it is measured on.
"""

from __future__ import annotations

import sysconfig
import zlib
from functools import lru_cache
from pathlib import Path

KINDS = ("prose", "code")
PARTS = ("training", "calibration", "evaluation")

# Of ten documents, five are for training, three for calibration and two for evaluation.
_PART_OF_TENTH = ("training",) * 5 + ("calibration",) * 3 + ("evaluation",) * 2
# A document of one screen has little context; tables of character sets are neither prose nor code.
_MIN_CHARACTERS = 2_000
_MAX_CHARACTERS = 200_000


def documents(kind: str, part: str) -> dict[str, str]:
    """Texts of one kind and part, by name, in the order of their names.

    Args:
        kind: "prose": the topics of Python's reference manual, as `help()` shows them; "code": the modules at the top
            of the standard library.
        part: "training", "calibration" or "evaluation"; no document is in two of them.

    Raises:
        ValueError: another kind or part, or a Python that came without these files.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")
    found = {name: text for name, text in _all(kind).items() if part_of(name) == part}
    if not found:
        raise ValueError(f"this Python came without the {kind} that the workbook reads; install its standard library")
    return found


def part_of(name: str) -> str:
    """The part that a document of this name belongs to."""
    return _PART_OF_TENTH[zlib.crc32(name.encode()) % len(_PART_OF_TENTH)]


@lru_cache(maxsize=len(KINDS))
def _all(kind: str) -> dict[str, str]:
    texts = _topics() if kind == "prose" else _modules()
    return {name: text for name, text in sorted(texts.items()) if _MIN_CHARACTERS <= len(text) <= _MAX_CHARACTERS}


def _topics() -> dict[str, str]:
    # Imported here: half a megabyte that few callers want.
    from pydoc_data.topics import topics

    return dict(topics)


def _modules() -> dict[str, str]:
    folder = Path(sysconfig.get_path("stdlib"))
    return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*.py")}
