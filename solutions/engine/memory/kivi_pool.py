"""Keys and values by KIVI, in blocks: a full block as codes, the one that a text still grows in as it came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from ..kv_manager import Move, MoveKind, SlotMove
from ..models.kv_shape import KVShape
from ..request import blocks_for
from .block_plane import BlockPlane
from .kivi_codes import Coded, KiviCodes


class KiviPool:
    """What layers keep of their tokens: codes of every block, and pages in full precision for those that are open.

        block    codes ──────────────────────────┐
        codes    ████ ████ ████ ████ ████ ████   │ written in the pass that fills the block
        pages         ▒▒▒▒           ▒▒░░        │ while a request could yet write to it

    A block is open for the request whose text ends in it. It is full when its last token is computed; it stays open
    until that token is part of the text for good: a draft in it may be rejected, and then others take its place. So no
    code is ever turned back, and a request needs a page for the block in which its text ends, and for those that its
    drafts reach.

    Args:
        kv_shape: of the model.
        bits: of a code, 4 or 2.
        num_blocks: blocks in each layer.
        block_size: tokens in a block.
        max_requests: that hold blocks at once.
        num_host_blocks: blocks in host memory, for requests that are swapped out.
        dtype: of pages, and of what is read.
        max_drafts: of a request in a step.

    Raises:
        ValueError: a model that keeps no keys and values, or heads whose codes don't fill whole bytes.
    """

    def __init__(
        self, kv_shape: KVShape, bits: int, num_blocks: int, block_size: int, max_requests: int,
        num_host_blocks: int = 0, dtype: torch.dtype = torch.float32, max_drafts: int = 0,
    ) -> None:  # fmt: skip
        if kv_shape.num_parts != 2:
            raise ValueError(
                "KIVI treats keys and values differently, and this model keeps a latent that both are made from; take "
                "another kv_dtype"
            )
        self.block_size = block_size
        self.device = torch.device("cpu")
        self.codes = codes = KiviCodes(bits, kv_shape.head_dim)
        heads, dim = kv_shape.num_heads, kv_shape.head_dim
        packed = (block_size, heads, dim // codes.codes_per_byte)
        key_range, value_range = (1, heads, dim), (block_size, heads, dim // codes.group_size)
        shapes = [(packed, torch.uint8), (key_range, torch.float16), (key_range, torch.float16)]
        shapes += [(packed, torch.uint8), (value_range, torch.float16), (value_range, torch.float16)]
        layers = kv_shape.num_layers
        self._planes = [
            BlockPlane(layers, num_blocks, num_host_blocks, shape, kind, self.device) for shape, kind in shapes
        ]
        num_pages = max_requests * (1 + blocks_for(max_drafts, block_size))
        # Keys and values side by side.
        self._pages = torch.zeros((layers, 2, num_pages, block_size, heads, dim), dtype=dtype)
        self._page_of: dict[int, int] = {}
        self._free_pages = list(range(num_pages))
        # A host block's page stays until something else takes the block: forks of a request share host blocks.
        self._host_pages: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of the pool, codes, ranges and pages; host memory not counted."""
        return sum(plane.num_bytes for plane in self._planes) + self._pages.numel() * self._pages.element_size()

    @property
    def num_bytes_per_token(self) -> float:
        """Memory of one token of a full block in all layers: its codes, and its share of the block's ranges."""
        return sum(plane.num_bytes_per_block for plane in self._planes) / self.block_size

    def page(self, block: int) -> int:
        """The page of an open block; it gets one if it has none."""
        if block not in self._page_of:
            self._page_of[block] = self._free_pages.pop()
        return self._page_of[block]

    def pass_page(self, block: int, to: int) -> None:
        """An open block is filled for good, and its page goes to another, which has none yet."""
        self._page_of[to] = self._page_of.pop(block)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all pages, to read and to write, each `[pages, block_size, heads, head_dim]`."""
        return self._pages[layer, 0], self._pages[layer, 1]

    def seal(self, layer: int, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes the codes of full blocks.

        Args:
            layer: 0 for the first.
            blocks: ids, int64 `[blocks]`.
            keys: `[blocks, block_size, heads, head_dim]`.
            values: as `keys`.
        """
        coded = self.codes.encode_keys(keys), self.codes.encode_values(values)
        parts = [part for one in coded for part in (one.packed, one.low, one.scale)]
        for plane, part in zip(self._planes, parts, strict=True):
            plane.tensors[layer][blocks] = part

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that the codes of blocks `[blocks]` stand for, each `[blocks · block_size, heads, dim]`."""
        parts = [plane.tensors[layer][blocks] for plane in self._planes]
        keys, values = self.codes.decode_keys(Coded(*parts[:3])), self.codes.decode_values(Coded(*parts[3:]))
        return keys.to(self._pages.dtype).flatten(0, 1), values.to(self._pages.dtype).flatten(0, 1)

    def move(self, moves: Sequence[Move], open_blocks: Collection[int] = ()) -> None:
        """Makes the moves of a step, in order, and takes back the pages of blocks that are open no more.

        Args:
            moves: of blocks.
            open_blocks: those in which a request's text ends, once the moves are made.
        """
        wanted = Counter(move.source for move in moves if move.kind is not MoveKind.IN)  # by moves that are to come
        self._keep(block for block in self._page_of if block in open_blocks or block in wanted)
        for move in moves:
            for plane in self._planes:
                plane.move(move.kind, [move.source], [move.target])
            self._move_page(move)
            if move.kind is not MoveKind.IN:
                wanted[move.source] -= 1
            # Whoever had the source may be gone, and whoever got the target may have been preempted in the same step.
            for block in _blocks_of_pool(move):
                if not wanted[block] and block not in open_blocks:
                    self._drop_page(block)

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """See `KVPool`; drafts that would have to be moved are refused, as `make_speculator` says."""
        raise NotImplementedError("a block's codes stand for all of its tokens; none of them can be moved alone")

    def _move_page(self, move: Move) -> None:
        if move.kind is MoveKind.OUT:
            self._host_pages.pop(move.target, None)
            if move.source in self._page_of:
                self._host_pages[move.target] = self._pages[:, :, self._page_of[move.source]].clone()
        elif move.kind is MoveKind.IN:
            if move.source in self._host_pages:
                self._pages[:, :, self.page(move.target)] = self._host_pages[move.source]
        elif move.source in self._page_of:
            self._pages[:, :, self.page(move.target)] = self._pages[:, :, self._page_of[move.source]]

    def _keep(self, blocks: Iterable[int]) -> None:
        kept = set(blocks)
        for block in [block for block in self._page_of if block not in kept]:
            self._drop_page(block)

    def _drop_page(self, block: int) -> None:
        if block in self._page_of:
            self._free_pages.append(self._page_of.pop(block))


def _blocks_of_pool(move: Move) -> tuple[int, ...]:
    """Those ends of a move that lie in the pool."""
    if move.kind is MoveKind.COPY:
        return move.source, move.target
    return (move.source,) if move.kind is MoveKind.OUT else (move.target,)
