"""Ranges and pins: complete, consistent, and checked against what a GPU build demands."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
REQUIREMENTS = [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]


@pytest.fixture
def check_pins() -> ModuleType:
    """The tool, loaded by its path since tools/ is no package."""
    spec = importlib.util.spec_from_file_location("check_pins", ROOT / "tools" / "check_pins.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    pin = PINS.get(requirement.name)
    assert pin is not None, f"constraints.txt has no pin for {requirement.name}"
    assert requirement.specifier.contains(pin), f"{requirement.name}=={pin} is outside {requirement.specifier}"


def test_pins_hold_for_every_build_of_torch() -> None:
    assert "+" not in PINS["torch"], "a local tag such as +cpu would shut out the CUDA build"


def test_every_dependency_says_why() -> None:
    lines = [line.strip() for line in PYPROJECT.splitlines()]
    for number, line in enumerate(lines):
        if re.match(r'^"[a-z-]+[><=]', line):
            assert lines[number - 1].startswith("# "), f"no comment above {line}"


@pytest.mark.parametrize(
    ("demanded", "expected", "verdict"),
    [("triton==3.7.1", 0, "agree"), ("triton==3.6.0", 1, "WRONG"), (None, 0, "*not verified here*")],
)
def test_verdict_on_the_pair(
    demanded: str | None,
    expected: int,
    verdict: str,
    check_pins: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only a known disagreement fails, and an index out of reach is not called a pass."""
    monkeypatch.setattr(check_pins, "demanded_triton", lambda version: demanded and Requirement(demanded))
    assert check_pins.main() == expected
    assert verdict in capsys.readouterr().out
