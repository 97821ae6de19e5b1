"""Machine facts, and a bandwidth that is measured once and remembered for this machine only."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import psutil
import pytest
import torch

from labkit import machine


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "read_bandwidth.json"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices that were measured; each measurement gives one more byte per second."""
    devices: list[str] = []

    def measure(device: str) -> float:
        devices.append(device)
        return float(len(devices))

    monkeypatch.setattr(machine, "_measure", measure)
    return devices


def test_facts_describe_this_machine_and_are_plain_values() -> None:
    facts = machine.facts()
    assert facts.cpu and facts.logical_cores >= 1
    assert facts.memory_bytes == psutil.virtual_memory().total
    assert facts.torch == torch.__version__ and (facts.gpu is None) == (not torch.cuda.is_available())
    json.dumps(dataclasses.asdict(facts))


def test_the_measured_bandwidth_is_that_of_memory_not_of_a_cache_or_a_clock(cache: Path) -> None:
    bandwidth = machine.read_bandwidth()
    assert 1e8 < bandwidth < 2e12, f"{bandwidth:.3g} bytes/s"
    assert machine.read_bandwidth() == bandwidth


def test_a_result_is_kept_until_asked_again(cache: Path, measured: list[str]) -> None:
    assert [machine.read_bandwidth(), machine.read_bandwidth(), machine.read_bandwidth(again=True)] == [1.0, 1.0, 2.0]
    assert machine.read_bandwidth() == 2.0 and measured == ["cpu", "cpu"]
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_another_machine_or_number_of_threads_is_measured_on_its_own(
        cache: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.read_bandwidth() == 1.0
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(machine.platform, "node", lambda: "another")
        assert machine.read_bandwidth() == 2.0
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch, "get_num_threads", lambda: 77)
        assert machine.read_bandwidth() == 3.0
    assert machine.read_bandwidth() == 1.0


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"x": "fast"}'])
def test_a_damaged_record_is_measured_again(cache: Path, measured: list[str], content: str) -> None:
    cache.parent.mkdir()
    cache.write_text(content)
    assert machine.read_bandwidth() == 1.0
    assert machine.read_bandwidth() == 1.0 and len(measured) == 1


def test_a_cache_that_cannot_be_written_costs_only_the_memory(
        tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "file" / "cache"))
    assert [machine.read_bandwidth(), machine.read_bandwidth()] == [1.0, 2.0]


def test_devices_that_are_not_there_are_refused(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'tpu'"):
        machine.read_bandwidth("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        machine.read_bandwidth("cuda")
    assert measured == []
