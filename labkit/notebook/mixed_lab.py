"""A lab whose modules are the student's where they are written, and the reference's where they are not."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from labkit.implementation import implementation_folder
from labkit.loader import LabPackage
from labkit.manifest import ROOT, Manifest, Task, load_manifest
from labkit.notebook.check_card import whose
from labkit.notebook.checking import chosen_impl
from labkit.notebook.palette import BLUE, ORANGE
from labkit.notebook.written import is_written


class _MixedPackage(LabPackage):
    """A package whose modules come from two folders. Siblings find each other wherever they lie.

    Args:
        name: as for `LabPackage`.
        folder: the student's.
        reference: the reference's.
        modules: names that may be imported, each with whether it is taken from the student.
    """

    def __init__(self, name: str, folder: Path, reference: Path, modules: dict[str, bool]) -> None:
        super().__init__(name, folder, modules)
        self._reference = reference
        self._own = modules

    def file_of(self, module: str) -> Path:
        """Where a module's text lies."""
        return (self.folder if self._own[module] else self._reference) / f"{module}.py"


class MixedLab:
    """The functions and classes of a lab, by name: `lab.KVCache(…)`. As the value of a cell it says whose they are.

    Args:
        manifest: the lab.
        impl: whose code is preferred: "labs", "solutions" or a folder of this workbook.

    Raises:
        ValueError: `impl` names nothing that can be used.
    """

    def __init__(self, manifest: Manifest, impl: str) -> None:
        folder = implementation_folder(manifest, impl)
        # A copy of the workbook without the reference has nothing to fall back on: its stubs name their task.
        reference = manifest.solutions if manifest.solutions.is_dir() else folder
        self._manifest = manifest
        self._impl = impl
        self._own = {m: reference == folder or is_written(folder / f"{m}.py") for m in manifest.modules}
        self._package = _MixedPackage(f"lab{manifest.id}", folder, reference, self._own)
        self._package.mount()

    def __getattr__(self, name: str) -> Any:
        module = None if name.startswith("_") else self._manifest.interface.module_of(name)
        if module is None:
            raise AttributeError(f"lab {self._manifest.id} has no {name!r}; it has: {self._manifest.interface}")
        return getattr(self._package.module(module), name)

    def whose(self, task: Task) -> str:
        """Whose modules a task uses here, in words."""
        own = [module for module in task.modules if self._own[module]]
        missing = [module for module in task.modules if not self._own[module]]
        if not missing:
            return whose(self._impl)
        if not own:
            return whose("solutions")
        return f"{whose(self._impl)} ({', '.join(own)}), the reference ({', '.join(missing)})"

    def __str__(self) -> str:
        lines = [f"lab {self._manifest.id}, {self._manifest.title}"]
        lines += [f"  task {t.number:>2} {t.title}: {self.whose(t)}" for t in self._manifest.tasks]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = []
        for task in self._manifest.tasks:
            text = self.whose(task)
            colour = BLUE if text == whose(self._impl) else ORANGE
            cell = "border:none;text-align:left;padding:1px 8px"
            mark = f'<td style="{cell};border-left:4px solid {colour}">{html.escape(text)}</td>'
            title = f'<td style="{cell}">{task.number} {html.escape(task.title)}</td>'
            rows.append(f"<tr>{title}{mark}</tr>")
        return f'<table style="border:none">{"".join(rows)}</table>'


def open_lab(lab_id: str, root: Path = ROOT) -> MixedLab:
    """Opens a lab: your code where it is written, the reference elsewhere; `IMPL` in the environment chooses anew.

    Modules are read when first used. After an edit, open the lab again and run the cells that use it.

    Args:
        lab_id: two digits, such as "07".
        root: the workbook.

    Raises:
        ValueError: there is no such lab, or `IMPL` names nothing that can be used.
    """
    return MixedLab(load_manifest(lab_id, root), chosen_impl())
