"""The report's pages: what they say, that no submission can make them do anything, and that they can be read."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest

from grader.reports.html_report import MAX_ROW_BYTES, MAX_STUDENT_PAGE_BYTES, write_html
from grader.reports.page_names import page_names
from grader.reports.student_page import MAX_FLAGS
from grader.reports.test_sources import test_sources as sources_of
from grader.reports.wording import WORDINGS, property_in_words
from grader.verdicts import CaseResult, SubmissionResult, Verdict, clean_text, same_for_all, task_results
from labkit.manifest import Manifest, available_labs, load_manifest

FACTS = {
    "sandbox": "bwrap",
    "seed": 3,
    "limits": {"cpu_seconds": 20, "total_cpu_seconds": 300.0, "memory_bytes": 3 << 30},
    "versions": {"python": "3.12.1", "torch": None},
    "suite_sha256": "ab" * 32,
}
MARK = "document.documentElement.setAttribute('data-ran', '1')"
HOSTILE = [
    f"<script>{MARK}</script>",
    f"</pre></code></bdi><script>{MARK}</script>",
    f"</title></style><script>{MARK}</script>",
    f'<img src=nowhere onerror="{MARK}">',
    f"<svg onload={MARK.replace(' ', '')}>",
    f'" onmouseover="{MARK}" autofocus onfocus="{MARK}',
    f"javascript:{MARK}",
    f'<a href="javascript:{MARK}">click</a>',
    f'<iframe srcdoc="<script>parent.{MARK}</script>"></iframe>',
    '<meta http-equiv="refresh" content="0;url=http://example.invalid/">',
    '<base href="http://example.invalid/"><style>* { display: none }</style>',
    "{{ 7 * 191 }} {% raw %} {{ config }} ${7*191} #{7*191} <%= 7*191 %>",
    "<!-- ]]> --> <![CDATA[ &lt;b&gt; &amp; &#0; <plaintext>",
    "a\u202eb\u2066c\u200fd\x00e\x1b[2Jf\ud800g\ufeffh",
    "é" * 5_000 + "<b>",
]
VOID = {"meta", "br", "line", "rect"}
ELEMENTS = VOID | set(
    "html head title style body header main footer nav section article aside h1 h2 h3 p ul li a b small bdi code pre "
    "span div dl dt dd table caption thead tbody tr th td details summary figure figcaption svg text".split()
)
ATTRIBUTES = set(
    "lang charset http-equiv content name class id href scope role aria-label aria-sort aria-hidden tabindex title "
    "viewbox x y x1 x2 y1 y2 width height".split()
)


class Page(HTMLParser):
    """A page as the standard parser reads it; an element or attribute that has no place in a report is a failure."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.metas: dict[str, str] = {}
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.header_scopes: list[str | None] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"left open: {self._open}"

    @property
    def text(self) -> str:
        """Everything that is shown."""
        return "".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ELEMENTS, f"unexpected element {tag} at {self.getpos()}"
        values = dict(attrs)
        assert len(values) == len(attrs) and set(values) <= ATTRIBUTES, f"unexpected attribute in {tag} {attrs}"
        if "href" in values:
            assert tag == "a"
            self.links.append(values["href"] or "")
        if "id" in values:
            self.ids.append(values["id"] or "")
        if tag == "meta":
            self.metas[values.get("http-equiv") or values.get("name") or "charset"] = values.get("content") or ""
        if tag == "th":
            self.header_scopes.append(values.get("scope"))
        if tag in ("h1", "h2", "h3"):
            self.headings.append(tag)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-1:]} at {self.getpos()}"
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.texts.append(data)


def read(path: Path) -> Page:
    """A page of the report."""
    return Page(path.read_text(encoding="utf-8"))


def hostile_results(manifest: Manifest) -> list[SubmissionResult]:
    """Submissions that put every hostile text everywhere it can go."""
    results = []
    for number, text in enumerate(HOSTILE):
        cases = [
            CaseResult(test, f"{test}[{text}]", Verdict.EXCEPTION, f"{text}\n{HOSTILE[place % len(HOSTILE)]}")
            for task in manifest.tasks
            for place, test in enumerate(task.tests)
        ]
        # As intake hands names over.
        name = f"{clean_text(text, 200)} {number}"
        results.append(SubmissionResult(name, "ab" * 32, task_results(manifest, cases), (text,), (text, *HOSTILE)))
    return results


@pytest.fixture
def lab() -> Manifest:
    """The manifest of a real lab, whose tests have sources."""
    return load_manifest("07")


