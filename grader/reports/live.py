"""Progress of a batch: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from grader.verdicts import SubmissionResult


class LiveProgress:
    """Shows how far a batch is and about how long it will go on; a context manager.

    Args:
        console: where to.
        total: submissions.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._running: list[str] = []
        self._started = time.monotonic()
        # Refreshed by hand: a thread of its own would not be wise in a process that forks.
        self._bar = Progress(
            TextColumn("grading"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[now]}", style="dim", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("grading", total=total, left="", now="")

    def __enter__(self) -> LiveProgress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def started(self, name: str) -> None:
        """A submission's tests begin."""
        self._running.append(name)
        self.idle()

    def case(self, name: str) -> None:
        """One more test case of a submission is done."""

    def finished(self, result: SubmissionResult) -> None:
        """A submission is graded."""
        self._done += 1
        if result.name in self._running:
            self._running.remove(result.name)
        if not self._console.is_terminal:
            text = f"[{self._done}/{self._total}] {result.name}: {result.points:g} points"
            self._console.print(f"{text}{self._left(', ')}", markup=False, highlight=False, soft_wrap=True)
        self.idle()

    def idle(self) -> None:
        """Some time has passed."""
        if self._console.is_terminal:
            self._bar.update(
                self._task, completed=self._done, left=self._left(""), now=", ".join(self._running), refresh=True
            )

    def _left(self, before: str) -> str:
        if not 0 < self._done < self._total:
            return ""
        seconds = (time.monotonic() - self._started) / self._done * (self._total - self._done)
        return f"{before}about {seconds:.0f} s left" if seconds < 90 else f"{before}about {seconds / 60:.0f} min left"
