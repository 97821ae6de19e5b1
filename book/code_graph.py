"""The project's Python files: what each is about, and who imports whom."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SourceFile:
    """One Python file.

    Args:
        path: relative to the repository.
        summary: the first line of its docstring; empty if it has none.
        imports: files of the project that it imports, sorted.
    """

    path: Path
    summary: str
    imports: tuple[Path, ...]


class CodeGraph:
    """Files below some folders of a repository.

    Args:
        root: of the repository.
        folders: relative to it.
    """

    def __init__(self, root: Path, folders: tuple[str, ...]) -> None:
        paths = sorted(
            path.relative_to(root)
            for folder in folders
            for path in (root / folder).rglob("*.py")
            if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(root).parts)
        )
        self._modules = {_module_name(path): path for path in paths}
        self.files = {path: self._read(root, path) for path in paths}
        self._importers: dict[Path, list[Path]] = defaultdict(list)
        for path, file in self.files.items():
            for imported in file.imports:
                self._importers[imported].append(path)

    def importers(self, path: Path, below: str = "") -> list[Path]:
        """Files that import one, those below a folder."""
        return [one for one in self._importers[path] if str(one).startswith(below)]

    def _read(self, root: Path, path: Path) -> SourceFile:
        tree = ast.parse((root / path).read_text("utf-8"))
        summary = (ast.get_docstring(tree) or "").partition("\n")[0]
        imports = set[Path]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imports |= self._found(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(path.parts[: len(path.parts) - node.level]) if node.level else ""
                origin = ".".join(part for part in (base, node.module) if part)
                # What stands behind `import` may be a module of its own, or a name in its parent.
                found = self._found(f"{origin}.{alias.name}" for alias in node.names)
                imports |= found or self._found([origin])
        return SourceFile(path, summary, tuple(sorted(imports - {path})))

    def _found(self, names: Iterable[str]) -> set[Path]:
        return {self._modules[name] for name in names if name in self._modules}


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
