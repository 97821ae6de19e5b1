"""`python -m grader update`, the command behind `make update`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from grader.authoring.history import GitFault
from grader.authoring.stub_update import Outcome
from grader.authoring.update import Plan, UpdateRefused, apply_update, plan_update
from labkit.manifest import ROOT

WHAT_TO_DO = """\
In a file with conflicts look for the lines <<<<<<<, ======= and >>>>>>>. Between the first two stands what you have,
between the last two what the new stub has. Keep what is right of both, delete the three lines, run the lab's tests."""

_COLOURS = {Outcome.CONFLICT: "red", Outcome.KEPT: "yellow"}


def update(
    root: Annotated[Path, typer.Option(help="the workbook")] = ROOT,
    fetch: Annotated[bool, typer.Option(help="ask the remote for what is new")] = True,
    check: Annotated[bool, typer.Option("--check", help="only say what would be done")] = False,
) -> None:
    """Bring the course's news here: edited files are copied, then merged; 1: some wait for you, 2: nothing was done."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        plan = plan_update(root.resolve(), fetch=fetch)
        copies = None if check else apply_update(root.resolve(), plan)
    except (GitFault, OSError, UpdateRefused, ValueError) as error:
        console.print(f"[red]not updated[/] {escape(str(error))}")
        raise typer.Exit(2) from None
    for line in _lines(plan):
        console.print(line)
    if copies is not None:
        console.print(f"your files as they were before: {escape(str(copies))}")
    if check:
        console.print("this was a look ahead; no file was changed")
    elif plan.conflicts:
        console.print(WHAT_TO_DO, markup=False)
    raise typer.Exit(1 if plan.conflicts or plan.stuck else 0)


def _lines(plan: Plan) -> list[str]:
    """What a plan comes to, a line for each file that is not simply up to date."""
    lines = [f"new version from: {escape(plan.source)}"]
    for change in plan.stubs:
        if change.outcome is not Outcome.CURRENT:
            note = f": {escape(change.note)}" if change.note else ""
            colour = _COLOURS.get(change.outcome, "green")
            lines.append(f"{escape(change.path)}: [{colour}]{change.outcome.value}[/]{note}")
    for path in plan.kept:
        show = escape(f"git show {plan.revision}:{path}")
        lines.append(f"{escape(path)}: [yellow]kept, since you changed it[/]; the course's version: {show}")
    current = sum(change.outcome is Outcome.CURRENT for change in plan.stubs)
    others = f"; of the course's other files {len(plan.written)} written, {len(plan.removed)} removed"
    return [*lines, f"{current} of {len(plan.stubs)} files of yours were up to date{others if plan.revision else ''}"]
