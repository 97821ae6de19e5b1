"""The marked regions of a reference file: what a student must write.

A region stands between the comments `# BEGIN SOLUTION` and `# END SOLUTION`, each alone on its line and equally
indented, and holds whole statements of one block. Comments are found by the tokenizer, so that a marker in a string is
noticed.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

BEGIN, END = "# BEGIN SOLUTION", "# END SOLUTION"

_LOOKS_LIKE_MARKER = re.compile(r"#\s*(begin|end)[\s_-]*solution", re.IGNORECASE)
_STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class MarkerError(ValueError):
    """Markers that don't delimit a region; the text names file and line."""


@dataclass(frozen=True)
class Region:
    """A marked region.

    Args:
        begin: line of the BEGIN marker, counted from 1.
        end: line of the END marker.
        indent: white space before the markers.
        owner: qualified name of the outermost function or method around the region; None at module or class level.
        is_kernel: whether that function is compiled by Triton.
    """

    begin: int
    end: int
    indent: str
    owner: str | None
    is_kernel: bool

    def lines(self, source: str) -> list[str]:
        """The lines between the markers."""
        return source.splitlines()[self.begin : self.end - 1]


def find_regions(source: str, name: str) -> list[Region]:
    """The marked regions of a file, from top to bottom.

    Args:
        source: text of the file.
        name: how to call the file in errors.

    Raises:
        MarkerError: markers are nested, unbalanced, misspelled, in a string, differently indented, or hold anything
            but whole statements of one block.
        SyntaxError: the file is no Python.
    """
    tree = ast.parse(source, name)
    return [_region(tree, name, *pair) for pair in _marker_pairs(source, name)]


def _marker_pairs(source: str, name: str) -> Iterator[tuple[tokenize.TokenInfo, tokenize.TokenInfo]]:
    opened: tokenize.TokenInfo | None = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        where = f"{name}:{token.start[0]}"
        looks_like_marker = _LOOKS_LIKE_MARKER.search(token.string)
        if token.type in _STRINGS and looks_like_marker:
            raise MarkerError(f"{where}: a marker inside a string marks nothing; take it out of the text")
        if token.type != tokenize.COMMENT or not looks_like_marker:
            continue
        if token.string not in (BEGIN, END) or token.line.strip() != token.string:
            raise MarkerError(f"{where}: {token.string!r} is no marker; write {BEGIN!r} or {END!r} alone on a line")
        if token.string == BEGIN:
            if opened is not None:
                raise MarkerError(f"{where}: the region begun in line {opened.start[0]} is still open; they don't nest")
            opened = token
        elif opened is None:
            raise MarkerError(f"{where}: {END!r} without {BEGIN!r} before it")
        elif opened.start[1] != token.start[1]:
            raise MarkerError(f"{where}: indented otherwise than its {BEGIN!r} in line {opened.start[0]}")
        else:
            yield opened, token
            opened = None
    if opened is not None:
        raise MarkerError(f"{name}:{opened.start[0]}: {BEGIN!r} without {END!r} after it")


def _region(tree: ast.Module, name: str, first: tokenize.TokenInfo, last: tokenize.TokenInfo) -> Region:
    begin, end = first.start[0], last.start[0]
    path = _enclosing(tree, begin, end, first.start[1])
    if path is None:
        raise MarkerError(f"{name}:{begin}: the region up to line {end} must hold whole statements of one block")
    named = [node for node in path if isinstance(node, (*_Function, ast.ClassDef))]
    functions = [node for node in named if isinstance(node, _Function)]
    owner = None
    if functions:
        owner = ".".join(node.name for node in named[: named.index(functions[0]) + 1])
    return Region(begin, end, first.line[: first.start[1]], owner, any(map(_is_kernel, functions)))


def _enclosing(node: ast.AST, begin: int, end: int, column: int) -> list[ast.AST] | None:
    """The nodes from here down to the one whose block holds the region's statements; None if it cuts one."""
    for _, block in ast.iter_fields(node):
        if not isinstance(block, list):
            continue
        for child in block:
            if not isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
                continue
            start, stop = _span(child)
            if begin < start and stop < end:
                cut = [c for c in block if _cuts(_span(c), begin, end)]
                # Deeper than the markers: then an `else:` or the like stands between.
                whole = isinstance(child, ast.stmt) and child.col_offset == column
                return [node] if whole and not cut else None
            if (below := _enclosing(child, begin, end, column)) is not None:
                return [node, *below]
    return None


def _cuts(span: tuple[int, int], begin: int, end: int) -> bool:
    start, stop = span
    return start < begin < stop or start < end < stop


def _span(node: ast.stmt | ast.excepthandler | ast.match_case) -> tuple[int, int]:
    """First and last line, decorators included."""
    if isinstance(node, ast.match_case):
        return node.pattern.lineno, node.body[-1].end_lineno or 0
    first = [decorator.lineno for decorator in getattr(node, "decorator_list", ())]
    return min([node.lineno, *first]), node.end_lineno or node.lineno


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = (ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list)
    return any(name in ("triton.jit", "jit") for name in names)
