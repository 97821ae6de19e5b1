"""Puts a student's lab files in the place of the reference's, so that the engine runs on them.

A marked module's text is the same in `labs/` and in `solutions/`: it imports only `labkit` and its siblings. So a
student's file can stand where the reference's stands, file by file; one that isn't written to its end yet is left out,
and the reference goes on doing its part.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from labkit.errors import NOT_ATTEMPTED_MARKER
from labkit.implementation import implementation_folder
from labkit.loader import SourceLoader
from labkit.manifest import Manifest, available_labs, load_manifest

VARIABLE = "ENGINE_IMPL"
"""Environment variable that names whose code the engine runs on: "labs" for the student's."""


@dataclass(frozen=True)
class Part:
    """One file of a lab, and whose it is.

    Args:
        lab: two digits.
        module: name of the file without its ending.
        package: of the reference, e.g. "kv_cache".
        path: the file that is used.
        is_student: whether that is the student's.
        why: what keeps the student's file out; empty if it is in.
    """

    lab: str
    module: str
    package: str
    path: Path
    is_student: bool
    why: str = ""

    @property
    def name(self) -> str:
        """The name that it is imported by."""
        return f"solutions.{self.package}.{self.module}"


def choose_parts(impl: str = "labs", labs: Sequence[str] | None = None, *, trust: bool = False) -> list[Part]:
    """For each file of each lab: the student's if it is written to its end, else the reference's.

    Args:
        impl: "labs", or a folder with one lab's modules.
        labs: their numbers; all of them if not given.
        trust: allows a folder outside of the workbook.

    Raises:
        ValueError: there is no such lab or folder, or a file that isn't written has no reference to fall back to.
    """
    parts = []
    for lab in labs if labs is not None else available_labs():
        manifest = load_manifest(lab)
        folder = implementation_folder(manifest, impl, trust=trust)
        parts += [_part(manifest, folder / f"{module}.py", module) for module in manifest.modules]
    return parts


def _part(manifest: Manifest, path: Path, module: str) -> Part:
    package, why = manifest.solutions.name, _what_keeps_it_out(path)
    if not why:
        return Part(manifest.id, module, package, path, is_student=True)
    reference = manifest.solutions / f"{module}.py"
    if not reference.is_file():
        task = next(task.number for task in manifest.tasks if module in task.modules)
        raise ValueError(
            f"lab {manifest.id} task {task}: {module}.py {why}, and there is no reference here to stand in"
        )
    return Part(manifest.id, module, package, reference, is_student=False, why=why)


def _what_keeps_it_out(path: Path) -> str:
    if not path.is_file():
        return "is missing"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        return f"is no Python: {error}"
    left = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and _is_marker(node.value)]
    return f"has {len(left)} parts not written yet" if len(left) > 1 else "has a part not written yet" if left else ""


def _is_marker(value: object) -> bool:
    return isinstance(value, str) and NOT_ATTEMPTED_MARKER in value and value.startswith("lab ")


class StudentCode(importlib.abc.MetaPathFinder):
    """Answers the import system's question for the modules that are the student's.

    Args:
        parts: of `choose_parts`.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._paths = {part.name: part.path for part in parts if part.is_student}

    def install(self) -> None:
        """From now on imports find the student's files.

        Raises:
            ValueError: a module that is to be replaced has been imported already.
        """
        if early := sorted(set(self._paths) & set(sys.modules)):
            raise ValueError(f"{', '.join(early)} had been imported before the student's code was put in its place")
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Undoes `install`, and forgets what was imported through it."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name in self._paths:
            sys.modules.pop(name, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Where `fullname` is, if it is one of the student's."""
        file = self._paths.get(fullname)
        if file is None:
            return None
        return importlib.util.spec_from_file_location(fullname, file, loader=SourceLoader(fullname, str(file)))


def fault_line(error: BaseException, parts: Sequence[Part]) -> str:
    """A line on what went wrong with a student's files in place: what, where, and what to do.

    Args:
        error: that was raised.
        parts: of `choose_parts`.
    """
    own = {str(part.path): part.lab for part in parts if part.is_student}
    frames = traceback.extract_tb(error.__traceback__)
    # Where their code took part; what it returned may also have broken the code that asked for it.
    frame = next((one for one in reversed(frames) if one.filename in own), frames[-1])
    labs = [own[frame.filename]] if frame.filename in own else sorted(set(own.values()))
    told = " ".join(str(error).split())
    return (
        f"on your code the engine has failed: {type(error).__name__} {told}, in {frame.filename}, line {frame.lineno}; "
        f"{' and '.join(f'make test-lab{lab}' for lab in labs)} may tell why"
    )


def use_from_environment() -> list[Part]:
    """What `ENGINE_IMPL` asks for, done: "labs" puts the student's files in place, "solutions" or nothing does not.

    Returns:
        All parts, or none if nothing was asked for.

    Raises:
        ValueError: another value, or as `StudentCode.install`.
    """
    wanted = os.environ.get(VARIABLE, "solutions")
    if wanted == "solutions":
        return []
    if wanted != "labs":
        raise ValueError(f"{VARIABLE}={wanted}: allowed are labs and solutions")
    parts = choose_parts()
    StudentCode(parts).install()
    return parts
