"""The catalogue: every entry of lab 07 is usable, and unusable ones are refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grader.authoring.degenerate import KINDS, degenerates, write_degenerate
from grader.authoring.misconceptions import (
    CatalogueError,
    Misconception,
    load_misconceptions,
    mutated_source,
    write_mutant,
)
from grader.authoring.stubs import solution_source
from labkit.manifest import Manifest, load_manifest

LAB = load_manifest("07")
ENTRIES = load_misconceptions(LAB)


def entry(find: str, put: str = "pass", occurrence: int = 0) -> Misconception:
    """An entry for the lab of halves."""
    return Misconception("odd", 1, "numbers", find, put, "why", "what?", occurrence)


def test_the_first_four_tasks_of_lab_07_have_many_entries_each() -> None:
    counts = {task.number: sum(e.task == task.number for e in ENTRIES) for task in LAB.tasks}
    assert min(counts[number] for number in (1, 2, 3, 4)) >= 10, counts


@pytest.mark.parametrize("misconception", ENTRIES, ids=lambda e: e.name)
def test_every_entry_of_lab_07_is_usable(misconception: Misconception) -> None:
    # Raises if the text isn't there or the result is no Python.
    mutated_source(solution_source(LAB, misconception.module), misconception)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", misconception.name), "names are in kebab case"
    assert misconception.question.rstrip().endswith(("?", ".")), "the question should ask or lead on"
    assert misconception.explanation.rstrip().endswith(".")


def test_no_two_entries_make_the_same_edit() -> None:
    edits = [(e.module, mutated_source(solution_source(LAB, e.module), e)) for e in ENTRIES]
    assert len(set(edits)) == len(edits), [
        e.name for e, edit in zip(ENTRIES, edits, strict=True) if edits.count(edit) > 1
    ]


def test_an_edit_changes_its_place_and_nothing_else(halves: Manifest, tmp_path: Path) -> None:
    source = solution_source(halves, "numbers")
    folder = write_mutant(halves, entry("(number, 2)", "(number, 3)"), tmp_path / "mutant")
    assert (folder / "numbers.py").read_text() == source.replace("(number, 2)", "(number, 3)")
    assert (folder / "boxes.py").read_text() == solution_source(halves, "boxes")
    second = mutated_source(source, entry("operator", "math", occurrence=2))
    assert "import operator" in second and "math.floordiv" in second


@pytest.mark.parametrize(
    ("odd", "complaint"),
    [
        (entry("no such text"), "isn't in any marked region"),
        (entry("if number < 0"), "stands outside of them"),
        (entry("operator"), "stands 2 times"),
        (entry("operator", occurrence=3), "there are 2"),
        (entry("(number, 2)", "(number,"), "no Python"),
        (entry("(number, 2)", "(number, 2)"), "changes nothing"),
    ],
)
def test_unusable_edits_are_refused(halves: Manifest, odd: Misconception, complaint: str) -> None:
    with pytest.raises(CatalogueError, match=re.escape(complaint)) as caught:
        mutated_source(solution_source(halves, "numbers"), odd)
    assert "misconception odd (numbers.py)" in str(caught.value)


GOOD = '[[misconception]]\nname = "a-b"\nfind = "edge"\nreplace = "1"\nexplanation = "Why."\nquestion = "What?"\n'


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("numbers", GOOD + GOOD, "names used twice: a-b"),
        (
            "numbers",
            GOOD.replace('question = "What?"', ""),
            "entry 1 (a-b): these must be given as text: question",
        ),
        ("numbers", GOOD.replace("What?", " "), "empty: question"),
        ("numbers", GOOD + "hint = 1\n", "unknown fields: hint"),
        ("numbers", GOOD + 'occurrence = "first"\n', "occurrence must be an int"),
        ("numbers", "[[misconception]\n", "needs [[misconception]] tables"),
        ("numbers", "", "needs [[misconception]] tables"),
        ("elsewhere", GOOD, "elsewhere is no module; they are numbers, boxes"),
    ],
)
def test_malformed_files_are_refused(
    halves: Manifest, tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    folder = tmp_path / "malformed"
    folder.mkdir()
    (folder / f"{name}.toml").write_text(text)
    with pytest.raises(CatalogueError, match=re.escape(complaint)):
        load_misconceptions(halves, folder)


def test_a_non_answer_of_each_kind_is_built_for_each_task(tmp_path: Path) -> None:
    entries = degenerates(LAB)
    assert len({e.name for e in entries}) == len(KINDS) * len(LAB.tasks)
    for number, degenerate in enumerate(entries):
        folder = write_degenerate(LAB, degenerate, tmp_path / str(number))
        for module in LAB.modules:
            text = (folder / f"{module}.py").read_text()
            compile(text, f"{degenerate.name}/{module}.py", "exec")
            spoilt = text != solution_source(LAB, module)
            assert spoilt == (module in degenerate.task.modules), f"{degenerate.name}: {module}.py"
