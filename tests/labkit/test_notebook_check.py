"""`check` and `progress`: what a student is told about a task, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from labkit.implementation import implementation_folder
from labkit.manifest import Manifest, Task
from labkit.notebook import check, progress
from labkit.notebook.check_card import CheckCard
from labkit.notebook.checking import check_task
from labkit.notebook.naming import find_task
from labkit.notebook.progress_card import ProgressCard, progress_card
from labkit.notebook.show import Place
from labkit.notebook.task_run import CheckError, FunctionResult, Outcome, TaskRun
from labkit.paths import cache_dir

RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a * b\n"


def checked(toy: Manifest, number: int = 1, impl: str = "labs", **options: float) -> CheckCard:
    return check_task(toy, toy.task(number), impl, **options)  # type: ignore[arg-type]


def write(toy: Manifest, text: str) -> None:
    (toy.folder / "sums.py").write_text(text)


def card(toy: Manifest, impl: str = "labs") -> ProgressCard:
    return progress_card(impl, root=toy.folder.parent.parent)


@pytest.fixture
def swift(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of pytest in another process: the same verdicts at once, for tests of what is made of them."""

    def run(manifest: Manifest, task: Task, impl: str, **options: object) -> TaskRun:
        names: dict[str, Callable[[int, int], int]] = {}
        exec((implementation_folder(manifest, impl) / "sums.py").read_text(), names)  # the toy's own text
        pairs = {"test_add": (1, 2), "test_add_negative": (-1, -2), "test_box": (0, 1)}

        def result(test: str) -> FunctionResult:
            try:
                passed = names["add"](*pairs[test]) == sum(pairs[test])
            except NotImplementedError as error:
                return FunctionResult(test, Outcome.NOT_WRITTEN, str(error), str(error))
            return FunctionResult(test, Outcome.PASSED if passed else Outcome.FAILED)

        return TaskRun(manifest, task, impl, tuple(map(result, task.tests)))

    monkeypatch.setattr("labkit.notebook.checking.run_task", run)


def test_an_untouched_stub_is_not_written_yet_and_brings_the_first_hint(toy: Manifest) -> None:
    told = checked(toy)
    assert told.verdict == "not written yet" and told.run.points == 0
    for face in (told.as_text(), told.as_html()):
        assert "lab 98 task 1: add is not written yet" in face
        assert "a nudge" in face and "a push" not in face
        assert "hint=2" in face, "how to see the next hint is not told"


def test_the_reference_has_passed(toy: Manifest) -> None:
    told = checked(toy, impl="solutions")
    assert told.run.done and told.verdict == "done"
    assert "2 of 2 tests passed, 10 of 10 points" in told.as_text() and "the reference" in told.as_text()
    assert "int" not in told.as_text().split("points")[1], "no hint for a task that is done"
    assert "add negative" in told.as_html(), "the tests that passed are listed in words"


def test_files_are_read_anew_and_each_failure_on_changed_code_brings_the_next_hint(toy: Manifest, swift: None) -> None:
    assert checked(toy).hint_level == 1
    assert checked(toy).hint_level == 1, "running a cell again is no new try"
    write(toy, WRONG)
    assert checked(toy).hint_level == 2
    assert checked(toy, hint=1).hint_level == 1, "the hint asked for is the one shown"
    for tries, level in ((3, 3), (4, 3)):
        write(toy, WRONG + "#" * tries)
        assert checked(toy).hint_level == level
    write(toy, RIGHT)
    told = checked(toy)
    assert told.run.done and told.hint_level is None
    write(toy, WRONG)
    assert checked(toy).hint_level == 1, "a success does not begin anew"


def test_a_failure_shows_what_failed_first_and_why(toy: Manifest) -> None:
    write(toy, "def add(a, b):\n    return abs(a) + abs(b)\n")
    told = checked(toy)
    assert told.verdict == "not yet" and told.run.passed == 1 and told.run.points == 5
    assert "✗ test_add_negative" in told.as_text() and "✗ test_add\n" not in told.as_text()
    assert "assert 3 == -3" in told.as_text() and "Traceback" not in told.as_text()
    write(toy, WRONG)
    told = checked(toy)
    assert [result.outcome for result in told.run.results] == [Outcome.FAILED, Outcome.FAILED]
    markup = told.as_html()
    assert "<b>addition</b>" not in markup and "&lt;b&gt;addition&lt;/b&gt; is off" in markup


