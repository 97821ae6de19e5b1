"""Task 8a: a name for a block that says what it holds and what comes before it."""

from __future__ import annotations

import hashlib
import struct


def root_hash(adapter: str | None, salt: str | None) -> bytes:
    """The hash that stands before the first block: sequences share blocks only if adapter and salt are equal.

    Args:
        adapter: name of the fine-tuned weights in use; None for the plain model.
        salt: separates tenants that must not see each other's blocks; None for the common space.

    Returns:
        Bytes that differ for any two different pairs; in particular a name means another thing as adapter than as
        salt, and None is not the empty text.
    """
    # BEGIN SOLUTION
    return hashlib.sha256(repr(("adapter", adapter, "salt", salt)).encode()).digest()
    # END SOLUTION


def block_hash(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """The hash of a block: of its tokens and, through its parent's hash, of everything before it.

    Args:
        parent: hash of the block before, or `root_hash`.
        tokens: ids of a full block, each below 2**63.

    Returns:
        Bytes, the same in every process and on every day.

    Source: module section 2.3.
    """
    # BEGIN SOLUTION
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}q", *tokens)).digest()
    # END SOLUTION
