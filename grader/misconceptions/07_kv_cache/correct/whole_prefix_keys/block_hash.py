"""Text that says everything, hashed by another function."""

from __future__ import annotations

import hashlib
import json


def root_hash(adapter: str | None, salt: str | None) -> bytes:
    """JSON keeps names apart."""
    return b"root" + hashlib.blake2b(json.dumps({"adapter": adapter, "salt": salt}).encode()).digest()


def block_hash(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """JSON keeps ids apart."""
    return hashlib.blake2b(json.dumps([parent.hex(), list(tokens)]).encode(), digest_size=24).digest()
