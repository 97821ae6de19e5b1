"""Mounts a folder of lab modules as a package, whoever wrote them.

The student's folder, the reference's, a mutant's or a stranger's: each is imported as `lab07`, so the same text works
in every place. Only the modules that the manifest names can be imported, from source and never from a stale `.pyc`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, ModuleType


class SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles the file as it is now; a cached `.pyc` is too old if an edit keeps size and second."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True)


class LabPackage(importlib.abc.MetaPathFinder):
    """A mounted lab.

    Args:
        name: the package's name while mounted, e.g. "lab07".
        folder: where the modules lie.
        modules: names that may be imported from it.

    Raises:
        FileNotFoundError: if the folder does not exist.
    """

    def __init__(self, name: str, folder: Path, modules: Iterable[str]) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder; give the folder that holds the lab's modules")
        self.name = name
        self.folder = folder.resolve()
        self.modules = tuple(modules)

    def mount(self) -> None:
        """Makes the package importable; replaces whatever was mounted under its name."""
        for finder in [f for f in sys.meta_path if isinstance(f, LabPackage) and f.name == self.name]:
            finder.unmount()
        package = ModuleType(self.name)
        package.__path__ = [str(self.folder)]
        sys.modules[self.name] = package
        sys.meta_path.insert(0, self)
        linecache.checkcache()

    def unmount(self) -> None:
        """Forgets the package and its modules."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            for name in [n for n in sys.modules if n == self.name or n.startswith(f"{self.name}.")]:
                del sys.modules[name]

    def module(self, name: str) -> ModuleType:
        """Imports a module of the package.

        Raises:
            ModuleNotFoundError: if the file is missing.
            Exception: whatever the module's own code raises.
        """
        return importlib.import_module(f"{self.name}.{name}")

    def file_of(self, module: str) -> Path:
        """Where a module's text lies."""
        return self.folder / f"{module}.py"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The import system's question: where is `fullname`?"""
        package, _, module = fullname.partition(".")
        if package != self.name or not module:
            return None
        if module not in self.modules:
            raise ModuleNotFoundError(
                f"{fullname} is not part of the lab; its modules are {', '.join(self.modules)}", name=fullname
            )
        file = self.file_of(module)
        if not file.is_file():
            raise ModuleNotFoundError(f"{file.name} is missing from {file.parent}", name=fullname)
        return importlib.util.spec_from_file_location(fullname, file, loader=SourceLoader(fullname, str(file)))
