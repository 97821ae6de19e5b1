"""The notebooks: source and stored half are a pair, run from a clean kernel, and show what they promise."""

from __future__ import annotations

import base64
import os
import re
import struct
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from labkit.checkpoints import CheckpointError, bundled_folder
from labkit.manifest import load_manifest
from labkit.notebook.execution import execute, find_notebooks, is_paired, stored

MAX_BYTES = 600_000
QUICK_SECONDS = 300
"""For one cell, on a machine with other things to do; the whole quick form takes well under a minute alone."""

SOURCES = find_notebooks()
MACHINE_PATH = re.compile("(?<![\\w.])/" + r"(home|Users|root|work|tmp|opt|usr)/[\w.-]+")


@pytest.fixture(params=SOURCES, ids=lambda source: source.parent.name)
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


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(cell: NotebookNode) -> list[bytes]:
    """The PNGs that a cell shows."""
    found = [output.data for output in cell.outputs if output.output_type in ("display_data", "execute_result")]
    return [base64.b64decode(data["image/png"]) for data in found if "image/png" in data]


def draws(cell: NotebookNode) -> bool:
    """Whether a cell promises a plot."""
    return re.search(r"\bpanels\(", cell.source) is not None


def check_outputs(notebook: NotebookNode) -> None:
    """Every cell ran, in order, without errors or noise, and showed its plots."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not one run from the top"
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error", f"{output.get('ename')}: {output.get('evalue')}"
            assert output.get("name") != "stderr", f"noise in the output: {output.get('text')}"
            leftover = output.get("data", {}).get("text/plain", "")
            assert draws(cell) is False or output.output_type != "execute_result", f"a value nobody wants: {leftover}"
        assert not draws(cell) or pictures(cell), f"no plot where one is promised:\n{cell.source[:300]}"
    plots = [picture for cell in cells for picture in pictures(cell)]
    assert plots, "a walkthrough without a plot"
    for picture in plots:
        width, height = struct.unpack(">II", picture[16:24])
        assert width <= 1000 and height <= 800, f"a plot of {width} by {height} pixels"


def test_the_pair_is_in_sync(source: Path, kept: NotebookNode) -> None:
    assert is_paired(source), f"{stored(source).name} has other cells than {source.name}: run `make notebooks`"


def test_stored_outputs_are_whole_small_and_of_no_machine(source: Path, kept: NotebookNode) -> None:
    nbformat.validate(kept)
    check_outputs(kept)
    assert stored(source).stat().st_size < MAX_BYTES
    text = stored(source).read_text(encoding="utf-8")
    assert not MACHINE_PATH.search(text), f"a path of one machine: {MACHINE_PATH.search(text)}"


def test_each_core_task_is_walked_and_checked_in_order(source: Path, kept: NotebookNode) -> None:
    manifest = load_manifest(source.parent.name[:2])
    wanted = [f"{manifest.id}.{task.number}" for task in manifest.tasks if not task.stretch]
    calls = re.findall(r'^check\("([\d.]+)"\)', "\n".join(cell.source for cell in code_cells(kept)), re.MULTILINE)
    assert [name for name in calls if name in wanted] == wanted
    for cell in code_cells(kept):
        if "check" in cell.metadata.get("tags", ()):
            shown = "".join(output.data.get("text/plain", "") for output in cell.outputs if "data" in output)
            assert ": done. " in shown, f"{cell.source} was stored with: {shown[:300]}"


def test_it_runs_from_a_clean_kernel(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model_or_skip()
    # Threads that wait for each other make a busy machine slower still.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # A user's own settings must not reach it: this matplotlibrc would give figures of another size.
    (tmp_path / "matplotlibrc").write_text("figure.dpi: 300\n")
    monkeypatch.setenv("MATPLOTLIBRC", str(tmp_path / "matplotlibrc"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    notebook = execute(source, quick=True, cell_seconds=QUICK_SECONDS)
    check_outputs(notebook)
    shown = [output.data for cell in code_cells(notebook) for output in cell.outputs if "data" in output]
    assert any("text/html" in data and "points" in data["text/plain"] for data in shown), "no progress was drawn"


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

    def printed(quick: bool) -> list[str]:
        cells = code_cells(execute(source, quick=quick, cell_seconds=QUICK_SECONDS))
        return [output.text.strip() for cell in cells for output in cell.outputs]

    assert printed(quick=False) == ["150", "checked"]
    assert printed(quick=True) == ["6"]
    source.write_text(text.replace("SIZE: 2", "SIZES: 2"))
    with pytest.raises(ValueError, match="SIZES replaces 0 assignments"):
        execute(source, quick=True)


def test_a_lab_without_a_notebook_is_refused() -> None:
    assert find_notebooks("07") == [path for path in SOURCES if path.parent.name.startswith("07")]
    with pytest.raises(ValueError, match="no notebook of lab '99'"):
        find_notebooks("99")


def model_or_skip() -> None:
    """Skips where the bundled model has not been fetched."""
    try:
        bundled_folder()
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")
