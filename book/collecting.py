"""Collects the book's pages: handouts, notebooks, and a page for each file of code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from .code_graph import CodeGraph, SourceFile
from .lab_links import LabLinks, source_link
from .links import BOOK, page_of, relative, rewrite_links

CODE = ("labkit", "solutions", "grader", "benchmarks", "tools", "tests")
"""Folders whose Python files have pages."""
_LANGUAGES = {".py": "python", ".toml": "toml", ".txt": "text", ".json": "json"}


class Collector:
    """Writes the sources of the book into a folder, each page where its file stands in the repository.

    Args:
        root: of the repository.
        target: the folder; emptied first.
    """

    def __init__(self, root: Path, target: Path) -> None:
        self._root = root
        self._target = target
        folders = tuple(str(path.relative_to(root)) for path in sorted((root / "labs").glob("*/tests")))
        self._code = CodeGraph(root, (*CODE, *folders))
        self._labs = LabLinks(root, self._code)
        self._wanted: set[Path] = set()

    def collect(self) -> int:
        """Write all pages.

        Returns:
            How many there are.

        Raises:
            ValueError: a link to a file that doesn't exist.
        """
        shutil.rmtree(self._target, ignore_errors=True)
        for page in self._handouts():
            text = rewrite_links((self._root / page).read_text("utf-8"), page, self._root, self._wanted.add)
            self._write(page, self._labs.with_task_links(text, page))
        for page in self._notebooks():
            self._write(page, self._notebook(page))
        for file in self._code.files.values():
            self._write_source(file)
        for page in sorted(path.relative_to(self._root) for path in (self._root / BOOK).glob("*.md")):
            text = rewrite_links((self._root / page).read_text("utf-8"), page, self._root, self._wanted.add)
            self._write(Path(page.name), text.replace("{{contents}}", self._contents()))
        for path in sorted(self._wanted - set(self._code.files)):
            self._write_linked(path)
        shutil.copy(self._root / BOOK / "conf.py", self._target / "conf.py")
        shutil.copytree(self._root / BOOK / "static", self._target / "_static")
        return sum(1 for path in self._target.rglob("*") if path.suffix in (".md", ".ipynb"))

    def _handouts(self) -> list[Path]:
        found = [*self._root.glob("*.md"), *self._root.glob("labs/*/README.md"), *self._root.glob("notebooks/*.md")]
        found += self._root.glob("benchmarks/results/*.md")
        return sorted(path.relative_to(self._root) for path in found)

    def _notebooks(self) -> list[Path]:
        found = [*self._root.glob("notebooks/*.ipynb"), *self._root.glob("labs/*/*.ipynb")]
        return sorted(path.relative_to(self._root) for path in found)

    def _contents(self) -> str:
        """The tables of contents of the front page."""
        labs = [page for folder in self._labs.folders for page in (folder / "README.md", folder / "walkthrough.ipynb")]
        parts = {
            "The mechanisms": [Path("pictures.md"), Path("formulas.md")],
            "The module": [page for page in self._notebooks() if page.parts[0] == "notebooks"],
            "The labs": labs,
            "Measured": [page for page in self._handouts() if page.parts[0] == "benchmarks"],
            "The project": [Path("README.md"), Path("CONTRIBUTING.md"), Path("CHANGELOG.md")],
        }
        return "\n\n".join(
            "```{toctree}\n:caption: " + caption + "\n:maxdepth: 1\n\n" + "\n".join(map(str, pages)) + "\n```"
            for caption, pages in parts.items()
            if pages
        )

    def _notebook(self, page: Path) -> str:
        notebook = json.loads((self._root / page).read_text("utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                text = "".join(cell["source"])
                cell["source"] = rewrite_links(text, page, self._root, self._wanted.add)
        return json.dumps(notebook)

    def _write_source(self, file: SourceFile) -> None:
        """The page of a Python file: what it is about, what it belongs to, and its text."""
        page = file.path.with_name(file.path.name + ".md")
        related = {
            "Belongs to": self._labs.tasks_of(file.path, page),
            "Stands on": [source_link(one, page) for one in file.imports],
            "Used by": [source_link(one, page) for one in self._code.importers(file.path)],
        }
        lines = [f"{name}: {', '.join(links)}.\n" for name, links in related.items() if links]
        self._write_listing(file.path, [file.summary, "", *lines])
        self._wanted.update(file.path.parents)

    def _write_linked(self, path: Path) -> None:
        """The page of a folder, or of a file that a link leads to, if it hasn't got one."""
        page = page_of(path, self._root)
        assert page is not None, f"links to {path} were checked when they were rewritten"
        if (self._target / page).exists() or path == Path():
            return
        if not (self._root / path).is_dir():
            self._write_listing(path, [])
            return
        inside = [one for one in self._code.files if one.parent == path]
        below = sorted({path / one.relative_to(path).parts[0] for one in self._code.files if path in one.parents[1:]})
        lines = [f"- [{one.name}/]({relative(page_of(one, self._root) or one, page)})" for one in below]
        lines += [f"- {source_link(one, page)}: {self._code.files[one].summary}" for one in inside]
        pages = [one for one in (*self._handouts(), *self._notebooks()) if one.parent == path]
        lines += [f"- [{one.stem}]({relative(one, page)})" for one in pages]
        self._write(page, "\n".join(["---", "orphan: true", "---", "", f"# `{path}`", "", *lines, ""]))

    def _write_listing(self, path: Path, above: list[str]) -> None:
        """A page that shows a file's text."""
        language = _LANGUAGES.get(path.suffix, "text")
        shown = ["```{literalinclude} " + path.name, f":language: {language}", ":linenos:", "```", ""]
        page = path.with_name(path.name + ".md")
        self._write(page, "\n".join(["---", "orphan: true", "---", "", f"# `{path}`", "", *above, *shown]))
        # An empty file can't be shown; a line says so.
        text = (self._root / path).read_text("utf-8")
        self._write(path, text if text.strip() else "# This file only makes the folder a package.\n")

    def _write(self, page: Path, text: str) -> None:
        place = self._target / page
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, "utf-8")
