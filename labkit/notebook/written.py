"""Whether a module is still a stub, read off its text without running it."""

from __future__ import annotations

import ast
from pathlib import Path

from labkit.errors import NOT_ATTEMPTED_MARKER


def is_written(file: Path) -> bool:
    """Whether a file is there, is Python, and no stub is left in it.

    Args:
        file: a lab's module.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    # A stub calls something with the marker in its message: NotImplementedError, or an assertion in a kernel.
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    texts = (arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant))
    return not any(isinstance(text, str) and NOT_ATTEMPTED_MARKER in text for text in texts)
