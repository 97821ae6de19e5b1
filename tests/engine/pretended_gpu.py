"""A GPU made of tensors without numbers, which is strict about what lies where and counts what is fetched from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
"""Tensors there have shapes and types, and every operation on them yields such tensors."""


class PretendedGpu(TorchDispatchMode):
    """While it is on, `DEVICE` stands for a GPU.

    An operation whose tensors lie partly there and partly on the CPU fails, as it would on a GPU, and so does an index
    on the CPU, for which a GPU would have to wait. Only copies may cross. What is fetched comes as zeros, or as equal
    shares of 1 if it is floating point, and `all` is true, so that nobody finds anything wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_fetched = 0
        """How often the CPU has waited for a result."""
        self._true: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        places = {one.device.type for one in given}
        # Below autograd operations come in parts; in inference mode they come whole.
        name = func.overloadpacket.__name__  # type: ignore[attr-defined]
        if name in ("item", "is_nonzero", "_local_scalar_dense") and places == {DEVICE.type}:
            return self._fetch(given[0]).item() or id(given[0]) in self._true
        if name in ("to", "_to_copy"):
            settings = (*args, *kwargs.values())
            if any(isinstance(one, torch.device) and one.type == "cpu" for one in settings) and places == {DEVICE.type}:
                return self._fetch(given[0], *(one for one in settings if isinstance(one, torch.dtype)))
            return func(*args, **kwargs)
        if name == "copy_":
            source = (
                self._fetch(args[1]) if places == {DEVICE.type, "cpu"} and args[0].device.type == "cpu" else args[1]
            )
            return func(args[0], source, *args[2:], **kwargs)
        if len(places) > 1 and any(one.device.type == "cpu" and one.dim() for one in given):
            raise AssertionError(f"{func} was given tensors on {sorted(places)}")
        out = func(*args, **kwargs)
        if name == "all" and out.device.type == DEVICE.type:
            self._true.add(id(out))
            weakref.finalize(out, self._true.discard, id(out))
        return out

    def _fetch(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        self.num_fetched += 1
        share = 1 / tensor.shape[-1] if tensor.is_floating_point() and tensor.dim() else 0
        return torch.full(tensor.shape, share, dtype=dtype or tensor.dtype, device="cpu")
