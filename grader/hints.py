"""Hints of a task, one level at a time."""

from __future__ import annotations

from labkit.manifest import Manifest


def hint_text(manifest: Manifest, task_number: int, level: int) -> str:
    """One hint, and how to see the next.

    Args:
        manifest: the lab.
        task_number: one of its tasks.
        level: 1 for a nudge; higher ones say more.

    Raises:
        ValueError: if there is no such task or level.
    """
    task = manifest.task(task_number)
    count = len(task.hints)
    if not 1 <= level <= count:
        raise ValueError(f"lab {manifest.id} task {task.number} has hints of level 1 to {count}, not {level}")
    lines = [f"lab {manifest.id} task {task.number}: {task.title} (hint {level} of {count})", "", task.hints[level - 1]]
    if level < count:
        lines += ["", f"For more: python -m grader hint {manifest.id} {task.number} --level {level + 1}"]
    return "\n".join(lines)
