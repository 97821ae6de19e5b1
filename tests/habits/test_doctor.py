"""The doctor tells every part, says what to do about each, and fails only where the labs cannot run."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import doctor
from labkit.doctor import Finding, State

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["Python", "torch", "triton", "GPU", "speed", "memory", "disk", "model cache", "sandbox", "libseccomp"]


def test_every_part_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0, "these tests run, so the labs can"
    told = capsys.readouterr().out
    assert not [part for part in PARTS if f"\n{part} " not in "\n" + told]
    assert "The labs can run." in told


def test_whatever_is_not_well_comes_with_advice() -> None:
    for finding in doctor.findings():
        if finding.state in (State.BROKEN, State.LIMITED):
            assert finding.advice, f"no advice for {finding}"


def test_it_can_be_asked_before_anything_is_set_up() -> None:
    """Without site-packages there is no torch: the exit code says so, and so does the advice."""
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
         "from labkit import doctor; sys.exit(doctor.main())"],
        capture_output=True, text=True, timeout=120, check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "The labs cannot run yet: torch" in result.stdout
    assert "run: make setup" in result.stdout


def test_a_check_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Finding:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "gpu_finding", fail)
    found = {finding.part: finding for finding in doctor.findings()}
    assert set(PARTS) <= set(found)
    assert found["GPU"].state is State.NOT_VERIFIED
    assert "no such device" in found["GPU"].detail


def test_a_missing_sandbox_limits_and_does_not_break(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("not verified here: the sandbox is for Linux")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    finding = doctor.sandbox_finding()
    assert finding.state is State.LIMITED
    assert "apt-get install bubblewrap" in finding.advice


def test_an_empty_model_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "nowhere"))
    finding = doctor.model_finding()
    assert finding.state is State.LIMITED
    assert str(tmp_path / "nowhere") in finding.detail and "make setup" in finding.advice


@pytest.mark.parametrize(("capability", "built_for", "runs"), [
    ("12.0", ["sm_90", "sm_120"], True),
    ("12.0", ["sm_80", "sm_90"], False),  # an RTX 5060 and a torch from before it
    ("12.0", ["sm_90", "compute_90"], True),  # translated by the driver
    ("8.9", ["sm_80", "sm_90"], True),  # an RTX 40 runs Ampere's code
    ("8.0", ["sm_86"], False),
    ("9.0", ["sm_90a"], True),
    ("12.0", ["sm_90a", "compute_90a"], False),
    ("7.5", [], False),
])  # fmt: skip
def test_a_build_runs_on_cards_of_its_own_generation_or_by_intermediate_code(
    capability: str, built_for: list[str], runs: bool
) -> None:
    assert doctor.has_kernels_for(capability, built_for) is runs


def test_a_card_that_this_torch_has_no_kernels_for_is_no_gpu_to_rely_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from labkit import machine

    card = machine.Gpu("Toy 5060", 8 * 2**30, "12.0")
    monkeypatch.setattr(doctor, "machine_facts", lambda: dataclasses.replace(machine.facts(), gpu=card))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_120"])
    assert doctor.gpu_finding() == Finding("GPU", State.OK, "Toy 5060, 8.0 GiB, sm_120")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    finding = doctor.gpu_finding()
    assert finding.state is State.LIMITED and "no kernels: it has those of sm_80, sm_90" in finding.detail


def test_speed_is_told_where_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    finding = doctor.speed_finding()
    assert (finding.state, finding.advice) == (State.NOT_VERIFIED, "run: make measure")