def mixed_results(manifest: Manifest) -> list[SubmissionResult]:
    """One submission that is right, one in part, one blank, one refused."""
    first = manifest.tasks[0]
    cases = [CaseResult(test, test, Verdict.PASSED) for test in first.tests[1:]]
    cases.append(CaseResult(first.tests[0], first.tests[0], Verdict.WRONG_ANSWER, "row 3 is\n  4, not 5"))
    spent = "not run: the submission has used up its 300 seconds of processor time"
    cases += [CaseResult(test, test, Verdict.TIMEOUT_CPU, spent) for task in manifest.tasks[1:] for test in task.tests]
    return [
        SubmissionResult("Zoë", "cd" * 32, same_for_all(manifest, Verdict.PASSED, "")),
        SubmissionResult("part", "ab" * 32, task_results(manifest, cases), ("notes.txt",)),
        SubmissionResult("blank", "ef" * 32, same_for_all(manifest, Verdict.NOT_ATTEMPTED, "task 1: not written yet")),
        SubmissionResult("bad", "", same_for_all(manifest, Verdict.REFUSED, "a link"), (), ("refused: a link",)),
    ]


def student(index: Path, name: str) -> Path:
    """The page of a submission."""
    return index.parent / page_names([name])[name]


def test_the_page_of_a_student_says_what_failed_and_what_helps(lab: Manifest, tmp_path: Path) -> None:
    index = write_html(tmp_path, lab, FACTS, mixed_results(lab))
    first = lab.tasks[0]
    text = read(student(index, "part")).text
    for said in (
        "row 3 is\n  4, not 5",
        property_in_words(first.tests[0]),
        sources_of(lab)[first.tests[0]].text,
        first.hints[1],
        f"make hint LAB={lab.id} TASK={first.number} LEVEL=3",
        "wrong answer",
        "out of time",
        "processor time for the whole submission was used up",
        "notes.txt",
        "20 s a test, 300 s in all",
    ):
        assert said in text, f"the page does not say {said!r}"
    assert sources_of(lab)[first.tests[1]].text not in text, "the source of a test that passed is shown"
    assert first.hints[0] not in text and first.hints[2] not in text


def test_an_instructors_terms_stand_on_every_page(lab: Manifest, tmp_path: Path) -> None:
    terms = {"weights": {"1": 30, "2": 5}, "deadline": "2027-02-01T23:59:00+01:00"}
    index = write_html(tmp_path, lab, {**FACTS, "course": terms}, mixed_results(lab))
    for path in index.parent.iterdir():
        text = read(path).text
        assert "1: 30, 2: 5" in text and "2027-02-01T23:59:00+01:00" in text
    write_html(tmp_path, lab, FACTS, mixed_results(lab))
    assert "Deadline" not in read(index).text


def test_an_untouched_task_gets_the_first_hint_and_a_done_one_none(lab: Manifest, tmp_path: Path) -> None:
    index = write_html(tmp_path, lab, FACTS, mixed_results(lab))
    blank, right = read(student(index, "blank")).text, read(student(index, "Zoë")).text
    for task in lab.tasks:
        assert task.hints[0] in blank and task.hints[1] not in blank
        assert not [hint for hint in task.hints if hint in right]
    assert "wrong answer" not in right and f"{lab.points:g} of {lab.points:g} points" in right
    shared = "task 1: not written yet"
    assert blank.count(shared) == len(lab.tasks), "a message that tests of a task share is shown once a task"


def test_the_class_is_listed_sorted_counted_and_linked(lab: Manifest, tmp_path: Path) -> None:
    results = mixed_results(lab)
    index = write_html(tmp_path, lab, FACTS, results)
    page = read(index)
    names = page_names(result.name for result in results)
    text = page.text.partition("Submissions")[2]
    assert [text.index(name) for name in ("bad", "blank", "part", "Zoë")] == sorted(
        text.index(name) for name in ("bad", "blank", "part", "Zoë")
    )
    by_total = [link for link in read(index.parent / "by-total.html").links if link.startswith("student-")]
    assert by_total == [names[name] for name in ("Zoë", "part", "bad", "blank")]
    assert "refused: a link" in page.text.partition("Submissions")[0]
    assert property_in_words(lab.tasks[0].tests[0]) in page.text.partition("Tests that fail most")[2]
    bars = index.read_text().count('class="bar"')
    assert bars == 7 * len(lab.tasks)
    assert "1 at below 100 %" in index.read_text() and "1 at 100 %" in index.read_text()


def test_every_link_leads_somewhere(lab: Manifest, tmp_path: Path) -> None:
    index = write_html(tmp_path, lab, FACTS, mixed_results(lab))
    pages = {path.name: read(path) for path in index.parent.iterdir()}
    for name, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            assert not target or target in pages, f"{name} links to {link}"
            assert not anchor or anchor in pages[unquote(target) or name].ids, f"{name} links to {link}"
    assert {name for name in pages if name.startswith("student-")} <= set(pages["index.html"].links)
    assert all("index.html" in page.links for name, page in pages.items() if name != "index.html")


