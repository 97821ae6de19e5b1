"""The catalogue of plausible wrong implementations: named edits inside the marked regions of the reference."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from grader.authoring.regions import find_regions
from grader.authoring.stubs import solution_source, task_of_module
from labkit.manifest import Manifest

FOLDER = Path(__file__).resolve().parent.parent / "misconceptions"

_TEXTS = ("name", "find", "replace", "explanation", "question")


class CatalogueError(ValueError):
    """An entry that can't be used; the text names file and entry."""


@dataclass(frozen=True)
class Misconception:
    """One misunderstanding, as code.

    Args:
        name: short, in kebab case; unique within the lab.
        task: number of the task whose tests must notice.
        module: the reference file that is edited.
        find: text inside a marked region.
        replace: what stands there instead.
        explanation: what is wrong and what comes of it.
        question: leads a student on, without giving the answer away.
        occurrence: which of several places in marked regions is meant, 1 for the first; 0 says there is only one.
    """

    name: str
    task: int
    module: str
    find: str
    replace: str
    explanation: str
    question: str
    occurrence: int = 0


def catalogue_folder(manifest: Manifest) -> Path:
    """Where a lab's entries lie: one file for each module, and right implementations under `correct/`."""
    return FOLDER / manifest.folder.name


def load_misconceptions(manifest: Manifest, folder: Path | None = None) -> list[Misconception]:
    """The entries of a lab, in the order of its modules.

    Args:
        manifest: the lab.
        folder: where the files lie, if not in the lab's own place.

    Raises:
        CatalogueError: a file names no module, or an entry lacks a field, repeats a name or has an unknown field.
    """
    folder = folder or catalogue_folder(manifest)
    entries: list[Misconception] = []
    paths = {path.stem: path for path in folder.glob("*.toml")}
    if unknown := sorted(set(paths) - set(manifest.modules)):
        raise CatalogueError(f"{folder}: {', '.join(unknown)} is no module; they are {', '.join(manifest.modules)}")
    for module in manifest.modules:
        if module in paths:
            entries += _read(paths[module], module, task_of_module(manifest, module).number)
    names = [entry.name for entry in entries]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise CatalogueError(f"{folder}: names used twice: {', '.join(repeated)}")
    return entries


def _read(path: Path, module: str, task: int) -> list[Misconception]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))["misconception"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise CatalogueError(f"{path}: needs [[misconception]] tables: {type(error).__name__} {error}") from error
    entries = []
    for number, table in enumerate(tables, start=1):
        where = f"{path.name}, entry {number} ({table.get('name', 'without a name')})"
        if missing := [key for key in _TEXTS if not isinstance(table.get(key), str)]:
            raise CatalogueError(f"{where}: these must be given as text: {', '.join(missing)}")
        if empty := [key for key in _TEXTS if key != "replace" and not table[key].strip()]:
            raise CatalogueError(f"{where}: empty: {', '.join(empty)}")
        if unknown := sorted(set(table) - {*_TEXTS, "occurrence"}):
            raise CatalogueError(f"{where}: unknown fields: {', '.join(unknown)}")
        occurrence = table.get("occurrence", 0)
        if type(occurrence) is not int or occurrence < 0:
            raise CatalogueError(f"{where}: occurrence must be an int of at least 1, got {occurrence!r}")
        texts = {key: table[key] for key in _TEXTS}
        entries.append(Misconception(task=task, module=module, occurrence=occurrence, **texts))
    return entries


def mutated_source(source: str, entry: Misconception) -> str:
    """A reference file with an entry's edit made.

    Args:
        source: text of the entry's module.
        entry: the edit.

    Raises:
        CatalogueError: the text to find isn't there once inside the marked regions, or the result is no Python.
    """
    where = f"misconception {entry.name} ({entry.module}.py)"
    places = _places(source, entry)
    if not places:
        outside = "; it stands outside of them" if entry.find in source else ""
        raise CatalogueError(f"{where}: the text to find isn't in any marked region{outside}: {entry.find!r}")
    if entry.occurrence > len(places):
        raise CatalogueError(f"{where}: occurrence {entry.occurrence} is asked for, there are {len(places)}")
    if entry.occurrence == 0 and len(places) > 1:
        raise CatalogueError(f"{where}: the text to find stands {len(places)} times; lengthen it or give occurrence")
    start = places[max(entry.occurrence, 1) - 1]
    mutant = source[:start] + entry.replace + source[start + len(entry.find) :]
    if mutant == source:
        raise CatalogueError(f"{where}: the edit changes nothing")
    try:
        compile(mutant, f"{entry.module}.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise CatalogueError(f"{where}: the edited file is no Python: {error}") from error
    return mutant


def _places(source: str, entry: Misconception) -> list[int]:
    """Offsets at which the text to find stands whole inside a marked region."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for region in find_regions(source, f"{entry.module}.py"):
        position, stop = starts[region.begin], starts[region.end - 1]
        while (position := source.find(entry.find, position, stop)) >= 0:
            found.append(position)
            position += 1
    return found


def write_mutant(manifest: Manifest, entry: Misconception, folder: Path) -> Path:
    """Writes a lab's reference with one entry's edit made.

    Args:
        manifest: the lab.
        entry: the edit.
        folder: where to write; is created.

    Returns:
        The folder.

    Raises:
        ValueError: the reference is missing, or the entry can't be used.
    """
    return write_implementation(
        manifest, folder, {entry.module: mutated_source(solution_source(manifest, entry.module), entry)}
    )


def write_implementation(manifest: Manifest, folder: Path, replaced: dict[str, str]) -> Path:
    """Writes the modules of a lab: the reference's, but for those given as text."""
    folder.mkdir(parents=True)
    for module in manifest.modules:
        text = replaced.get(module)
        path = folder / f"{module}.py"
        path.write_text(solution_source(manifest, module) if text is None else text, encoding="utf-8")
    return folder
