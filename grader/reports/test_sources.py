"""The source of the tests that a report shows."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from labkit.manifest import Manifest

MAX_SOURCE_CHARACTERS = 6_000


@dataclass(frozen=True)
class TestSource:
    """Where a test stands and what it says.

    Args:
        file: the file's name.
        line: of the first line shown, decorators included.
        text: its source, cut if it is very long.
        about: the first sentence of its docstring, or nothing.
    """

    __test__ = False  # not a class of tests, whatever pytest makes of its name

    file: str
    line: int
    text: str
    about: str = ""


def test_sources(manifest: Manifest) -> dict[str, TestSource]:
    """The sources of a lab's tests by the function's name; only those that the manifest lists."""
    listed = {name for task in manifest.tasks for name in task.tests}
    return {
        name: source
        for path in sorted(manifest.tests_folder.glob("*.py"))
        for name, source in _functions(path).items()
        if name in listed
    }


test_sources.__test__ = False  # type: ignore[attr-defined]


def _functions(path: Path) -> dict[str, TestSource]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            source = "\n".join(lines[first - 1 : node.end_lineno])
            if len(source) > MAX_SOURCE_CHARACTERS:
                source = source[: MAX_SOURCE_CHARACTERS - 1] + "…"
            about = (ast.get_docstring(node) or "").partition("\n\n")[0]
            found[node.name] = TestSource(path.name, first, source, " ".join(about.split()))
    return found
