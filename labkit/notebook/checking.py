"""`check("07.4")`: the tests of a task on the student's files, and the next hint."""

from __future__ import annotations

import os
from collections.abc import Callable

from labkit.implementation import implementation_folder
from labkit.manifest import Manifest, Task
from labkit.notebook.check_card import CheckCard
from labkit.notebook.last_results import LastResult, digest_of, keep_result, read_results
from labkit.notebook.naming import find_task
from labkit.notebook.show import Place
from labkit.notebook.task_run import run_task

DEFAULT_SECONDS = 600.0


def chosen_impl() -> str:
    """Whose code notebooks use: what the environment names in `IMPL`, otherwise the student's."""
    return os.environ.get("IMPL") or "labs"


def check(name: str, *, hint: int | None = None, seconds: float = DEFAULT_SECONDS) -> None:
    """Runs the tests of a task, and shows what passed, what failed first, and a hint.

    The files are read as they are on disk now; the kernel need not be restarted after an edit. `IMPL` in the
    environment says whose files they are, the student's if it is not set. The first failure brings the first hint,
    each further one on changed code the next.

    Args:
        name: lab and task, such as "07.4".
        hint: show the hint of this level instead, 1 being a nudge.
        seconds: after which the tests are ended.

    Raises:
        ValueError: there is no such lab, task, hint or implementation. Nothing was run then.
        CheckError: the tests could not be run.
    """
    manifest, task = find_task(name)
    if hint is not None:
        manifest.hint(task.number, hint)
    place = Place()
    place.wait(f"lab {manifest.id} task {task.number}: running {len(task.tests)} tests …")

    def tell(done: int) -> None:
        place.wait(f"lab {manifest.id} task {task.number}: running {len(task.tests)} tests, {done} cases done …")

    place.show(check_task(manifest, task, chosen_impl(), hint=hint, seconds=seconds, tell=tell))


def check_task(
    manifest: Manifest,
    task: Task,
    impl: str,
    *,
    hint: int | None = None,
    seconds: float = DEFAULT_SECONDS,
    tell: Callable[[int], None] = lambda done: None,
) -> CheckCard:
    """As `check`, but returns the card; what was found is remembered for `progress`."""
    run = run_task(manifest, task, impl, seconds=seconds, tell=tell)
    name = f"{manifest.id}.{task.number}"
    folder = implementation_folder(manifest, impl)
    digest = digest_of(folder / f"{module}.py" for module in task.modules)
    before = read_results(impl).get(name)
    failures = 0
    if not run.done:
        earlier = before.failures if before else 0
        # Running a cell again is no new try.
        failures = earlier if before and before.digest == digest and earlier else earlier + 1
    keep_result(impl, name, LastResult(run.passed, len(run.results), run.points, digest, failures))
    level = hint or min(failures, len(task.hints))
    return CheckCard(run, level or None)
