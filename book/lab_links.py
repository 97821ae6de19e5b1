"""From each task of a lab to what belongs to it: reference, tests, notebook, the engine's files that stand on it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from labkit.manifest import Manifest, Task, available_labs, load_manifest

from .code_graph import CodeGraph
from .links import heading_anchor, relative

_TASK_HEADING = re.compile(r"^## Task (\d+).*$", re.MULTILINE)


class LabLinks:
    """The tasks of all labs, and where each stands.

    Args:
        root: of the repository.
        code: its Python files.
    """

    def __init__(self, root: Path, code: CodeGraph) -> None:
        self._root = root
        self._code = code
        self._labs = {self._inside(lab.folder): lab for lab in (load_manifest(lab) for lab in available_labs())}
        self._owners: dict[Path, list[tuple[Path, int]]] = defaultdict(list)
        for folder, lab in self._labs.items():
            for task in lab.tasks:
                for path in (*self._reference(lab, task), *self._tests(lab, task)):
                    self._owners[path].append((folder, task.number))
        self._anchors = {
            folder: {
                int(match[1]): heading_anchor(match[0][3:])
                for match in _TASK_HEADING.finditer((root / folder / "README.md").read_text("utf-8"))
            }
            for folder in self._labs
        }

    @property
    def folders(self) -> list[Path]:
        """Of the labs, in order."""
        return sorted(self._labs)

    def with_task_links(self, text: str, page: Path) -> str:
        """A handout with a line of links below each task's heading; any other page as it is."""
        lab = self._labs.get(page.parent)
        if lab is None or page.name != "README.md":
            return text
        return _TASK_HEADING.sub(
            lambda match: f"{match[0]}\n\n{{.task-links}}\n{self._line(lab, lab.task(int(match[1])), page)}\n", text
        )

    def tasks_of(self, path: Path, page: Path) -> list[str]:
        """Links to the tasks that a file belongs to: as reference, or as their tests."""
        links = []
        for folder, number in self._owners[path]:
            lab, anchor = self._labs[folder], self._anchors[folder][number]
            link = f"{relative(folder / 'README.md', page)}#{anchor}"
            links.append(f"[lab {lab.id} task {number}: {lab.task(number).title}]({link})")
        return links

    def _line(self, lab: Manifest, task: Task, page: Path) -> str:
        reference = self._reference(lab, task)
        engine = sorted({one for path in reference for one in self._code.importers(path, "solutions/engine")})
        parts = {
            "Reference": reference,
            "Tests": self._tests(lab, task),
            "In the engine": engine,
        }
        lines = [
            f"{name}: {', '.join(source_link(one, page) for one in paths)}." for name, paths in parts.items() if paths
        ]
        return " ".join([*lines, "On the real model: [walkthrough](walkthrough.ipynb)."])

    def _reference(self, lab: Manifest, task: Task) -> list[Path]:
        return [self._inside(lab.solutions / f"{name}.py") for name in task.modules]

    def _tests(self, lab: Manifest, task: Task) -> list[Path]:
        return [self._inside(path) for path in lab.test_files(task.number) if path.is_file()]

    def _inside(self, path: Path) -> Path:
        return path.resolve().relative_to(self._root)


def source_link(path: Path, page: Path) -> str:
    """A link to the page that shows a file."""
    return f"[`{path.stem}`]({relative(path.with_name(path.name + '.md'), page)})"
