"""Marked regions: what is found, and what is refused with the line that is wrong."""

from __future__ import annotations

import pytest

from grader.authoring.regions import MarkerError, find_regions

FOUND = '''import math

# BEGIN SOLUTION
import numpy
# END SOLUTION


class Box:
    # BEGIN SOLUTION
    size = 3
    # END SOLUTION

    def get(self):
        """Doc."""
        if self.size:
            # BEGIN SOLUTION
            return 1
            # END SOLUTION
        return 2


@triton.jit
def kernel(x):
    # BEGIN SOLUTION
    pass
    # END SOLUTION


@triton.autotune(configs=[], key=[])
@triton.jit(debug=True)
def tuned(x):
    # BEGIN SOLUTION
    pass
    # END SOLUTION
'''


def test_regions_know_their_owner_and_indentation() -> None:
    found = [(region.owner, region.indent, region.is_kernel) for region in find_regions(FOUND, "box.py")]
    assert found == [
        (None, "", False),
        (None, "    ", False),
        ("Box.get", "            ", False),
        ("kernel", "    ", True),
        ("tuned", "    ", True),
    ]


def test_lines_of_a_region_are_those_between_the_markers() -> None:
    first = find_regions(FOUND, "box.py")[0]
    assert first.lines(FOUND) == ["import numpy"]


@pytest.mark.parametrize(
    ("source", "line", "complaint"),
    [
        ("# BEGIN SOLUTION\nx = 1\n", 1, "without"),
        ("x = 1\n# END SOLUTION\n", 2, "without"),
        ("# BEGIN SOLUTION\nx = 1\n# BEGIN SOLUTION\n# END SOLUTION\n", 3, "nest"),
        ("# begin solution\nx = 1\n# END SOLUTION\n", 1, "no marker"),
        ("#BEGIN SOLUTION\nx = 1\n# END SOLUTION\n", 1, "no marker"),
        ("x = 1  # BEGIN SOLUTION\n# END SOLUTION\n", 1, "alone on a line"),
        ('x = """\n# BEGIN SOLUTION\n"""\n', 1, "inside a string"),
        ("def f():\n    # BEGIN SOLUTION\n    x = 1\n# END SOLUTION\n", 4, "indented"),
        ("# BEGIN SOLUTION\n# END SOLUTION\nx = 1\n", 1, "whole statements"),
        ("# BEGIN SOLUTION\nx = (\n# END SOLUTION\n1)\n", 1, "whole statements"),
        ("if x:\n    y = 1\n# BEGIN SOLUTION\nelse:\n    y = 2\n# END SOLUTION\n", 3, "whole statements"),
    ],
)
def test_wrong_markers_are_refused_with_their_line(source: str, line: int, complaint: str) -> None:
    with pytest.raises(MarkerError, match=complaint) as caught:
        find_regions(source, "lab.py")
    assert str(caught.value).startswith(f"lab.py:{line}:")
