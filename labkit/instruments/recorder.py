"""Watches what interpreted kernels do to memory: whose bytes they load and store, and what a GPU would refuse.

Triton's interpreter runs a kernel as Python and comes to memory by a few methods of its builder. While a `Recorder` is
active those are wrapped, and every tensor argument has an address of its own making (`address_space`), so that an
access is checked before it happens. Without recording the first stray access ends the kernel; a recorder goes on and
writes it down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Literal

import numpy as np
from torch import Tensor
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from labkit.errors import exception_chain
from labkit.instruments.access_log import AccessLog, Flag, Launch, ProgramId, StrayAccess
from labkit.instruments.address_space import AddressSpace, Region, distinct
from labkit.instruments.arithmetic import ArithmeticWatch
from labkit.instruments.patching import replaced
from labkit.instruments.portability import missing_other_fault, poison

Operation = Literal["load", "store", "atomic"]
Handle = interpreter.TensorHandle

_ACTIVE: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
_OFFSETS_SHOWN = 6
_builder = interpreter.interpreter_builder


@dataclass(frozen=True)
class Access:
    """One load or store of one program.

    Args:
        kernel: the kernel function's name.
        operation: "load", "store" or "atomic".
        tensor: the parameter that the pointer was computed from.
        line: of the kernel's file.
        program_id: of the program.
        offsets: of the lanes that the mask let through, in elements from the tensor's first one.
    """

    kernel: str
    operation: Operation
    tensor: str
    line: int
    program_id: ProgramId
    offsets: np.ndarray


class KernelFailed(RuntimeError):
    """A kernel that did not get to its end; the text names it, the exception behind this one says why."""


def watching() -> bool:
    """Whether a recorder is active."""
    return _ACTIVE.get() is not None


class Recorder:
    """Wraps the interpreter while it is the active context.

    Args:
        strict: stop a kernel at its first stray access or bf16 arithmetic, instead of writing it down; count nothing.
        undefined: what lanes hold that the mask of a load without `other` switches off; on a GPU nobody knows.
        on_access: told of every access as it happens, e.g. for a picture.
    """

    def __init__(
        self,
        *,
        strict: bool,
        undefined: Literal["poison", "zero"] = "poison",
        on_access: Callable[[Access], None] | None = None,
    ) -> None:
        self._strict = strict
        self._on_access = on_access
        self._undefined = undefined
        self._launches: list[Launch] = []
        self._stray: dict[tuple[str, str, str, int], StrayAccess] = {}
        self._flags: dict[tuple[str, str, int], Flag] = {}
        self._undefined_lanes: dict[tuple[str, int], tuple[ProgramId, int]] = {}
        self._space = AddressSpace()
        self._regions: dict[int, Region] = {}
        self._kernel = ""
        self._file = ""
        self.launching = False
        self._language_is_patched = False
        self._arithmetic = ArithmeticWatch(self._flag)
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        with contextlib.ExitStack() as stack:
            token = _ACTIVE.set(self)
            stack.callback(_ACTIVE.reset, token)
            for target, name, wrapped in self._replacements():
                stack.enter_context(replaced(target, name, wrapped))
            self._patches = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patches.close()

    @property
    def undefined_lanes(self) -> int:
        """Lanes, so far, that a mask switched off in loads without `other`."""
        return sum(lanes for _, lanes in self._undefined_lanes.values())

    def log(self, *, undefined_lanes_matter: bool = False) -> AccessLog:
        """What was seen.

        Args:
            undefined_lanes_matter: whether results were found to depend on lanes that a mask switched off without an
                `other`; then those loads are flagged.
        """
        flags = list(self._flags.values())
        if undefined_lanes_matter:
            flags += [
                Flag("missing_other", kernel, line, program_id, missing_other_fault(lanes))
                for (kernel, line), (program_id, lanes) in self._undefined_lanes.items()
            ]
        return AccessLog(tuple(self._launches), tuple(self._stray.values()), tuple(flags))

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """What is wrapped: the owner, the name, and the wrapper."""
        yield interpreter.GridExecutor, "__call__", self._launching(interpreter.GridExecutor.__call__)
        yield interpreter, "_implicit_cvt", self._addressing(interpreter._implicit_cvt)
        yield interpreter, "_patch_lang", self._patching(interpreter._patch_lang)
        yield _builder, "create_load", self._load_unmasked
        yield _builder, "create_masked_load", self._load
        yield _builder, "create_store", self._store_unmasked
        yield _builder, "create_masked_store", self._store
        yield _builder, "create_atomic_rmw", self._atomic_rmw
        yield _builder, "create_atomic_cas", self._atomic_cas
        yield from self._arithmetic.replacements()
        if self._strict:
            # Triton computes every integer operation twice to find overflows, which only a record has a place for.
            yield _builder, "options", dataclasses.replace(_builder.options, sanitize_overflow=False)

    # One launch

    def _launching(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._kernel, self._file = executor.fn.__name__, executor.fn.__code__.co_filename
            self._space, self._regions = AddressSpace(), {}
            executor.pre_run_hooks = [*executor.pre_run_hooks, lambda *a, **k: self._place(executor.fn, a, k)]
            self.launching = True
            try:
                original(executor, *args, **kwargs)
            except InterpreterError as error:
                root = next(link for link in exception_chain(error) if not isinstance(link, InterpreterError))
                if isinstance(root, KernelFailed):
                    raise root from None
                at = f"line {self._line_of(root)}, program {_builder.grid_idx}"
                raise KernelFailed(f"{self._kernel}, {at}: {type(root).__name__}: {root}") from root
            finally:
                self.launching = self._language_is_patched = False
                tensors = tuple(region.traffic() for region in self._space.regions)
                self._launches.append(Launch(self._kernel, tuple(_builder.grid_dim), tensors))

        return call

    def _place(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gives each tensor argument its addresses. The tensors here are the very ones that are turned to pointers."""
        for name, value in inspect.signature(fn).bind(*args, **kwargs).arguments.items():
            for label, tensor in _tensors(name, value):
                self._regions[id(tensor)] = self._space.add(label, tensor)

    def _patching(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Turns Triton's language into its interpreted form once a launch, not at each call of a function in it."""
        everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

        def patch(fn: Any) -> Any:
            if self._language_is_patched:
                return interpreter._LangPatchScope()
            self._language_is_patched = True
            return original(everything)

        return patch

    def _addressing(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def convert(value: Any) -> Any:
            converted = original(value)
            if (region := self._regions.get(id(value))) is not None:
                converted.handle.data = np.array([region.made_up], dtype=np.uint64)
            return converted

        return convert

    def _line(self) -> int:
        """The line of the kernel's file that is running."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back  # type: ignore[assignment]
        return frame.f_lineno if frame is not None else 0

    def _line_of(self, error: BaseException) -> int:
        trace, line = error.__traceback__, 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._file:
                line = trace.tb_lineno
            trace = trace.tb_next
        return line

    # Memory

    def _load_unmasked(self, pointers: Any, cache_modifier: Any, eviction_policy: Any, is_volatile: Any) -> Any:
        return self._load(pointers, None, None, cache_modifier, eviction_policy, is_volatile)

    def _load(
        self, pointers: Any, mask: Any, other: Any, cache_modifier: Any, eviction_policy: Any, is_volatile: Any
    ) -> Any:
        lanes, real = self._access("load", pointers, mask)
        dtype = pointers.get_element_ty()
        if other is None and not lanes.all():
            kind = interpreter._get_np_dtype(dtype)
            if mask is not None:
                self._note_undefined(int((~_lanes(mask)).sum()))
            if self._undefined == "poison":
                other = Handle(poison(lanes.shape, kind), dtype)
        original = interpreter.InterpreterBuilder.create_masked_load
        return original(_builder, real, Handle(lanes, tl.int1), other, cache_modifier, eviction_policy, is_volatile)

    def _store_unmasked(self, pointers: Any, value: Any, cache: Any, eviction: Any) -> Any:
        return self._store(pointers, value, None, cache, eviction)

    def _store(self, pointers: Any, value: Any, mask: Any, cache: Any, eviction: Any) -> Any:
        lanes, real = self._access("store", pointers, mask)
        original = interpreter.InterpreterBuilder.create_masked_store
        return original(_builder, real, value, Handle(lanes, tl.int1), cache, eviction)

    def _atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, semantic: Any, scope: Any) -> Any:
        self._arithmetic.check_bf16("an atomic operation", value)
        lanes, real = self._access("atomic", pointers, mask)
        original = interpreter.InterpreterBuilder.create_atomic_rmw
        return original(_builder, operation, real, value, Handle(lanes, tl.int1), semantic, scope)

    def _atomic_cas(self, pointers: Any, compared: Any, value: Any, semantic: Any, scope: Any) -> Any:
        lanes, real = self._access("atomic", pointers, None)
        if not lanes.all():  # it has no mask by which to leave stray lanes out
            raise KernelFailed(str(next(reversed(self._stray.values()))))
        return interpreter.InterpreterBuilder.create_atomic_cas(_builder, real, compared, value, semantic, scope)

    def _access(self, operation: Operation, pointers: Any, mask: Any) -> tuple[np.ndarray, Any]:
        """Counts and checks an access; returns the lanes that may go on, and their real addresses."""
        lanes = np.ones(pointers.data.shape, dtype=bool) if mask is None else _lanes(mask).copy()
        real = pointers.data.copy()
        # Nearly always one; a kernel may choose between the pointers of two tensors lane by lane.
        for region, chosen in self._space.split(pointers.data, lanes):
            if region is None:
                raise KernelFailed(
                    f"{self._kernel}, line {self._line()}: program {_builder.grid_idx} {operation}s at an address that "
                    "comes from none of its tensors"
                )
            lanes[chosen] &= self._access_region(operation, region, pointers, chosen, masked=mask is not None)
            real[chosen] = region.to_real(pointers.data[chosen])
        return lanes, Handle(real, pointers.dtype)

    def _access_region(
        self, operation: Operation, region: Region, pointers: Any, chosen: np.ndarray, *, masked: bool
    ) -> np.ndarray:
        """Counts and checks the lanes that go to one tensor; returns which of them stay inside."""
        active = pointers.data[chosen]
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        stray = region.stray(active, itemsize)
        if stray.any():
            self._note_stray(operation, region, active[stray])
        if self._on_access is not None:
            offsets = region.offsets(active)
            self._on_access(Access(self._kernel, operation, region.name, self._line(), _builder.grid_idx, offsets))
        if not self._strict:
            self._count(operation, region, distinct(active, itemsize) * itemsize, masked=masked)
        return ~stray

    def _count(self, operation: Operation, region: Region, num_bytes: int, *, masked: bool) -> None:
        if operation != "store":
            region.counts["bytes_loaded"] += num_bytes
            region.counts["unmasked_loads"] += not masked
        if operation != "load":
            region.counts["bytes_stored"] += num_bytes
            region.counts["unmasked_stores"] += not masked

    # Faults

    def _note_stray(self, operation: Operation, region: Region, addresses: np.ndarray) -> None:
        line = self._line()
        key = (self._kernel, operation, region.name, line)
        before = self._stray.get(key)
        offsets = tuple(region.offsets(addresses)[:_OFFSETS_SHOWN].tolist())
        found = StrayAccess(
            self._kernel,
            operation,
            region.name,
            line,
            before.program_id if before else _builder.grid_idx,
            before.offsets if before else offsets,
            (before.num_lanes if before else 0) + int(addresses.size),
        )
        if self._strict:
            raise KernelFailed(str(found))
        self._stray[key] = found

    def _note_undefined(self, num_lanes: int) -> None:
        if num_lanes and not self._strict:
            key = (self._kernel, self._line())
            program_id, before = self._undefined_lanes.get(key, (_builder.grid_idx, 0))
            self._undefined_lanes[key] = (program_id, before + num_lanes)

    def _flag(self, kind: str, text: str) -> None:
        line = self._line()
        if self._strict and kind == "bf16":
            raise KernelFailed(f"{self._kernel}, line {line}: {text}")
        self._flags.setdefault((kind, self._kernel, line), Flag(kind, self._kernel, line, _builder.grid_idx, text))


def _lanes(mask: Any) -> np.ndarray:
    """A mask's lanes; for block pointers Triton passes the bare array."""
    return np.asarray(mask if isinstance(mask, np.ndarray) else mask.data, dtype=bool)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an argument, with what to call them."""
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)
    elif isinstance(value, Tensor):
        yield name, value
    elif isinstance(getattr(value, "base", None), Tensor):  # a tensor descriptor
        yield name, value.base
