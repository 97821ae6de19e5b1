"""A change in one module is looked at by the tests of every task that can notice it, and by no others."""

from __future__ import annotations

import pytest

from grader.authoring.reach import tasks_reached
from labkit.manifest import Manifest, load_manifest


def test_importers_and_tasks_that_require_it_are_reached(halves: Manifest) -> None:
    assert tasks_reached(halves, {"numbers"}) == (1, 2)
    assert tasks_reached(halves, {"boxes"}) == (2,)


def test_it_is_followed_over_several_steps() -> None:
    lab = load_manifest("07")
    assert tasks_reached(lab, {"regex"}) == (13,)
    # Task 10 needs 9, which needs 7, where blocks are handed out; no module of task 13 or of what it needs does.
    assert {7, 8, 9, 10} <= set(tasks_reached(lab, {"blocks"}))
    assert 13 not in tasks_reached(lab, {"blocks"})
    assert tasks_reached(lab, set(lab.modules)) == tuple(task.number for task in lab.tasks)


def test_a_module_of_no_task_is_refused(halves: Manifest) -> None:
    with pytest.raises(ValueError, match="thirds"):
        tasks_reached(halves, {"thirds"})
