"""The copy of a submission that its worker sees.

Modules that are missing, or that fail when they are imported, give way to their stubs there. So the modules that import
them still load, and a syntax error in one file costs the task of that file alone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grader.authoring.stubs import generate_stub
from labkit.manifest import Manifest


@dataclass
class Staging:
    """A folder for the worker, made from a submission's.

    Args:
        manifest: the lab.
        submitted: what was taken in; stays as it is.
        folder: an empty folder, which the worker sees.
    """

    manifest: Manifest
    submitted: Path
    folder: Path
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for module in self.manifest.modules:
            file = self.submitted / f"{module}.py"
            if file.is_file():
                (self.folder / file.name).write_bytes(file.read_bytes())
            else:
                self.missing.append(module)
                self.put_stub(module)

    def put_stub(self, module: str) -> bool:
        """Puts the stub in a module's place; False if this copy of the workbook has nothing to make stubs from."""
        try:
            text = generate_stub(self.manifest, module)
        except ValueError:
            return False
        (self.folder / f"{module}.py").write_text(text, encoding="utf-8")
        return True

    def imports(self, module: str) -> set[str]:
        """Modules of the lab that a module imports, as far as its text tells."""
        try:
            tree = ast.parse((self.folder / f"{module}.py").read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return set()
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                found |= {node.module.partition(".")[0]} if node.module else {alias.name for alias in node.names}
        return (found & set(self.manifest.modules)) - {module}


@dataclass(frozen=True)
class Fault:
    """Why a module cannot be imported: by an error of its own, or through a module that it imports."""

    error: Exception
    through: str | None = None


def find_faults(staging: Staging, probe: Callable[[], Mapping[str, Exception]]) -> dict[str, Fault]:
    """Imports every module; puts stubs in the place of those that fail until the rest loads.

    Args:
        staging: the worker's folder.
        probe: imports each module anew and returns the errors of those that failed.

    Returns:
        The modules that failed. One that only failed because a module that it imports did is left out, unless it
        still fails on that one's stub.
    """
    faults: dict[str, Fault] = {}
    for _ in staging.manifest.modules:
        errors = probe()
        if not errors:
            return faults
        replaced = True
        for module in _first_to_fail(staging, errors):
            through = next((name for name in sorted(staging.imports(module)) if name in faults), None)
            faults.setdefault(module, Fault(errors[module], through))
            replaced &= staging.put_stub(module)
        if not replaced:
            for module, error in errors.items():
                faults.setdefault(module, Fault(error))
            return faults
    return faults


def _first_to_fail(staging: Staging, errors: Iterable[str]) -> list[str]:
    """Modules that fail and import none that fails; all of them if they import each other in a circle."""
    failing = set(errors)
    return [module for module in failing if not staging.imports(module) & failing] or list(failing)
