"""The merge of a student's file with a new stub keeps every line that the student wrote, whatever the two changed."""

from __future__ import annotations

import random

import pytest

from grader.authoring import stub_merge
from grader.authoring.stub_merge import Merge, MergeRefused, has_conflict_markers, merge_stub
from grader.authoring.stubs import mark_of

RAISED = 'raise NotImplementedError(\n        "lab 98 task 1: {} is not written yet. "\n        "{}"\n    )'


def stub(*bodies: str, mark: str = "0" * 16) -> str:
    """A file of functions, each with the words of its placeholder; code where they begin with "return"."""
    parts = [f"# Lab 98.\n# Generated (mark {mark}).\n" + '"""Numbers."""\n']
    for number, words in enumerate(bodies):
        body = words if words.startswith("return") else RAISED.format(f"f{number}", words)
        parts.append(f'\n\ndef f{number}(x):\n    """Function {number}."""\n    {body}\n')
    return "".join(parts)


def test_changes_of_both_sides_come_together() -> None:
    base, new = stub("Do.", "Do."), stub("Do.", "Do.", "Do.", mark="1" * 16)
    merge = merge_stub(base, stub("return 1", "Do."), new)
    assert merge == Merge(stub("return 1", "Do.", "Do.", mark="1" * 16), 0)


def test_a_written_function_does_not_clash_with_new_words_and_an_unwritten_one_gets_them() -> None:
    base, new = stub("Do.", "Do."), stub("Do it well.", "Do it well.", mark="1" * 16)
    merge = merge_stub(base, stub("return 1", "Do."), new)
    assert merge == Merge(stub("return 1", "Do it well.", mark="1" * 16), 0)


def test_comments_above_and_edits_just_below_the_header_stay() -> None:
    mine = "# by Ada\n" + stub("return 1", "Do.").replace('"""Numbers."""', '"""Ada\'s numbers."""')
    merge = merge_stub(stub("Do.", "Do."), mine, stub("Do.", "Do.", "Do.", mark="1" * 16))
    assert merge.conflicts == 0
    assert merge.text.startswith("# by Ada\n# Lab 98.\n") and '"""Ada\'s numbers."""' in merge.text
    assert mark_of(merge.text) == "1" * 16


def test_an_overlap_shows_both_sides() -> None:
    base, mine = stub("Do."), stub("return 1").replace("Function 0.", "My function.")
    merge = merge_stub(base, mine, stub("Do.").replace("Function 0.", "The function."))
    assert merge.conflicts == 1 and has_conflict_markers(merge.text)
    assert "My function." in merge.text and "The function." in merge.text
    assert not has_conflict_markers(mine)
    assert not has_conflict_markers("x = 1 <<<<<<< 2\n======= \n")


def test_a_merge_that_loses_a_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub_merge, "_merge_file", lambda mine, base, new: Merge(new, 0))
    assert merge_stub(stub("Do."), stub("Do."), stub("Do.", "Do.")).conflicts == 0
    with pytest.raises(MergeRefused, match="return 1"):
        merge_stub(stub("Do."), stub("return 1"), stub("Do.", "Do."))


def test_no_line_is_lost_in_random_edits() -> None:
    """Both sides replace, add and remove lines; what either wrote must stand in the result, or in a conflict."""
    conflicts = 0
    for seed in range(60):
        draw = random.Random(seed)
        base = edited(stub(*(["Do."] * 4)), "base", draw)
        mine, new = edited(base, "mine", draw), edited(base, "new", draw)
        merge = merge_stub(base, mine, new)
        conflicts += merge.conflicts > 0
        lines = merge.text.splitlines()
        lost = [line for text in (mine, new) for line in text.splitlines() if "by" in line and line not in lines]
        # A line of the first version may go, if one of the two took it out.
        assert not [line for line in lost if "base" not in line], f"seed {seed}"
    assert 5 < conflicts < 55, "both kinds of merges must have been tried"


def edited(text: str, who: str, draw: random.Random) -> str:
    """A few comments replaced, added or removed between the functions and above their docstrings."""
    lines = text.splitlines()
    for number in range(draw.randint(2, 5)):
        places = [n for n, line in enumerate(lines) if n > 1 and line.lstrip().startswith(("#", "def", '"""'))]
        place = draw.choice(places)
        own = f"{lines[place][: len(lines[place]) - len(lines[place].lstrip())]}# by {who} {number}"
        comment = lines[place].lstrip().startswith("#")
        if comment and draw.random() < 0.6:
            lines[place : place + 1] = [own] if draw.random() < 0.5 else []
        else:
            lines.insert(place, own)
    return "\n".join(lines) + "\n"
