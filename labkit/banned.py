"""Names that a lab does not allow, found in the source text without running it.

A finding is a flag with a line number. It is one defence among several: a determined student can hide a call from it,
which the record of operators that ran and a reader's eye are for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ALWAYS_BANNED = ("solutions", "grader")
"""Packages of the workbook that hold answers; no lab module needs them."""


@dataclass(frozen=True)
class BannedUse:
    """One use of a banned name."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} uses {self.name}, which this lab does not allow"


def find_banned(folder: Path, modules: Iterable[str], banned: Iterable[str]) -> list[BannedUse]:
    """Looks through lab modules for banned names, import aliases resolved.

    Args:
        folder: where the modules lie; missing and unparsable ones are passed over, importing them tells more.
        modules: names without .py.
        banned: dotted names, e.g. "torch.nn.functional.scaled_dot_product_attention". The last part alone is also
            matched as an attribute of anything, and as a string handed to getattr.
    """
    names = (*banned, *ALWAYS_BANNED)
    found = []
    for module in modules:
        path = folder / f"{module}.py"
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        found += [BannedUse(path.name, line, name) for line, name in _uses(tree, names)]
    return found


def _uses(tree: ast.Module, banned: tuple[str, ...]) -> list[tuple[int, str]]:
    # Of names with the same last part the first one listed stands for all.
    members = {name.rpartition(".")[2]: name for name in reversed(banned) if "." in name}
    packages = {name for name in banned if "." not in name}
    uses = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dotted = [f"{node.module or ''}.{alias.name}" for alias in node.names] if node.level == 0 else []
        elif isinstance(node, ast.Attribute):
            dotted = [f".{node.attr}"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A whole string, as in getattr(F, "name"); prose that mentions the name is longer.
            dotted = [f".{node.value}"]
        else:
            continue
        for name in dotted:
            if (member := name.rpartition(".")[2]) in members:
                uses.add((node.lineno, members[member]))
            if name.partition(".")[0] in packages:
                uses.add((node.lineno, name.partition(".")[0]))
    return sorted(uses)
