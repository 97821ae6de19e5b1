"""The pytest side of the labs: the `lab` fixture, `--impl`, `--task`, and messages that lead on."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from labkit.banned import find_banned
from labkit.client import LabClient, local_lab
from labkit.errors import not_attempted_text
from labkit.implementation import implementation_folder
from labkit.launch import triton_fault, use_interpreter
from labkit.manifest import Manifest, Task, available_labs, load_manifest

LabProvider = Callable[[pytest.Item, Manifest], AbstractContextManager[LabClient]]

LAB_PROVIDER: pytest.StashKey[LabProvider] = pytest.StashKey()
"""Set in `config.stash` to say where a test's lab comes from; otherwise it is `--impl` in this process."""

_TALLY: pytest.StashKey[dict[tuple[str, int], Counter[str]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of lab suites."""
    group = parser.getgroup("labs")
    group.addoption(
        "--impl",
        default=os.environ.get("IMPL") or "labs",
        help="whose code is tested: labs (the student's), solutions (the reference), or a folder",
    )
    group.addoption("--task", default=os.environ.get("TASK") or None, help="run the tests of this task only")
    group.addoption("--trust", action="store_true", help="run code from a folder outside this repository, unsandboxed")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers; sets Triton up before anything imports it, where a lab has kernels."""
    config.addinivalue_line("markers", "task(number): the lab task whose property the test proves")
    config.addinivalue_line("markers", "integration: uses the code of the tasks that its own task requires")
    tally: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    config.stash[_TALLY] = tally
    if any(manifest.interpreter for manifest in _labs_asked_for(config)):
        with contextlib.suppress(ModuleNotFoundError):  # told where the lab's tests are collected
            use_interpreter()


def _labs_asked_for(config: pytest.Config) -> Iterator[Manifest]:
    """The labs whose suites lie at or below the paths on the command line."""
    asked = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    for lab_id, folder in available_labs().items():
        tests = folder / "tests"
        if any(tests.is_relative_to(path) or path.is_relative_to(tests) for path in asked):
            yield load_manifest(lab_id)


def manifest_of(path: Path) -> Manifest | None:
    """The lab whose suite holds a test file, or None for other tests."""
    for lab_id, folder in available_labs().items():
        if path.is_relative_to(folder / "tests"):
            return load_manifest(lab_id)
    return None


def task_number(item: pytest.Item) -> int | None:
    """The number in an item's task marker."""
    marker = item.get_closest_marker("task")
    return marker.args[0] if marker else None


def _folder(config: pytest.Config, manifest: Manifest) -> Path:
    """The folder that `--impl` names for a lab.

    Raises:
        pytest.UsageError: if it cannot be used.
    """
    try:
        return implementation_folder(manifest, config.getoption("--impl"), trust=config.getoption("--trust"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of `--task` only, and refuses an `--impl` that cannot be used before any test asks for it."""
    found = [manifest_of(path) for path in {item.path for item in items}]
    manifests = [manifest for manifest in found if manifest is not None]
    if LAB_PROVIDER not in config.stash:
        for manifest in manifests:
            _folder(config, manifest)
            if manifest.interpreter and (fault := triton_fault()):
                raise pytest.UsageError(f"the kernels of lab {manifest.id} cannot run here: {fault}")
    wanted = config.getoption("--task")
    if wanted is None:
        return
    known = {task.number for manifest in manifests for task in manifest.tasks}
    if not wanted.isdecimal() or int(wanted) not in known:
        raise pytest.UsageError(f"TASK={wanted}: no such task; allowed: {', '.join(map(str, sorted(known)))}")
    keep = [item for item in items if task_number(item) == int(wanted)]
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = keep


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[LabClient]:
    """The code under test, reached only through the names that the lab's manifest declares."""
    item = request.node
    manifest = manifest_of(item.path)
    if manifest is None:
        raise pytest.UsageError(f"{item.nodeid} asks for `lab` but is not in a folder labs/*/tests")
    provider = item.config.stash.get(LAB_PROVIDER, _in_process)
    with provider(item, manifest) as client:
        yield client


def _in_process(item: pytest.Item, manifest: Manifest) -> LabClient:
    folder = _folder(item.config, manifest)
    number = task_number(item)
    modules = manifest.task(number).modules if number is not None else manifest.modules
    if uses := find_banned(folder, modules, manifest.banned):
        pytest.fail("\n".join(str(use) for use in uses), pytrace=False)
    return local_lab(manifest, folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Replaces the traceback of an untouched stub by its message, and counts results by task."""
    report: Any = yield
    manifest, number = manifest_of(item.path), task_number(item)
    if manifest is None or number is None or (report.when != "call" and not report.failed):
        return report
    if report.failed and call.excinfo is not None:
        if text := not_attempted_text(call.excinfo.value):
            report.longrepr = text
            report.not_attempted = text
        if blocker := _blocker(item, manifest.task(number), text):
            report.longrepr = f"blocked by task {blocker}: this test also uses its code.\n{report.longrepr}"
    outcome = "not attempted" if getattr(report, "not_attempted", None) else report.outcome
    item.config.stash[_TALLY][manifest.id, number][outcome] += 1
    return report


def _blocker(item: pytest.Item, task: Task, stub_text: str | None) -> int | None:
    """The required task that an integration test failed through, as far as this run can tell."""
    if item.get_closest_marker("integration") is None:
        return None
    lab_id = manifest_of(item.path).id  # type: ignore[union-attr]
    tally = item.config.stash[_TALLY]
    for number in task.requires:
        counts = tally.get((lab_id, number), Counter())
        if counts["failed"] or counts["not attempted"] or f"lab {lab_id} task {number}:" in (stub_text or ""):
            return number
    return None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line a task: how many tests pass, and the command that goes on."""
    tally = config.stash[_TALLY]
    for lab_id in sorted({lab_id for lab_id, _ in tally}):
        manifest = load_manifest(lab_id)
        impl = config.getoption("--impl")
        terminalreporter.section(f"lab {lab_id}: {manifest.title} ({impl})")
        for task in manifest.tasks:
            counts = tally.get((lab_id, task.number))
            if counts is None:
                continue
            total, passed = sum(counts.values()), counts["passed"]
            if passed == total:
                note, colour = "done", {"green": True}
            elif counts["not attempted"] == total:
                note, colour = "not attempted", {"yellow": True}
            else:
                note, colour = f"next: make hint LAB={lab_id} TASK={task.number}", {"red": True}
            line = f"task {task.number:>2}  {task.title:<36} {passed:>3}/{total:<3} tests  {note}"
            terminalreporter.write_line(line, **colour)
