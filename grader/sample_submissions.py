"""Makes a lab's sample submissions from their recipes: good, half good, wrong, unlucky and hostile ones."""

from __future__ import annotations

import io
import shutil
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from grader.authoring.misconceptions import CatalogueError
from grader.authoring.stubs import generate_stub, solution_source
from grader.verdicts import Verdict
from labkit.manifest import Manifest

FOLDER = Path(__file__).resolve().parent / "samples"

_MARK = ".samples"
_MARKERS = ("# BEGIN SOLUTION", "# END SOLUTION")
_BOMB_BYTES = 256 << 20


@dataclass(frozen=True)
class Edit:
    """One change of a module's text."""

    module: str
    find: str
    replace: str


@dataclass(frozen=True)
class Sample:
    """A recipe; the fields are explained at the head of the lab's file in `grader/samples/`."""

    name: str
    about: str
    base: str
    solved: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    append: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    pack: str = "folder"
    refused: bool = False
    fails: dict[str, str] = field(default_factory=dict)

    def expected(self, manifest: Manifest) -> dict[str, Verdict]:
        """The verdict that each test of the lab must come to; a test's own entry outweighs its task's."""
        if self.refused:
            return {name: Verdict.REFUSED for task in manifest.tasks for name in task.tests}
        verdicts = {}
        for task in manifest.tasks:
            for name in task.tests:
                verdicts[name] = Verdict(self.fails.get(name, self.fails.get(f"task {task.number}", "passed")))
        return verdicts


def load_samples(manifest: Manifest) -> list[Sample]:
    """The recipes of a lab.

    Raises:
        CatalogueError: if the lab has none, or one is malformed or names what does not exist.
    """
    path = FOLDER / f"{manifest.folder.name}.toml"
    if not path.is_file():
        raise CatalogueError(f"lab {manifest.id} has no sample submissions; they would stand in {path}")
    samples = []
    for table in tomllib.loads(path.read_text(encoding="utf-8"))["sample"]:
        try:
            fields: dict[str, Any] = {k: tuple(v) if type(v) is list else v for k, v in table.items()}
            fields["edits"] = tuple(Edit(**edit) for edit in table.get("edits", ()))
            sample = Sample(**fields)
            known = {f"task {task.number}" for task in manifest.tasks} | set(sample.expected(manifest))
        except (TypeError, ValueError) as error:
            raise CatalogueError(f"{path.name}, sample {table.get('name')}: {error}") from error
        if unknown := sorted(set(sample.fails) - known):
            raise CatalogueError(f"{path.name}, sample {sample.name}: no such test or task: {', '.join(unknown)}")
        if sample.base not in ("stub", "solution") or sample.pack not in _PACKERS:
            raise CatalogueError(
                f"{path.name}, sample {sample.name}: base must be stub or solution, got {sample.base!r}; "
                f"pack must be one of {', '.join(_PACKERS)}, got {sample.pack!r}"
            )
        samples.append(sample)
    return samples


def sample_modules(manifest: Manifest, sample: Sample) -> dict[str, str]:
    """Texts of the modules that a sample hands in.

    Raises:
        CatalogueError: if an edit does not apply exactly once.
        ValueError: if this copy of the workbook lacks the reference.
    """
    texts = {}
    for module in manifest.modules:
        if sample.base == "solution" or module in sample.solved:
            lines = solution_source(manifest, module).splitlines(keepends=True)
            texts[module] = "".join(line for line in lines if line.strip() not in _MARKERS)
        else:
            texts[module] = generate_stub(manifest, module)
    for edit in sample.edits:
        if (count := texts[edit.module].count(edit.find)) != 1:
            where = f"{count} times in {edit.module}.py, not once"
            raise CatalogueError(f"sample {sample.name}: {edit.find!r} stands {where}")
        texts[edit.module] = texts[edit.module].replace(edit.find, edit.replace)
    for module, text in sample.append.items():
        texts[module] += text
    return {module: text for module, text in texts.items() if module not in sample.left_out}


def write_samples(manifest: Manifest, folder: Path, only: str = "*") -> list[Path]:
    """Writes a lab's sample submissions, each as a student would hand it in.

    Args:
        manifest: the lab.
        folder: created, or one that an earlier call has made; that one is emptied first.
        only: pattern of the names that are wanted, e.g. "hostile-*".

    Raises:
        ValueError: if the folder holds anything else, if no sample has such a name, or as `sample_modules`.
    """
    every = load_samples(manifest)
    samples = [sample for sample in every if fnmatchcase(sample.name, only)]
    if not samples:
        raise ValueError(f"no sample is called {only}; there are {', '.join(sample.name for sample in every)}")
    texts = {sample.name: sample_modules(manifest, sample) for sample in samples}
    if folder.exists() and not (folder / _MARK).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and does not hold sample submissions; name an empty or a new folder")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _MARK).touch()
    written = []
    for sample in samples:
        files = {f"{module}.py": text for module, text in texts[sample.name].items()} | sample.files
        written.append(_PACKERS[sample.pack](folder, sample.name, files))
    return written


def _folder(folder: Path, name: str, files: dict[str, str]) -> Path:
    target = folder / name
    target.mkdir()
    for file, text in files.items():
        (target / file).write_text(text, encoding="utf-8")
    return target


def _zip(folder: Path, name: str, files: dict[str, str], prefix: str = "") -> Path:
    target = folder / f"{name}.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in files.items():
            archive.writestr(prefix + file, text)
    return target


def _wrapped_zip(folder: Path, name: str, files: dict[str, str]) -> Path:
    return _zip(folder, name, files, prefix="my homework/")


def _tar(folder: Path, name: str, files: dict[str, str]) -> Path:
    target = folder / f"{name}.tar.gz"
    with tarfile.open(target, "w:gz") as archive:
        for file, text in files.items():
            member = tarfile.TarInfo(file)
            member.size = len(content := text.encode())
            archive.addfile(member, io.BytesIO(content))
    return target


def _link(folder: Path, name: str, files: dict[str, str]) -> Path:
    *most, last = files
    target = _folder(folder, name, {file: files[file] for file in most})
    (target / last).symlink_to("/etc/passwd")
    return target


def _bomb(folder: Path, name: str, files: dict[str, str]) -> Path:
    target = _zip(folder, name, files)
    with zipfile.ZipFile(target, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("data.bin", "w") as member:
        for _ in range(_BOMB_BYTES >> 20):
            member.write(bytes(1 << 20))
    return target


def _traversal(folder: Path, name: str, files: dict[str, str]) -> Path:
    return _zip(folder, name, files | {"../../solutions/kv_cache/sizing.py": "# mine now\n"})


def _no_zip(folder: Path, name: str, files: dict[str, str]) -> Path:
    target = folder / f"{name}.zip"
    target.write_text("\n".join(files.values()), encoding="utf-8")
    return target


_PACKERS: dict[str, Callable[[Path, str, dict[str, str]], Path]] = {
    "folder": _folder,
    "zip": _zip,
    "wrapped zip": _wrapped_zip,
    "tar.gz": _tar,
    "link": _link,
    "bomb": _bomb,
    "traversal": _traversal,
    "no zip": _no_zip,
}

