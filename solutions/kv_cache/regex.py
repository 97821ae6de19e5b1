r"""Task 13a: a regex becomes a tree.

A part of what Python's `re` knows, with the meaning that it has there under `re.ASCII` and `fullmatch`:

    a  \.  \n  \x41  \u00e9     one character, plain or escaped
    .                          any character but a line feed
    [a-z_]  [^"\\]              one of a set, or any that is not in it
    \d  \w  \s  \D  \W  \S      ASCII digits, word characters, white space, and all others
    ab   a|b   (a)   (?:a)     one behind the other, either of them, a group
    a*  a+  a?  a{3}  a{3,}  a{3,5}

Everything else is refused, by name and position: it either can't be done by a finite automaton (backreferences),
makes no sense where the whole text must match (anchors), or would mean something else than the reader expects.
"""

from __future__ import annotations

from typing import NoReturn

from labkit.regex_tree import (
    MAX_CODE_POINT,
    Alternation,
    CharacterClass,
    CodePointRange,
    Concatenation,
    RegexTree,
    Repetition,
)

MAX_NESTING = 50
"""How deep groups may stand in groups."""

MAX_COUNT = 10_000
"""The largest number in {m,n}."""

Ranges = tuple[CodePointRange, ...]


def parse_regex(pattern: str) -> RegexTree:
    """Turn a pattern into a tree.

    Args:
        pattern: a regex of the subset above. The tree stands for exactly the texts that the pattern matches as a
            whole; which of several trees with that property comes back makes no difference.

    Returns:
        The tree; the empty pattern matches the empty text.

    Raises:
        ValueError: the pattern holds something that isn't in the subset. `refuse` raises it for you, with the position
            of what is at fault. Much of it the given code recognises; the rest is yours:

            - a bracket without its other half, and a class without any character: the position of the bracket;
            - groups nested deeper than `MAX_NESTING`: the first ( too many;
            - a second repeat, so also a lazy (`a*?`) or possessive one (`a*+`): the second;
            - a { that starts none of {m} {m,} {m,n}, numbers above `MAX_COUNT`, n below m: the {;
            - a range that runs downwards, or with a class such as \\d as one of its ends: its first character.
    """
    # BEGIN SOLUTION
    tree, position = _alternation(pattern, 0, 0)
    if position < len(pattern):
        refuse(pattern, position, "a ) without its (")
    return tree
    # END SOLUTION


# BEGIN SOLUTION
def _alternation(pattern: str, position: int, depth: int) -> tuple[RegexTree, int]:
    """Options up to the end of the pattern or a `)`, and where they end."""
    options = []
    while True:
        option, position = _concatenation(pattern, position, depth)
        options.append(option)
        if pattern[position : position + 1] != "|":
            return (Alternation(tuple(options)) if len(options) > 1 else option), position
        position += 1


def _concatenation(pattern: str, position: int, depth: int) -> tuple[RegexTree, int]:
    """Parts, each with its repeat, up to the end of the option."""
    parts: list[RegexTree] = []
    while pattern[position : position + 1] not in ("", "|", ")"):
        part, position = _part(pattern, position, depth)
        part, position = _repeat(part, pattern, position)
        parts.append(part)
    return (parts[0] if len(parts) == 1 else Concatenation(tuple(parts))), position


def _part(pattern: str, position: int, depth: int) -> tuple[RegexTree, int]:
    """A group, a class or a character."""
    if pattern[position] == "(":
        if depth == MAX_NESTING:
            refuse(pattern, position, f"a group in more than {MAX_NESTING} groups")
        tree, after = _alternation(pattern, read_group_start(pattern, position), depth + 1)
        if after == len(pattern):
            refuse(pattern, position, "a ( without its )")
        return tree, after + 1
    if pattern[position] == "[":
        return _character_class(pattern, position)
    if pattern[position] == ".":
        return CharacterClass(complement(((ord("\n"), ord("\n")),))), position + 1
    ranges, after = read_character(pattern, position, in_class=False)
    return CharacterClass(ranges), after


def _repeat(part: RegexTree, pattern: str, position: int) -> tuple[RegexTree, int]:
    """A part with the repeat that stands behind it, if there is one."""
    sign = pattern[position : position + 1]
    if sign not in ("*", "+", "?", "{"):
        return part, position
    if sign == "{":
        least, most, after = _counts(pattern, position)
    else:
        least, most, after = int(sign == "+"), (1 if sign == "?" else None), position + 1
    if pattern[after : after + 1] in ("*", "+", "?", "{"):
        refuse(pattern, after, "a second repeat, or a lazy or possessive one")
    return Repetition(part, least, most), after


def _counts(pattern: str, position: int) -> tuple[int, int | None, int]:
    """The numbers of {m}, {m,} or {m,n}, and where they end."""
    inside, brace, _ = pattern[position + 1 :].partition("}")
    low, comma, high = inside.partition(",")
    numbers = [low, high] if high else [low]
    if not brace or not all(number.isascii() and number.isdecimal() for number in numbers):
        refuse(pattern, position, "a { that starts no repeat {m}, {m,} or {m,n}")
    # Python refuses to read numbers of thousands of digits, in words of its own.
    if any(len(number.lstrip("0")) > len(str(MAX_COUNT)) or int(number) > MAX_COUNT for number in numbers):
        refuse(pattern, position, f"a repeat of more than {MAX_COUNT}")
    least = int(low)
    most = int(high) if high else None if comma else least
    if most is not None and most < least:
        refuse(pattern, position, "a repeat whose most is below its least")
    return least, most, position + len(inside) + 2


