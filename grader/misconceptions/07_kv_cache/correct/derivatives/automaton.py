"""Derivatives: a state is a regex over bytes, what is left to match. No sets of states, and none that is dead."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from labkit.byte_automaton import ByteAutomaton
from labkit.regex_tree import Alternation, CharacterClass, Concatenation, RegexTree, Repetition

from .regex import parse_regex
from .utf8 import utf8_sequences

Node = Any
"""None matches nothing; (), the empty text; frozensets of bytes; ("then", a, b), ("or", frozenset), ("star", a)."""


def compile_regex(pattern: str, max_states: int = 10_000) -> ByteAutomaton:
    """Both steps."""
    return build_automaton(parse_regex(pattern), max_states)


def build_automaton(tree: RegexTree, max_states: int = 10_000) -> ByteAutomaton:
    """Brzozowski 1964; Owens, Reppy and Turon 2009 for the bytes that go together."""
    if isinstance(max_states, bool) or not isinstance(max_states, int) or max_states < 1:
        raise ValueError(f"max_states can't be {max_states!r}")
    if _size(tree) > 50_000:
        raise ValueError("this regex is too large")
    start = _bytes_of(tree)
    if start is None:
        raise ValueError("this regex has no text")
    states: dict[Node, int] = {start: 0}
    rows = []
    for node in (waiting := [start]):
        row = torch.full((256,), -1)
        for group in _groups(node):
            following = _derivative(node, min(group))
            if following is None:
                continue
            if following not in states:
                if len(states) >= max_states:
                    raise ValueError(f"more than {max_states} states")
                states[following] = len(states)
                waiting.append(following)
            row[sorted(group)] = states[following]
        rows.append(row)
    return ByteAutomaton(torch.stack(rows), torch.tensor([_nullable(node) for node in waiting]))


def _size(tree: RegexTree) -> int:
    if isinstance(tree, CharacterClass):
        return len(tree.ranges)
    if isinstance(tree, Repetition):
        return 1 + (1 + _size(tree.part)) * max(tree.most or 0, tree.least, 1)
    return 1 + sum(map(_size, tree.parts if isinstance(tree, Concatenation) else tree.options))


def _bytes_of(tree: RegexTree) -> Node:
    if isinstance(tree, CharacterClass):
        node: Node = None
        for first, last in tree.ranges:
            for sequence in utf8_sequences(first, last):
                one: Node = ()
                for low, high in reversed(sequence):
                    one = _then(frozenset(range(low, high + 1)), one)
                node = _or(node, one)
        return node
    if isinstance(tree, Alternation):
        node = None
        for option in tree.options:
            node = _or(node, _bytes_of(option))
        return node
    if isinstance(tree, Concatenation):
        node = ()
        for part in reversed(tree.parts):
            node = _then(_bytes_of(part), node)
        return node
    part = _bytes_of(tree.part)
    node = ()
    if tree.most is None:
        node = () if part in (None, ()) else ("star", part)
    else:
        for _ in range(tree.most - tree.least):
            node = _or((), _then(part, node))
    for _ in range(tree.least):
        node = _then(part, node)
    return node


def _then(first: Node, second: Node) -> Node:
    if first is None or second is None:
        return None
    if first == () or second == ():
        return second if first == () else first
    if isinstance(first, tuple) and first[0] == "then":
        return _then(first[1], _then(first[2], second))
    return ("then", first, second)


def _or(first: Node, second: Node) -> Node:
    options: set[Node] = set()
    for node in (first, second):
        if isinstance(node, tuple) and node[:1] == ("or",):
            options |= node[1]
        elif node is not None:
            options.add(node)
    if len(options) < 2:
        return next(iter(options), None)
    return ("or", frozenset(options))


@cache
def _nullable(node: Node) -> bool:
    if node is None or isinstance(node, frozenset):
        return False
    if node == () or node[0] == "star":
        return True
    if node[0] == "then":
        return _nullable(node[1]) and _nullable(node[2])
    return any(map(_nullable, node[1]))


@cache
def _derivative(node: Node, byte: int) -> Node:
    if node is None or node == ():
        return None
    if isinstance(node, frozenset):
        return () if byte in node else None
    if node[0] == "star":
        return _then(_derivative(node[1], byte), node)
    if node[0] == "then":
        result = _then(_derivative(node[1], byte), node[2])
        return _or(result, _derivative(node[2], byte)) if _nullable(node[1]) else result
    result = None
    for option in node[1]:
        result = _or(result, _derivative(option, byte))
    return result


@cache
def _groups(node: Node) -> frozenset[frozenset[int]]:
    """Bytes that certainly have the same derivative."""
    if node is None or node == ():
        return frozenset({frozenset(range(256))})
    if isinstance(node, frozenset):
        return frozenset({node, frozenset(range(256)) - node} - {frozenset()})
    if node[0] == "star":
        return _groups(node[1])
    if node[0] == "then" and not _nullable(node[1]):
        return _groups(node[1])
    found = frozenset({frozenset(range(256))})
    for part in node[1] if node[0] == "or" else node[1:]:
        found = frozenset(a & b for a in found for b in _groups(part) if a & b)
    return found
