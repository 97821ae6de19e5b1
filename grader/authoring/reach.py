"""How far the code of a module reaches: the tasks whose tests can tell one implementation of it from another."""

from __future__ import annotations

import ast
from typing import TypeVar

from grader.authoring.stubs import solution_source, task_of_module
from labkit.manifest import Manifest

T = TypeVar("T", int, str)


def tasks_reached(manifest: Manifest, modules: set[str]) -> tuple[int, ...]:
    """Numbers of the tasks whose tests may run code of some modules, rising.

    A test runs code of its own task, of what that imports, and, where it is an integration test, of the tasks that its
    task requires.

    Args:
        manifest: the lab.
        modules: names of modules of the lab.

    Raises:
        ValueError: a module has no reference, or belongs to no task.
    """
    imports = {name: _siblings(manifest, name) for name in manifest.modules}
    reached = _closure(modules, imports)
    tasks = {task_of_module(manifest, module).number for module in reached}
    return tuple(sorted(_closure(tasks, {task.number: set(task.requires) for task in manifest.tasks})))


def _siblings(manifest: Manifest, module: str) -> set[str]:
    """The modules of the lab that one imports."""
    nodes = ast.walk(ast.parse(solution_source(manifest, module)))
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module}


def _closure(start: set[T], needs: dict[T, set[T]]) -> set[T]:
    """What is in `start`, and whatever needs something that is in here."""
    found = set(start)
    while more := {item for item, needed in needs.items() if needed & found} - found:
        found |= more
    return found
