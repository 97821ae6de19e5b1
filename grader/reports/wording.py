"""Verdicts and tests in words, for people who read a report without knowing the grader."""

from __future__ import annotations

import re
from dataclasses import dataclass

from grader.verdicts import Verdict


@dataclass(frozen=True)
class Wording:
    """How a verdict is shown.

    Args:
        label: one or two words; colour is never the only sign.
        tone: "good", "bad", "odd" (a person should look) or "open" (nothing was judged); the colour.
        meaning: one sentence that says what happened and what it asks for.
    """

    label: str
    tone: str
    meaning: str


WORDINGS = {
    Verdict.PASSED: Wording("passed", "good", "All of its cases passed."),
    Verdict.WRONG_ANSWER: Wording("wrong answer", "bad", "The code ran, and what it returned or did is not right."),
    Verdict.EXCEPTION: Wording("exception", "bad", "The code raised an error where it should have answered."),
    Verdict.TIMEOUT_CPU: Wording("out of time", "bad", "It used more processor time than a test may take."),
    Verdict.TIMEOUT_WALL: Wording("no answer", "bad", "It neither answered nor computed until the clock ran out."),
    Verdict.MEMORY: Wording("out of memory", "bad", "It asked for more memory than it may use."),
    Verdict.OUTPUT_LIMIT: Wording("too much output", "bad", "It printed more than it may."),
    Verdict.EXITED_EARLY: Wording("process ended", "bad", "It ended its process instead of returning."),
    Verdict.PROTOCOL_FAULT: Wording("malformed answer", "odd", "What came back breaks the rules of the wire."),
    Verdict.BANNED_CALL: Wording("banned call", "odd", "The code names something that does the exercise for it."),
    Verdict.NOT_ATTEMPTED: Wording("not attempted", "open", "The stub is untouched, or the file was not handed in."),
    Verdict.BLOCKED: Wording("blocked", "open", "An earlier part that this test also uses does not work yet."),
    Verdict.REFUSED: Wording("refused", "odd", "The submission was not taken in, so no test was run on it."),
    Verdict.UNVERIFIED: Wording("not verified", "odd", "The machine that graded could not run this test."),
    Verdict.INTERNAL_ERROR: Wording("grader's fault", "odd", "The grader failed here; this says nothing of the code."),
}


def property_in_words(test: str) -> str:
    """The property that a test proves, read off its name.

    Args:
        test: e.g. "test_chunked_prefill_matches_single_prefill".

    Returns:
        E.g. "Chunked prefill matches single prefill".
    """
    words = re.sub(r"^test_+", "", test).replace("_", " ").strip() or test
    return words[0].upper() + words[1:]
