"""Text is shown as early as it can be, and not earlier."""

from __future__ import annotations

import random

import pytest

from labkit.checkpoints import load_tokenizer
from labkit.tokenizer import Tokenizer
from solutions.engine.detokenizer import TextStream


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The bundled model's."""
    return load_tokenizer("smollm2")


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[list[int]]:
    """Each piece in tokens of its own."""
    return [tokenizer.encode(piece) for piece in pieces]


def feed(stream: TextStream, tokens: list[int]) -> str:
    """What several tokens release."""
    return "".join(stream.feed(token) for token in tokens)


def test_a_stop_text_over_several_tokens_is_never_shown(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("DEFGHIJ",))
    assert [feed(stream, ids) for ids in ids_of(tokenizer, "abc", "DEF", "G", "HI", "J")] == ["abc", "", "", "", ""]
    assert stream.stopped and stream.text == "abc" and stream.finish() == ""


def test_of_stop_texts_in_one_token_the_first_in_the_text_ends_it(tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode(" day")
    for stops in (("y", "a"), ("a", "y"), ("ay", "a")):
        stream = TextStream(tokenizer, stops)
        assert stream.feed(token) == " d" and stream.stopped


def test_what_only_looked_like_a_stop_text_is_released(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("\nUser:",))
    first, second = ids_of(tokenizer, "end\nUs", "ual")
    assert feed(stream, first) == "end"
    assert feed(stream, second) == "\nUsual"
    assert not stream.stopped


def test_at_the_end_the_beginning_of_a_stop_text_is_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("STOP",))
    assert feed(stream, tokenizer.encode("go ST")) + stream.finish() == "go ST"


def test_no_more_is_held_back_than_could_begin_a_stop_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("aab",))
    assert feed(stream, tokenizer.encode("xaa")) == "x"
    assert feed(stream, tokenizer.encode("a")) == "a"
    assert feed(stream, tokenizer.encode("b")) == "" and stream.text == "xa"


def test_characters_are_never_split(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂ď")
    assert len(ids) > 2, "these characters are to take several tokens"
    stream = TextStream(tokenizer)
    pieces = [stream.feed(token) for token in ids]
    assert "".join(pieces) == "🙂ď" and "\ufffd" not in "".join(pieces)
    half = TextStream(tokenizer)
    assert half.feed(ids[0]) == "" and half.finish() == "\ufffd"


def test_streamed_or_not_the_text_is_the_same(tokenizer: Tokenizer) -> None:
    choose = random.Random(4)
    for _ in range(300):
        text = "".join(choose.choice("abč🙂\n") for _ in range(choose.randint(0, 12)))
        stops = tuple(
            "".join(choose.choice("abč") for _ in range(choose.randint(1, 4))) for _ in range(choose.randint(0, 2))
        )
        places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
        stream, shown = TextStream(tokenizer, stops), ""
        for character in text:
            shown += feed(stream, tokenizer.encode(character))
            if stream.stopped:
                break
            assert not any(stop in shown for stop in stops)
        shown += stream.finish()
        assert shown == stream.text
        if not places:
            assert shown == text
        else:
            assert stream.stopped and text.startswith(shown) and not any(stop in shown for stop in stops)
