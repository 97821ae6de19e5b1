"""The command line of the grader."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.panel import Panel

from labkit.manifest import ROOT, Manifest, load_manifest

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Grades submissions of a lab in a sandbox; gives hints; looks after the labs.",
)

EXIT_NEEDS_REVIEW = 3
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False, soft_wrap=True)

Lab = Annotated[str, typer.Option("--lab", help="two digits, e.g. 07")]


@app.command()
def grade(
    lab: Lab,
    submissions: Annotated[Path, typer.Option(help="a folder with one folder, .zip or .tar.gz for each student")],
    out: Annotated[Path, typer.Option(help="where report/, results.json, results.csv and journal.jsonl go")],
    jobs: Annotated[int | None, typer.Option(min=1, help="submissions at a time; default: physical cores")] = None,
    seed: Annotated[int, typer.Option(help="of what the tests draw at random; stands in the report")] = 0,
    no_sandbox: Annotated[
        bool, typer.Option("--no-sandbox", help="where no sandbox works: run submissions unprotected")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="grade this submission; may be repeated")] = None,
    cpu_seconds: Annotated[int, typer.Option(min=1, help="processor time that one test may take")] = 20,
    course: Annotated[Path, typer.Option(help="an instructor's weights and deadlines")] = ROOT / "course.toml",
) -> None:
    """Grade a folder of submissions; 0: all graded, 3: some need a person, 2: nothing was run."""
    # Imported here, so that `hint` and `--help` answer at once.
    from grader.batch import Batch, default_jobs, grade_all
    from grader.course import read_terms
    from grader.intake import find_entries
    from grader.isolation.sandbox import Limits, SandboxUnavailable, Tier, choose_tier
    from grader.reports.csv_report import write_csv
    from grader.reports.facts import run_facts
    from grader.reports.html_report import write_html
    from grader.reports.json_report import write_json
    from grader.reports.live import LiveProgress
    from grader.reports.table import remark_lines, results_table

    manifest = _manifest(lab)
    try:
        terms = read_terms(course, manifest)
        manifest = terms.weigh(manifest)
        entries = find_entries(submissions)
        if only:
            if unknown := [name for name in only if name not in entries]:
                raise ValueError(f"there is no submission {unknown[0]!r}; there are: {', '.join(entries)}")
            entries = {name: path for name, path in entries.items() if name in only}
        tier = choose_tier(no_sandbox)
        out.mkdir(parents=True, exist_ok=True)
    except SandboxUnavailable as error:
        _refuse(
            f"submissions cannot be held safely here: {error}.\n"
            "Only if you trust every author: --no-sandbox runs their code with your rights."
        )
    except (OSError, ValueError) as error:
        _refuse(str(error))
    if tier is Tier.NONE:
        warning = "NO SANDBOX: submissions run with your rights and can read and change your files."
        _err.print(Panel(warning, style="bold white on red"))
    limits = Limits(cpu_seconds=cpu_seconds)
    batch = Batch(manifest, entries, out, tier, seed, jobs or default_jobs(), limits)
    facts = run_facts(batch)  # of the suite as it is now, before the tests run
    if decided := terms.facts():
        facts["course"] = decided
    try:
        with LiveProgress(_out, len(entries)) as progress:
            results = [terms.judge(result, entries[result.name]) for result in grade_all(batch, progress)]
    except KeyboardInterrupt:
        _err.print(f"interrupted; what was graded so far stands in {out / 'journal.jsonl'}", markup=False)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    write_json(out / "results.json", facts, results)
    write_csv(out / "results.csv", manifest, results)
    pages = write_html(out, manifest, facts, results)
    _out.print(results_table(manifest, results))
    for line in remark_lines(results):
        _out.print(line, soft_wrap=True)
    _out.print(
        f"reports: {pages}, {out / 'results.json'}, {out / 'results.csv'}; journal: {out / 'journal.jsonl'} "
        f"(sandbox: {tier.value}, seed {seed})",
        markup=False,
        soft_wrap=True,
    )
    for name in terms.extensions:
        if name not in entries:
            _err.print(f"{course.name}: there is an extension for {name!r}, but no such submission", markup=False)
    review = [result.name for result in results if result.needs_review]
    if review:
        _out.print(f"{len(review)} of {len(results)} need a person: {', '.join(review)}", markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_NEEDS_REVIEW)


@app.command()
def hint(
    lab: Annotated[str, typer.Argument(help="two digits, e.g. 07")],
    task: Annotated[int, typer.Argument(help="number of the task")],
    level: Annotated[int, typer.Option(help="1 is a nudge, higher levels say more")] = 1,
) -> None:
    """Show a hint of a task."""
    from grader.hints import hint_text

    try:
        _out.print(hint_text(_manifest(lab), task, level), markup=False, width=100)
    except ValueError as error:
        _refuse(str(error))


@app.command()
def samples(
    lab: Lab,
    out: Annotated[Path, typer.Option(help="where the sample submissions go")],
    only: Annotated[
        list[str] | None, typer.Option(help="ordinary, hostile or a sample's name; may be repeated; default: all")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="the few that are graded in about a minute")] = False,
) -> None:
    """Write sample submissions whose scores are known, to see the grader at work."""
    from grader.sample_submissions import load_samples, select_samples, write_samples

    try:
        manifest = _manifest(lab)
        chosen = select_samples(load_samples(manifest), only or (), quick=quick)
        write_samples(manifest, chosen, out)
    except (OSError, ValueError) as error:
        _refuse(str(error))
    for sample in chosen:
        _out.print(f"{sample.name} ({sample.kind}): {sample.about}", markup=False, soft_wrap=True)
    _out.print(f"{len(chosen)} sample submissions of lab {lab} in {out}", markup=False, soft_wrap=True)


def main() -> None:
    """Runs the command line."""
    from grader.authoring.commands import register

    register(app)
    app()


def _manifest(lab: str) -> Manifest:
    try:
        return load_manifest(lab)
    except ValueError as error:
        _refuse(str(error))


def _refuse(text: str) -> NoReturn:
    _err.print(f"error: {text}", markup=False, style="red")
    raise typer.Exit(EXIT_USAGE)
