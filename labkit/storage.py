"""Tensors in messages: the bytes of a storage, the views that lie in it, and a canary in the gaps between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from labkit.errors import OutOfViewWrite, ProtocolFault

Buffer = bytes | bytearray | memoryview

MAX_TENSOR_BYTES = 1 << 30
ALIGNMENT = 16
"""Storages start and end on multiples of this, so that a view of any dtype can be taken of the buffer."""
_CANARY = 0xA5
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class View:
    """Where a tensor lies in its storage's buffer; offset and strides in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """One past the last element touched, relative to offset 0; equals the offset for an empty tensor."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def of(self, flat: Tensor) -> Tensor:
        """This view of a flat uint8 tensor."""
        return flat.view(self.dtype).as_strided(self.shape, self.stride, self.offset)

    def mark(self, covered: Tensor) -> None:
        """Sets the bytes that this view covers to 255."""
        dtype = _INTEGER_OF_SIZE[self.dtype.itemsize]
        fill = 255 if dtype == torch.uint8 else -1
        covered.view(dtype).as_strided(self.shape, self.stride, self.offset).fill_(fill)


@dataclass
class Storage:
    """One storage on its way out: the tensors that lie in it and the header nodes that describe them."""

    storage: torch.UntypedStorage
    tensors: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)
    start: int = 0
    num_bytes: int = 0
    covered: Tensor | None = None

    def pack(self) -> bytearray:
        """Copies the span that the tensors cover; the gaps between them hold the canary."""
        spans = [self._span(tensor) for tensor, _ in self.tensors]
        self.start = min(start for start, _ in spans) // ALIGNMENT * ALIGNMENT
        end = max(end for _, end in spans)
        self.num_bytes = -(-(end - self.start) // ALIGNMENT) * ALIGNMENT
        if self.num_bytes > MAX_TENSOR_BYTES:
            raise ValueError(f"a tensor of {self.num_bytes} bytes cannot cross; at most {MAX_TENSOR_BYTES} bytes")
        covered = torch.zeros(self.num_bytes, dtype=torch.uint8)
        for tensor, node in self.tensors:
            offset = int(tensor.storage_offset()) - self.start // tensor.element_size()
            node["offset"] = offset
            if tensor.numel():
                View(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset).mark(covered)
        self.covered = covered.bool()
        packed = torch.full((self.num_bytes,), _CANARY, dtype=torch.uint8)
        here = self._bytes()
        packed[: here.numel()] = torch.where(self.covered[: here.numel()], here, packed[: here.numel()])
        return bytearray(packed.numpy().tobytes())

    def unpack(self, buffer: Buffer) -> None:
        """Writes changed bytes back where they came from.

        Raises:
            ProtocolFault: if the buffer has another size.
            OutOfViewWrite: if bytes between the given tensors were changed; then nothing is written.
        """
        assert self.covered is not None
        if len(buffer) != self.num_bytes:
            raise ProtocolFault(f"a storage of {self.num_bytes} bytes came back with {len(buffer)}")
        new = flat_bytes(buffer)
        stray = int(((new != _CANARY) & ~self.covered).sum())
        if stray:
            raise OutOfViewWrite(stray)
        here = self._bytes()
        here.copy_(torch.where(self.covered[: here.numel()], new[: here.numel()], here))

    def _bytes(self) -> Tensor:
        flat = torch.empty(0, dtype=torch.uint8).set_(self.storage)
        return flat[self.start : self.start + self.num_bytes]

    @staticmethod
    def _span(tensor: Tensor) -> tuple[int, int]:
        view = View(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        size = tensor.element_size()
        return view.offset * size, view.end * size


def flat_bytes(buffer: Buffer) -> Tensor:
    """A buffer's bytes as a writable uint8 tensor of its own."""
    return torch.frombuffer(bytearray(buffer), dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
