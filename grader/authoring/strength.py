"""Test strength: does each known wrong implementation fail its task's tests, and do right ones pass?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from grader.authoring.degenerate import KINDS, Degenerate, degenerates, write_degenerate
from grader.authoring.misconceptions import (
    Misconception,
    catalogue_folder,
    load_misconceptions,
    write_implementation,
    write_mutant,
)
from grader.authoring.reach import tasks_reached
from grader.authoring.runs import Job, SuiteRun, run_all
from labkit.manifest import Manifest

MUTANT_SECONDS = 40.0
"""A mutant that loops for ever is as good as killed; the tests of a task take a few seconds."""

WHOLE_SUITE_SECONDS = 300.0


@dataclass(frozen=True)
class Correct:
    """An implementation that is right but built otherwise than the reference."""

    name: str
    folder: Path


Entry = Misconception | Degenerate | Correct


@dataclass
class Verdict:
    """What the tests said to an entry.

    Args:
        entry: what was run.
        run: how it went.
        fault: why this is not as it must be; None if it is.
    """

    entry: Entry
    run: SuiteRun
    fault: str | None


@dataclass
class StrengthReport:
    """All verdicts of a lab."""

    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def wrong(self) -> list[Verdict]:
        """Verdicts on wrong implementations."""
        return [verdict for verdict in self.verdicts if not isinstance(verdict.entry, Correct)]

    @property
    def killed(self) -> int:
        """Wrong implementations that the tests noticed as they must."""
        return sum(verdict.fault is None for verdict in self.wrong)

    @property
    def faults(self) -> list[Verdict]:
        """Whatever is not as it must be."""
        return [verdict for verdict in self.verdicts if verdict.fault is not None]

    @property
    def timed_out(self) -> list[Verdict]:
        """Entries ended by the clock."""
        return [verdict for verdict in self.verdicts if verdict.run.timed_out is not None]


def correct_implementations(manifest: Manifest, folder: Path | None = None) -> list[Correct]:
    """The folders under `correct/` in a lab's catalogue; each holds the modules that differ from the reference."""
    folder = (folder or catalogue_folder(manifest)) / "correct"
    paths = sorted(path for path in folder.glob("*") if path.is_dir() and any(path.glob("*.py")))
    return [Correct(f"correct/{path.name}", path) for path in paths]


def all_entries(manifest: Manifest, folder: Path | None = None) -> list[Entry]:
    """Everything that a strength run tries, the longest runs first."""
    return [*correct_implementations(manifest, folder), *degenerates(manifest), *load_misconceptions(manifest, folder)]


def select(entries: list[Entry], pattern: str) -> list[Entry]:
    """The entries whose name matches a pattern with `*`.

    Raises:
        ValueError: none does.
    """
    chosen = [entry for entry in entries if fnmatchcase(entry.name, pattern)]
    if not chosen:
        raise ValueError(f"no entry is named {pattern!r}; names are: {', '.join(entry.name for entry in entries)}")
    return chosen


def measure_strength(
    manifest: Manifest, entries: list[Entry], *, parallel: int = 2, on_verdict: Callable[[Verdict], None] | None = None
) -> StrengthReport:
    """Runs the tests on every entry.

    Args:
        manifest: the lab.
        entries: what to run.
        parallel: how many run at once.
        on_verdict: told of each verdict as it comes.

    Raises:
        ValueError: an entry can't be built; nothing has run then.
    """
    report = StrengthReport()
    with tempfile.TemporaryDirectory(prefix="strength-") as scratch:
        by_name = {entry.name: entry for entry in entries}
        jobs = [_job(manifest, entry, Path(scratch) / f"{number:03}") for number, entry in enumerate(entries)]
        for run in run_all(manifest, jobs, parallel=parallel):
            entry = by_name[run.job.name]
            verdict = Verdict(entry, run, _fault(entry, run))
            report.verdicts.append(verdict)
            if on_verdict is not None:
                on_verdict(verdict)
    return report


def _job(manifest: Manifest, entry: Entry, folder: Path) -> Job:
    """Builds an entry's implementation in a folder of its own, and says what to run on it."""
    if isinstance(entry, Misconception):
        write_mutant(manifest, entry, folder)
        return Job(entry.name, folder, (entry.task,), stop_at_failure=True, seconds=MUTANT_SECONDS)
    if isinstance(entry, Degenerate):
        write_degenerate(manifest, entry, folder)
        return Job(entry.name, folder, (entry.task.number,), seconds=WHOLE_SUITE_SECONDS)
    texts = {path.stem: path.read_text(encoding="utf-8") for path in entry.folder.glob("*.py")}
    if unknown := sorted(set(texts) - set(manifest.modules)):
        raise ValueError(f"{entry.folder}: {', '.join(unknown)} is no module; they are {', '.join(manifest.modules)}")
    write_implementation(manifest, folder, texts)
    return Job(entry.name, folder, tasks_reached(manifest, set(texts)), seconds=WHOLE_SUITE_SECONDS)


def _fault(entry: Entry, run: SuiteRun) -> str | None:
    """Why a run is not as it must be, in a sentence."""
    if run.error is not None:
        return run.error
    if isinstance(entry, Correct):
        if run.timed_out is not None:
            return f"right, but {run.timed_out} took longer than {run.job.seconds:.0f} s"
        if run.failed:
            name, text = next(iter(run.failed.items()))
            return f"right, but {len(run.failed)} tests fail; {name}: {text}"
        return None
    if isinstance(entry, Degenerate):
        if run.passed:
            return f"answers {KINDS[entry.kind]}, and yet passes {', '.join(run.passed)}"
        if run.timed_out is None and (missing := _never_ran(entry, run)):
            return f"these tests did not run: {', '.join(missing)}"
        return None
    if run.failed or run.timed_out is not None:
        return None
    if skipped := [name for name, case in run.cases.items() if case.skipped]:
        return f"no test fails, but some were skipped: {', '.join(skipped)}"
    return entry.explanation


def _never_ran(entry: Degenerate, run: SuiteRun) -> list[str]:
    return [name for name in entry.task.tests if name not in run.cases]
