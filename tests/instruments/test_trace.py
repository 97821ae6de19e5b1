"""Traces: accesses in order, and maps of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

from labkit.instruments.trace import NOBODY, program_that_touched, times_touched, trace
from labkit.loader import LabPackage
from tests.instruments.conftest import FOLDER


@pytest.fixture
def toys() -> Iterator[ModuleType]:
    """The toy kernels, in this process."""
    package = LabPackage("lab97", FOLDER, ["kernels"])
    package.mount()
    yield package.module("kernels")
    package.unmount()


def test_accesses_come_in_the_order_of_programs(toys: ModuleType) -> None:
    accesses = trace(lambda: toys.copy(torch.arange(6.0), 1, 5))
    assert [(a.operation, a.tensor, a.program_id[0], a.offsets.tolist()) for a in accesses] == [
        ("load", "x_ptr", 0, [1, 2, 3, 4]),
        ("store", "y_ptr", 0, [0, 1, 2, 3]),
        ("load", "x_ptr", 1, [5]),
        ("store", "y_ptr", 1, [4]),
    ]
    assert len({a.line for a in accesses}) == 1 and {a.kernel for a in accesses} == {"copy_kernel"}


def test_maps_show_who_came_how_often(toys: ModuleType) -> None:
    x = torch.zeros(3, 4)
    accesses = trace(lambda: (toys.softmax(x), toys.softmax(x)))
    assert np.array_equal(times_touched(accesses, "x_ptr", "load", (3, 4)), np.full((3, 4), 2))
    assert program_that_touched(accesses, "y_ptr", "store", (3, 4)).tolist() == [[i] * 4 for i in range(3)]
    untouched = program_that_touched(accesses, "y_ptr", "load", (3, 4))
    assert (untouched == NOBODY).all()


def test_lanes_that_share_an_address_count_once(toys: ModuleType) -> None:
    accesses = trace(lambda: toys.nibbles(torch.zeros(2, dtype=torch.int32)))
    assert times_touched(accesses, "x_ptr", "load", (2,)).tolist() == [1, 1]
