"""A drafter whose guesses come from the test, so that the test sees every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.drafting import Draft, Drafter, DraftTree, TreeDrafter
from labkit.protocols import Spec


@dataclass(frozen=True)
class ScriptedDrafter(Spec):
    """Stands for a drafter; see `labkit.drafting.Drafter`.

    Args:
        propose: takes the text, the most drafts and the uniforms, as lists; returns a `Draft`.
    """

    propose: Callable[[list[int], int, list[float]], Draft]

    def build(self) -> Drafter:
        """An object that calls back."""
        return _Scripted(self)


class _Scripted:
    """Shows a script's function as the method of the protocol."""

    def __init__(self, script: ScriptedDrafter) -> None:
        self._script = script

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Calls the test's function."""
        return self._script.propose(list(tokens), max_drafts, list(uniforms))


@dataclass(frozen=True)
class ScriptedTreeDrafter(Spec):
    """Stands for a drafter of trees; see `labkit.drafting.TreeDrafter`.

    Args:
        propose_tree: takes the text, the greatest depth and the uniforms, as lists; returns a `DraftTree`.
    """

    propose_tree: Callable[[list[int], int, list[float]], DraftTree]

    def build(self) -> TreeDrafter:
        """An object that calls back."""
        return _ScriptedTree(self)


class _ScriptedTree:
    """Shows a script's function as the method of the protocol."""

    def __init__(self, script: ScriptedTreeDrafter) -> None:
        self._script = script

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float]) -> DraftTree:
        """Calls the test's function."""
        return self._script.propose_tree(list(tokens), max_depth, list(uniforms))
