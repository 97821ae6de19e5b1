"""What `check_answer` shows."""

from __future__ import annotations

import html
from dataclasses import dataclass

from labkit.notebook.palette import BLUE, GREEN, ORANGE, QUIET

OPEN = "not answered yet"
RIGHT = "right"
WRONG = "not yet"


@dataclass(frozen=True)
class AnswerCard:
    """The verdict on an answer.

    Args:
        name: of the exercise.
        answered: False as long as there is no answer.
        problem: what is wrong with it, None if nothing.
        hint: for who is wrong.
    """

    name: str
    answered: bool = True
    problem: str | None = None
    hint: str = ""

    @property
    def verdict(self) -> str:
        """In a few words."""
        if not self.answered:
            return OPEN
        return RIGHT if self.problem is None else WRONG

    def as_text(self) -> str:
        """Verdict, problem and hint."""
        lines = [f"exercise {self.name}: {self.verdict}"]
        if self.problem is not None:
            lines += [f"  {self.problem}", f"  hint: {self.hint}"]
        return "\n".join(lines)

    def as_html(self) -> str:
        """The same."""
        colour = {OPEN: QUIET, RIGHT: GREEN, WRONG: ORANGE}[self.verdict]
        pill = f"background:{colour};color:white;border-radius:3px;padding:0 6px"
        parts = [f'<b>Exercise {html.escape(self.name)}</b> <span style="{pill}">{self.verdict}</span>']
        if self.problem is not None:
            parts.append(f"<div>{html.escape(self.problem)}</div>")
            parts.append(
                f'<div style="border-left:3px solid {BLUE};padding-left:8px;margin-top:4px">'
                f"<b>Hint.</b> {html.escape(self.hint)}</div>"
            )
        body = "".join(parts)
        return f'<div style="border-left:5px solid {colour};padding:4px 12px;max-width:60em">{body}</div>'
