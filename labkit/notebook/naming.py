"""From "07.4" to task 4 of lab 07."""

from __future__ import annotations

import re
from pathlib import Path

from labkit.manifest import ROOT, Manifest, Task, load_manifest


def find_task(name: str, root: Path = ROOT) -> tuple[Manifest, Task]:
    """The lab and the task that a name stands for.

    Args:
        name: two digits of the lab, a point, the number of the task.
        root: the workbook.

    Raises:
        ValueError: if the name has another form, or there is no such lab or task.
    """
    found = re.fullmatch(r"(\d\d)\.(\d+)", name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f'{name!r} names no task; give lab and task as text, such as "07.4"')
    manifest = load_manifest(found[1], root)
    return manifest, manifest.task(int(found[2]))
