"""Compiling without a GPU: what compiles, what is refused, and what does not fit a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from labkit.instruments.compiled import SHARED_BYTES, Case, compile_case, load_cases
from labkit.launch import VARIABLE
from labkit.loader import LabPackage
from labkit.manifest import ROOT
from tests.instruments.conftest import FOLDER, MANIFEST

WANTED = {
    "softmax": [[4, 100]],
    "gram": [[16, 8]],
    "stub": [[4]],
    "greedy_gram": [256],
    "tuned_gram": [256, 64],
    "attention_by_another_name": [[1, 1, 2, 16]] * 3,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What came of each toy, by function."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.instruments.compile_toys", json.dumps(WANTED)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_a_kernel_compiles_for_every_card(compiled: dict[str, list[dict[str, Any]]]) -> None:
    made = compiled["softmax"]
    assert [one["capability"] for one in made] == list(SHARED_BYTES) and [one["fault"] for one in made] == [False] * 3
    assert all(0 < one["shared_bytes"] < 1024 and "fits" in one["text"] for one in made)


def test_a_shallow_dot_does_not_compile(compiled: dict[str, list[dict[str, Any]]]) -> None:
    for one in compiled["gram"]:
        assert one["fault"] and one["shared_bytes"] is None and "K >= 16" in one["text"]


def test_a_stub_is_not_attempted(compiled: dict[str, list[dict[str, Any]]]) -> None:
    for one in compiled["stub"]:
        assert one["not_attempted"] and one["error"].startswith("lab 97 task 1: stub_kernel is not written yet.")


def test_what_is_too_large_for_a_card_is_a_fault(compiled: dict[str, list[dict[str, Any]]]) -> None:
    by_card = {one["capability"]: one for one in compiled["greedy_gram"]}
    assert by_card[120]["fault"] and "TOO LARGE" in by_card[120]["text"]
    assert not by_card[90]["fault"]


def test_of_a_tuners_choices_one_must_fit(compiled: dict[str, list[dict[str, Any]]]) -> None:
    made = compiled["tuned_gram"]
    assert [(one["capability"], one["choice"]) for one in made] == [(c, i) for c in SHARED_BYTES for i in range(2)]
    assert [one["shared_bytes"] > SHARED_BYTES[120] for one in made[-2:]] == [True, False]
    assert not any(one["fault"] for one in made)


def test_a_launcher_without_a_launch_is_a_fault(compiled: dict[str, list[dict[str, Any]]]) -> None:
    (one,) = compiled["attention_by_another_name"]
    assert one["fault"] and "started no kernel" in one["error"]


def test_the_interpreters_process_refuses_to_compile() -> None:
    package = LabPackage("lab97", FOLDER, ["kernels"])
    with pytest.raises(RuntimeError, match=f"without {VARIABLE}=1"):
        next(compile_case(package, Case(1, "kernels", "softmax", tuple)))


def test_a_lab_without_cases_says_so() -> None:
    with pytest.raises(ValueError, match="lab 97 has no kernels to compile"):
        load_cases(MANIFEST)
