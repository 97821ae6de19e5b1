"""Runs a notebook from its text, in a kernel of its own, and keeps what it showed.

A notebook is a pair: `walkthrough.py` of a lab or `NN_name.py` of the module (jupytext, percent format) is the source,
the `.ipynb` beside it the same cells with their outputs. Three tags of cells mean something here:

    parameters   sizes; a quick run replaces them by those in the notebook's own metadata `quick`
    check        runs tests of a lab; left out of a quick run
    exercise     begins with `answer = None`; an answered run takes the cell's own metadata `solution` in place of None
"""

from __future__ import annotations

import base64
import io
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image
from traitlets.config import Config

from labkit.manifest import ROOT

CELL_SECONDS = 1200
PLOT_COLOURS = 128
ANY = "[0-9][0-9]"


def find_notebooks(lab: str | None = None, module: str | None = None, root: Path = ROOT) -> list[Path]:
    """The sources of notebooks: all of them, those of a lab, or one of the module's.

    Args:
        lab: two digits, for one lab alone.
        module: two digits, for that notebook of the module alone.
        root: the workbook.

    Raises:
        ValueError: there is none.
    """
    patterns = []
    if lab or not module:
        patterns.append(f"labs/{lab or ANY}_*/walkthrough.py")
    if module or not lab:
        patterns.append(f"notebooks/{module or ANY}_*.py")
    found = {pattern: sorted(root.glob(pattern)) for pattern in patterns}
    missing = [pattern for pattern, sources in found.items() if not sources]
    if missing and (lab or module or missing == patterns):
        raise ValueError(f"there is no notebook {' or '.join(missing)} in {root}")
    return [source for sources in found.values() for source in sources]


def is_of_a_lab(source: Path) -> bool:
    """Whether a notebook walks through a lab; the others belong to the module."""
    return source.name == "walkthrough.py"


def read_source(source: Path) -> NotebookNode:
    """The cells of a source, numbered so that two readings are equal."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
        # In the order in which nbformat stores them.
        cell["metadata"] = NotebookNode(sorted(cell.metadata.items()))
    return notebook


def execute(
    source: Path,
    *,
    impl: str = "solutions",
    quick: bool = False,
    answered: bool = False,
    cell_seconds: int = CELL_SECONDS,
    tell: Callable[[int, int], None] = lambda done, count: None,
) -> NotebookNode:
    """Runs a notebook in a fresh kernel.

    Args:
        source: the percent file.
        impl: whose code it uses.
        quick: with the quick parameters, and without the cells that run tests.
        answered: with every exercise answered by the solution that its cell states.
        cell_seconds: that one cell may take.
        tell: called before each cell with the number of cells done, and of all.

    Returns:
        The notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = read_source(source)
    if quick:
        _make_quick(notebook)
    if answered:
        _answer(notebook)
    with tempfile.TemporaryDirectory(prefix="notebook-") as scratch:
        client = NotebookClient(
            notebook,
            timeout=cell_seconds,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": str(source.parent)}},
            on_cell_start=lambda cell, cell_index: tell(cell_index, len(notebook.cells)),
            # Sockets in a folder of this run's: nobody else can reach them, and no port is needed.
            config=Config(KernelManager={"transport": "ipc", "connection_file": f"{scratch}/kernel.json"}),
        )
        client.execute(env=_environment(impl, scratch))
    # The exact Python and the session's own marks are nobody's business, and would change with every run.
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def stored(source: Path) -> Path:
    """The other half of the pair."""
    return source.with_suffix(".ipynb")


def is_paired(source: Path) -> bool:
    """Whether the stored notebook has the very cells of its source."""
    if not stored(source).is_file():
        return False
    kept = nbformat.read(stored(source), as_version=4)
    return jupytext.writes(kept, fmt="py:percent") == jupytext.writes(read_source(source), fmt="py:percent")


def store(source: Path, notebook: NotebookNode) -> None:
    """Replaces the stored notebook in one step; its plots are stored in as few colours as they need."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = _small(output.data["image/png"])
    target = stored(source)
    partial = target.with_suffix(".ipynb.part")
    nbformat.write(notebook, partial)
    os.replace(partial, target)


def _small(png: str) -> str:
    """A PNG, base64, with a palette: plots have few colours, and a third of the bytes is enough for them."""
    with Image.open(io.BytesIO(base64.b64decode(png))) as image, io.BytesIO() as file:
        image.convert("RGB").quantize(PLOT_COLOURS).save(file, "PNG", optimize=True)
        return base64.b64encode(file.getvalue()).decode()


def _make_quick(notebook: NotebookNode) -> None:
    """Replaces parameters, and drops the cells that run tests."""
    notebook.cells = [cell for cell in notebook.cells if "check" not in cell.metadata.get("tags", ())]
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            values = notebook.metadata.get("quick", {})
            cell.source = _replaced(cell.source, {name: repr(value) for name, value in values.items()})


def _answer(notebook: NotebookNode) -> None:
    """Replaces the open answers of exercises by the solutions that their cells state."""
    for cell in notebook.cells:
        if "exercise" in cell.metadata.get("tags", ()):
            if not isinstance(cell.metadata.get("solution"), str):
                raise ValueError(f"an exercise states no solution, an expression in quotes:\n{cell.source[:200]}")
            cell.source = _replaced(cell.source, {"answer": cell.metadata["solution"]})


def _replaced(code: str, values: Mapping[str, str]) -> str:
    """Assignments of other expressions.

    Raises:
        ValueError: a name that the code does not assign once, at the beginning of a line.
    """
    for name, value in values.items():
        line = f"{name} = {value}".replace("\\", r"\\")  # no group of the pattern is meant
        code, count = re.subn(rf"^{re.escape(name)} = .*$", line, code, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"the value of {name} replaces {count} assignments; the cell must hold one")
    return code


def _environment(impl: str, scratch: str) -> dict[str, str]:
    """What the kernel sees: this environment, but none of the user's own settings of Jupyter and matplotlib."""
    own = {name: value for name, value in os.environ.items() if name not in ("MPLBACKEND", "MATPLOTLIBRC")}
    return {**own, "IMPL": impl, "MPLCONFIGDIR": scratch, "IPYTHONDIR": scratch, "PYTHONPATH": str(ROOT)}
