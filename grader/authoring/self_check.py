"""The maintainer's check: stubs fail, the reference passes, and nothing that a student needs is missing."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from grader.authoring.regions import find_regions
from grader.authoring.runs import Job, SuiteRun, run_all
from grader.authoring.stubs import generate_stub, outdated_edits, solution_source, stale_stubs
from labkit.manifest import ROOT, Manifest

HINT_LEVELS = 3
SUITE_SECONDS = 300.0

SHORTEST_TELLING_LINE = 30
"""Characters from which a line of a solution, seen elsewhere, gives something away."""

_TELLS_NOTHING = re.compile(
    r"[\w, ]+ = \w+\.shape(\[[\w:]+\])?(, \w+\.shape\[[\w:]+\])*"
    r"|\w+ = torch\.empty\(.*\)"
    r"|for [\w, ]+ in enumerate\(.*\):"
)
"""Reading sizes, taking memory and walking over rows look the same in given and in missing code."""


def self_check(manifest: Manifest, *, progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """Everything that is wrong with a lab; an empty list if nothing is.

    Args:
        manifest: the lab.
        progress: told what is being checked.

    Raises:
        ValueError: the reference is missing or its markers are wrong.
    """
    progress(f"lab {manifest.id}: manifest, interface and stubs")
    found = [*manifest_faults(manifest), *stub_faults(manifest)]
    found += [f"{path} is out of date: run `make stubs`, and commit it" for path in stale_stubs(manifest)]
    for path in outdated_edits(manifest):
        # No fault: the work is a student's, and the stub behind it has changed since they began.
        progress(f"lab {manifest.id}: {path.name} is edited, and its stub has changed since: run `make update`")
    with tempfile.TemporaryDirectory(prefix="self-check-") as scratch:
        stubs = Path(scratch) / "stubs"
        stubs.mkdir()
        for module in manifest.modules:
            (stubs / f"{module}.py").write_text(generate_stub(manifest, module), encoding="utf-8")
        found += lint_faults(manifest, stubs)
        progress(f"lab {manifest.id}: every test on untouched stubs and on the reference")
        jobs = [
            Job("reference", manifest.solutions, seconds=SUITE_SECONDS),
            Job("stubs", stubs, seconds=SUITE_SECONDS),
        ]
        for run in run_all(manifest, jobs):
            found += (reference_faults if run.job.name == "reference" else untouched_faults)(manifest, run)
    return found


def manifest_faults(manifest: Manifest) -> Iterator[str]:
    """Tasks without points, tests or hints; names that don't exist."""
    where = f"lab {manifest.id}"
    written = _test_functions(manifest)
    listed = {name for task in manifest.tasks for name in task.tests}
    for name in sorted(listed - set(written)):
        yield f"{where}: lab.toml lists the test {name}, which no file in {manifest.tests_folder} defines"
    for name in sorted(set(written) - listed):
        yield f"{where}: {written[name]} defines {name}, which lab.toml lists under no task, so it earns nothing"
    for task in manifest.tasks:
        if task.points <= 0:
            yield f"{where} task {task.number}: no points"
        if not task.tests:
            yield f"{where} task {task.number}: no tests"
        if len(task.hints) != HINT_LEVELS or not all(hint.strip() for hint in task.hints):
            yield f"{where} task {task.number}: needs hints in {HINT_LEVELS} levels, none empty"
    yield from _interface_faults(manifest)


