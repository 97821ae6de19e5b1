"""What `IMPL` names: the student's folder of a lab, the reference's, or another."""

from __future__ import annotations

from pathlib import Path

from labkit.manifest import ROOT, Manifest


def implementation_folder(manifest: Manifest, impl: str, *, trust: bool = False) -> Path:
    """The folder that holds the modules of an implementation.

    Args:
        manifest: the lab.
        impl: "labs" (the student's), "solutions" (the reference), or the path of a folder.
        trust: allows a folder outside this repository, whose code would run here without a sandbox.

    Raises:
        ValueError: if it does not exist, or lies outside the repository without `trust`.
    """
    if impl == "labs":
        return manifest.folder
    if impl == "solutions":
        if not manifest.solutions.is_dir():
            raise ValueError(f"IMPL=solutions: this copy of the workbook has no {manifest.solutions}")
        return manifest.solutions
    folder = Path(impl).resolve()
    if not folder.is_dir():
        raise ValueError(f"IMPL={impl}: no such folder; allowed: labs, solutions, or a folder with the modules")
    if not folder.is_relative_to(ROOT) and not trust:
        raise ValueError(
            f"IMPL={impl} lies outside the workbook and would run here without a sandbox. "
            "Grade it safely with `make grade`, or add TRUST=1 if you trust its author."
        )
    return folder
