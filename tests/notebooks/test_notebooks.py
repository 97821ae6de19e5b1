"""The notebooks: source and stored half are a pair, run from a clean kernel, and show what they promise."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from labkit.checkpoints import CheckpointError, bundled_folder
from labkit.manifest import load_manifest
from labkit.notebook.answer_card import OPEN, RIGHT
from labkit.notebook.execution import execute, find_notebooks, is_of_a_lab, is_paired, stored
from tests.notebooks.cells import check_outputs, code_cells, pictures, shown, tagged

MAX_BYTES = 600_000
QUICK_SECONDS = 300
"""For one cell, on a machine with other things to do; the whole quick form takes well under a minute alone."""

SOURCES = find_notebooks()
LABS = [source for source in SOURCES if is_of_a_lab(source)]
MODULE = [source for source in SOURCES if not is_of_a_lab(source)]
MACHINE_PATH = re.compile("(?<![\\w.])/" + r"(home|Users|root|work|tmp|opt|usr)/[\w.-]+")


def name_of(source: Path) -> str:
    """The lab's folder, or the file's own name."""
    return source.parent.name if is_of_a_lab(source) else source.stem


def each(sources: list[Path]) -> pytest.MarkDecorator:
    """The test for each of these notebooks instead of for all."""
    return pytest.mark.parametrize("source", sources, ids=name_of)


@pytest.fixture(params=SOURCES, ids=name_of)
def source(request: pytest.FixtureRequest) -> Path:
    """Each notebook's source in turn."""
    return request.param


@pytest.fixture
def kept(source: Path) -> NotebookNode:
    """The stored half, as it was committed: once a student has run it, it shows their own results."""
    command = ["git", "diff", "--quiet", "HEAD", "--", str(source), str(stored(source))]
    if subprocess.run(command, cwd=source.parent, capture_output=True, check=False).returncode == 1:
        pytest.skip("not verified here: the notebook has been edited or run since it was committed")
    return nbformat.read(stored(source), as_version=4)


def test_the_pair_is_in_sync(source: Path, kept: NotebookNode) -> None:
    assert is_paired(source), f"{stored(source).name} has other cells than {source.name}: run `make notebooks`"


def test_stored_outputs_are_whole_small_and_of_no_machine(source: Path, kept: NotebookNode) -> None:
    nbformat.validate(kept)
    check_outputs(kept)
    assert stored(source).stat().st_size < MAX_BYTES
    text = stored(source).read_text(encoding="utf-8")
    assert not MACHINE_PATH.search(text), f"a path of one machine: {MACHINE_PATH.search(text)}"


@each(LABS)
def test_each_core_task_is_walked_and_checked_in_order(source: Path, kept: NotebookNode) -> None:
    manifest = load_manifest(source.parent.name[:2])
    wanted = [f"{manifest.id}.{task.number}" for task in manifest.tasks if not task.stretch]
    calls = re.findall(r'^check\("([\d.]+)"\)', "\n".join(cell.source for cell in code_cells(kept)), re.MULTILINE)
    assert [name for name in calls if name in wanted] == wanted
    for cell in tagged(kept, "check"):
        assert ": done. " in shown(cell), f"{cell.source} was stored with: {shown(cell)[:300]}"


@each(LABS)
def test_a_labs_notebook_runs_in_a_copy_without_the_reference(source: Path) -> None:
    imported = re.findall(r"^\s*(?:from|import) solutions.*$", source.read_text(encoding="utf-8"), re.MULTILINE)
    assert not imported, f"take it from `open_lab` or labkit: {imported}"


@each(MODULE)
def test_exercises_are_numbered_stored_open_and_answered_out_of_sight(source: Path, kept: NotebookNode) -> None:
    exercises = tagged(kept, "exercise")
    names = [re.search(r'check_answer\(\s*"(\d+)"', cell.source) for cell in exercises]
    assert [name and int(name[1]) for name in names] == list(range(1, len(exercises) + 1)), "number them from 1"
    assert exercises, "a notebook of the module has exercises"
    for number, cell in enumerate(exercises, start=1):
        assert re.search(r"^answer = None\b", cell.source, re.MULTILINE)
        assert shown(cell).startswith(f"exercise {number}: {OPEN}"), f"stored with: {shown(cell)[:300]}"
        before = kept.cells[kept.cells.index(cell) - 1].source
        assert f"**Exercise {number}" in before and "<details>" in before and "<summary>Answer" in before, (
            f"the cell before exercise {number} states it and folds its answer into <details>"
        )


