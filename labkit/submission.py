"""`make submit`: runs a lab's tests on the student's files, then packs exactly the files that the lab names.

The archive depends on the files alone: names in order, a fixed date, and nothing compressed, since compressors differ
from one machine to the next. So equal files have equal hashes, whoever packs them.
"""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from labkit.banned import find_banned
from labkit.implementation import implementation_folder
from labkit.manifest import ROOT, Manifest, Task, load_manifest
from labkit.result_lines import read_events

MAX_MODULE_BYTES = 1 << 20
"""The grader refuses a module that is larger."""

_DATE = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")


class NotPacked(ValueError):
    """Nothing was packed; the text says what to do first."""


@dataclass(frozen=True)
class TaskScore:
    """What a task's tests came to on this machine."""

    task: Task
    passed: int

    @property
    def points(self) -> float:
        """Each test function earns an equal share, if all of its cases pass."""
        return round(self.task.points * self.passed / len(self.task.tests), 2)


@dataclass(frozen=True)
class LocalRun:
    """A run of a lab's tests on this machine.

    Args:
        scores: in the manifest's order.
        ended_early: whether pytest did not get to its end, so that some tests did not run.
    """

    scores: tuple[TaskScore, ...]
    ended_early: bool = False

    @property
    def points(self) -> float:
        """Of all tasks."""
        return round(sum(score.points for score in self.scores), 2)

    @property
    def open_tests(self) -> int:
        """Test functions that do not pass."""
        return sum(len(score.task.tests) - score.passed for score in self.scores)


def read_modules(manifest: Manifest, folder: Path) -> dict[str, bytes]:
    """The modules of a lab as they are now.

    Args:
        manifest: names the modules.
        folder: where they lie.

    Returns:
        Contents by module, in the manifest's order.

    Raises:
        NotPacked: naming each file that is missing, no regular file, or too large.
    """
    missing, wrong = [], []
    for module in manifest.modules:
        path = folder / f"{module}.py"
        if path.is_symlink() or (path.exists() and not path.is_file()):
            wrong.append(f"{path.name} is a link or no file: put the file itself there")
        elif not path.exists():
            missing.append(path.name)
        elif path.stat().st_size > MAX_MODULE_BYTES:
            wrong.append(f"{path.name} is larger than {MAX_MODULE_BYTES >> 20} MiB, which the grader refuses")
    if missing:
        wrong.insert(0, f"missing from {folder}: {', '.join(missing)}. `make update` writes the stub of a missing file")
    if wrong:
        raise NotPacked("; ".join(wrong))
    return {module: (folder / f"{module}.py").read_bytes() for module in manifest.modules}


