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
    hint, task = manifest.hint(task_number, level), manifest.task(task_number)
    count = len(task.hints)
    lines = [f"lab {manifest.id} task {task.number}: {task.title} (hint {level} of {count})", "", hint]
    if level < count:
        lines += ["", f"For more: make hint LAB={manifest.id} TASK={task.number} LEVEL={level + 1}"]
    return "\n".join(lines)