def _character_class(pattern: str, position: int) -> tuple[RegexTree, int]:
    """What stands between [ and ]."""
    start = position
    negated = pattern[start + 1 : start + 2] == "^"
    position += 2 if negated else 1
    ranges: Ranges = ()
    while pattern[position : position + 1] != "]":
        if position >= len(pattern):
            refuse(pattern, start, "a [ without its ]")
        first, after = read_character(pattern, position, in_class=True)
        # A - is a sign of its own at the end of the class, or at its start, where nothing stands before it.
        if pattern[after : after + 1] == "-" and pattern[after + 1 : after + 2] not in ("", "]"):
            last, after = read_character(pattern, after + 1, in_class=True)
            if len(first) > 1 or len(last) > 1 or first[0][0] != first[0][1] or last[0][0] != last[0][1]:
                refuse(pattern, position, "a range with a class at its end")
            if last[0][0] < first[0][0]:
                refuse(pattern, position, "a range that runs downwards")
            first = ((first[0][0], last[0][0]),)
        ranges += first
        position = after
    if not ranges:
        refuse(pattern, start, "a class without characters")
    if negated and not (ranges := complement(ranges)):
        refuse(pattern, start, "a class without characters")
    return CharacterClass(ranges), position + 1


# END SOLUTION


def complement(ranges: Ranges) -> Ranges:
    """All code points that are in none of the ranges.

    Args:
        ranges: in any order; they may overlap.

    Returns:
        Ranges in rising order, with at least one code point between two of them; none if nothing is left.
    """
    # BEGIN SOLUTION
    gaps = []
    start = 0
    for first, last in sorted(ranges):
        if start < first:
            gaps.append((start, first - 1))
        start = max(start, last + 1)
    if start <= MAX_CODE_POINT:
        gaps.append((start, MAX_CODE_POINT))
    return tuple(gaps)
    # END SOLUTION


def refuse(pattern: str, position: int, what: str) -> NoReturn:
    """Raise the ValueError that names what isn't in the subset and where it stands, counted from 0."""
    raise ValueError(f"{what} at position {position} of {pattern!r}: not in the subset that can be compiled")


_DIGITS: Ranges = ((ord("0"), ord("9")),)
_WORD: Ranges = (*_DIGITS, (ord("A"), ord("Z")), (ord("_"), ord("_")), (ord("a"), ord("z")))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))

_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_GROUPS = {"=": "a lookahead", "!": "a lookahead", "<": "a lookbehind", "P": "a named group", ">": "an atomic group",
           "(": "a conditional", "#": "a comment"}
_ANCHORS = "AZbB"


def read_group_start(pattern: str, position: int) -> int:
    """The position behind the `(` or `(?:` at `position`; refuses other kinds of groups by name."""
    if pattern[position + 1 : position + 2] != "?":
        return position + 1
    kind = pattern[position + 2 : position + 3]
    if kind == ":":
        return position + 3
    what = "a lookbehind" if kind == "<" else _GROUPS.get(kind, "a flag")
    return refuse(pattern, position, what)


def read_character(pattern: str, position: int, *, in_class: bool) -> tuple[Ranges, int]:
    """Read one character, plain or escaped, or one of the classes \\d \\w \\s \\D \\W \\S.

    Args:
        pattern: the whole pattern.
        position: where the character starts; it must not be the end of the pattern.
        in_class: whether it stands between [ and ], where only `\\` has a meaning of its own.

    Returns:
        The code points it stands for, and the position behind it.

    Raises:
        ValueError: it is a sign with a meaning that doesn't fit here, or an escape that isn't in the subset.
    """
    char = pattern[position]
    if char != "\\":
        if not in_class and char in "^$":
            refuse(pattern, position, f"the anchor {char}, needless since the whole text must match,")
        if not in_class and char in "*+?{}]":
            refuse(pattern, position, f"a {char} with nothing before it (escape it to mean the character)")
        return ((ord(char), ord(char)),), position + 1
    escaped = pattern[position + 1 : position + 2]
    if escaped.lower() in _CLASSES and escaped:
        ranges = _CLASSES[escaped.lower()]
        return (complement(ranges) if escaped.isupper() else ranges), position + 2
    if escaped in _HEX_DIGITS:
        end = position + 2 + _HEX_DIGITS[escaped]
        digits = pattern[position + 2 : end]
        is_hex = len(digits) == _HEX_DIGITS[escaped] and all(digit in "0123456789abcdefABCDEF" for digit in digits)
        if not is_hex or int(digits, 16) > MAX_CODE_POINT:
            refuse(pattern, position, f"an escape \\{escaped} without {_HEX_DIGITS[escaped]} hex digits of a character")
        return ((int(digits, 16), int(digits, 16)),), end
    if escaped in _CONTROLS:
        return ((ord(_CONTROLS[escaped]), ord(_CONTROLS[escaped])),), position + 2
    if not escaped or (escaped.isascii() and escaped.isalnum()):
        refuse(pattern, position, _escape_name(escaped))
    return ((ord(escaped), ord(escaped)),), position + 2


def _escape_name(escaped: str) -> str:
    """What a refused escape is called."""
    if not escaped:
        return "a \\ with nothing behind it"
    if escaped in _ANCHORS:
        return f"the anchor \\{escaped}"
    return f"the backreference \\{escaped}" if escaped in "123456789" else f"the escape \\{escaped}"