def test_code_that_does_not_end_is_ended(toy: Manifest) -> None:
    write(toy, "def add(a, b):\n    while b != -2: pass\n    return a + b\n")
    for seconds in (5, 20, 80):  # the least that lets this machine begin
        told = checked(toy, seconds=seconds)
        first, second = told.run.results
        if first.outcome is not Outcome.NOT_RUN:
            break
    assert first.outcome is Outcome.FAILED and "loop without end" in first.message
    assert second.outcome is Outcome.NOT_RUN and told.hint_level == 1


def test_an_interrupted_check_leaves_nothing_running(toy: Manifest) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt):
        check_task(toy, toy.task(1), "labs", tell=interrupt)
    assert not set(psutil.Process().children(recursive=True)) - before
    assert not cache_dir().exists(), "half a result was remembered"


def test_a_suite_that_can_not_run_is_no_verdict_on_the_student(toy: Manifest) -> None:
    (toy.tests_folder / "test_toy.py").write_text("import pytest\nmark.task(1\n")
    with pytest.raises(CheckError, match=r"could not be run; pytest says:(.|\n)*SyntaxError"):
        checked(toy)
    assert not cache_dir().exists()


def test_a_syntax_error_is_a_failure_with_its_line(toy: Manifest) -> None:
    write(toy, "def add(a, b:\n    return a + b\n")
    told = checked(toy)
    assert told.verdict == "not yet" and "sums.py" in told.as_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("7.4", "names no task"),
        ("07", "names no task"),
        (7.4, "names no task"),
        ("97.1", "no lab '97'; labs here: "),
        ("07.99", "lab 07 has no task 99; its tasks are 1, 2, 3"),
    ],
)
def test_what_names_no_task_is_refused(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, task = find_task("07.4")
    assert (manifest.id, task.number) == ("07", 4)
    monkeypatch.setattr("labkit.notebook.checking.run_task", lambda *args, **options: pytest.fail("tests were run"))
    with pytest.raises(ValueError, match=words):
        check(name)


def test_hints_and_implementations_that_do_not_exist_are_refused_before_anything_runs(
    toy: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="hints of level 1 to 3, not 4"):
        check("07.4", hint=4)
    with pytest.raises(ValueError, match="no such folder; allowed: labs, solutions"):
        checked(toy, impl="nowhere")
    with pytest.raises(ValueError, match="no lab '97'"):
        progress("97")
    monkeypatch.setenv("IMPL", "nowhere")
    with pytest.raises(ValueError, match="no such folder"):
        progress("07")
    assert not cache_dir().exists(), "a refused call was remembered"


def test_outside_a_notebook_cards_are_printed_once(toy: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place()
    place.wait("running …")
    place.show(card(toy))
    printed = capsys.readouterr().out
    assert "running" not in printed and printed.count("Lab 98, toy") == 1 and "<" not in printed


def test_progress_tells_what_is_done_and_what_comes_next(toy: Manifest, swift: None) -> None:
    before = card(toy).as_text()
    assert "not written yet" in before and "0 of 15 points" in before
    assert 'Next: task 98.1, Sums. Write sums.py, then check("98.1")' in before

    write(toy, "def add(a, b):\n    return abs(a) + abs(b)\n")
    assert "not checked yet" in card(toy).as_text()
    checked(toy)
    half = card(toy)
    assert "1 of 2 tests" in half.as_text() and "5 of 15 points" in half.as_text()
    assert "██████████░░░░░░░░░░" in half.as_text() and "width:50%" in half.as_html()
    assert 'Next: task 98.1, Sums: check("98.1")' in half.as_text()

    write(toy, RIGHT)
    assert "edited since the last check" in card(toy).as_text(), "an old result is shown as if it were new"
    checked(toy)
    assert "Next: task 98.2" in card(toy).as_text() and "Boxes (stretch)" in card(toy).as_text()
    checked(toy, 2)
    assert "15 of 15 points" in card(toy).as_text() and "All tasks are done." in card(toy).as_html()
    assert "0 of 15 points" in card(toy, "solutions").as_text(), "the reference is credited with the student's results"


def test_a_damaged_memory_is_an_empty_one(toy: Manifest, swift: None) -> None:
    checked(toy, impl="solutions")
    (memory,) = cache_dir().iterdir()
    good = memory.read_text()
    for damaged in ("", "[1]", '{"solutions": 3}', '{"solutions": {"98.1": {"passed": "x"}}}', good[: len(good) // 2]):
        memory.write_text(damaged)
        assert "0 of 15 points" in card(toy, "solutions").as_text(), damaged
    checked(toy, impl="solutions")
    assert "10 of 15 points" in card(toy, "solutions").as_text()


def test_where_nothing_can_be_remembered_a_check_still_tells(
    toy: Manifest, swift: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = toy.folder / "a file, no folder"
    blocked.write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(Path(blocked)))
    assert checked(toy, impl="solutions").run.done
