"""Packed layers of a GGUF file in the cache of models, so that the file is taken apart and packed only once.

Reading a GGUF file's metadata and packing its layers takes several times as long as all else together. An entry of the
cache holds the outcome under a name made of the file's content and of all that the packed form depends on, so that it
can't outlive either. Entries appear by one rename, and can be made by several processes at once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from labkit.checkpoints.gguf_file import open_gguf
from labkit.checkpoints.gguf_tokenizer import read_tokenizer
from labkit.checkpoints.locking import exclusive
from labkit.config import ModelConfig
from labkit.decoder import weight_shapes
from labkit.paths import cache_dir
from labkit.tokenizer import write_tokenizer
from solutions.quantization.packed_linear import Int4Linear, Int8WeightLinear, StorableLinear

from ..models.blocks import HeldWeights
from ..models.dense import Linear
from .packing import Packing
from .projection import PackedProjection

_VERSION = 1
"""To be raised whenever layers are packed differently, or kept differently."""
_KINDS: Mapping[str, type[StorableLinear]] = {"int4": Int4Linear, "int8": Int8WeightLinear}
_WEIGHTS, _CONFIG = "packed.safetensors", "config.json"
_PLAIN = "plain"
_BETWEEN = "|"
"""Stands between the parts of a tensor's name in the file: kind, layers, and the tensor's name in its layer."""


class PackedWeights(HeldWeights):
    """Weights whose projections are packed already.

    Args:
        tensors: the plain ones, and shapes of the others.
        layers: packed, by the names of those that each was joined from.
        packing: how they run.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], layers: Mapping[tuple[str, ...], StorableLinear], packing: Packing
    ) -> None:
        self._tensors = tensors
        self._layers = layers
        self._packing = packing

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> PackedWeights:
        """See `HeldWeights`."""
        return PackedWeights(tensors, self._layers, self._packing)

    def joined(self, names: Sequence[str]) -> Linear:
        """See `HeldWeights`."""
        return PackedProjection(self._layers[tuple(names)], self._packing)

    def joins(self, name: str) -> bool:
        """See `HeldWeights`."""
        return any(name in names for names in self._layers)


def entry_of(gguf: Path, packing: Packing) -> Path:
    """The folder that holds, or will hold, the packed form of a file; reads all of the file."""
    with gguf.open("rb") as file:
        source = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    # torch packs codes in an order that depends on the CPU, and may do it differently tomorrow.
    form = (_VERSION, torch.__version__, torch.backends.cpu.get_cpu_capability(), packing.head_bits)
    return cache_dir() / "packed" / f"{source}-{hashlib.sha256(repr(form).encode()).hexdigest()[:16]}"


def read(entry: Path, packing: Packing) -> tuple[ModelConfig, PackedWeights] | None:
    """What an entry holds, plain tensors by memory map; None if there is none, or if it is damaged."""
    try:
        config = ModelConfig.from_huggingface(json.loads((entry / _CONFIG).read_text(encoding="utf-8")))
        stored = load_file(entry / _WEIGHTS)
    except (OSError, ValueError, SafetensorError):
        return None
    plain: dict[str, Tensor] = {}
    parts: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        kind, layers, part = name.split(_BETWEEN)
        if kind == _PLAIN:
            plain[layers] = tensor
        else:
            # A copy, for its place in memory: in a file tensors start anywhere, and torch's packed products end the
            # process unless they start at a multiple of 64 bytes.
            parts.setdefault((kind, layers), {})[part] = tensor.clone()
    packed = {tuple(layers.split(",")): _KINDS[kind].restored(found) for (kind, layers), found in parts.items()}
    shapes = {
        name: torch.empty(shape, device="meta") for name, shape in weight_shapes(config).items() if name not in plain
    }
    return config, PackedWeights({**plain, **shapes}, packed, packing)


def write(
    entry: Path, gguf: Path, config: ModelConfig, plain: Mapping[str, Tensor], made: Mapping[tuple[str, ...], Linear]
) -> None:
    """Makes an entry, unless another process does; where that is not possible, nothing is kept.

    Args:
        entry: where.
        gguf: the file, for its tokenizer.
        config: of its model.
        plain: its tensors that are not quantized.
        made: the projections of the model; nothing is kept unless all of them are packed.
    """
    tensors = {_BETWEEN.join((_PLAIN, name, "")): tensor for name, tensor in plain.items()}
    for names, product in made.items():
        packed = product.packed if isinstance(product, PackedProjection) else None
        kind = next((kind for kind, cls in _KINDS.items() if isinstance(packed, cls)), None)
        if kind is None:
            return
        assert isinstance(packed, Int4Linear | Int8WeightLinear)
        tensors |= {_BETWEEN.join((kind, ",".join(names), part)): one for part, one in packed.tensors().items()}
    with suppress(OSError):  # a cache that can't be written to, or a full disk: the model is loaded all the same
        entry.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(entry.parent / ".lock"):
            _clear(entry)
            with tempfile.TemporaryDirectory(prefix=".making-", dir=entry.parent) as temporary:
                folder = Path(temporary) / "made"
                folder.mkdir()
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _WEIGHTS)
                (folder / _WEIGHTS).chmod(0o644)  # the library makes it private, and a cache may be shared
                (folder / _CONFIG).write_text(json.dumps(config.to_huggingface()), encoding="utf-8")
                write_tokenizer(folder, *read_tokenizer(open_gguf(gguf)))
                folder.rename(entry)


def _clear(entry: Path) -> None:
    """Makes room for an entry; the caller holds the lock.

    What goes is a damaged one in its place, the same file packed in another way, and what processes left
    that died at work.
    """
    source = entry.name.partition("-")[0]
    for old in entry.parent.iterdir():
        if old.is_dir() and old.name.startswith((f"{source}-", ".making-")):
            shutil.rmtree(old)
