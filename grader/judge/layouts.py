"""The same values in other memory layouts, and outputs that show where nothing was written.

Gaps between the tensors of a call hold a canary of the transport's, whatever the test put there. So NaN that a kernel
must not read has to lie in a tensor of the same call: in its output, which `arranged` can put right behind the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "columns first", "every other", "side by side")
"""Row-major; column-major; with gaps between elements; and each input's rows followed by rows of output."""


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A tensor's values in another layout of its last two axes.

    Args:
        tensor: at least two axes.
        layout: "contiguous", "columns first" or "every other".
    """
    if layout == "columns first":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "every other":
        room = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3))
        room[..., 1 : 1 + 2 * tensor.shape[-1] : 2] = tensor
        return room[..., 1 : 1 + 2 * tensor.shape[-1] : 2]
    return tensor.contiguous()


def unwritten(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An output before the call: NaN everywhere."""
    return torch.full(tuple(shape), float("nan"), dtype=dtype)


def arranged(layout: str, inputs: Sequence[Tensor], num_outputs: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs of one shape, and as many outputs of that shape, in a layout.

    Args:
        layout: one of `LAYOUTS`. Side by side, all lie in one buffer, so that whoever reads beyond a row's end meets
            the next tensor; the outputs' NaN stands behind every input. Otherwise it is the first tensor's layout, and
            each further one has the next, so that strides taken from the wrong tensor show.
        inputs: tensors of one shape and dtype, at least two axes.
        num_outputs: how many outputs are wanted.

    Returns:
        The inputs in that layout, and outputs filled with NaN.
    """
    like = inputs[0]
    if layout != "side by side":
        outputs = [unwritten(like.shape, like.dtype) for _ in range(num_outputs)]
        first = LAYOUTS.index(layout)
        placed = [laid_out(tensor, LAYOUTS[(first + i) % 3]) for i, tensor in enumerate([*inputs, *outputs])]
        return placed[: len(inputs)], placed[len(inputs) :]
    width = like.shape[-1]
    columns = [piece for tensor in inputs for piece in (tensor, unwritten(like.shape, like.dtype))]
    columns += [unwritten(like.shape, like.dtype)] * max(0, num_outputs - len(inputs))
    room = torch.cat(columns, dim=-1)
    pieces = list(room.split(width, dim=-1))
    placed = [pieces[2 * index] for index in range(len(inputs))]
    free = [pieces[2 * index + 1] for index in range(len(inputs))] + pieces[2 * len(inputs) :]
    return placed, free[:num_outputs]
