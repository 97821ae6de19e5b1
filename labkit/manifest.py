"""A lab's manifest, `lab.toml`: its modules, tasks, points, tests, hints and the interface that tests may use."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Task:
    """One task of a lab.

    Args:
        number: 1, 2, …
        title: a few words.
        goal: one sentence of what to do; ends the message of a stub.
        points: what all its tests together earn.
        requires: numbers of the tasks whose code its integration tests use.
        modules: the files, without .py, in which its code stands.
        tests: names of its test functions; each earns an equal share of the points.
        hints: from a nudge to nearly the answer.
        stretch: beyond the core of the lab; graded like any other task, and marked as such wherever tasks are listed.
    """

    number: int
    title: str
    goal: str
    points: float
    requires: tuple[int, ...]
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    hints: tuple[str, ...]
    stretch: bool = False


@dataclass(frozen=True)
class LabClass:
    """A class of a lab: where it stands and which of its members tests may use."""

    module: str
    methods: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()


@dataclass(frozen=True)
class Interface:
    """The names through which tests reach a lab: functions by module, and classes."""

    functions: dict[str, str]
    classes: dict[str, LabClass]

    @property
    def methods(self) -> frozenset[str]:
        """Methods of any class."""
        return frozenset(name for cls in self.classes.values() for name in cls.methods)

    @property
    def properties(self) -> frozenset[str]:
        """Properties of any class."""
        return frozenset(name for cls in self.classes.values() for name in cls.properties)

    def module_of(self, name: str) -> str | None:
        """The module that defines a function or class, or None if the interface has no such name."""
        return self.classes[name].module if name in self.classes else self.functions.get(name)

    def __str__(self) -> str:
        return ", ".join(sorted([*self.functions, *self.classes]))


@dataclass(frozen=True)
class Manifest:
    """Everything about a lab that is not code."""

    id: str
    title: str
    folder: Path
    solutions: Path
    modules: tuple[str, ...]
    banned: tuple[str, ...]
    tasks: tuple[Task, ...]
    interface: Interface

    @property
    def tests_folder(self) -> Path:
        """The pytest suite."""
        return self.folder / "tests"

    @property
    def points(self) -> float:
        """What a complete submission earns."""
        return sum(task.points for task in self.tasks)

    def task(self, number: int) -> Task:
        """The task of that number.

        Raises:
            ValueError: if the lab has none.
        """
        for task in self.tasks:
            if task.number == number:
                return task
        numbers = ", ".join(str(task.number) for task in self.tasks)
        raise ValueError(f"lab {self.id} has no task {number}; its tasks are {numbers}")

    def hint(self, task_number: int, level: int) -> str:
        """One hint of a task.

        Args:
            task_number: one of the lab's tasks.
            level: 1 for a nudge; higher ones say more.

        Raises:
            ValueError: if there is no such task or level.
        """
        hints = self.task(task_number).hints
        if not 1 <= level <= len(hints):
            raise ValueError(f"lab {self.id} task {task_number} has hints of level 1 to {len(hints)}, not {level}")
        return hints[level - 1]

    def test_files(self, task_number: int | None = None) -> list[Path]:
        """The files that may hold tests of a task, told by their text; the whole folder if they can't be told."""
        mark = f"mark.task({task_number})"
        files = [path for path in sorted(self.tests_folder.glob("test_*.py")) if mark in path.read_text("utf-8")]
        return files or [self.tests_folder]

    def task_of_test(self, function_name: str) -> Task | None:
        """The task that a test function belongs to, or None if the manifest does not list it."""
        return next((task for task in self.tasks if function_name in task.tests), None)


class ManifestError(ValueError):
    """A `lab.toml` that does not say what it must; the text names the file and the field."""


def available_labs(root: Path = ROOT) -> dict[str, Path]:
    """Lab ids and their folders, in order: every folder of `labs/` with a `lab.toml`."""
    return {path.parent.name[:2]: path.parent for path in sorted((root / "labs").glob("[0-9][0-9]_*/lab.toml"))}


@cache
def load_manifest(lab_id: str, root: Path = ROOT) -> Manifest:
    """Reads and checks the manifest of a lab.

    Args:
        lab_id: two digits, e.g. "07".
        root: the repository.

    Raises:
        ValueError: if there is no such lab.
        ManifestError: if its manifest is malformed or contradicts itself.
    """
    folders = available_labs(root)
    if lab_id not in folders:
        raise ValueError(f"there is no lab {lab_id!r}; labs here: {', '.join(folders) or 'none'}")
    path = folders[lab_id] / "lab.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        manifest = _read(data, folders[lab_id], root)
    except (KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise ManifestError(f"{path}: {type(error).__name__} {error}") from error
    for complaint in _complaints(manifest):
        raise ManifestError(f"{path}: {complaint}")
    return manifest


def _read(data: dict[str, Any], folder: Path, root: Path) -> Manifest:
    lab, interface = data["lab"], data["interface"]
    tasks = [
        Task(
            number=task["number"],
            title=task["title"],
            goal=task["goal"],
            points=task["points"],
            requires=tuple(task.get("requires", ())),
            modules=tuple(task["modules"]),
            tests=tuple(task["tests"]),
            hints=tuple(task["hints"]),
            stretch=bool(task.get("stretch", False)),
        )
        for task in data["task"]
    ]
    classes = {
        name: LabClass(entry["module"], tuple(entry.get("methods", ())), tuple(entry.get("properties", ())))
        for name, entry in interface.get("classes", {}).items()
    }
    return Manifest(
        id=lab["id"],
        title=lab["title"],
        folder=folder,
        solutions=root / "solutions" / lab["solutions"],
        modules=tuple(lab["modules"]),
        banned=tuple(lab.get("banned", ())),
        tasks=tuple(tasks),
        interface=Interface(dict(interface.get("functions", {})), classes),
    )


def _complaints(manifest: Manifest) -> list[str]:
    found = []
    if manifest.id != manifest.folder.name[:2]:
        found.append(f"lab.id is {manifest.id!r}, but the folder is {manifest.folder.name}")
    numbers = [task.number for task in manifest.tasks]
    if numbers != sorted(set(numbers)) or any(number < 1 for number in numbers):
        found.append(f"tasks are numbered {numbers}; number them from 1 upwards, each once, in order")
    tests = [name for task in manifest.tasks for name in task.tests]
    if repeated := sorted({name for name in tests if tests.count(name) > 1}):
        found.append(f"tests listed twice: {', '.join(repeated)}")
    for task in manifest.tasks:
        if task.points <= 0 or not task.tests or not task.hints:
            found.append(f"task {task.number} needs points, tests and hints")
        if unknown := set(task.modules) - set(manifest.modules):
            found.append(f"task {task.number} names unknown modules: {', '.join(sorted(unknown))}")
        if any(number >= task.number for number in task.requires):
            found.append(f"task {task.number} requires {list(task.requires)}; only earlier tasks can be required")
    homes = {*manifest.interface.functions.values(), *(c.module for c in manifest.interface.classes.values())}
    if unknown := homes - set(manifest.modules):
        found.append(f"the interface names unknown modules: {', '.join(sorted(unknown))}")
    if both := manifest.interface.methods & manifest.interface.properties:
        found.append(f"both method and property: {', '.join(sorted(both))}")
    return found
