"""What `check` shows."""

from __future__ import annotations

import html
from dataclasses import dataclass

from labkit.notebook.palette import BLUE, GREEN, ORANGE, QUIET, RED
from labkit.notebook.task_run import FunctionResult, Outcome, TaskRun

SIGNS = {
    Outcome.PASSED: "✓",
    Outcome.SKIPPED: "–",
    Outcome.NOT_WRITTEN: "○",
    Outcome.FAILED: "✗",
    Outcome.NOT_RUN: "·",
}
COLOURS = {
    Outcome.PASSED: GREEN,
    Outcome.SKIPPED: QUIET,
    Outcome.NOT_WRITTEN: ORANGE,
    Outcome.FAILED: RED,
    Outcome.NOT_RUN: QUIET,
}
MAX_MESSAGE_LINES = 14
MAX_TEXT_CHARACTERS = 6000


@dataclass(frozen=True)
class CheckCard:
    """The results of a task's tests.

    Args:
        run: what the tests found.
        hint_level: the hint to show, from 1; None shows none.
    """

    run: TaskRun
    hint_level: int | None = None

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.run.done:
            return "done"
        return Outcome.NOT_WRITTEN.value if self.run.not_written else "not yet"

    @property
    def headline(self) -> str:
        """Task, verdict and points in one line."""
        run = self.run
        return (
            f"lab {run.manifest.id} task {run.task.number}, {run.task.title} ({whose(run.impl)}): {self.verdict}. "
            f"{run.passed} of {len(run.results)} tests passed, {points(run.points)} of {points(run.task.points)} points"
        )

    def as_text(self) -> str:
        """Headline, what did not pass, the first message and the hint."""
        lines = [self.headline]
        if not self.run.not_written:
            lines += [f"  {SIGNS[r.outcome]} {r.name}" for r in self.run.results if r.outcome is not Outcome.PASSED]
        if problem := self.run.first_problem:
            lines += ["", f"{problem.name}:", *(f"  {line}" for line in short(problem.message))]
        if self.hint_level:
            lines += ["", f"{self._hint_title()}: {self._hint()}", *filter(None, [self._more()])]
        return "\n".join(lines)

    def as_html(self) -> str:
        """The same; tests that passed and the traceback are folded away."""
        run = self.run
        colour = GREEN if run.done else ORANGE if run.not_written else RED
        pill = f"background:{colour};color:white;border-radius:3px;padding:0 6px"
        parts = [
            f'<div style="font-size:105%"><b>Task {run.task.number}: {html.escape(run.task.title)}</b> '
            f'<span style="{pill}">{self.verdict}</span></div>',
            f'<div style="color:{QUIET}">{run.passed} of {len(run.results)} tests passed · {points(run.points)} of '
            f"{points(run.task.points)} points · {html.escape(whose(run.impl))}</div>",
        ]
        if not run.not_written:
            parts += [_line(result) for result in run.results if result.outcome is not Outcome.PASSED]
        if passed := [result for result in run.results if result.outcome is Outcome.PASSED]:
            parts.append(_folded("what passed", "".join(map(_line, passed))))
        if problem := run.first_problem:
            message = html.escape("\n".join(short(problem.message)))
            parts.append(f'<pre style="border-left:3px solid {colour};padding-left:8px;margin:8px 0">{message}</pre>')
            if problem.text.strip() != problem.message.strip():
                whole = html.escape(problem.text[-MAX_TEXT_CHARACTERS:])
                parts.append(_folded(f"traceback of {problem.name}", f"<pre>{whole}</pre>"))
        if self.hint_level:
            more = f'<div style="color:{QUIET}">{html.escape(self._more())}</div>' if self._more() else ""
            parts.append(
                f'<div style="border-left:3px solid {BLUE};padding-left:8px;margin-top:8px">'
                f"<b>{self._hint_title()}.</b> {html.escape(self._hint())}{more}</div>"
            )
        body = "".join(parts)
        return f'<div style="border-left:5px solid {colour};padding:4px 12px;max-width:60em">{body}</div>'

    def _hint(self) -> str:
        assert self.hint_level is not None
        return self.run.manifest.hint(self.run.task.number, self.hint_level)

    def _hint_title(self) -> str:
        return f"Hint {self.hint_level} of {len(self.run.task.hints)}"

    def _more(self) -> str:
        """How to see the next hint; nothing after the last."""
        run, level = self.run, self.hint_level or 0
        if level >= len(run.task.hints):
            return ""
        return f'The next hint: check("{run.manifest.id}.{run.task.number}", hint={level + 1})'


def whose(impl: str) -> str:
    """Whose code was looked at, in words."""
    return {"labs": "your code", "solutions": "the reference"}.get(impl, f"the code in {impl}")


def points(value: float) -> str:
    """Points to two decimals, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def short(message: str) -> list[str]:
    """The first lines of a message."""
    lines = message.strip().splitlines()
    return lines if len(lines) <= MAX_MESSAGE_LINES else [*lines[:MAX_MESSAGE_LINES], "…"]


def in_words(test: str) -> str:
    """What a test function proves, read off its name."""
    return test.removeprefix("test_").replace("_", " ")


def _line(result: FunctionResult) -> str:
    sign = f'<span style="color:{COLOURS[result.outcome]}">{SIGNS[result.outcome]}</span>'
    why = f' <span style="color:{QUIET}">({result.outcome.value})</span>'
    return f"<div>{sign} {html.escape(in_words(result.name))}{'' if result.outcome is Outcome.PASSED else why}</div>"


def _folded(title: str, body: str) -> str:
    return f'<details><summary style="color:{QUIET}">{html.escape(title)}</summary>{body}</details>'