def modules_sha256(modules: Mapping[str, bytes]) -> str:
    """Hash of the contents of modules, as the grader's reports show it.

    Args:
        modules: contents by module, in the manifest's order.
    """
    digest = hashlib.sha256()
    for module, content in modules.items():
        digest.update(f"{module}.py {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def pack(modules: Mapping[str, bytes]) -> bytes:
    """A zip archive of modules: equal contents give equal bytes.

    Args:
        modules: contents by module.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for module in sorted(modules):
            entry = zipfile.ZipInfo(f"{module}.py", _DATE)
            entry.create_system = 3  # Unix, whose modes these are, on whatever system it is packed
            entry.external_attr = _MODE << 16
            archive.writestr(entry, modules[module])
    return packed.getvalue()


def run_tests(manifest: Manifest, impl: str, *, trust: bool = False) -> LocalRun:
    """Runs the tests of a lab in a process of their own, so that code which ends its process does not end this one.

    Args:
        manifest: the lab.
        impl: whose code; see `implementation_folder`.
        trust: allows a folder outside the workbook.
    """
    with tempfile.TemporaryDirectory(prefix="submit-") as scratch:
        lines = Path(scratch) / "results.jsonl"
        lines.touch()
        command = [sys.executable, "-m", "pytest", str(manifest.tests_folder), "-q", "-rN", "--tb=no", "--impl", impl]
        command += ["-p", "no:cacheprovider", "-p", "labkit.result_lines", "--result-lines", str(lines)]
        command += ["--trust"] if trust else []
        ended = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
        outcomes: dict[str, list[str]] = {}
        running: str | None = None
        for event in read_events(lines):
            if event["kind"] == "report":
                outcomes.setdefault(event["name"], []).append(event["outcome"])
                running = None
            else:
                running = event["name"]
    if running is not None:  # a case that was begun and never reported: it ended the process
        outcomes.setdefault(running, []).append("ended")
    passed = {name for name, ends in outcomes.items() if set(ends) == {"passed"}}
    # The exit code alone tells nothing: code under test may have chosen it.
    every = {test for task in manifest.tasks for test in task.tests}
    return LocalRun(
        tuple(TaskScore(task, sum(test in passed for test in task.tests)) for task in manifest.tasks),
        ended_early=ended.returncode not in (0, 1) or running is not None or not every <= set(outcomes),
    )


def main(
    lab: Annotated[str, typer.Option("--lab", help="two digits, e.g. 07")],
    name: Annotated[str, typer.Option(help="yours, for the name of the file; letters, digits, . _ -")] = "",
    out: Annotated[Path, typer.Option(help="the folder that the archive goes to")] = ROOT / ".out" / "submit",
    impl: Annotated[str, typer.Option(help="whose files: labs (yours), solutions, or a folder")] = "labs",
    trust: Annotated[bool, typer.Option("--trust", help="allow a folder outside the workbook")] = False,
    no_tests: Annotated[bool, typer.Option("--no-tests", help="pack without running the tests first")] = False,
) -> None:
    """Test the files of a lab, then pack them to hand in; 0: packed, whether all tests pass or not, 2: not packed."""
    if name and not _NAME.fullmatch(name):
        _refuse(f"NAME={name}: at most 80 letters, digits, dots, dashes and underscores are allowed")
    try:
        manifest = load_manifest(lab)
        folder = implementation_folder(manifest, impl, trust=trust)
        modules = read_modules(manifest, folder)
        if not no_tests:
            tell_score(manifest, run_tests(manifest, impl, trust=trust))
            if read_modules(manifest, folder) != modules:
                raise NotPacked("a file was edited while its tests ran; run it again, so that points and files agree")
        path = out / f"lab{manifest.id}{f'-{name}' if name else ''}.zip"
        out.mkdir(parents=True, exist_ok=True)
        packed = pack(modules)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_bytes(packed)
        temporary.replace(path)
    except KeyboardInterrupt:
        without = f"{sys.executable} -m labkit.submission --lab {lab} --no-tests"
        print(f"\ninterrupted, and nothing was packed; to pack without tests: {without}", file=sys.stderr)
        raise typer.Exit(130) from None
    except (OSError, ValueError) as error:
        _refuse(str(error))
    for use in find_banned(folder, manifest.modules, manifest.banned):
        print(f"the grader will not count its task: {use}")
    print(f"packed {len(modules)} files: {path} ({len(packed):,} bytes)")
    print(f"SHA-256 of the archive: {hashlib.sha256(packed).hexdigest()}")
    print(f"SHA-256 of the files, as the grader's report shows it: {modules_sha256(modules)}")


def tell_score(manifest: Manifest, run: LocalRun) -> None:
    """Prints the points of a run."""
    print()
    for score in run.scores:
        print(f"task {score.task.number:>2}  {score.task.title:<40} {score.points:>6g} of {score.task.points:g} points")
    print(f"{run.points:g} of {manifest.points:g} points on this machine; what the grader counts decides")
    if run.ended_early:
        print("the tests ended early, perhaps since a call ended their process; what did not run counts as failed here")
    if run.open_tests:
        print(f"{run.open_tests} tests do not pass; the files are packed all the same, and you can hand in again later")


def _refuse(text: str) -> NoReturn:
    print(f"not packed: {text}", file=sys.stderr)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
