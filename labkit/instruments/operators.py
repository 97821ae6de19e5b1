"""Which torch operators lab code runs, seen where every alias of a library function ends up: at the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.instruments.access_log import Allocation

_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")

JOBS: dict[str, tuple[str, ...]] = {
    "attention": ("scaled_dot_product", "flash_attention", "efficient_attention", "fused_sdp", "flex_attention"),
    "matmul": ("mm", "matmul", "mv", "dot", "linear", "einsum", "convolution"),
    "softmax": ("softmax", "logsumexp", "logaddexp"),
    "norm": ("rms_norm", "layer_norm", "group_norm"),
    "sampling": ("multinomial", "topk", "sort", "argmax", "kthvalue", "cumsum"),
}
"""What kernels are for, and parts of the names of the operators that would do it in their place."""


def doing_the_job(operators: Iterable[str], *jobs: str) -> tuple[str, ...]:
    """The operators that do what a kernel is there to do.

    Args:
        operators: names as in `AccessLog.operators`.
        jobs: keys of `JOBS`. Attention is also suspected where a softmax is.

    Raises:
        ValueError: a job that `JOBS` does not have.
    """
    if unknown := sorted(set(jobs) - set(JOBS)):
        raise ValueError(f"no job is called {', '.join(unknown)}; they are {', '.join(JOBS)}")
    parts = [part for job in jobs for part in JOBS[job]]
    return tuple(name for name in operators if any(part in name.partition(".")[2] for part in parts))


class OperatorRecorder(TorchDispatchMode):
    """Notes operators and the tensors they make, while it is the active context.

    Args:
        paused: asked at each operator; while it says yes nothing is noted (the interpreter uses torch itself).
        spoil_unwritten: fill memory that is handed out unwritten with NaN and huge numbers, so that an answer which
            nobody computed cannot be right by luck.
    """

    def __init__(self, *, paused: Callable[[], bool] = lambda: False, spoil_unwritten: bool = False) -> None:
        super().__init__()
        self._paused = paused
        self._spoil = spoil_unwritten
        self._operators: dict[str, None] = {}
        self._allocations: dict[Allocation, None] = {}

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of the operators, each once, in the order of their first call."""
        return tuple(self._operators)

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """The kinds of tensors that they made, each once."""
        return tuple(self._allocations)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in an operator's place."""
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        if self._paused():
            return result
        namespace, _, operator = func._schema.name.partition("::")
        name = f"{namespace}.{operator}"
        self._operators.setdefault(name)
        for tensor in _tensors(result):
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in known:
                self._allocations.setdefault(Allocation(name, tuple(tensor.shape), tensor.dtype))
                if self._spoil and operator in _UNWRITTEN:
                    _spoil(tensor)
        return result


def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
