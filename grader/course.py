"""`course.toml`: what an instructor decides about a lab, the weights of its tasks and its deadline."""

from __future__ import annotations

import itertools
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grader.verdicts import SubmissionResult, clean_text
from labkit.manifest import Manifest, available_labs

FILE = "course.toml"

_KEYS = ("weights", "deadline", "late_percent_per_day", "late_percent_at_most", "extensions")
_DAY = 86_400.0
_MAX_FILES = 5_000


class CourseError(ValueError):
    """A `course.toml` that cannot be meant so; the text names the file, the key and what is allowed."""


@dataclass(frozen=True)
class Terms:
    """What holds for one lab of a course.

    Args:
        weights: points of tasks in place of the manifest's, by number.
        deadline: what is handed in later loses points; None for no deadline.
        late_percent_per_day: of the points earned, for each day that has begun after the deadline.
        late_percent_at_most: of the points earned, however late.
        extensions: deadlines of their own, by the submission's name.
    """

    weights: Mapping[int, float] = field(default_factory=dict)
    deadline: datetime | None = None
    late_percent_per_day: float = 0.0
    late_percent_at_most: float = 100.0
    extensions: Mapping[str, datetime] = field(default_factory=dict)

    def weigh(self, manifest: Manifest) -> Manifest:
        """The lab with the points that its tasks have in this course."""
        tasks = [replace(task, points=self.weights.get(task.number, task.points)) for task in manifest.tasks]
        return replace(manifest, tasks=tuple(tasks))

    def judge(self, result: SubmissionResult, entry: Path) -> SubmissionResult:
        """A submission's result with what its lateness costs; the remark says when it was handed in.

        Args:
            result: as its tests earned it.
            entry: what was handed in; its time of change counts, as the copy that lies here has it.
        """
        deadline = self.extensions.get(result.name, self.deadline)
        if deadline is None:
            return result
        try:
            time = handed_in(entry)
        except (OSError, OverflowError, ValueError) as error:
            flag = clean_text(f"whether it is late is not known: its time of change cannot be read: {error}", 300)
            return replace(result, flags=(*result.flags, flag))
        days = math.ceil((time - deadline).total_seconds() / _DAY)
        if days <= 0:
            return result
        percent = min(self.late_percent_per_day * days, self.late_percent_at_most)
        when, due = (f"{each.astimezone(UTC):%Y-%m-%d %H:%M} UTC" for each in (time, deadline))
        cost = f"{percent:g} % of its points are taken off for {days} day{'s' if days > 1 else ''}"
        flag = f"late: handed in {when} by the file's time, due {due}; {cost}"
        return replace(result, penalty_percent=percent, flags=(*result.flags, flag))

    def facts(self) -> dict[str, Any]:
        """For the reports; nothing if nothing was decided."""
        facts: dict[str, Any] = {}
        if self.weights:
            facts["weights"] = {str(number): points for number, points in self.weights.items()}
        if self.deadline is not None:
            facts["deadline"] = self.deadline.isoformat()
            facts["late_percent_per_day"] = self.late_percent_per_day
            facts["late_percent_at_most"] = self.late_percent_at_most
        if self.extensions:
            facts["extensions"] = {name: time.isoformat() for name, time in self.extensions.items()}
        return facts


def read_terms(path: Path, manifest: Manifest) -> Terms:
    """What a course file says about a lab; everything in it is checked, also what concerns other labs.

    Args:
        path: of the file; if there is none, nothing was decided.
        manifest: the lab.

    Raises:
        CourseError: if the file is malformed, or names a lab, task or key that does not exist.
    """
    if not path.is_file():
        return Terms()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CourseError(f"{path}: {error}") from error
    _allow(path, "the file", data, ("lab",))
    labs = _table(path, "lab", data.get("lab", {}))
    _allow(path, "lab", labs, tuple(available_labs(manifest.folder.parent.parent)))
    for lab_id, entry in labs.items():
        _allow(path, f"lab.{lab_id}", _table(path, f"lab.{lab_id}", entry), _KEYS)
    return _terms(path, manifest, labs.get(manifest.id, {}))


def handed_in(entry: Path) -> datetime:
    """When a submission was last changed: an archive by its own time, a folder by the newest file in it."""
    times = [entry.lstat().st_mtime]
    if entry.is_dir() and not entry.is_symlink():
        files = (Path(folder) / name for folder, _, names in os.walk(entry) for name in names)
        # A folder's own time only tells when it was copied here.
        times = [path.lstat().st_mtime for path in itertools.islice(files, _MAX_FILES)] or times
    return datetime.fromtimestamp(max(times), UTC)


def _terms(path: Path, manifest: Manifest, entry: dict[str, Any]) -> Terms:
    where = f"lab.{manifest.id}"
    weights = _table(path, f"{where}.weights", entry.get("weights", {}))
    _allow(path, f"{where}.weights", weights, tuple(str(task.number) for task in manifest.tasks))
    extensions = _table(path, f"{where}.extensions", entry.get("extensions", {}))
    if "deadline" not in entry and (unused := [key for key in _KEYS[2:] if key in entry]):
        raise CourseError(f"{path}: {where}.{unused[0]} needs a {where}.deadline")
    return Terms(
        {int(number): _number(path, f"{where}.weights.{number}", points, 1e6) for number, points in weights.items()},
        _time(path, f"{where}.deadline", entry["deadline"]) if "deadline" in entry else None,
        _number(path, f"{where}.late_percent_per_day", entry.get("late_percent_per_day", 0.0), 100, least=0),
        _number(path, f"{where}.late_percent_at_most", entry.get("late_percent_at_most", 100.0), 100, least=0),
        {name: _time(path, f"{where}.extensions.{name}", time) for name, time in extensions.items()},
    )


def _allow(path: Path, where: str, table: dict[str, Any], allowed: tuple[str, ...]) -> None:
    if unknown := [key for key in table if key not in allowed]:
        raise CourseError(f"{path}: {where} has no {unknown[0]!r}; allowed: {', '.join(allowed)}")


def _table(path: Path, where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CourseError(f"{path}: {where} must be a table, got {value!r}")
    return value


def _number(path: Path, where: str, value: object, most: float, *, least: float | None = None) -> float:
    """A number from `least` to `most`, or above 0 if there is no `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CourseError(f"{path}: {where} must be a number, got {value!r}")
    enough = value > 0 if least is None else value >= least
    if not enough or value > most:
        span = "above 0 and at most" if least is None else f"from {least:g} to"
        raise CourseError(f"{path}: {where} must be {span} {most:g}, got {value}")
    return value


def _time(path: Path, where: str, value: object) -> datetime:
    if not isinstance(value, datetime) or value.tzinfo is None:
        example = "2027-02-01T23:59:00+01:00"
        raise CourseError(f"{path}: {where} must be a time with its offset from UTC, as in {example}, got {value}")
    return value
