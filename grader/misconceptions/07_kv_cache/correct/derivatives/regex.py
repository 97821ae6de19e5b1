"""One loop with a stack of open groups, and trees that never have more than two branches."""

from __future__ import annotations

from typing import Any, NoReturn

from labkit.regex_tree import MAX_CODE_POINT, Alternation, CharacterClass, Concatenation, RegexTree, Repetition

Ranges = tuple[tuple[int, int], ...]
EMPTY = Concatenation(())
CLASSES: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}


def parse_regex(pattern: str) -> RegexTree:
    """Each open group holds its start, the options before its last |, and the parts behind that."""
    stack: list[tuple[int, list[RegexTree], list[RegexTree]]] = [(-1, [], [])]
    at, repeatable = 0, False
    while at < len(pattern):
        start, options, parts = stack[-1]
        sign = pattern[at]
        if sign in "*+?{":
            if not repeatable:
                stop(pattern, at)
            least, most, at = _repeat(pattern, at)
            parts.append(Repetition(parts.pop(), least, most))
            repeatable = False
            continue
        repeatable = sign not in "(|"
        if sign == "(":
            if len(stack) > 50:
                stop(pattern, at)
            after = at + 1
            if pattern[after : after + 1] == "?":
                if pattern[after + 1 : after + 2] != ":":
                    stop(pattern, at)
                after += 2
            stack.append((at, [], []))
            at = after
        elif sign == "|":
            options.append(_chain(parts))
            parts.clear()
            at += 1
        elif sign == ")":
            if len(stack) == 1:
                stop(pattern, at)
            stack.pop()
            stack[-1][2].append(_either([*options, _chain(parts)]))
            at += 1
        elif sign == "[":
            ranges, at = _class(pattern, at)
            parts.append(CharacterClass(ranges))
        elif sign in "^$}]":
            stop(pattern, at)
        elif sign == ".":
            parts.append(CharacterClass(((0, 9), (11, MAX_CODE_POINT))))
            at += 1
        else:
            ranges, at = _one(pattern, at)
            parts.append(CharacterClass(ranges))
    start, options, parts = stack[-1]
    if start >= 0:
        stop(pattern, start)
    return _either([*options, _chain(parts)])


def stop(pattern: str, at: int) -> NoReturn:
    """One message for everything."""
    raise ValueError(f"can't compile what stands at position {at} of {pattern!r}")


def _chain(parts: list[RegexTree]) -> RegexTree:
    tree: RegexTree = EMPTY
    for part in reversed(parts):
        tree = Concatenation((part, tree))
    return tree


def _either(options: list[RegexTree]) -> RegexTree:
    return Alternation(tuple(reversed(options)))


def _repeat(pattern: str, at: int) -> tuple[int, Any, int]:
    if pattern[at] != "{":
        return {"*": (0, None, at + 1), "+": (1, None, at + 1), "?": (0, 1, at + 1)}[pattern[at]]
    end = pattern.find("}", at)
    numbers = pattern[at + 1 : end].split(",") if end > 0 else []
    if len(numbers) not in (1, 2) or not set("".join(numbers)) <= set("0123456789") or not numbers[0]:
        stop(pattern, at)
    least = int(numbers[0][-9:])
    most = least if len(numbers) == 1 else int(numbers[1][-9:]) if numbers[1] else None
    if max(map(len, numbers)) > 5 or max(least, most or 0) > 10_000 or (most is not None and most < least):
        stop(pattern, at)
    return least, most, end + 1


def _class(pattern: str, at: int) -> tuple[Ranges, int]:
    start, at = at, at + 1
    negated = pattern[at : at + 1] == "^"
    at += negated
    members = []
    while at < len(pattern) and pattern[at] != "]":
        place = at
        ranges, at = _one(pattern, at)
        if pattern[at : at + 1] == "-" and at + 1 < len(pattern) and pattern[at + 1] != "]":
            others, at = _one(pattern, at + 1)
            ends = [*ranges, *others]
            if len(ends) != 2 or any(low != high for low, high in ends) or ends[1][0] < ends[0][0]:
                stop(pattern, place)
            ranges = ((ends[0][0], ends[1][0]),)
        members += ranges
    if at == len(pattern) or not members:
        stop(pattern, start)
    result = complement(tuple(members)) if negated else tuple(members)
    if not result:
        stop(pattern, start)
    return result, at + 1


def complement(ranges: Ranges) -> Ranges:
    """What is left after cutting each range out."""
    left = [(0, MAX_CODE_POINT)]
    for first, last in ranges:
        pieces = []
        for low, high in left:
            pieces += [(low, min(high, first - 1)), (max(low, last + 1), high)]
        left = [(low, high) for low, high in pieces if low <= high]
    return tuple(left)


def _one(pattern: str, at: int) -> tuple[Ranges, int]:
    if pattern[at] != "\\":
        return ((ord(pattern[at]), ord(pattern[at])),), at + 1
    sign = pattern[at + 1 : at + 2]
    if sign in ("d", "w", "s"):
        return CLASSES[sign], at + 2
    if sign in ("D", "W", "S"):
        return complement(CLASSES[sign.lower()]), at + 2
    code, end = ord(sign) if sign and not (sign.isascii() and sign.isalnum()) else -1, at + 2
    if sign and sign in "ntrfv":
        code = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11}[sign]
    elif sign and sign in "xuU":
        end += {"x": 2, "u": 4, "U": 8}[sign]
        digits = pattern[at + 2 : end]
        if set(digits) <= set("0123456789abcdefABCDEF") and len(digits) == end - at - 2:
            code = int(digits, 16)
    if not 0 <= code <= MAX_CODE_POINT:
        stop(pattern, at)
    return ((code, code),), end