def test_it_runs_from_a_clean_kernel(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model_or_skip()
    # Threads that wait for each other make a busy machine slower still.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # A user's own settings must not reach it: this matplotlibrc would give figures of another size.
    (tmp_path / "matplotlibrc").write_text("figure.dpi: 300\n")
    monkeypatch.setenv("MATPLOTLIBRC", str(tmp_path / "matplotlibrc"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    notebook = execute(source, quick=True, answered=True, cell_seconds=QUICK_SECONDS)
    check_outputs(notebook)
    if is_of_a_lab(source):
        data = [output.data for cell in code_cells(notebook) for output in cell.outputs if "data" in output]
        assert any("text/html" in part and "points" in part["text/plain"] for part in data), "no progress was drawn"
    for number, cell in enumerate(tagged(notebook, "exercise"), start=1):
        assert shown(cell) == f"exercise {number}: {RIGHT}", f"the answer of the notebook's own: {shown(cell)}"


@pytest.mark.evidence
def test_it_runs_in_full(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_or_skip()
    quick = os.environ.get("EVIDENCE") == "quick"
    if quick:  # small products, for which a second thread is waited for longer than it works
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = execute(source, quick=quick)
    check_outputs(notebook)
    if not quick:
        kept = nbformat.read(stored(source), as_version=4)
        assert [len(pictures(cell)) for cell in code_cells(notebook)] == [len(pictures(c)) for c in code_cells(kept)]


def test_a_cell_that_raises_fails_the_run(tmp_path: Path) -> None:
    bad = tmp_path / "walkthrough.py"
    bad.write_text("# %%\nimport labkit\n\n# %%\nraise KeyError('nothing here')\n")
    with pytest.raises(Exception, match="nothing here"):
        execute(bad, cell_seconds=QUICK_SECONDS)


def test_quick_values_replace_parameters_and_checks_are_left_out(tmp_path: Path) -> None:
    text = (
        "# ---\n# jupyter:\n#   jupytext:\n#     notebook_metadata_filter: quick\n#   quick:\n#     SIZE: 2\n# ---\n\n"
        '# %% tags=["parameters"]\nSIZE = 50\nOTHER = 3\n\n# %%\nprint(SIZE * OTHER)\n\n'
        '# %% tags=["check"]\nprint("checked")\n'
    )
    source = tmp_path / "walkthrough.py"
    source.write_text(text)

    def printed(**options: bool) -> list[str]:
        cells = code_cells(execute(source, cell_seconds=QUICK_SECONDS, **options))
        return [output.text.strip() for cell in cells for output in cell.outputs]

    assert printed(quick=False) == ["150", "checked"]
    assert printed(quick=True) == ["6"]
    source.write_text(text.replace("SIZE: 2", "SIZES: 2"))
    with pytest.raises(ValueError, match="SIZES replaces 0 assignments"):
        execute(source, quick=True)


def test_answers_are_put_in_only_where_asked_and_only_where_they_are_stated(tmp_path: Path) -> None:
    source = tmp_path / "01_small.py"
    cell = '# %% tags=["exercise"] solution="SIDE ** 2"\nanswer = None  # of the square\nprint(answer)\n'
    source.write_text(f"# %%\nSIDE = 3\n\n{cell}")

    def printed(**options: bool) -> str:
        return code_cells(execute(source, cell_seconds=QUICK_SECONDS, **options))[1].outputs[0].text.strip()

    assert [printed(), printed(answered=True)] == ["None", "9"]
    source.write_text(cell.replace(' solution="SIDE ** 2"', ""))
    with pytest.raises(ValueError, match="an exercise states no solution"):
        execute(source, answered=True)


def test_notebooks_are_found_by_lab_and_by_number() -> None:
    assert find_notebooks("07") == [path for path in SOURCES if path.parent.name.startswith("07")]
    assert find_notebooks(module="01") == [path for path in MODULE if path.name.startswith("01")]
    assert find_notebooks("07", "01") == [*find_notebooks("07"), *find_notebooks(module="01")]
    with pytest.raises(ValueError, match=r"no notebook labs/99_\*/walkthrough.py"):
        find_notebooks("99")
    with pytest.raises(ValueError, match=r"no notebook notebooks/99_\*.py"):
        find_notebooks("07", "99")


def model_or_skip() -> None:
    """Skips where the bundled model has not been fetched."""
    try:
        bundled_folder()
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")
