"""Watches the arithmetic of interpreted kernels for what a GPU refuses, or the interpreter gets wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

from labkit.instruments.portability import bf16_fault, dot_k_fault, overflow_fault

Handle = interpreter.TensorHandle

_OVERFLOW = re.compile(r"(int\d+) overflow detected")
_builder = interpreter.interpreter_builder
_semantic = interpreter.interpreter_semantic


class ArithmeticWatch:
    """Wrappers of the interpreter's arithmetic.

    Args:
        report: told of each fault, by its kind as in `Flag`, and in words.
    """

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """What is wrapped: the owner, the name, and the wrapper."""
        yield _builder, "create_dot", self._dot
        yield _builder, "cast_impl", self._cast
        yield _semantic, "device_assert", self._assert
        for name in ("binary_op", "unary_op", "create_fma"):
            yield _builder, name, self._elementwise(getattr(interpreter.InterpreterBuilder, name))
        for operations in (interpreter.ReduceOps, interpreter.ScanOps):
            yield operations, "apply", self._reduction(operations.apply)

    def check_bf16(self, operation: str, *operands: Any) -> None:
        """Reports an operation on bf16 values, of which the interpreter sees the bits only."""
        if any(operand.dtype.scalar == tl.bfloat16 for operand in operands):
            self._report("bf16", bf16_fault(operation))

    def _dot(self, a: Any, b: Any, accumulator: Any, precision: Any, imprecise: Any) -> Any:
        self.check_bf16("tl.dot", a, b)
        if fault := dot_k_fault(a.dtype.scalar.primitive_bitwidth, a.data.shape[-1]):
            self._report("dot_k", fault)
        return interpreter.InterpreterBuilder.create_dot(_builder, a, b, accumulator, precision, imprecise)

    def _cast(self, value: Any, target: Any) -> Any:
        kinds = {value.dtype.scalar, target.scalar}
        if tl.bfloat16 in kinds and not kinds <= {tl.bfloat16, tl.float32}:
            self._report("bf16", bf16_fault("a conversion to or from another type than tl.float32"))
        return interpreter.InterpreterBuilder.cast_impl(_builder, value, target)

    def _elementwise(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*arguments: Any) -> Any:
            self.check_bf16("arithmetic", *(value for value in arguments if isinstance(value, Handle)))
            return original(_builder, *arguments)

        return compute

    def _reduction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(operation: Any, values: Any) -> Any:
            given = values if isinstance(values, tuple) else (values,)
            self.check_bf16("a reduction", *(value.handle for value in given if isinstance(value, tl.tensor)))
            return original(operation, values)

        return apply

    def _assert(self, condition: Any, message: str, mask: Any) -> Any:
        """Triton checks each integer operation of its own accord and hands the finding to an assertion."""
        if found := _OVERFLOW.match(message):
            if not condition.handle.data.all():
                self._report("int32_overflow", overflow_fault(found[1]))
            return None
        return type(_semantic).device_assert(_semantic, condition, message, mask)
