"""Lists of children, and a walk that calls itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.drafting import DraftTree

from .acceptance import accept_or_resample, check_distributions, check_uniforms, draw, residual


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Powers of the step from child to parent."""
    count = len(parents)
    step = torch.zeros(count, count)
    for child, parent in enumerate(parents):
        if parent != -1:
            step[child, parent] = 1
    reached, power = torch.eye(count), torch.eye(count)
    for _ in range(count):
        power = power @ step
        reached = reached + power
    return reached > 0


def tree_positions(parents: Sequence[int], start: int) -> Tensor:
    """One more than the parent's."""
    if type(start) is not int or start < 0:
        raise ValueError(f"start must be a whole number of at least 0, got {start!r}")
    positions: list[int] = []
    for parent in parents:
        positions.append(start if parent == -1 else positions[parent] + 1)
    return torch.tensor(positions, dtype=torch.int64)


def verify_tree(p: Tensor, tree: DraftTree, uniforms: Tensor) -> tuple[list[int], int]:
    """Descend into the first child that is kept."""
    count = len(tree.tokens)
    p = check_distributions("p", p)
    if p.dim() != 2 or len(p) != count + 1:
        raise ValueError(f"{count} drafts need {count + 1} rows, got {list(p.shape)}")
    uniforms = check_uniforms("uniforms", uniforms, torch.Size((count + 1, 2)))
    tokens = torch.tensor(tree.tokens, dtype=torch.int64)
    if count and (int(tokens.min()) < 0 or int(tokens.max()) >= p.shape[1]):
        raise ValueError(f"drafts {list(tree.tokens)} are not all below {p.shape[1]}")
    q = torch.eye(p.shape[1], dtype=torch.float64)[tokens] if tree.probs is None else tree.probs
    if q.shape != (count, p.shape[1]):
        raise ValueError(f"each draft needs a row of {p.shape[1]}, got {list(q.shape)}")
    if count:
        q = check_distributions("tree.probs", q)
        zeros = torch.zeros(count, dtype=torch.float64)
        accept_or_resample(q, q, tokens, zeros, zeros)  # refuses drafts that their rows can't draw
    children: dict[int, list[int]] = {node: [] for node in range(-1, count)}
    for child, parent in enumerate(tree.parents):
        children[parent].append(child)

    def walk(node: int, wanted: Tensor, siblings: list[int]) -> tuple[list[int], int]:
        if not siblings:
            return [], int(draw(wanted, uniforms[node + 1, 1]))
        child = siblings[0]
        accepted, _ = accept_or_resample(
            wanted[None], q[child][None], tokens[child : child + 1], uniforms[child + 1, :1], uniforms[child + 1, 1:]
        )
        if bool(accepted):
            path, own = walk(child, p[child + 1], children[child])
            return [child, *path], own
        return walk(node, residual(wanted, q[child]), siblings[1:])

    return walk(-1, p[0], children[-1])
