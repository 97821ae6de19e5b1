"""What a grading run was made with; stands at the head of its reports, so that it can be repeated."""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from grader.batch import Batch
from grader.suite import suite_hash


def run_facts(batch: Batch) -> dict[str, Any]:
    """Versions, sandbox, seed and limits; no time and no path, so that equal runs have equal reports."""
    return {
        "lab": batch.manifest.id,
        "title": batch.manifest.title,
        "max_points": batch.manifest.points,
        "suite_sha256": suite_hash(batch.manifest),
        "seed": batch.seed,
        "sandbox": batch.tier.value,
        "limits": dataclasses.asdict(batch.limits),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("inference-workbook", "torch", "triton", "pytest")},
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
