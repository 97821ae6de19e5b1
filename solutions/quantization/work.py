"""One run of `quantize`: from a model's name to a finished checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labkit.checkpoints import bundled_folder, bundled_gguf, find_model, load
from solutions.quantization.calibration import Calibration, calibration_text
from solutions.quantization.exporting import FORMATS, GGUF, Origin, export
from solutions.quantization.methods import Settings
from solutions.quantization.pipeline import check_settings, find_method, quantize_model, with_own_memory

_WORK = ".blocks"


@dataclass(frozen=True)
class Job:
    """What the user asked for; the fields are the options of the command.

    Args:
        model: name, folder, file or hub id.
        method: of `METHODS`.
        settings: bits, groups and the like.
        calibration: a file, "prose" or "code".
        sequences: of calibration text.
        length: tokens of each.
        format: of the checkpoint; None takes the first that the method has.
        head_bits: of embedding and head.
        out: folder of the checkpoint.
    """

    model: str
    method: str
    settings: Settings
    calibration: str
    sequences: int
    length: int
    format: str | None
    head_bits: int
    out: Path


def run(job: Job, progress: Callable[[int, int], None]) -> str:
    """Do it, and say what there is now.

    Raises:
        ValueError: a mistake of the user; before anything long has run wherever that can be told.
    """
    format = _check(job)
    source = find_model(job.model)
    gguf = _gguf_of(source)
    if format == "gguf" and gguf is None:
        raise ValueError(f"a GGUF export needs the tokenizer of a GGUF file; give the model as one, not {source}")
    loaded = load(job.model)
    check_settings(loaded.config, job.method, job.settings)
    text: Calibration | None = None
    if find_method(job.method).calibrated:
        text = calibration_text(job.calibration, loaded.tokenizer, job.sequences, job.length)
    work = job.out / _WORK
    decoder = with_own_memory(loaded.decoder)
    model = quantize_model(decoder, job.method, job.settings, text, work, progress)
    origin = Origin(source, gguf, job.method, job.settings, None if text is None else text.name)
    export(model, format, job.out, origin, job.head_bits)
    shutil.rmtree(work)
    size = sum(path.stat().st_size for path in job.out.rglob("*") if path.is_file())
    return (
        f"{job.out}: {job.method} in the {format} layout, {model.bits_per_weight():.3f} bits per weight in the linear "
        f"layers, {size / 1e6:.0f} MB on disk"
    )


def _check(job: Job) -> str:
    """Refuse what cannot work, and return the format."""
    method = find_method(job.method)
    if not method.formats:
        raise ValueError(f"method {job.method} is for comparison only; no layout here holds it (see `compare`)")
    format = job.format or method.formats[0]
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if format not in method.formats:
        raise ValueError(f"the {format} layout does not hold {job.method}; it goes into {', '.join(method.formats)}")
    if format == "awq" and job.settings.bits != 4:
        raise ValueError(f"the AWQ layout has 4 bits, got {job.settings.bits}")
    if format.startswith("gptq") and job.settings.bits not in (2, 3, 4, 8):
        raise ValueError(f"the GPTQ layout has 2, 3, 4 or 8 bits, got {job.settings.bits}")
    if format == "gguf" and method.fixed_bits is None:
        if job.settings.group_size != 32 or job.settings.bits not in (4, 5, 8):
            raise ValueError(
                f"GGUF holds codes of 4, 5 or 8 bits in groups of 32, got {job.settings.bits} bits in groups of "
                f"{job.settings.group_size}; give --group-size 32, or a GGUF type as --method"
            )
        if job.settings.bits == 8 and not job.settings.symmetric:
            raise ValueError("GGUF has no 8-bit codes with a zero point; leave --zero-point out")
    if job.head_bits not in (16, 8) or (job.head_bits == 8 and format != "gguf"):
        raise ValueError(f"--head-bits is 16, or 8 with --format gguf; got {job.head_bits} with {format}")
    for name in ("config.json", GGUF):
        if (job.out / name).exists():
            raise ValueError(f"{job.out} holds a finished checkpoint ({name}); choose another --out")
    return format


def _gguf_of(source: Path) -> Path | None:
    """A GGUF file of the same model: the source itself, or the one that the bundled model was converted from."""
    if source.suffix == ".gguf" and source.is_file():
        return source
    try:
        return bundled_gguf() if source == bundled_folder() else None
    except ValueError:
        return None
