"""`progress()`: what is done of every lab, and what comes next."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from labkit.implementation import implementation_folder
from labkit.manifest import ROOT, Manifest, Task, available_labs, load_manifest
from labkit.notebook.check_card import points, whose
from labkit.notebook.checking import chosen_impl
from labkit.notebook.last_results import LastResult, digest_of, read_results
from labkit.notebook.palette import BLUE, GREEN, QUIET
from labkit.notebook.show import Place
from labkit.notebook.written import is_written

_BAR_CELLS = 20


def progress(lab: str | None = None) -> None:
    """Draws what the last checks found, at once, for every task of every lab; and says what to do next.

    Args:
        lab: two digits, for one lab alone.

    Raises:
        ValueError: there is no such lab.
    """
    Place().show(progress_card(chosen_impl(), lab))


@dataclass(frozen=True)
class TaskProgress:
    """Where one task stands.

    Args:
        manifest: its lab.
        task: the task.
        last: what its last check found, or None if it was never checked.
        edited: whether its files have changed since.
        written: whether none of its files is a stub.
    """

    manifest: Manifest
    task: Task
    last: LastResult | None
    edited: bool
    written: bool

    @property
    def share(self) -> float:
        """Of its tests, how many passed."""
        return self.last.passed / self.last.total if self.last and self.last.total else 0.0

    @property
    def done(self) -> bool:
        """Whether all tests passed, on the files as they are."""
        return self.share == 1.0 and not self.edited

    @property
    def state(self) -> str:
        """In words."""
        if not self.written and not self.share:
            return "not written yet"
        if self.last is None:
            return "not checked yet"
        if self.edited:
            return "edited since the last check"
        return "done" if self.done else f"{self.last.passed} of {self.last.total} tests"

    @property
    def earned(self) -> float:
        """Points by the last check."""
        return self.last.points if self.last else 0.0


@dataclass(frozen=True)
class ProgressCard:
    """All tasks of some labs."""

    impl: str
    tasks: tuple[TaskProgress, ...]

    @property
    def next_step(self) -> str:
        """The first task that is not done, core before stretch, and what to do about it."""
        for one in sorted(self.tasks, key=lambda task: task.task.stretch):
            if one.done:
                continue
            name = f"{one.manifest.id}.{one.task.number}"
            call = f'check("{name}")'
            if one.written:
                return f"Next: task {name}, {one.task.title}: {call}"
            files = " and ".join(f"{module}.py" for module in one.task.modules)
            return f"Next: task {name}, {one.task.title}. Write {files}, then {call}"
        return "All tasks are done."

    def as_text(self) -> str:
        """A line a task."""
        lines = []
        for manifest, tasks in self._by_lab():
            lines.append(self._lab_line(manifest, tasks))
            for one in tasks:
                filled = int(one.share * _BAR_CELLS)
                bar = "█" * filled + "░" * (_BAR_CELLS - filled)
                earned = f"{points(one.earned):>5} / {points(one.task.points):<3}"
                lines.append(f"  {one.task.number:>2} {_title(one.task):<44} {bar} {earned} {one.state}")
        return "\n".join([*lines, self.next_step])

    def as_html(self) -> str:
        """A bar a task."""
        parts = []
        for manifest, tasks in self._by_lab():
            rows = "".join(map(_row, tasks))
            line = html.escape(self._lab_line(manifest, tasks))
            parts.append(f'<div style="margin:6px 0"><b>{line}</b></div><table style="border:none">{rows}</table>')
        parts.append(f'<div style="border-left:5px solid {BLUE};padding:2px 10px">{html.escape(self.next_step)}</div>')
        return f"<div>{''.join(parts)}</div>"

    def _by_lab(self) -> list[tuple[Manifest, list[TaskProgress]]]:
        labs: dict[str, list[TaskProgress]] = {}
        for one in self.tasks:
            labs.setdefault(one.manifest.id, []).append(one)
        return [(tasks[0].manifest, tasks) for tasks in labs.values()]

    def _lab_line(self, manifest: Manifest, tasks: list[TaskProgress]) -> str:
        earned = points(sum(one.earned for one in tasks))
        return f"Lab {manifest.id}, {manifest.title} ({whose(self.impl)}): {earned} of {points(manifest.points)} points"


def progress_card(impl: str, lab: str | None = None, root: Path = ROOT) -> ProgressCard:
    """The card that `progress` shows.

    Raises:
        ValueError: there is no such lab, or `impl` names nothing that can be used.
    """
    results = read_results(impl)
    tasks = []
    for lab_id in [lab] if lab is not None else available_labs(root):
        manifest = load_manifest(lab_id, root)
        folder = implementation_folder(manifest, impl)
        for task in manifest.tasks:
            files = [folder / f"{module}.py" for module in task.modules]
            last = results.get(f"{lab_id}.{task.number}")
            edited = last is not None and last.digest != digest_of(files)
            tasks.append(TaskProgress(manifest, task, last, edited, all(map(is_written, files))))
    return ProgressCard(impl, tuple(tasks))


def _title(task: Task) -> str:
    return f"{task.title} (stretch)" if task.stretch else task.title


def _row(one: TaskProgress) -> str:
    colour = GREEN if one.done else BLUE
    cell = "text-align:left;border:none;padding:1px 8px"
    bar = (
        '<div style="background:rgba(128,128,128,.25);width:14em;height:.8em;border-radius:3px">'
        f'<div style="background:{colour};width:{one.share:.0%};height:100%;border-radius:3px;'
        f'opacity:{0.45 if one.edited else 1}"></div></div>'
    )
    earned = f"{points(one.earned)} / {points(one.task.points)}"
    return (
        f'<tr><td style="{cell}">{one.task.number}</td><td style="{cell}">{html.escape(_title(one.task))}</td>'
        f'<td style="{cell}">{bar}</td><td style="{cell}">{earned}</td>'
        f'<td style="{cell};color:{QUIET}">{html.escape(one.state)}</td></tr>'
    )
