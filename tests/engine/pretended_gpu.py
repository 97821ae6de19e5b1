"""A GPU made of tensors without numbers, which is strict about what lies where and counts what is fetched from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
"""Tensors there have shapes and types, and every operation on them yields such tensors."""

_ACROSS = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class PretendedGpu(TorchDispatchMode):
    """While it is on, `DEVICE` stands for a GPU.

    An operation whose tensors lie partly there and partly on the CPU fails, as it would on a GPU, and so does an index
    on the CPU, for which a GPU would have to wait. Only copies may cross. What is fetched comes as zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_fetched = 0
        """How often the CPU has waited for a result."""
        self.num_sent = 0
        """How often it has sent something."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        places = {one.device.type for one in given}
        if func is torch.ops.aten._local_scalar_dense.default and places == {DEVICE.type}:
            self.num_fetched += 1
            return torch.zeros((), dtype=given[0].dtype).item()
        if func in _ACROSS:
            return self._copy(func, args, kwargs)
        if len(places) > 1 and any(one.device.type == "cpu" and one.dim() for one in given):
            raise AssertionError(f"{func} was given tensors on {sorted(places)}")
        return func(*args, **kwargs)

    def _copy(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func is torch.ops.aten.copy_.default:
            source, goal = args[1], args[0].device
        else:
            source, goal = args[0], kwargs.get("device") or args[0].device
        if source.device.type == DEVICE.type and goal.type == "cpu":
            self.num_fetched += 1
            fetched = torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype, device="cpu")
            return args[0].copy_(fetched) if func is torch.ops.aten.copy_.default else fetched
        self.num_sent += source.device.type != goal.type
        return func(*args, **kwargs)
