"""Bounds: what follows from them, what is kept of them and for whom, and how they are told."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from rich.console import Console

from labkit.notebook.roofline import draw_roofline
from labkit.probing import MachineBounds, Spread, kept, kept_bounds, machine_bounds
from labkit.probing.table import print_bounds

is_busy = kept._is_busy


@pytest.fixture
def measured(bounds: MachineBounds, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each measurement was quick; every one finds one more byte per second."""
    asked: list[bool] = []

    def measure(device: str, *, quick: bool, tell: Any) -> MachineBounds:
        asked.append(quick)
        read = Spread(1.0, 1.0, float(len(asked)), 1)
        return dataclasses.replace(bounds, device=device, quick=quick, bandwidth={"read": read})

    monkeypatch.setattr(kept.measuring, "measure", measure)
    monkeypatch.setattr(kept, "_is_busy", lambda: False)
    return asked


def test_ridges_and_the_roof_follow_from_rates(bounds: MachineBounds) -> None:
    assert (bounds.ridge("bf16"), bounds.ridge("fp32")) == (100.0, 20.0)
    assert bounds.attainable(1.0, "bf16") == bounds.read == 100e9
    assert bounds.attainable(99.0, "bf16") < bounds.attainable(100.0, "bf16") == bounds.attainable(1e6, "bf16") == 10e12


def test_a_dtype_that_is_missing_is_refused_with_the_reason(bounds: MachineBounds) -> None:
    with pytest.raises(ValueError, match=r"Toy 9000 has no rate for fp8: needs compute capability 8.9.*fp32, bf16"):
        bounds.flops("fp8")
    with pytest.raises(ValueError, match="no such dtype is measured"):
        bounds.ridge("int3")


def test_one_line_tells_the_bounds(bounds: MachineBounds) -> None:
    line = bounds.line()
    assert line.startswith("Toy 9000: reads 100.0 GB/s, multiplies ") and "10,000 GFLOP/s in bf16" in line


def test_json_comes_back_as_it_went_and_says_its_ridges(bounds: MachineBounds) -> None:
    told = json.loads(json.dumps(bounds.to_json()))
    assert MachineBounds.from_json(told) == bounds
    assert told["ridge"] == {"fp32": 20.0, "bf16": 100.0}
    assert told["bandwidth"]["read"] == {"median": 95e9, "low": 90e9, "high": 100e9, "repeats": 9}
    for broken in (told | {"schema": 0}, {"schema": 1}, told | {"bandwidth": {"read": 3}}, told | {"points": [{}]}):
        with pytest.raises(ValueError, match="run: make measure"):
            MachineBounds.from_json(broken)


def test_bounds_are_measured_once_and_again_when_asked(cache: Path, measured: list[bool]) -> None:
    assert [machine_bounds("cpu").read, machine_bounds("cpu").read, machine_bounds("cpu", again=True).read] == [1, 1, 2]
    assert machine_bounds("cpu").read == 2 and [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_a_hurried_result_never_stands_for_one_at_leisure(cache: Path, measured: list[bool]) -> None:
    assert [machine_bounds("cpu", quick=True).read, machine_bounds("cpu", quick=True).read] == [1, 1]
    assert machine_bounds("cpu").read == 2
    assert machine_bounds("cpu", quick=True).read == 2, "the better one is at hand"
    assert measured == [True, False]


def test_what_a_busy_machine_could_do_besides_is_no_bound(
    cache: Path, measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept.os, "getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr(kept.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(kept, "_is_busy", is_busy)
    load = 3.1
    assert [machine_bounds("cpu").read, machine_bounds("cpu").read] == [1, 1], "good enough while it is busy"
    load = 2.9
    assert kept_bounds("cpu") is None
    assert [machine_bounds("cpu").read, machine_bounds("cpu").read] == [2, 2]
    load = 3.1
    assert machine_bounds("cpu").read == 2, "the better one is at hand"


def test_another_machine_or_number_of_threads_is_measured_on_its_own(
    cache: Path, measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine_bounds("cpu").read == 1
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kept.platform, "node", lambda: "another")
        assert kept_bounds("cpu") is None
        assert machine_bounds("cpu").read == 2
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch, "get_num_threads", lambda: 77)
        assert machine_bounds("cpu").read == 3
    assert machine_bounds("cpu").read == 1


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"x": "fast"}'])
def test_a_damaged_record_is_measured_again(cache: Path, measured: list[bool], content: str) -> None:
    cache.parent.mkdir()
    cache.write_text(content)
    assert [machine_bounds("cpu").read, machine_bounds("cpu").read] == [1, 1]


def test_a_cache_that_cannot_be_written_costs_only_the_memory(
    tmp_path: Path, measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "file" / "cache"))
    assert [machine_bounds("cpu").read, machine_bounds("cpu").read] == [1, 2]


def test_devices_that_are_not_there_are_refused(measured: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'tpu'"):
        machine_bounds("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        machine_bounds("cuda")
    assert measured == []


def told_of(bounds: MachineBounds) -> str:
    console = Console(record=True, width=100, file=io.StringIO())
    print_bounds(bounds, console)
    return console.export_text()


def test_the_table_tells_numbers_units_ranges_and_what_is_missing(bounds: MachineBounds) -> None:
    text = told_of(bounds)
    for part in ("Toy 9000", "8.0 GiB", "95   90 – 100   GB/s", "9      5 – 10   TFLOP/s", "100 FLOP/byte",
                 "starting an operator", "fp8: not measured; needs compute capability 8.9"):  # fmt: skip
        assert " ".join(part.split()) in " ".join(text.split()), f"{part} is missing in\n{text}"
    assert "wide ranges (bf16)" in text
    assert "not verified here" not in text
    assert "a GPU: *not verified here*" in told_of(dataclasses.replace(bounds, device="cpu", threads=2))


def test_the_picture_has_slope_roofs_ridges_and_points(bounds: MachineBounds) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    draw_roofline(axes, bounds, ["bf16", "fp32"])
    slope, *roofs, points = (line.get_xydata() for line in axes.lines)
    assert [y / x for x, y in slope] == pytest.approx([100e9, 100e9]) and slope[-1][0] == 100.0
    assert [(roof[0].tolist(), roof[1][1]) for roof in roofs] == [([100.0, 10e12], 10e12), ([20.0, 2e12], 2e12)]
    assert points.tolist() == [[1.0, 95e9], [60.0, 5e12]]
    assert {"ridge 100", "ridge 20", "1 token", "64 tokens"} <= {text.get_text() for text in axes.texts}
    plt.close(figure)
