"""A CUDA graph for a CPU: the list of operations of one run, with the very memory and numbers they had, run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from solutions.engine.graphs.cuda_graphs import Compute


class Tape:
    """A `Recorder`. No code of the step runs in a replay, so whatever Python decided is what it was when recorded.

    What an operation reads lies where it lay; what it made goes to where it went. Recording fails where a number is
    fetched, as it would on a GPU.
    """

    def __init__(self) -> None:
        self.recorded: list[int] = []
        """Operations of each recorded step."""
        self.num_replays = 0

    def record(self, compute: Compute) -> Compute:
        """See `Recorder`."""
        compute()  # what happens in a first run only is not recorded
        with _Recording() as recording:
            result = compute()
        self.recorded.append(len(recording.again))

        def replay() -> Tensor:
            self.num_replays += 1
            for run in recording.again:
                run()
            return result

        return replay


class _Recording(TorchDispatchMode):
    """Writes down what is run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.again: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a step that is being recorded has asked for a number")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        memory = {_memory(one) for one in _tensors((args, kwargs))}
        made = [_memory(one) not in memory for one in _tensors(out)]

        def run() -> None:
            for old, new, is_new in zip(_tensors(out), _tensors(func(*args, **kwargs)), made, strict=True):
                if is_new:  # else it is a view, or was changed in place
                    old.copy_(new)

        self.again.append(run)
        return out


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _memory(tensor: Tensor) -> int:
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()
