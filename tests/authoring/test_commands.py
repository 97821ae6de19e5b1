"""The author's commands: what they print and the exit codes that scripts rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from grader.authoring import commands
from grader.authoring.degenerate import degenerates
from grader.authoring.runs import Case, Job, SuiteRun
from grader.authoring.strength import Correct, StrengthReport, Verdict
from labkit.manifest import Manifest


@pytest.fixture
def run(halves: Manifest, monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs a command on the lab of halves: gives exit code and output."""
    app = typer.Typer()
    commands.register(app)

    def load(lab_id: str) -> object:
        if lab_id != "98":
            raise ValueError(f"there is no lab {lab_id!r}; labs here: 98")
        return halves

    monkeypatch.setattr(commands, "load_manifest", load)
    monkeypatch.setattr(commands, "available_labs", lambda: {"98": halves.folder})

    def invoke(*arguments: str) -> tuple[int, str]:
        # The console keeps the stream that it was made with.
        result = CliRunner().invoke(app, list(arguments))
        return result.exit_code, result.output

    return invoke


def test_stubs_are_written_kept_and_checked(run: object, halves: Manifest) -> None:
    assert callable(run)
    code, output = run("stubs", "--check")
    assert code == 1 and "out of date: labs/98_halves/numbers.py" in output
    assert not (halves.folder / "numbers.py").exists(), "--check writes nothing"
    code, output = run("stubs")
    assert code == 0 and "labs/98_halves/numbers.py: written" in output
    code, output = run("stubs", "--lab", "98", "--check")
    assert code == 0 and "up to date" in output
    (halves.folder / "numbers.py").write_text("mine = 1\n")
    code, output = run("stubs")
    assert code == 0 and "kept" in output and "--force" in output
    assert (halves.folder / "numbers.py").read_text() == "mine = 1\n"
    code, _ = run("stubs", "--force")
    assert code == 0 and "mine" not in (halves.folder / "numbers.py").read_text()


def test_an_unknown_lab_and_wrong_markers_are_refused(run: object, halves: Manifest) -> None:
    assert callable(run)
    code, output = run("stubs", "--lab", "97")
    assert code == 2 and "there is no lab '97'" in output
    (halves.solutions / "numbers.py").write_text("# BEGIN SOLUTION\nx = 1\n")
    code, output = run("stubs")
    assert code == 2 and "numbers.py:1" in output


def test_self_check_fails_when_there_are_faults(run: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(run)
    monkeypatch.setattr(commands, "self_check", lambda manifest, progress: ["a hint is empty [1]"])
    code, output = run("self-check")
    assert code == 1 and "a hint is empty [1]" in output
    monkeypatch.setattr(commands, "self_check", lambda manifest, progress: [])
    code, output = run("self-check")
    assert code == 0 and "lab 98 is sound: 2 tasks, 2 tests" in output


def test_strength_prints_killed_and_total_and_fails_for_survivors(
    run: object, halves: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(run)
    right, wrong = Correct("correct/other", Path()), degenerates(halves)[:2]
    monkeypatch.setattr(commands, "all_entries", lambda manifest: [right, *wrong])

    def report(faults: list[str | None]) -> StrengthReport:
        ended = SuiteRun(Job("x", Path()), {"test_half": Case(1)}, 1.0)
        return StrengthReport([Verdict(e, ended, f) for e, f in zip([right, *wrong], faults, strict=True)])

    for faults, code, summary in (
        ([None, None, None], 0, "2/2 wrong implementations killed, 1/1 right ones passed"),
        ([None, None, "passes test_half"], 1, "1/2 wrong implementations killed, 1/1 right ones passed"),
        (["right, but fails", None, None], 1, "2/2 wrong implementations killed, 0/1 right ones passed"),
    ):
        monkeypatch.setattr(
            commands, "measure_strength", lambda *args, faults=faults, **kwargs: report(faults)
        )
        got, output = run("strength")
        assert got == code and summary in output, output
        for fault in filter(None, faults):
            assert fault in output
    code, output = run("strength", "--only", "nothing")
    assert code == 2 and "no entry is named 'nothing'" in output
