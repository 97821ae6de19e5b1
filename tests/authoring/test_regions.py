"""Markers: where they may stand, and what is said where they may not."""

from __future__ import annotations

import pytest

from grader.authoring.regions import MarkerError, find_regions

GOOD = """
# BEGIN SOLUTION
import os
# END SOLUTION

class Box:
    # BEGIN SOLUTION
    limit = 3
    # END SOLUTION

    def put(self):
        def inner():
            # BEGIN SOLUTION
            return 1
            # END SOLUTION
        if inner():
            # BEGIN SOLUTION
            pass
            # END SOLUTION

@triton.jit
def kernel(x):
    # BEGIN SOLUTION
    y = x
    # END SOLUTION

@triton.autotune(configs=[])
@triton.jit(debug=True)
def tuned(x):
    # BEGIN SOLUTION
    y = x
    # END SOLUTION
"""


def test_each_region_knows_its_owner() -> None:
    regions = find_regions(GOOD, "good.py")
    owners = [(region.owner, region.is_kernel) for region in regions]
    assert owners == [
        (None, False), (None, False), ("Box.put", False), ("Box.put", False), ("kernel", True), ("tuned", True),
    ]  # fmt: skip
    assert regions[2].lines(GOOD) == ["            return 1"]
    assert regions[2].indent == " " * 12


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("# BEGIN SOLUTION\nx = 1\n", "without '# END SOLUTION'"),
        ("x = 1\n# END SOLUTION\n", "without '# BEGIN SOLUTION'"),
        ("# BEGIN SOLUTION\n# BEGIN SOLUTION\nx = 1\n# END SOLUTION\n# END SOLUTION\n", "don't nest"),
        ("x = '''\n# BEGIN SOLUTION\n'''\n", "inside a string"),
        ("x = f'''{1}\n# END SOLUTION\n'''\n", "inside a string"),
        ("# begin solution\nx = 1\n# END SOLUTION\n", "is no marker"),
        ("#BEGIN SOLUTION\nx = 1\n# END SOLUTION\n", "is no marker"),
        ("x = 1  # BEGIN SOLUTION\ny = 2\n# END SOLUTION\n", "is no marker"),
        ("# BEGIN SOLUTION\n# END SOLUTION\n", "whole statements"),
        ("x = (\n# BEGIN SOLUTION\n1\n# END SOLUTION\n)\n", "whole statements"),
        ("# BEGIN SOLUTION\nx = (\n# END SOLUTION\n1)\n", "whole statements"),
        ("def f():\n    # BEGIN SOLUTION\n    return 1\n# END SOLUTION\n", "indented otherwise"),
        ("if x:\n    y = 1\n# BEGIN SOLUTION\nelse:\n    y = 2\n# END SOLUTION\n", "whole statements"),
        ("# BEGIN SOLUTION\nx = 1\nif x:\n    y = 2\n# END SOLUTION\n    z = 3\n", "whole statements"),
    ],
)
def test_wrong_markers_are_named_with_file_and_line(source: str, said: str) -> None:
    with pytest.raises(MarkerError, match=r"bad\.py:\d+: ") as caught:
        find_regions(source, "bad.py")
    assert said in str(caught.value)
