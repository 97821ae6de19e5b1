"""What the book is made of: links between pages, the graph of the code, diagrams, formulas."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from latex2mathml.converter import convert

from book.code_graph import CodeGraph
from book.collecting import Collector
from book.diagrams import DIAGRAMS
from book.links import heading_anchor, rewrite_links
from book.site_links import broken_links
from labkit.paths import repo_root


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small repository: two packages, a handout, a folder without one."""
    files = {
        "solutions/engine/__init__.py": "",
        "solutions/engine/scheduler.py": '"""One rule."""\nfrom solutions.cache import blocks\nfrom .step import S\n',
        "solutions/engine/step.py": '"""A step."""\nimport solutions.cache.table\n',
        "solutions/cache/__init__.py": '"""A cache."""\n',
        "solutions/cache/blocks.py": '"""Blocks."""\nfrom . import table\n',
        "solutions/cache/table.py": "import os\n",
        "labs/07/README.md": "# Lab\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_imports_are_found_in_every_way_of_writing_them(repository: Path) -> None:
    code = CodeGraph(repository, ("solutions",))
    cache, engine = Path("solutions/cache"), Path("solutions/engine")
    assert code.files[engine / "scheduler.py"].imports == (cache / "blocks.py", engine / "step.py")
    assert code.files[engine / "step.py"].imports == (cache / "table.py",)
    assert code.files[cache / "blocks.py"].imports == (cache / "table.py",)
    assert code.importers(cache / "table.py") == [cache / "blocks.py", engine / "step.py"]
    assert code.importers(cache / "table.py", "solutions/engine") == [engine / "step.py"]
    assert code.files[engine / "scheduler.py"].summary == "One rule."


@pytest.mark.parametrize(
    ("link", "page"),
    [
        ("../../solutions/engine/step.py", "../../solutions/engine/step.py.md"),
        ("../../solutions/engine", "../../solutions/engine/index.md"),
        ("../07", "README.md"),
        ("README.md#task", "README.md#task"),
        ("https://example.org/a.py", "https://example.org/a.py"),
        ("#task", "#task"),
    ],
)
def test_a_link_leads_to_the_page_of_what_it_named(repository: Path, link: str, page: str) -> None:
    seen: list[Path] = []
    text = rewrite_links(f"See [this]({link}).", Path("labs/07/README.md"), repository, seen.append)
    assert text == f"See [this]({page})."
    assert all((repository / one).exists() for one in seen)


@pytest.mark.parametrize("link", ["gone.py", "../../../outside.md", "/etc/hosts"])
def test_a_link_to_nothing_is_refused_by_name(repository: Path, link: str) -> None:
    with pytest.raises(ValueError, match=rf"labs/07/README\.md: the link to {re.escape(link)} leads nowhere"):
        rewrite_links(f"[x]({link})", Path("labs/07/README.md"), repository, lambda path: None)


def test_anchors_follow_the_rule_of_the_host() -> None:
    assert heading_anchor("Task 6 (30 points): many sequences, one pass") == "task-6-30-points-many-sequences-one-pass"
    assert heading_anchor("Task 12 (40 points, stretch): caches that store less") == (
        "task-12-40-points-stretch-caches-that-store-less"
    )


def test_links_of_a_site_are_followed_to_file_and_anchor(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html#there">1</a><a href="#here">2</a><img src="c.png">')
    (tmp_path / "b.html").write_text('<p id="there"><a href="a.html#gone">3</a><a href="d.html">4</a>')
    assert broken_links(tmp_path) == [
        "a.html: c.png (no such file)",
        "b.html: a.html#gone (no such anchor)",
        "b.html: d.html (no such file)",
    ]


@pytest.mark.parametrize(("name", "draw"), DIAGRAMS.items())
def test_diagrams_are_drawings_inside_their_canvas_in_colours_of_the_page(name: str, draw: Callable[[], str]) -> None:
    svg = ET.fromstring(draw())
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    styles = (repo_root() / "book/static/book.css").read_text()
    shapes = [element for element in svg if element.tag != "defs"]
    assert len(shapes) > 5, f"{name} is empty"
    for shape in shapes:
        assert "fill" not in shape.attrib, f"{name}: colours are classes, so that they follow the page"
        for kind in shape.attrib.get("class", "").split():
            assert kind in ("plain", "words") or f".{kind}" in styles, f"{name}: no style for {kind}"
        if shape.tag == "rect":
            x, y, w, h = (float(shape.attrib[key]) for key in ("x", "y", "width", "height"))
            assert min(x, y) >= 0 and x + w <= width and y + h <= height, f"{name}: a box outside"
        if shape.tag == "text":
            assert 0 <= float(shape.attrib["x"]) <= width and 0 <= float(shape.attrib["y"]) <= height, name


def test_every_diagram_is_shown_and_every_formula_converts() -> None:
    pages = {path.name: path.read_text() for path in (repo_root() / "book").glob("*.md")}
    shown = set(re.findall(r"\{diagram\} (\S+)", "".join(pages.values())))
    assert shown == set(DIAGRAMS)
    formulas = re.findall(r"\$\$(.+?)\$\$", pages["formulas.md"], re.DOTALL)
    assert len(formulas) >= 10
    for formula in formulas:
        assert "\\" not in convert(formula), f"not understood: {formula}"


def test_all_pages_of_the_workbook_can_be_collected(tmp_path: Path) -> None:
    Collector(repo_root(), tmp_path / "source").collect()
    handout = (tmp_path / "source/labs/07_kv_cache/README.md").read_text()
    line = re.search(r"^## Task 7 .*\n\n\{\.task-links\}\n(.*)$", handout, re.MULTILINE)
    assert line is not None
    for expected in ("solutions/kv_cache/block_table.py.md", "tests/test_task7", "solutions/engine/kv_manager.py.md"):
        assert expected in line[1]
    assert "(01_roofline.ipynb)" in (tmp_path / "source/notebooks/index.md").read_text()
    engine = (tmp_path / "source/solutions/engine/kv_manager.py.md").read_text()
    assert "../kv_cache/block_table.py.md" in engine
    reference = (tmp_path / "source/solutions/kv_cache/block_table.py.md").read_text()
    assert "../../labs/07_kv_cache/README.md#task-7" in reference
