"""Sample submissions: made from the reference or its stubs by small edits, each with the score that it has earned.

`grader/samples/<lab>/recipes.toml` says how. They show the grader at work, and its tests demand these exact verdicts.
"""

from __future__ import annotations

import io
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grader.authoring.regions import BEGIN, END
from grader.authoring.stubs import generate_stub, solution_source
from grader.verdicts import Verdict
from labkit.manifest import Manifest, Task

RECIPES = Path(__file__).resolve().parent / "samples"
KINDS = ("ordinary", "hostile")
BASES = ("solution", "stub", "none")
PACKINGS = ("folder", "zip")
SPECIAL = ("zip_bomb", "traversal", "not_a_zip", "symlink")

_BOMB_BYTES = 256 << 20


@dataclass(frozen=True)
class Edit:
    """A text replaced in a module; it must stand there exactly once."""

    module: str
    find: str
    replace: str


@dataclass(frozen=True)
class Sample:
    """One sample submission.

    Args:
        name: of the submission.
        kind: "ordinary" or "hostile".
        about: what it does, in one line.
        base: what its modules are before the edits.
        solution: modules taken from the reference although the base is the stub.
        own: modules replaced by a file beside the recipes.
        edits: changes of the modules.
        files: files that do not belong to the lab, by path.
        packing: "folder" or "zip".
        special: an archive that is malformed in this way, or None.
        default: the verdict of every test that `verdicts` does not name.
        verdicts: verdicts by test.
        quick: one of the few that together show the grader at work in about a minute.
    """

    name: str
    kind: str
    about: str
    base: str = "solution"
    solution: tuple[str, ...] = ()
    own: tuple[tuple[str, str], ...] = ()
    edits: tuple[Edit, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    packing: str = "folder"
    special: str | None = None
    default: Verdict = Verdict.PASSED
    verdicts: tuple[tuple[str, Verdict], ...] = ()
    quick: bool = False

    def verdict_of(self, test: str) -> Verdict:
        """The verdict that a test must get."""
        return dict(self.verdicts).get(test, self.default)

    def points_of(self, task: Task) -> float:
        """What it must earn in a task: an equal share for each test that must pass."""
        passed = sum(self.verdict_of(test) is Verdict.PASSED for test in task.tests)
        return round(task.points * passed / len(task.tests), 2)


def load_samples(manifest: Manifest) -> list[Sample]:
    """The samples of a lab.

    Raises:
        ValueError: if it has none, or a recipe is wrong; the text names it.
    """
    path = RECIPES / manifest.folder.name / "recipes.toml"
    if not path.is_file():
        raise ValueError(f"lab {manifest.id} has no sample submissions: {path} is missing")
    return [_sample(manifest, entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["sample"]]


def _sample(manifest: Manifest, entry: dict[str, Any]) -> Sample:
    given = dict(entry)
    verdicts, edits = given.pop("verdicts", {}), given.pop("edit", ())
    own, files, default = given.pop("own", {}), given.pop("files", {}), given.pop("default", "passed")
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        sample = Sample(
            edits=tuple(Edit(**edit) for edit in edits),
            own=tuple(own.items()),
            files=tuple(files.items()),
            default=Verdict(default),
            verdicts=_expanded(manifest, verdicts),
            **plain,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"sample {entry.get('name')!r}: {error}") from error
    for what, value, allowed in (
        ("kind", sample.kind, KINDS),
        ("base", sample.base, BASES),
        ("packing", sample.packing, PACKINGS),
        ("special", sample.special, (None, *SPECIAL)),
    ):
        if value not in allowed:
            raise ValueError(f"sample {sample.name}: {what} is {value!r}; allowed: {allowed}")
    if unknown := [test for test, _ in sample.verdicts if manifest.task_of_test(test) is None]:
        raise ValueError(f"sample {sample.name}: there are no tests named {', '.join(unknown)}")
    return sample


def _expanded(manifest: Manifest, verdicts: dict[str, list[str]]) -> tuple[tuple[str, Verdict], ...]:
    """Verdicts by test, from names of tests and "task n" for all tests of a task; a test's own name comes first."""
    tasks = {f"task {task.number}": task.tests for task in manifest.tasks}
    named = [(name, Verdict(verdict)) for verdict, names in verdicts.items() for name in names]
    by_test = {test: verdict for name, verdict in named for test in tasks.get(name, ())}
    by_test.update((name, verdict) for name, verdict in named if name not in tasks)
    return tuple(by_test.items())


def select_samples(samples: Sequence[Sample], only: Sequence[str] = (), *, quick: bool = False) -> list[Sample]:
    """Some of the samples, in their order.

    Args:
        samples: of a lab.
        only: names and kinds; none means all.
        quick: those marked as quick, and no other.

    Raises:
        ValueError: if a name is neither a sample's nor a kind.
    """
    names = [sample.name for sample in samples]
    for name in only:
        if name not in (*KINDS, *names):
            raise ValueError(f"--only {name}: allowed are {', '.join(KINDS)}, and the samples {', '.join(names)}")
    chosen = [sample for sample in samples if not only or sample.name in only or sample.kind in only]
    return [sample for sample in chosen if sample.quick or not quick]


def write_samples(manifest: Manifest, samples: Sequence[Sample], out: Path) -> list[Path]:
    """Writes sample submissions into a folder.

    Args:
        manifest: the lab.
        samples: what to write.
        out: made if it is absent; a sample written earlier is replaced.

    Returns:
        Paths of the submissions.

    Raises:
        ValueError: if an edit does not fit the text it edits.
    """
    out.mkdir(parents=True, exist_ok=True)
    return [_write(manifest, sample, out) for sample in samples]


def sample_files(manifest: Manifest, sample: Sample) -> dict[str, str]:
    """Texts of a sample's files by path.

    Raises:
        ValueError: if an edit does not fit.
    """
    texts: dict[str, str] = {}
    for module in manifest.modules if sample.base != "none" else ():
        if sample.base == "solution" or module in sample.solution:
            lines = solution_source(manifest, module).splitlines(keepends=True)
            # A student's file has no markers.
            texts[module] = "".join(line for line in lines if line.strip() not in (BEGIN, END))
        else:
            texts[module] = generate_stub(manifest, module)
    for module, file in sample.own:
        texts[module] = (RECIPES / manifest.folder.name / file).read_text(encoding="utf-8")
    for edit in sample.edits:
        count = texts.get(edit.module, "").count(edit.find)
        if count != 1:
            raise ValueError(f"sample {sample.name}: {edit.find!r} stands in {edit.module} {count} times, not once")
        texts[edit.module] = texts[edit.module].replace(edit.find, edit.replace)
    return {**{f"{module}.py": text for module, text in texts.items()}, **dict(sample.files)}


def _write(manifest: Manifest, sample: Sample, out: Path) -> Path:
    files = sample_files(manifest, sample)
    if sample.special in ("zip_bomb", "traversal", "not_a_zip"):
        path = out / f"{sample.name}.zip"
        path.write_bytes(_malformed(sample.special, manifest.modules[0]))
        return path
    if sample.packing == "zip":
        path = out / f"{sample.name}.zip"
        path.write_bytes(_zipped(files))
        return path
    folder = out / sample.name
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # Never written through: one sample has a link where a module should be.
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    if sample.special == "symlink":
        link = folder / f"{manifest.modules[0]}.py"
        link.unlink()
        link.symlink_to("/etc/passwd")
    return folder


def _zipped(files: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            # A fixed date makes equal samples equal files.
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _malformed(special: str, module: str) -> bytes:
    if special == "not_a_zip":
        return b"Rar!\x1a\x07\x00 this is another kind of archive under a zip's name\n" * 40
    if special == "traversal":
        return _zipped({f"../../{module}.py": "raise SystemExit\n", f"{module}.py": "raise SystemExit\n"})
    packed = io.BytesIO()
    entry = zipfile.ZipInfo(f"{module}.py", (2026, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(packed, "w") as archive, archive.open(entry, "w", force_zip64=True) as file:
        for _ in range(_BOMB_BYTES >> 20):
            file.write(b"#" * (1 << 20))
    return packed.getvalue()
