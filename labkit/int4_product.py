"""torch's product of activations with weights that stay packed in 4 bits, for CPUs."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

GROUPS = (32, 64, 128, 256)
MIDDLE = 8


class Int4Product:
    """A matrix of up to 4 bits with a scale and a minimum for each group: value = scale · (code − 8) + middle.

    Args:
        codes: 0 … 15, `[out, in]`.
        scale: `[out, groups]`.
        middle: the value of code 8, `[out, groups]`.

    Raises:
        ValueError: sizes that torch's packed product does not know.
    """

    def __init__(self, codes: Tensor, scale: Tensor, middle: Tensor) -> None:
        rows, columns = codes.shape
        self.group_size, rest = divmod(columns, scale.shape[1])
        if rest or self.group_size not in GROUPS or rows % 16 or columns % 2:
            raise ValueError(
                f"the packed int4 product takes groups of {', '.join(map(str, GROUPS))} and rows in sixteens, got "
                f"{rows} × {columns} in {scale.shape[1]} groups"
            )
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        self._shared = torch.stack((scale, middle), -1).to(torch.bfloat16).transpose(0, 1).contiguous()

    @classmethod
    def restored(cls, packed: Tensor, shared: Tensor, columns: int) -> Self:
        """The product that held these, by the same torch on a CPU of the same kind: the order of codes depends on both.

        Args:
            packed: its codes.
            shared: its scales and middles.
            columns: of the matrix.
        """
        product = cls.__new__(cls)
        product._packed, product._shared = packed, shared
        product.group_size = columns // len(shared)
        return product

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Its codes, and its scales and middles, as `restored` takes them."""
        return self._packed, self._shared

    def __call__(self, tokens: Tensor) -> Tensor:
        """`[tokens, in]` -> `[tokens, out]` float32; the product reads its inputs in bfloat16."""
        outputs = torch.ops.aten._weight_int4pack_mm_for_cpu(
            tokens.to(torch.bfloat16), self._packed, self.group_size, self._shared
        )
        return outputs.to(torch.float32)

    @property
    def scale_and_middle(self) -> tuple[Tensor, Tensor]:
        """As they are stored, which is in bfloat16; float32 `[out, groups]` each."""
        scale, middle = self._shared.to(torch.float32).transpose(0, 1).unbind(-1)
        return scale, middle
