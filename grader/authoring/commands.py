"""The commands around stubs: `stubs`, `self-check`, `strength`, and the student's `update`."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from grader.authoring.self_check import self_check
from grader.authoring.strength import Correct, StrengthReport, Verdict, all_entries, measure_strength, select
from grader.authoring.stubs import Outcome, stale_stubs, write_stubs
from grader.authoring.update_command import update
from labkit.manifest import Manifest, available_labs, load_manifest

Lab = Annotated[str | None, typer.Option("--lab", help="two digits; all labs if not given")]

_console = Console(highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Adds the commands to the grader's."""
    app.command("stubs")(stubs)
    app.command("self-check")(check)
    app.command("strength")(strength)
    app.command("update")(update)


def stubs(
    lab: Lab = None,
    check: Annotated[bool, typer.Option("--check", help="write nothing; fail if a stub is out of date")] = False,
    force: Annotated[bool, typer.Option("--force", help="overwrite edited files too: the edits are lost")] = False,
) -> None:
    """Write the student's files anew from the marked reference; edited ones are kept."""
    stale = 0
    for manifest in _manifests(lab):
        try:
            if check:
                paths = stale_stubs(manifest)
                stale += len(paths)
                for path in paths:
                    _console.print(f"out of date: {path.relative_to(manifest.folder.parent.parent)}")
                continue
            for report in write_stubs(manifest, force=force):
                colour = "yellow" if report.outcome is Outcome.KEPT else "green"
                name = report.path.relative_to(manifest.folder.parent.parent)
                _console.print(f"{name}: [{colour}]{report.outcome.value}[/]")
        except ValueError as error:
            _refuse(error)
    if check:
        _console.print(f"{stale} stubs are out of date: run `make stubs`" if stale else "all stubs are up to date")
        raise typer.Exit(1 if stale else 0)


def check(lab: Lab = None) -> None:
    """Check that stubs fail, the reference passes, and that nothing leaks or is missing."""
    faults = 0
    for manifest in _manifests(lab):
        try:
            found = self_check(manifest, progress=_console.print)
        except ValueError as error:
            _refuse(error)
        faults += len(found)
        for fault in found:
            _console.print(f"[red]fault[/] {escape(fault)}")
        if not found:
            count = sum(len(task.tests) for task in manifest.tasks)
            _console.print(f"[green]lab {manifest.id} is sound[/]: {len(manifest.tasks)} tasks, {count} tests")
    raise typer.Exit(1 if faults else 0)


def strength(
    lab: Lab = None,
    only: Annotated[str, typer.Option("--only", help="names of entries to run; * stands for anything")] = "*",
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="how many run at once")] = 2,
) -> None:
    """Run the tests on every known wrong implementation, and on right ones that are built differently."""
    faults = 0
    for manifest in _manifests(lab):
        try:
            entries = select(all_entries(manifest), only)
            # No refresh thread: a fork of a process with threads may inherit a lock that nobody will open.
            columns = (TextColumn("lab {task.fields[lab]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, TextColumn("{task.description}"), console=_console, auto_refresh=False) as bar:
                row = bar.add_task("", total=len(entries), lab=manifest.id)

                def tell(verdict: Verdict, bar: Progress = bar, row: object = row) -> None:
                    bar.update(row, advance=1, description=verdict.entry.name)  # type: ignore[arg-type]
                    bar.refresh()

                report = measure_strength(manifest, entries, parallel=jobs, on_verdict=tell)
        except ValueError as error:
            _refuse(error)
        _print_report(manifest, report)
        faults += len(report.faults)
    raise typer.Exit(1 if faults else 0)


def _print_report(manifest: Manifest, report: StrengthReport) -> None:
    for verdict in report.timed_out:
        _console.print(f"[yellow]out of time[/] {verdict.entry.name}: {verdict.run.timed_out}")
    for verdict in report.faults:
        kind = "rejected" if isinstance(verdict.entry, Correct) else "survived"
        _console.print(f"[red]{kind}[/] {verdict.entry.name}: {escape(verdict.fault or '')}")
    right = [verdict for verdict in report.verdicts if isinstance(verdict.entry, Correct)]
    passed = sum(verdict.fault is None for verdict in right)
    _console.print(
        f"lab {manifest.id}: {report.killed}/{len(report.wrong)} wrong implementations killed, "
        f"{passed}/{len(right)} right ones passed"
    )


def _manifests(lab: str | None) -> list[Manifest]:
    try:
        return [load_manifest(lab_id) for lab_id in ([lab] if lab is not None else available_labs())]
    except ValueError as error:
        _refuse(error)


def _refuse(error: ValueError) -> NoReturn:
    _console.print(f"[red]error[/] {escape(str(error))}")
    raise typer.Exit(2)
