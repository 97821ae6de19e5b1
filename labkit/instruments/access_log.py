"""What the instruments saw of one call, as plain facts that can cross to the test's side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ProgramId = tuple[int, int, int]


@dataclass(frozen=True)
class TensorTraffic:
    """Global memory traffic between one launch and one of its tensor arguments.

    Args:
        name: the kernel's parameter.
        shape: of the tensor that was passed.
        dtype: of its elements.
        bytes_loaded: by lanes whose mask let them through; a byte that two programs load counts twice.
        bytes_stored: likewise.
        unmasked_loads: load instructions executed without a mask.
        unmasked_stores: store instructions executed without a mask.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes_loaded: int = 0
    bytes_stored: int = 0
    unmasked_loads: int = 0
    unmasked_stores: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Args:
        kernel: the kernel function's name.
        grid: numbers of programs along x, y and z.
        tensors: its tensor arguments in order.
    """

    kernel: str
    grid: ProgramId
    tensors: tuple[TensorTraffic, ...]

    @property
    def bytes_loaded(self) -> int:
        """Bytes read from global memory."""
        return sum(tensor.bytes_loaded for tensor in self.tensors)

    @property
    def bytes_stored(self) -> int:
        """Bytes written to global memory."""
        return sum(tensor.bytes_stored for tensor in self.tensors)

    def tensor(self, name: str) -> TensorTraffic:
        """The traffic of one parameter.

        Raises:
            KeyError: the kernel has no tensor parameter of that name.
        """
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(f"{self.kernel} was given no tensor {name!r}; it has {', '.join(t.name for t in self.tensors)}")


@dataclass(frozen=True)
class StrayAccess:
    """A load or store outside the tensor that its pointer came from, told once for each line and parameter.

    Args:
        kernel: the kernel function's name.
        operation: "load", "store" or "atomic".
        tensor: the parameter that the pointer was computed from.
        line: of the kernel's file.
        program_id: of the first program that did it.
        offsets: the first few stray positions, in elements from the tensor's first one.
        num_lanes: how many lanes were stray in all.
    """

    kernel: str
    operation: str
    tensor: str
    line: int
    program_id: ProgramId
    offsets: tuple[int, ...]
    num_lanes: int

    def __str__(self) -> str:
        where = ", ".join(map(str, self.offsets)) + (", …" if self.num_lanes > len(self.offsets) else "")
        return (
            f"{self.kernel}, line {self.line}: program {self.program_id} {self.operation}s outside {self.tensor}, "
            f"at element offsets {where} ({self.num_lanes} lanes); mask them off or correct the offsets"
        )


@dataclass(frozen=True)
class Flag:
    """Something that the interpreter lets pass and a GPU does not, told once for each line.

    Args:
        kind: "dot_k" (K of `tl.dot` below the GPU's minimum), "missing_other" (lanes that a mask switched off are used
            although the load names no `other`), "int32_overflow" or "bf16".
        kernel: the kernel function's name.
        line: of the kernel's file.
        program_id: of the first program that did it.
        text: what happens on a GPU, and what to write instead.
    """

    kind: str
    kernel: str
    line: int
    program_id: ProgramId
    text: str

    def __str__(self) -> str:
        return f"{self.kernel}, line {self.line}, program {self.program_id}: {self.text}"


@dataclass(frozen=True)
class Allocation:
    """A tensor with memory of its own that a torch operator made between the launches.

    Args:
        operator: e.g. "aten.empty".
        shape: of the tensor.
        dtype: of its elements.
    """

    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class AccessLog:
    """What one call of lab code did to memory.

    Args:
        launches: the kernels it started, in order.
        stray: accesses out of bounds.
        flags: what would fail or differ on a GPU.
        operators: names of the torch operators it ran outside kernels, each once, in order, e.g. "aten.mm".
        allocations: the kinds of tensors that those operators made, each once.
    """

    launches: tuple[Launch, ...] = ()
    stray: tuple[StrayAccess, ...] = ()
    flags: tuple[Flag, ...] = ()
    operators: tuple[str, ...] = ()
    allocations: tuple[Allocation, ...] = ()

    @property
    def bytes_loaded(self) -> int:
        """Bytes that all kernels read from global memory."""
        return sum(launch.bytes_loaded for launch in self.launches)

    @property
    def bytes_stored(self) -> int:
        """Bytes that all kernels wrote to global memory."""
        return sum(launch.bytes_stored for launch in self.launches)

    def of(self, kernel: str) -> tuple[Launch, ...]:
        """The launches of one kernel."""
        return tuple(launch for launch in self.launches if launch.kernel == kernel)

    def allocated(self, wanted: Callable[[tuple[int, ...]], bool]) -> tuple[Allocation, ...]:
        """The tensors made whose shape is wanted, e.g. those with a T×T part."""
        return tuple(allocation for allocation in self.allocations if wanted(allocation.shape))
