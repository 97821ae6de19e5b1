"""The commands: listed, documented as they are, and honest about what stops them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERNAL = {"FORCE"}


def phony_targets(makefile: str) -> set[str]:
    """The targets that the Makefile declares, without those that only it uses."""
    declared = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert declared is not None
    return set(declared.group(1).split()) - INTERNAL


def run_make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run make and return what it printed; the environment counts as up to date, tests do not set up."""
    if shutil.which("make") is None:
        pytest.skip("not verified here: make is not installed")
    # The flags of a surrounding `make test` must not reach the commands under test.
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
    command = ["make", "-o", ".venv/.stamp", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_help_lists_every_target(makefile: str) -> None:
    result = run_make("help")
    assert result.returncode == 0, result.stderr
    listed = set(re.findall(r"^  make (\S+) +\S", result.stdout, flags=re.MULTILINE))
    assert listed == phony_targets(makefile) | {"test-lab07"}


def test_help_is_what_make_alone_prints() -> None:
    assert run_make().stdout == run_make("help").stdout


def test_every_variable_that_help_mentions_exists(makefile: str) -> None:
    mentioned = set(re.findall(r"\b([A-Z]{3,})=", run_make("help").stdout))
    defined = set(re.findall(r"^([A-Z]+) [?:]?=", makefile, flags=re.MULTILINE))
    assert mentioned, "help names no variable at all"
    assert mentioned <= defined


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documents_name_only_commands_that_exist(document: str, makefile: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", "\n".join(code_spans(text))))
    assert named, f"{document} names no command"
    targets = phony_targets(makefile) | {f"test-lab{path.name[:2]}" for path in (ROOT / "labs").glob("[0-9]*")}
    assert named <= targets, f"{document} names commands that do not exist: {sorted(named - targets)}"


def code_spans(markdown: str) -> list[str]:
    """The code in a Markdown text: fenced blocks and inline spans."""
    blocks = re.findall(r"^```.*?^```", markdown, flags=re.MULTILINE | re.DOTALL)
    return blocks + re.findall(r"`([^`\n]+)`", markdown)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documents_point_at_files_that_exist(document: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / document).read_text())
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_readme_begins_with_the_two_commands() -> None:
    blocks = re.findall(r"^```.*?^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^make (\S+)", blocks[0], flags=re.MULTILINE)
    assert commands == ["demo", "test"]


def test_unknown_lab_is_refused_with_the_labs_that_exist() -> None:
    result = run_make("test-lab99")
    assert result.returncode != 0
    assert "there is no lab 99" in result.stdout
    assert "labs/07_kv_cache" in result.stdout


def test_grade_without_submissions_says_what_to_name() -> None:
    result = run_make("grade")
    assert result.returncode != 0
    assert "SUBMISSIONS=dir" in result.stdout


def test_ci_stops_at_the_first_failure(tmp_path: Path) -> None:
    """A failing stage must decide the exit code and keep the later ones from running."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    stages = "setup lint test test-strength evidence".split()
    recipes = [f"{name}:\n\t@echo ran {name}" for name in stages]
    recipes[2] += "; exit 5"
    (tmp_path / "Makefile").write_text("\n".join(recipes) + "\n")
    # Nothing is to be installed by a test.
    (tmp_path / "chromium").touch(mode=0o755)
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:{tmp_path}"}
    result = subprocess.run(
        ["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode != 0
    assert "ran test\n" in result.stdout and "FAILED" in result.stdout
    assert "ran test-strength" not in result.stdout and "ran evidence" not in result.stdout
