"""Three kinds of prompts, made of what every machine has: the sources and docstrings of Python's own library."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import heapq
import inspect
import json
import random
import shutil
import statistics
import tempfile
import textwrap
from collections.abc import Callable
from typing import Any

from labkit.tokenizer import Tokenizer

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    textwrap.dedent, textwrap.shorten, textwrap.indent, shutil.copytree, shutil.move, shutil.copyfileobj, shutil.which,
    random.Random.sample, random.Random.choices, statistics.mean, statistics.median, statistics.quantiles, heapq.merge,
    heapq.nlargest, functools.wraps, functools.singledispatch, difflib.get_close_matches, difflib.ndiff,
    fnmatch.filter, json.dumps, tempfile.mkdtemp,
)  # fmt: skip
"""Written in Python and documented, in each version that the workbook supports."""

WORKLOADS = ("code", "copying", "open text")


def prompts(workload: str, tokenizer: Tokenizer, count: int, characters: int = 300) -> list[list[int]]:
    """Prompts of one kind, one for each of the first functions.

    Args:
        workload: "code": the beginning of a source, to be gone on with; "copying": a docstring to be repeated with
            one word changed; "open text": a story about the function's name, with nothing to copy from.
        tokenizer: of the model that is asked; the last two kinds use its chat template.
        count: from 1 to the number of `FUNCTIONS`.
        characters: of source or docstring in a prompt.

    Returns:
        Token ids of each prompt.

    Raises:
        ValueError: another workload, or a count out of range.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {workload!r}")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(FUNCTIONS):
        raise ValueError(f"count must be an int from 1 to {len(FUNCTIONS)}, got {count!r}")
    return [_prompt(workload, tokenizer, function, characters) for function in FUNCTIONS[:count]]


def _prompt(workload: str, tokenizer: Tokenizer, function: Callable[..., Any], characters: int) -> list[int]:
    if workload == "code":
        return tokenizer.encode(textwrap.dedent(inspect.getsource(function))[:characters])
    text = (inspect.getdoc(function) or "")[:characters]
    if workload == "copying":
        wish = f"Repeat this text, but write FUNCTION in place of its first word:\n\n{text}"
    else:
        wish = f'Write a short story about somebody at work. The word "{function.__name__}" must appear in it.'
    return tokenizer.chat([{"role": "user", "content": wish}])
