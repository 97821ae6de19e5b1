"""What the tests of notebooks read off their cells."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator

from nbformat import NotebookNode


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """In their order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook: NotebookNode, tag: str) -> list[NotebookNode]:
    """The cells with a tag."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def shown(cell: NotebookNode) -> str:
    """What a cell displays, as plain text."""
    return "".join(output.data.get("text/plain", "") for output in cell.outputs if "data" in output)


def pictures(cell: NotebookNode, kind: str = "png") -> list[bytes]:
    """The pictures that a cell shows."""
    found = [output.data for output in cell.outputs if output.output_type in ("display_data", "execute_result")]
    return [base64.b64decode(data[f"image/{kind}"]) for data in found if f"image/{kind}" in data]


def promised(cell: NotebookNode) -> Iterator[str]:
    """The kinds of pictures that a cell's code promises."""
    if re.search(r"\bpanels\(", cell.source):
        yield "png"
    if re.search(r"\banimate\(", cell.source):
        yield "gif"


def check_outputs(notebook: NotebookNode) -> None:
    """Every cell ran, in order, without errors or noise, and showed its plots."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not one run from the top"
    for cell in cells:
        kinds = list(promised(cell))
        for output in cell.outputs:
            assert output.output_type != "error", f"{output.get('ename')}: {output.get('evalue')}"
            assert output.get("name") != "stderr", f"noise in the output: {output.get('text')}"
            leftover = output.get("data", {}).get("text/plain", "")
            assert not kinds or output.output_type != "execute_result", f"a value nobody wants: {leftover}"
        for kind in kinds:
            assert pictures(cell, kind), f"no {kind} where one is promised:\n{cell.source[:300]}"
    plots = [picture for cell in cells for picture in pictures(cell)]
    assert plots, "a notebook without a plot"
    for picture in plots:
        width, height = struct.unpack(">II", picture[16:24])
        assert width <= 1000 and height <= 800, f"a plot of {width} by {height} pixels"
