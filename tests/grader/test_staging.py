"""A missing or broken module costs its own task only: the others load over its stub."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import grader.staging
from grader.staging import Staging, find_faults
from labkit.loader import LabPackage
from labkit.manifest import Manifest

Stage = Callable[[Mapping[str, str]], Staging]

STUB = "def f(): raise NotImplementedError\ndef g(): raise NotImplementedError\n"


@pytest.fixture
def stage(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Stages a submission of the texts given."""
    monkeypatch.setattr(grader.staging, "generate_stub", lambda manifest, module: STUB)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("submitted", "staged"):
        (tmp_path / name).mkdir()

    def begin(texts: Mapping[str, str]) -> Staging:
        for module, text in texts.items():
            (tmp_path / "submitted" / f"{module}.py").write_text(text)
        return Staging(manifest, tmp_path / "submitted", tmp_path / "staged")

    return begin


def probe(staging: Staging) -> Callable[[], dict[str, Exception]]:
    """Imports each module in this process; these are our own texts."""

    def errors() -> dict[str, Exception]:
        found: dict[str, Exception] = {}
        for module in staging.manifest.modules:
            package = LabPackage("lab98", staging.folder, staging.manifest.modules)
            package.mount()
            importlib.invalidate_caches()
            try:
                package.module(module)
            except Exception as error:
                found[module] = error
            finally:
                package.unmount()
        return found

    return errors


def test_good_modules_are_staged_as_they_are(stage: Stage) -> None:
    texts = {"part1": "def f(): return 1\n", "part2": "from .part1 import f\n"}
    staging = stage(texts)
    assert find_faults(staging, probe(staging)) == {} and staging.missing == []
    assert {path.stem: path.read_text() for path in staging.folder.iterdir()} == texts


def test_a_module_loads_over_the_stub_of_one_that_is_missing(stage: Stage) -> None:
    staging = stage({"part2": "from .part1 import f\n"})
    assert staging.missing == ["part1"]
    assert find_faults(staging, probe(staging)) == {}


@pytest.mark.parametrize("text", ["def f(:\n", "1 / 0\n", "import nonsense\n", "\0", "from .part2 import g\n1 / 0\n"])
def test_a_module_loads_over_the_stub_of_one_that_is_broken(
    stage: Stage, text: str
) -> None:
    staging = stage({"part1": text, "part2": "from .part1 import f\n" if "part2" not in text else "def g(): pass\n"})
    faults = find_faults(staging, probe(staging))
    assert list(faults) == ["part1"] and faults["part1"].through is None
    assert (staging.submitted / "part1.py").read_text() == text, "the submission itself was changed"


def test_a_module_that_needs_more_than_the_stub_has_fails_through_it(
    stage: Stage,
) -> None:
    staging = stage({"part1": "own = 1 / 0\n", "part2": "from .part1 import own\n"})
    faults = find_faults(staging, probe(staging))
    assert (faults["part1"].through, faults["part2"].through) == (None, "part1")


def test_modules_that_import_each_other_both_fail(stage: Stage) -> None:
    staging = stage({"part1": "from .part2 import g\n1 / 0\n", "part2": "from .part1 import f\n"})
    assert "part1" in find_faults(staging, probe(staging))


def test_without_stubs_every_fault_is_reported(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_reference(manifest: Manifest, module: str) -> str:
        raise ValueError("this copy lacks the reference")

    monkeypatch.setattr(grader.staging, "generate_stub", no_reference)
    staging = stage({"part1": "1 / 0\n", "part2": "from .part1 import f\n"})
    assert set(find_faults(staging, probe(staging))) == {"part1", "part2"}
