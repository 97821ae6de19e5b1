"""The report as static pages: one for each student, and some for the class, with nothing in them but text.

Names, messages and tracebacks come from submissions, some of them made to do harm. Four things keep them text: they are
cleaned and cut before they reach a template, templates escape everything, no attribute but our own file names holds
them, and a content policy on every page allows nothing except the page's own style sheet.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from grader.reports.class_page import class_page
from grader.reports.page_names import page_names
from grader.reports.student_page import student_page
from grader.reports.test_sources import test_sources
from grader.verdicts import SubmissionResult
from labkit.manifest import Manifest

FOLDER = "report"
MAX_STUDENT_PAGE_BYTES = 3_000_000
MAX_ROW_BYTES = 3_000
"""What a submission adds to a page of the class, at most."""

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_OURS = ("student-*.html", "by-*.html", "index.html")


def write_html(out: Path, manifest: Manifest, facts: Mapping[str, Any], results: Sequence[SubmissionResult]) -> Path:
    """Writes the pages; those of an earlier run that are no longer wanted are removed.

    Args:
        out: the folder of the reports; the pages go into `report/` in it.
        manifest: the lab.
        facts: about the run, from `run_facts`.
        results: of the submissions, at least one.

    Returns:
        The page to open first.
    """
    folder = out / FOLDER
    folder.mkdir(exist_ok=True)
    names = page_names(result.name for result in results)
    sources = test_sources(manifest)
    written = set()

    def write(name: str, template: str, **values: Any) -> None:
        text = _environment().get_template(template).render(
            **values, lab=manifest, facts=facts, css=_css(), policy=_policy()
        )  # fmt: skip
        temporary = folder / f".{name}.new"
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(folder / name)
        written.add(name)

    for result in results:
        write(names[result.name], "student.html.j2", page=student_page(manifest, sources, result))
    page = class_page(manifest, results, names)
    for order in page.orders:
        template = "class.html.j2" if order.key == "name" else "order.html.j2"
        write(order.page, template, page=page, order=order, rows=page.sorted_by(order))
    for pattern in _OURS:
        for path in folder.glob(pattern):
            if path.name not in written:
                path.unlink()
    return folder / "index.html"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = lambda value: f"{value:g}"
    return environment


@cache
def _css() -> Markup:
    return Markup((_TEMPLATES / "style.css").read_text(encoding="utf-8"))


@cache
def _policy() -> str:
    """Nothing may be loaded or run, and only a style sheet with this hash is applied."""
    digest = base64.b64encode(hashlib.sha256(_css().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