def _test_functions(manifest: Manifest) -> dict[str, str]:
    """Names of the test functions, and the file of each."""
    return {
        node.name: path.name
        for path in sorted(manifest.tests_folder.glob("test_*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _interface_faults(manifest: Manifest) -> Iterator[str]:
    trees = {module: ast.parse(solution_source(manifest, module)) for module in manifest.modules}
    defined = {
        module: {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        for module, tree in trees.items()
    }
    for name, module in manifest.interface.functions.items():
        if not isinstance(defined[module].get(name), ast.FunctionDef):
            yield f"lab {manifest.id}: the interface has the function {name}, which solutions' {module}.py lacks"
    for name, cls in manifest.interface.classes.items():
        node = defined[cls.module].get(name)
        if not isinstance(node, ast.ClassDef):
            yield f"lab {manifest.id}: the interface has the class {name}, which solutions' {cls.module}.py lacks"
            continue
        members = _members(node, cls.module, trees)
        for member in (*cls.methods, *cls.properties):
            if member not in members:
                yield f"lab {manifest.id}: the interface has {name}.{member}, which solutions' {cls.module}.py lacks"


def _members(node: ast.ClassDef, module: str, trees: Mapping[str, ast.Module]) -> set[str]:
    """What a class defines, and what it inherits from classes of the lab and from given ones in labkit."""
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    homes = {
        alias.name: item.module or ""
        for item in trees[module].body
        if isinstance(item, ast.ImportFrom) and (item.level == 1 or (item.module or "").startswith("labkit."))
        for alias in item.names
    }
    for base in node.bases:
        if not isinstance(base, ast.Name):
            continue
        home = homes.get(base.id, module)
        if home in trees:
            classes = (item for item in trees[home].body if isinstance(item, ast.ClassDef) and item.name == base.id)
            for inherited in classes:
                names |= _members(inherited, home, trees)
        elif home.startswith("labkit."):
            names |= set(dir(getattr(importlib.import_module(home), base.id)))
    return names


def stub_faults(manifest: Manifest) -> Iterator[str]:
    """Stubs that say something else than the reference, or too much."""
    for module in manifest.modules:
        solution, stub = solution_source(manifest, module), generate_stub(manifest, module)
        yield from (f"{module}.py: {fault}" for fault in [*differences(solution, stub), *leaks(solution, stub)])


def differences(solution: str, stub: str) -> Iterator[str]:
    """Signatures or docstrings of a stub that are not the reference's."""
    deleted = [region for region in find_regions(solution, "solution") if region.owner is None]
    theirs = dict(_definitions(ast.parse(stub)))
    for name, (line, form) in _definitions(ast.parse(solution)):
        if any(region.begin < line < region.end for region in deleted):
            continue
        if name not in theirs:
            yield f"the stub lacks {name}"
        elif theirs[name][1] != form:
            yield f"signature or docstring of {name} differs between reference and stub"


def _definitions(
    node: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[str, tuple[int, tuple[str | None, ...]]]]:
    """Qualified names of classes, functions and methods, with line, signature and docstring."""
    for item in node.body:
        if isinstance(item, ast.ClassDef):
            bases = [ast.unparse(base) for base in item.bases]
            yield f"{prefix}{item.name}", (item.lineno, (*bases, ast.get_docstring(item)))
            yield from _definitions(item, f"{prefix}{item.name}.")
        elif isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = [ast.unparse(decorator) for decorator in item.decorator_list]
            returns = ast.unparse(item.returns) if item.returns else None
            form = (*decorators, ast.unparse(item.args), returns, ast.get_docstring(item))
            yield f"{prefix}{item.name}", (item.lineno, form)


def leaks(solution: str, stub: str) -> Iterator[str]:
    """Telling lines of marked regions that stand in the stub all the same."""
    shown = {line.strip() for line in stub.splitlines()}
    for region in find_regions(solution, "solution"):
        for line in region.lines(solution):
            text = line.strip()
            if len(text) >= SHORTEST_TELLING_LINE and text in shown and not _TELLS_NOTHING.fullmatch(text):
                yield f"the stub shows a line of the solution: {text}"


def lint_faults(manifest: Manifest, stubs: Path) -> Iterator[str]:
    """What ruff says to stubs, by the rules for `labs/`."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        return
    for path in sorted(stubs.glob("*.py")):
        # As if it lay in `labs/`, wherever this lab does: the rules depend on the path.
        name = ROOT / "labs" / manifest.folder.name / path.name
        result = subprocess.run(
            [ruff, "check", "--quiet", "--output-format", "concise", "--stdin-filename", str(name), "-"],
            input=path.read_text(encoding="utf-8"), capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        if result.returncode != 0:
            yield f"ruff finds fault with the stub: {(result.stdout or result.stderr).strip()}"


def reference_faults(manifest: Manifest, run: SuiteRun) -> Iterator[str]:
    """Tests that the reference fails, and tests of another task than lab.toml says."""
    yield from _unfinished(run)
    for name, text in run.failed.items():
        yield f"the reference fails {name}: {text}"
    for name, case in run.cases.items():
        task = manifest.task_of_test(name)
        if task is not None and case.task != task.number:
            yield f"{name} is marked task {case.task}, but lab.toml lists it under task {task.number}"


def untouched_faults(manifest: Manifest, run: SuiteRun) -> Iterator[str]:
    """Tests that untouched stubs pass, or fail without being told which task to do."""
    yield from _unfinished(run)
    for name, case in run.cases.items():
        if case.passed:
            yield f"an untouched stub passes {name} in {case.passed} cases"
        for text in case.failures:
            if text not in case.not_attempted or f"lab {manifest.id} task " not in text:
                yield f"on an untouched stub {name} fails without naming the task to do: {text}"
                break


def _unfinished(run: SuiteRun) -> Iterator[str]:
    if run.error is not None:
        yield f"the tests could not run on the {run.job.name}: {run.error}"
    if run.timed_out is not None:
        yield f"on the {run.job.name} {run.timed_out} was still running after {run.job.seconds:.0f} s"
