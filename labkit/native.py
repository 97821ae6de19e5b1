"""Says by its exit code whether the tests of a lab can run natively here too: `python -m labkit.native 06`."""

from __future__ import annotations

import sys

import torch

from labkit.launch import interpreting
from labkit.manifest import Manifest, load_manifest


def native_device(manifest: Manifest) -> str:
    """Where a lab gets its tensors: "cuda" if it has kernels, there is a GPU, and nobody wants the interpreter."""
    wanted = manifest.interpreter and not interpreting()
    return "cuda" if wanted and torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(native_device(load_manifest(sys.argv[1])) != "cuda")
