"""One call of lab code under all instruments, or with its kernels taken away."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from triton.runtime import interpreter

from labkit import launch
from labkit.codec import Encoder
from labkit.instruments.access_log import AccessLog
from labkit.instruments.operators import OperatorRecorder
from labkit.instruments.patching import replaced
from labkit.instruments.recorder import Recorder


class NotInterpreted(RuntimeError):
    """The kernels of this process run natively, where their accesses cannot be seen."""


Function = Callable[..., Any]


def observe(function: Function, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, AccessLog]:
    """Calls a function and says what it did to memory.

    Where masks switch off lanes of a load without `other`, the call is repeated on the same arguments with other values
    in those lanes; if the answer changes, it depends on what a GPU leaves undefined.

    Args:
        function: lab code.
        args: its arguments in order; tensors among them are changed as by one call.
        kwargs: its arguments by name.

    Returns:
        What the function returned, and the log.

    Raises:
        NotInterpreted: kernels run natively in this process.
        Exception: whatever the function raises.
    """
    if not launch.interpreting():
        raise NotInterpreted(f"bytes are counted in Triton's interpreter only: set {launch.VARIABLE}=1")
    before = _Contents(args, kwargs)
    result, recorder, operators = _watched(function, args, kwargs, "poison")
    matters = False
    if recorder.undefined_lanes:
        after = _Contents(args, kwargs)
        before.restore()
        try:
            other, _, _ = _watched(function, args, kwargs, "zero")
            matters = _encoded(other) != _encoded(result) or not after.unchanged()
        except Exception:
            matters = True
        after.restore()
    log = recorder.log(undefined_lanes_matter=matters)
    return result, dataclasses.replace(log, operators=operators.operators, allocations=operators.allocations)


def without_launches(function: Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a function whose kernels do not run; memory that it allocates holds NaN and huge numbers.

    An answer that is still right was not computed by the kernels.

    Args:
        function: lab code.
        args: its arguments in order.
        kwargs: its arguments by name.

    Raises:
        Exception: whatever the function raises.
    """
    nothing = replaced(interpreter.GridExecutor, "__call__", lambda *args, **kwargs: None)
    with launch.without_launches(), nothing, OperatorRecorder(spoil_unwritten=True):
        return function(*args, **kwargs)


def _watched(
    function: Function, args: list[Any], kwargs: dict[str, Any], undefined: Literal["poison", "zero"]
) -> tuple[Any, Recorder, OperatorRecorder]:
    with Recorder(strict=False, undefined=undefined) as recorder:
        operators = OperatorRecorder(paused=lambda: recorder.launching)
        with operators:
            result = function(*args, **kwargs)
    return result, recorder, operators


class _Contents:
    """What the tensors among a call's arguments hold, as it is now."""

    def __init__(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in _tensors([*args, *kwargs.values()]))}
        self._kept = [(storage, _bytes(storage).clone()) for storage in storages.values()]

    def restore(self) -> None:
        """Brings it back."""
        for storage, kept in self._kept:
            _bytes(storage).copy_(kept)

    def unchanged(self) -> bool:
        """Whether the tensors hold the same still."""
        return all(torch.equal(_bytes(storage), kept) for storage, kept in self._kept)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _encoded(value: Any) -> tuple[dict[str, Any], list[bytes]]:
    """A value as it would cross: equal bit by bit where NaN is no different from itself."""
    encoder = Encoder(export_object=lambda item: 0)
    message = encoder.message({"value": encoder.encode(value)})
    return message.header, [bytes(buffer) for buffer in message.buffers]
