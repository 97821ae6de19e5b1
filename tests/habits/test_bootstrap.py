"""Set-up on a machine that lacks something: the missing package is named with the command that installs it."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bootstrap() -> ModuleType:
    """The tool, loaded by its path since tools/ is no package."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "tools" / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def commands(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that set-up would have run; none of them runs."""
    recorded: list[list[str]] = []

    def record(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        recorded.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bootstrap.subprocess, "run", record)
    return recorded


def lack(monkeypatch: pytest.MonkeyPatch, bootstrap: ModuleType, packages: dict[str, str], uid: int) -> None:
    """Pretend that Debian packages are missing and that this user runs the set-up."""
    monkeypatch.setattr(bootstrap, "missing_debian_packages", lambda: packages)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: uid)


def test_root_installs_only_what_is_missing(
    bootstrap: ModuleType, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lack(monkeypatch, bootstrap, {"bubblewrap": "the sandbox"}, uid=0)
    bootstrap.install_debian_packages()
    assert [command[:2] for command in commands] == [["apt-get", "update"], ["apt-get", "install"]]
    assert commands[1][-1] == "bubblewrap"


def test_user_is_told_the_command_and_goes_on(
    bootstrap: ModuleType,
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lack(monkeypatch, bootstrap, {"bubblewrap": "the sandbox", "libseccomp2": "the sandbox"}, uid=1000)
    bootstrap.install_debian_packages()
    told = capsys.readouterr().out
    assert not commands
    assert "sudo apt-get install bubblewrap" in told and "sudo apt-get install libseccomp2" in told


def test_without_venv_a_user_is_stopped_with_the_command(
    bootstrap: ModuleType, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lack(monkeypatch, bootstrap, {"python3-venv": "the environment"}, uid=1000)
    with pytest.raises(bootstrap.SetupError, match="sudo apt-get install python3-venv"):
        bootstrap.install_debian_packages()
    assert not commands


def test_missing_programs_are_found_missing(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    monkeypatch.setattr(bootstrap.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    missing = bootstrap.missing_debian_packages()
    assert {"bubblewrap", "git", "libseccomp2", "make"} < set(missing)
    assert any(name.endswith("-venv") for name in missing)


def test_an_old_python_is_refused_by_its_version(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 2))
    assert bootstrap.main() == 1
    message = capsys.readouterr().err
    assert "3.11 or later" in message and "3.9.2" in message and "PYTHON=" in message


def test_a_failing_step_is_named(bootstrap: ModuleType) -> None:
    with pytest.raises(bootstrap.SetupError, match=r"no packages .*exit code 3"):
        bootstrap.run(["bash", "-c", "exit 3"], "no packages")
    with pytest.raises(bootstrap.SetupError, match="no packages"):
        bootstrap.run(["no-such-program-at-all"], "no packages")
