"""Task 11a: a radix tree over tokens, whose edges carry the blocks that hold them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count as counter

from labkit.checks import check_count, check_tokens


@dataclass(eq=False)
class RadixNode:
    """A node, and the edge that leads to it.

    Args:
        key: under which the parent finds it: the tokens of its first block; the name for the first node of a namespace.
        tokens: of the edge: those of whole blocks, or a *tail*, fewer than a block holds. Nothing follows a tail.
        blocks: where their keys and values lie, in order.
        used: for each block the tree's time when it was used last.
        parent: None for the root of all.
        children: by their keys; none begins with all the tokens of another.
    """

    key: Hashable
    tokens: tuple[int, ...]
    blocks: list[int]
    used: list[int]
    parent: RadixNode | None
    children: dict[Hashable, RadixNode] = field(default_factory=dict)


Path = list[tuple[RadixNode, int]]
"""Nodes from the front of a prompt on, each with how many of its blocks hold tokens of the prompt."""


class RadixTree:
    """Finds the longest stored prefix of a prompt, and the block that has been out of use the longest.

    Edges hold runs of tokens, and part where prompts part; they are cut at multiples of the block size only. So a block
    belongs to one edge, and two prompts that part *within* a block have a block each from there on:

        blocks of 4                    [1 2 3 4 5 6 7 8]          blocks 0, 1
        1 2 3 4 5 6 7 8 9 9 9 9   ──►    ├── [9 9 9 9]            block 2
        1 2 3 4 5 6 7 8 9 9              ├── [9 5 5 5]            block 5
        1 2 3 4 5 6 7 8 9 5 5 5 3        │     └── [3]            block 6, a tail
        1 2 3 4 5 6 7 8 7                └── [7]                  block 7, a tail

    The second prompt needs nothing of its own: the first block behind the fork begins with its tokens.
    The tree knows nothing of owners: whoever uses it says which blocks may go.

    Args:
        block_size: tokens in a block.

    Raises:
        ValueError: `block_size` is not an int of at least 1.

    Source: Zheng et al. 2023 (2312.07104); module section 2.3.
    """

    def __init__(self, block_size: int) -> None:
        check_count("block_size", block_size, 1)
        self._block_size = block_size
        self._root = RadixNode(None, (), [], [], None)
        self._clock = 0

    @property
    def num_blocks(self) -> int:
        """Blocks on all edges."""
        return sum(len(node.blocks) for node in self._nodes())

    @property
    def num_nodes(self) -> int:
        """Edges: runs of whole blocks between two forks, and tails."""
        return len(self._nodes())

    def match(self, tokens: Sequence[int], namespace: Hashable = None) -> tuple[list[int], int]:
        """Find the longest stored prefix, token by token. Nothing is changed by looking.

        Args:
            tokens: of a prompt; none at all match nothing.
            namespace: prompts of two namespaces share nothing.

        Returns:
            The blocks that hold the prefix, in order, and its length in tokens. Of the last block only the first
            tokens may belong to the prefix.
        """
        # BEGIN SOLUTION
        path, length = self._walk(list(tokens), namespace)
        return [block for node, count in path for block in node.blocks[:count]], length
        # END SOLUTION

    def touch(self, tokens: Sequence[int], namespace: Hashable = None) -> None:
        """Mark the blocks that `match` finds for these tokens as just used, and no others."""
        # BEGIN SOLUTION
        path, _ = self._walk(list(tokens), namespace)
        self._clock += 1
        for node, count in path:
            node.used[:count] = [self._clock] * count
        # END SOLUTION

    def insert(
        self, tokens: Sequence[int], blocks: Sequence[int], namespace: Hashable = None
    ) -> tuple[list[int], list[int]]:
        """Store a sequence. What is stored already stays where it is; all of the sequence counts as just used.

        If a tail is stored that the sequence continues, the sequence's own block takes its place.

        Args:
            tokens: of the sequence.
            blocks: that hold them, in order; more are ignored.
            namespace: as for `match`.

        Returns:
            The blocks that the tree took, and those of a tail that it gave up for them.

        Raises:
            ValueError: no tokens, something that is no token id, or too few blocks. Nothing has changed then.
        """
        ids = check_tokens("tokens", tokens)
        needed = -(-len(ids) // self._block_size)
        if len(blocks) < needed:
            raise ValueError(f"{len(ids)} tokens need {needed} blocks of {self._block_size}, got {len(blocks)} blocks")
        # BEGIN SOLUTION
        path, length = self._walk(ids, namespace)
        if length == len(ids):
            self.touch(ids, namespace)
            return [], []
        covered = length // self._block_size
        self.touch(ids[: covered * self._block_size], namespace)
        node = self._node_after(path, covered, namespace)
        rest, new = tuple(ids[covered * self._block_size :]), list(blocks[covered:needed])
        dropped = []
        for child in list(node.children.values()):
            if child.tokens == rest[: len(child.tokens)]:
                dropped = child.blocks
                del node.children[child.key]
        whole = len(rest) // self._block_size
        if whole:
            node = self._attach(node, rest[: whole * self._block_size], new[:whole])
        if whole < len(new):
            self._attach(node, rest[whole * self._block_size :], new[whole:])
        return new, dropped
        # END SOLUTION

    def num_evictable(self, may_go: Callable[[int], bool]) -> int:
        """How many blocks `evict` could remove.

        Args:
            may_go: told a block, says whether nobody needs it.
        """
        # BEGIN SOLUTION
        evictable = 0
        kept: set[RadixNode] = set()
        for node in reversed(self._nodes()):  # children before their parents
            gone = 0
            if node not in kept:
                while gone < len(node.blocks) and may_go(node.blocks[-1 - gone]):
                    gone += 1
            evictable += gone
            if gone < len(node.blocks) and node.parent is not None:
                kept.add(node.parent)
        return evictable
        # END SOLUTION

    def evict(self, count: int, may_go: Callable[[int], bool]) -> list[int]:
        """Remove blocks, always the least recently used of those at the end of a leaf.

        Args:
            count: the most to remove.
            may_go: as in `num_evictable`. A block that may not go keeps all those before it.

        Returns:
            The blocks removed, in order.

        Raises:
            ValueError: `count` is no int of at least 0.
        """
        check_count("count", count, 0)
        # BEGIN SOLUTION
        number = counter()  # no two entries of the heap are equal, so that it never compares nodes
        leaves = [(node.used[-1], next(number), node) for node in self._nodes() if not node.children]
        heapq.heapify(leaves)
        removed: list[int] = []
        while leaves and len(removed) < count:
            _, _, node = heapq.heappop(leaves)
            if not may_go(node.blocks[-1]):
                continue
            removed.append(node.blocks.pop())
            node.used.pop()
            node.tokens = node.tokens[: len(node.blocks) * self._block_size]
            node = self._prune(node)
            if node.blocks and not node.children:
                heapq.heappush(leaves, (node.used[-1], next(number), node))
        return removed
        # END SOLUTION

    def _nodes(self) -> list[RadixNode]:
        """All nodes that have blocks, parents before their children. No recursion: a chain may be long."""
        found, waiting = [], [self._root]
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            if node.blocks:
                found.append(node)
        return found

    # BEGIN SOLUTION
    def _walk(self, ids: list[int], namespace: Hashable) -> tuple[Path, int]:
        """The nodes that hold the longest stored prefix, and its length in tokens."""
        path: Path = []
        length = 0
        node = self._root.children.get(namespace)
        while node is not None and node.children:
            # Either a child begins with the whole next block, or the one that has the most of it in common counts.
            child = node.children.get(tuple(ids[length : length + self._block_size]))
            if child is None:
                child = max(node.children.values(), key=lambda other: _common(other.tokens, ids, length))
            common = _common(child.tokens, ids, length)
            if common == 0:
                break
            path.append((child, -(-common // self._block_size)))
            length += common
            node = child if common == len(child.tokens) else None
        return path, length

    def _node_after(self, path: Path, num_blocks: int, namespace: Hashable) -> RadixNode:
        """The node at which the first blocks of a path end; an edge that goes on behind them is split."""
        if namespace not in self._root.children:
            self._root.children[namespace] = RadixNode(namespace, (), [], [], self._root)
        end = self._root.children[namespace]
        for node, _ in path:
            if num_blocks == 0:
                break
            if num_blocks < len(node.blocks):
                self._split(node, num_blocks)
            end = node
            num_blocks -= len(node.blocks)
        return end

    def _split(self, node: RadixNode, num_blocks: int) -> None:
        """Leave a node its first blocks, and give the others, and its children, to a new node below it."""
        at = num_blocks * self._block_size
        lower = RadixNode(
            node.tokens[at : at + self._block_size],
            node.tokens[at:],
            node.blocks[num_blocks:],
            node.used[num_blocks:],
            node,
            node.children,
        )
        for child in lower.children.values():
            child.parent = lower
        node.tokens, node.blocks, node.used = node.tokens[:at], node.blocks[:num_blocks], node.used[:num_blocks]
        node.children = {lower.key: lower}

    def _attach(self, parent: RadixNode, tokens: tuple[int, ...], blocks: list[int]) -> RadixNode:
        """A new child, just used."""
        child = RadixNode(tokens[: self._block_size], tokens, blocks, [self._clock] * len(blocks), parent)
        parent.children[child.key] = child
        return child

    def _prune(self, node: RadixNode) -> RadixNode:
        """Take nodes without blocks and children out, upwards; the first that stays."""
        while node.parent is not None and not node.blocks and not node.children:
            del node.parent.children[node.key]
            node = node.parent
        return node

    # END SOLUTION


# BEGIN SOLUTION
def _common(tokens: tuple[int, ...], ids: list[int], start: int) -> int:
    """How many tokens agree with the ids from `start` on."""
    agree = 0
    while agree < len(tokens) and start + agree < len(ids) and tokens[agree] == ids[start + agree]:
        agree += 1
    return agree


# END SOLUTION