def test_stretch_tasks_are_marked(manifest: Manifest, tmp_path: Path) -> None:
    results = [SubmissionResult("ada", "ab" * 32, same_for_all(manifest, Verdict.PASSED, ""))]
    plain = read(student(write_html(tmp_path, manifest, FACTS, results), "ada")).text
    assert "stretch" not in plain
    further = replace(manifest, tasks=(manifest.tasks[0], replace(manifest.tasks[1], stretch=True)))
    index = write_html(tmp_path, further, FACTS, results)
    assert read(student(index, "ada")).text.count("stretch") == 2
    assert "stretch" in read(index).text


def test_pages_of_an_earlier_run_go_and_other_files_stay(manifest: Manifest, tmp_path: Path) -> None:
    def result(name: str) -> SubmissionResult:
        return SubmissionResult(name, "ab" * 32, same_for_all(manifest, Verdict.PASSED, ""))

    folder = write_html(tmp_path, manifest, FACTS, [result("ada"), result("bob")]).parent
    (folder / "notes.html").write_text("mine")
    write_html(tmp_path, manifest, FACTS, [result("ada")])
    assert len(list(folder.glob("student-*.html"))) == 1
    assert (folder / "notes.html").read_text() == "mine"


def test_equal_results_give_equal_pages(lab: Manifest, tmp_path: Path) -> None:
    folders = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        folders.append(write_html(tmp_path / name, lab, FACTS, mixed_results(lab)).parent)
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second


def test_every_verdict_has_words_of_its_own() -> None:
    assert set(WORDINGS) == set(Verdict)
    assert len({wording.label for wording in WORDINGS.values()}) == len(Verdict)


@pytest.mark.parametrize("lab_id", available_labs())
def test_every_test_of_a_lab_has_a_source(lab_id: str) -> None:
    manifest = load_manifest(lab_id)
    sources = sources_of(manifest)
    assert set(sources) == {name for task in manifest.tasks for name in task.tests}
    for name, source in sources.items():
        lines = (manifest.tests_folder / source.file).read_text().splitlines()
        assert source.text.splitlines()[0] == lines[source.line - 1] and f"def {name}(" in source.text


# Names --------------------------------------------------------------------------------------------------------------


def test_names_of_pages_are_safe_and_their_own() -> None:
    names = ["Ada", "ada", "äda", "a/../../da", "", " ", "CON", "con.", "x" * 300, "x" * 301, "日本", "日木", *HOSTILE]
    pages = page_names(names)
    assert len({page.lower() for page in pages.values()}) == len(names)
    for page in pages.values():
        assert page.startswith("student-") and page.endswith(".html") and len(page) < 80
        assert set(page) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.") and page.count(".") == 1
    assert page_names(reversed(names)) == pages


# Hostile submissions --------------------------------------------------------------------------------------------------


def test_no_submission_adds_an_element_or_a_link(lab: Manifest, tmp_path: Path) -> None:
    results = hostile_results(lab)
    index = write_html(tmp_path, lab, FACTS, results)
    pages = {path.name: read(path) for path in index.parent.iterdir()}
    own = set(pages) | {f"#task-{task.number}" for task in lab.tasks}
    for page in pages.values():
        assert {link.removesuffix("#submissions") for link in page.links} <= own
        assert "default-src 'none'" in page.metas["Content-Security-Policy"]
        assert "unsafe" not in page.metas["Content-Security-Policy"]
    for result, text in zip(results, HOSTILE, strict=True):
        page = pages[page_names([result.name])[result.name]]
        assert clean_text(text, 200) in page.text and "1337" not in page.text
        assert clean_text(text, 500) in page.text or clean_text(text, 400) in page.text
    for path in index.parent.iterdir():
        raw = path.read_bytes()
        assert not [c for c in "\x00\x1b\u202e\u2066\u200f\ufeff" if c.encode() in raw]


def test_pages_have_a_largest_size(lab: Manifest, tmp_path: Path) -> None:
    worst = '"' * 10_000
    tests = [test for task in lab.tasks for test in task.tests]
    cases = [CaseResult(test, test, Verdict.EXCEPTION, f"{number}{worst}") for number, test in enumerate(tests)]
    flags = tuple(f"{n}{worst}" for n in range(10_000))
    results = [
        SubmissionResult(clean_text(f"{n}{worst}", 200), "ab" * 32, task_results(lab, cases), flags[:51], flags)
        for n in range(2)
    ]
    index = write_html(tmp_path, lab, FACTS, results)
    for result in results:
        page = student(index, result.name)
        assert page.stat().st_size <= MAX_STUDENT_PAGE_BYTES
        assert f"and {10_000 - MAX_FLAGS} more" in read(page).text
    few = index.stat().st_size
    more = [replace(results[0], name=f"{number}{results[0].name}"[:200]) for number in range(9)]
    write_html(tmp_path, lab, FACTS, more)
    assert (index.stat().st_size - few) / (len(more) - len(results)) <= MAX_ROW_BYTES


