"""What the target is asked to write for the training, and what it is given to read.

The prompts are of the same kinds as those of `labkit.workloads`, but none of theirs: other wishes in other words, and
no module that they are cut from.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.texts import documents
from labkit.tokenizer import Tokenizer
from labkit.workloads import FUNCTIONS

READING, WRITING = "reading", "writing"
PROSE_PROMPT, CODE_PROMPT = 48, 64
"""Tokens of a text that the target is to go on with."""

_JOBS = (
    "baker", "sailor", "gardener", "nurse", "clockmaker", "pilot", "teacher", "miner", "tailor", "farmer", "painter",
    "librarian", "cook", "carpenter", "shepherd", "detective", "musician", "mechanic", "beekeeper", "postman",
    "fisherman", "weaver", "judge", "surgeon", "actor", "lighthouse keeper", "train driver", "potter", "reporter",
    "botanist",
)  # fmt: skip
_THINGS = (
    "a lost key", "an old map", "a broken lamp", "a letter", "a stray dog", "a red umbrella", "a bridge", "a storm",
    "a silver coin", "a strange sound", "a locked door", "a forgotten song", "a bicycle", "a birthday", "a mirror",
    "a promise", "a wager", "a blue stone", "a late train", "an empty house", "a quarrel", "a recipe", "a snowfall",
    "a telescope", "a secret garden", "a visitor", "a wooden box", "a photograph", "a mistake", "a feast",
)  # fmt: skip
_STORIES = (
    "Tell me a story about a {job} and {thing}.",
    "Write the beginning of a novel in which a {job} finds {thing}.",
    "Invent a fairy tale: a {job}, a friend, and {thing}.",
    "Describe one day in the life of a {job} that is changed by {thing}.",
    "Write a few sentences about a {job} who dreams of {thing}.",
)
_SUBJECTS = (
    "volcanoes", "photosynthesis", "the moon", "bread", "earthquakes", "bees", "the French Revolution", "gravity",
    "the water cycle", "vaccines", "inflation", "electric cars", "coral reefs", "chess", "sleep", "the human heart",
    "glaciers", "democracy", "rainbows", "magnets", "black holes", "the Silk Road", "recycling", "whales", "memory",
    "algebra", "the printing press", "tea", "penguins", "solar panels", "the immune system", "sound", "deserts",
    "the Roman Empire", "computers", "the internet", "chocolate", "dinosaurs", "ocean tides", "music", "probability",
    "trees", "lightning", "the piano", "friendship", "soil", "bridges", "satellites", "batteries", "the brain",
    "bicycles", "salt", "paper", "steel", "weather forecasts", "maps", "insurance", "spiders", "the calendar", "zero",
)  # fmt: skip
_QUESTIONS = (
    "What is important to know about {subject}?",
    "Explain {subject} to a child.",
    "Give me three facts about {subject}.",
    "Write a short article on {subject}.",
    "How would you start learning about {subject}?",
    "List five questions that people ask about {subject}, with answers.",
)
_EXERCISES = (
    "Write a Python function that {exercise}.",
    "Show me Python code that {exercise}, and explain it.",
    "I need a small Python program that {exercise}.",
)
_EXERCISE_SUBJECTS = (
    "reverses a list", "counts the words of a file", "finds the largest prime below a number",
    "checks for a palindrome", "sorts a list of dictionaries by a key", "converts Celsius to Fahrenheit",
    "removes duplicates from a list", "reads a CSV file", "computes the Fibonacci numbers", "merges two dictionaries",
    "prints a multiplication table", "validates an e-mail address", "computes a running average",
    "searches a sorted list", "splits a string by commas", "counts vowels", "finds files by their ending",
    "parses a date", "computes a factorial", "transposes a matrix", "groups words by their first letter",
    "writes lines to a file", "measures how long a function takes", "implements a stack", "implements a queue",
    "draws a triangle of stars", "sums the digits of a number", "finds the longest word", "rounds prices",
    "encodes a string in Morse code",
)  # fmt: skip
_COPIES = (
    "Copy the text below word for word, but begin with NAME.\n\n{text}",
    "Write the following out once more, with NAME as its new first word:\n\n{text}",
    "Here is a note. Say it again without changing anything.\n\n{text}",
    "Please give me this passage back as it is, only in capital letters where it begins:\n\n{text}",
)


_KINDS = ("code", "stories", "copies", "questions", "prose", "exercises", "code", "stories", "copies", "questions")
"""Kinds of the chunks that are written, in an order of which any beginning is a fair mixture."""


@dataclass(frozen=True)
class Chunk:
    """One piece of work: texts that are made, and run through the target, together.

    Args:
        name: of its files; says the kind.
        task: `READING`: the rows are whole texts; `WRITING`: they are prompts, to be gone on with.
        rows: token ids of each.
    """

    name: str
    task: str
    rows: tuple[tuple[int, ...], ...]


def chunks(tokenizer: Tokenizer, rows: int, length: int, seed: int, written: int) -> list[Chunk]:
    """All chunks, the same ones for the same arguments on the same Python.

    Args:
        tokenizer: of the target.
        rows: texts of a chunk.
        length: tokens of a text that is read.
        seed: chooses what is asked for.
        written: chunks that the target writes, at least 1; for every two of them it reads one more, up to what there
            is to read.
    """
    writers: dict[str, Callable[[random.Random], list[int]]] = {
        "stories": lambda chance: _ask(tokenizer, _story(chance)),
        "questions": lambda chance: _ask(tokenizer, _question(chance)),
        "exercises": lambda chance: _ask(tokenizer, _exercise(chance)),
        "copies": _copier(tokenizer),
        "code": _beginning(tokenizer, _definitions(), CODE_PROMPT),
        "prose": _beginning(tokenizer, _paragraphs(), PROSE_PROMPT),
    }
    made = []
    for number in range(written):
        kind = _KINDS[number % len(_KINDS)]
        chance = random.Random(f"{seed} {number} {kind}")
        name = f"{number:02}-{kind}"
        made.append(Chunk(name, WRITING, tuple(tuple(writers[kind](chance)) for _ in range(rows))))
    for kind, count in (("prose", 1), ("code", max(1, written // 2 - 1))):
        windows = _windows(tokenizer, kind, length)
        random.Random(f"{seed} {kind}").shuffle(windows)
        for number, start in enumerate(range(0, min(count * rows, len(windows)), rows)):
            made.append(Chunk(f"{kind}-read-{number:02}", READING, tuple(windows[start : start + rows])))
    return made


def training_modules() -> dict[str, str]:
    """Sources to train on: those of `labkit.texts` without the modules that a workload takes its prompts from."""
    taken = {Path(inspect.getsourcefile(function) or "").name for function in FUNCTIONS}
    return {name: text for name, text in documents("code", "training").items() if name not in taken}


def _ask(tokenizer: Tokenizer, wish: str) -> list[int]:
    return tokenizer.chat([{"role": "user", "content": wish}])


def _story(chance: random.Random) -> str:
    return chance.choice(_STORIES).format(job=chance.choice(_JOBS), thing=chance.choice(_THINGS))


def _question(chance: random.Random) -> str:
    return chance.choice(_QUESTIONS).format(subject=chance.choice(_SUBJECTS))


def _exercise(chance: random.Random) -> str:
    return chance.choice(_EXERCISES).format(exercise=chance.choice(_EXERCISE_SUBJECTS))


def _copier(tokenizer: Tokenizer) -> Callable[[random.Random], list[int]]:
    """Wishes to repeat a docstring or a paragraph."""
    passages = [text for text in _docstrings() if len(text) > 60] + _paragraphs()

    def copy(chance: random.Random) -> list[int]:
        text = chance.choice(passages)[: chance.randrange(120, 320)]
        return _ask(tokenizer, chance.choice(_COPIES).format(text=text))

    return copy


def _beginning(tokenizer: Tokenizer, texts: Sequence[str], tokens: int) -> Callable[[random.Random], list[int]]:
    """The first tokens of one of the texts."""
    return lambda chance: tokenizer.encode(chance.choice(texts))[: chance.randrange(tokens // 2, tokens + 1)]


def _definitions() -> list[str]:
    """Functions and classes of the training modules, moved to the left."""
    found = []
    for text in training_modules().values():
        lines = text.splitlines(keepends=True)
        starts = [index for index, line in enumerate(lines) if re.match(r"\s*(async )?(def|class) ", line)]
        found += [textwrap.dedent("".join(lines[start : start + 30])) for start in starts]
    return found


def _docstrings() -> list[str]:
    """What the training modules say about their functions and classes."""
    found = []
    for text in training_modules().values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                found.append(ast.get_docstring(node) or "")
    return sorted(set(found))


def _paragraphs() -> list[str]:
    """Paragraphs of the training prose, each with what follows it."""
    found = []
    for text in documents("prose", "training").values():
        pieces = [piece for piece in re.split(r"\n\s*\n", text) if len(piece) > 120]
        found += ["\n\n".join(pieces[index : index + 3]) for index in range(len(pieces))]
    return found


def _windows(tokenizer: Tokenizer, kind: str, length: int) -> list[tuple[int, ...]]:
    """The training texts of a kind in windows of so many tokens, without remainders."""
    texts = training_modules() if kind == "code" else documents("prose", "training")
    windows = []
    for text in texts.values():
        ids = tokenizer.encode(text)
        windows += [tuple(ids[start : start + length]) for start in range(0, len(ids) - length + 1, length)]
    return windows
