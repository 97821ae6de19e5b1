"""Implementations that understand nothing: no test function may be content with them.

All but the stub call the right code and then give something else of the same form, so that a test which looks at shapes
only, or which bad input alone decides, shows itself.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from grader.authoring.misconceptions import write_implementation
from grader.authoring.stubs import generate_stub, solution_source
from labkit.manifest import Manifest, Task

KINDS = {
    "stub": "the untouched stub",
    "zeros": "zeros of the right shape",
    "echo": "its own arguments",
    "nan": "NaN of the right shape",
    "cached": "its first answer ever, whatever it is asked",
    "refuses": "a ValueError to every call",
}
"""Each kind and what every function answers."""

_PRELUDE = Path(__file__).with_name("degenerate_prelude.txt")


@dataclass(frozen=True)
class Degenerate:
    """A kind of non-answer given by all of a task's code."""

    kind: str
    task: Task

    @property
    def name(self) -> str:
        """What to call it."""
        return f"task-{self.task.number}-{self.kind}"


def degenerates(manifest: Manifest) -> list[Degenerate]:
    """Every kind for every task of a lab."""
    return [Degenerate(kind, task) for task in manifest.tasks for kind in KINDS]


def write_degenerate(manifest: Manifest, entry: Degenerate, folder: Path) -> Path:
    """Writes a lab whose other tasks are right and whose one task gives non-answers; returns the folder."""
    modules = {module: _source(manifest, module, entry.kind) for module in entry.task.modules}
    return write_implementation(manifest, folder, modules)


def _source(manifest: Manifest, module: str, kind: str) -> str:
    if kind == "stub":
        return generate_stub(manifest, module)
    source = solution_source(manifest, module)
    interface = manifest.interface
    functions = [name for name, home in interface.functions.items() if home == module]
    members = {
        name: [*sorted(_defined(source, name) & {*cls.methods, *cls.properties, "__init__"})]
        for name, cls in interface.classes.items()
        if cls.module == module
    }
    prelude = _PRELUDE.read_text(encoding="utf-8")
    return f"{source}\n\n{prelude}\n_spoil({kind!r}, {module!r}, {functions!r}, {members!r})\n"


def _defined(source: str, class_name: str) -> set[str]:
    """Names of the functions in a class."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    return set()
