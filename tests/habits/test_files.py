"""What may lie in the repository: small files, no traces of one machine, annotations that cost nothing."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_BYTES = 1_000_000
HEADS = Path("labkit/trained_heads")
MAX_HEADS_BYTES = 10_000_000
"""Of all trained heads together: the one thing here that is data rather than text."""
# Folders of one person's or one build machine's; the pattern is split so that this file does not match itself.
MACHINE_PATH = re.compile("(?<![\\w.])/" + r"(home|Users|root|work|opt/(wheels|pypi))/[\w.-]+")
# A registry belongs in the user's own configuration of pip, apt or npm.
REGISTRY = re.compile(
    "|".join(r"\b" + name + r"\.(?:org|com)\b" for name in ("pypi", "files\\.pythonhosted", "registry\\.npmjs"))
    + r"|--(?:extra-)?index" + "-url|--find" + "-links"
)


def text_of(path: Path) -> str | None:
    """The text of a file, or None if it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def test_no_file_is_large(tracked_files: list[Path]) -> None:
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in tracked_files}
    heads = {path for path in sizes if path.parent == HEADS and path.suffix == ".safetensors"}
    assert not {str(path): size for path, size in sizes.items() if size > MAX_FILE_BYTES and path not in heads}
    assert sum(sizes[path] for path in heads) <= MAX_HEADS_BYTES


@pytest.mark.parametrize(("pattern", "example"), [
    (MACHINE_PATH, "cd /" + "home/someone/course"),
    (REGISTRY, "pip install --index" + "-url https://example.org torch"),
], ids=["paths", "registries"])
def test_no_file_names_one_machine(pattern: re.Pattern[str], example: str, tracked_files: list[Path]) -> None:
    assert pattern.search(example), "the pattern would find nothing"
    found = []
    for path in tracked_files:
        for number, line in enumerate((text_of(path) or "").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def has_annotations(tree: ast.AST) -> bool:
    """Tell whether a module annotates anything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) or (isinstance(node, ast.arg) and node.annotation is not None):
            return True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            return True
    return False


def test_annotations_are_never_evaluated_at_import(tracked_files: list[Path]) -> None:
    without = []
    for path in tracked_files:
        if path.suffix != ".py":
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError:
            continue  # a sample submission may be broken on purpose; ruff sees to the others
        imports = {
            alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module == "__future__"
            for alias in node.names
        }
        if has_annotations(tree) and "annotations" not in imports:
            without.append(str(path.relative_to(ROOT)))
    assert not without, f"add `from __future__ import annotations` to {without}"


def test_import_contracts_cover_every_package() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(contracts["root_packages"])
    layers = " ".join(contracts["contracts"][0]["layers"])
    placed = set(re.findall(r"solutions\.(\w+)", layers))
    here = {path.stem for path in (ROOT / "solutions").iterdir() if path.suffix == ".py" or path.is_dir()}
    unplaced = {name for name in here if not name.startswith("_")} - placed
    assert not unplaced, f"pyproject.toml places no layer for solutions.{sorted(unplaced)}"