def test_pages_have_headings_in_order_and_headed_tables(lab: Manifest, tmp_path: Path) -> None:
    index = write_html(tmp_path, lab, FACTS, mixed_results(lab))
    for path in index.parent.iterdir():
        page = read(path)
        assert page.headings[0] == "h1" and page.headings.count("h1") == 1
        levels = [int(heading[1]) for heading in page.headings]
        assert all(after <= before + 1 for before, after in pairwise(levels))
        assert page.header_scopes and set(page.header_scopes) <= {"row", "col"}
        assert page.metas["viewport"].startswith("width=device-width")
        assert len(set(page.ids)) == len(page.ids)


# In a browser ---------------------------------------------------------------------------------------------------------

Browse = Callable[..., str]


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browse]:
    """Opens a page in headless Chromium; gives the document as it is after its scripts, if any, have run."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("not verified here: no Chromium; install it with: sudo apt-get install chromium")
    profile = tmp_path_factory.mktemp("profile")

    def run(page: Path, *options: str) -> str:
        command = [program, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        # Chromium's own sandbox refuses to start for root; the pages are the ones that were just written.
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        command += ["--virtual-time-budget=1000", *(options or ["--dump-dom"]), page.resolve().as_uri()]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stderr[-2000:]
        return result.stdout

    yield run


def test_nothing_that_a_submission_holds_runs(browse: Browse, lab: Manifest, tmp_path: Path) -> None:
    results = hostile_results(lab)
    index = write_html(tmp_path, lab, FACTS, results)
    # Every page holds all the texts; these three also have the worst of them as their title.
    for path in [index, *(student(index, results[place].name) for place in (0, 2, 5))]:
        document = browse(path)
        assert "data-ran" not in document.partition("<head>")[0], f"{path.name} ran a script"
        shown = Page(document)  # refuses elements that a submission might have added
        assert all(clean_text(text)[:40] in shown.text for text in HOSTILE)


def test_the_marker_would_tell(browse: Browse, lab: Manifest, tmp_path: Path) -> None:
    """The same texts do run where they are not escaped, and the policy alone stops those."""
    index = write_html(tmp_path, lab, FACTS, mixed_results(lab))
    own = index.read_text()
    (tmp_path / "bare.html").write_text(f"<!doctype html><html><body>{HOSTILE[0]}</body></html>")
    assert "data-ran" in browse(tmp_path / "bare.html")
    unescaped = own.replace("<main>", f"<main>{HOSTILE[0]}{HOSTILE[3]}")
    assert unescaped != own
    (tmp_path / "policy.html").write_text(unescaped)
    assert "data-ran=" not in browse(tmp_path / "policy.html")


def test_a_page_is_not_blank(browse: Browse, lab: Manifest, tmp_path: Path) -> None:
    index = write_html(tmp_path, lab, FACTS, mixed_results(lab))
    (tmp_path / "blank.html").write_text("<!doctype html><title>blank</title>")
    shades = {}
    for name, page in {"class": index, "student": student(index, "part"), "blank": tmp_path / "blank.html"}.items():
        browse(page, f"--screenshot={tmp_path / name}.png", "--window-size=420,800")
        shades[name] = distinct_bytes((tmp_path / f"{name}.png").read_bytes())
    assert shades["blank"] < 10 < 50 < min(shades["class"], shades["student"]), shades


def test_the_style_sheet_passes_the_policy(browse: Browse, lab: Manifest, tmp_path: Path) -> None:
    """With another sheet in its place the same page looks different: ours is applied."""
    index = write_html(tmp_path, lab, FACTS, mixed_results(lab))
    (tmp_path / "other.html").write_text(index.read_text().replace("<style>", "<style>/* not ours */"))
    pictures = []
    for name, page in {"ours": index, "other": tmp_path / "other.html"}.items():
        browse(page, f"--screenshot={tmp_path / name}.png", "--window-size=800,600")
        pictures.append((tmp_path / f"{name}.png").read_bytes())
    assert pictures[0] != pictures[1]


def distinct_bytes(png: bytes) -> int:
    """How many values the bytes of a picture take."""
    place, packed = 8, b""
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            packed += png[place + 8 : place + 8 + length]
        place += 12 + length
    return len(set(zlib.decompress(packed)))
