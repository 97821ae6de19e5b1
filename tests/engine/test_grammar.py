"""Structured output: every answer parses, however it was served, and what can't be followed is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from solutions.engine import SamplingParams
from solutions.engine.answer import Answer
from solutions.engine.detokenizer import TextStream
from solutions.engine.drafting.speculation import SpeculationConfig
from solutions.engine.grammar import Constraint
from solutions.engine.request import FinishReason
from solutions.speculative.ngram import NgramDrafter

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "a/b"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}

COERCED = {"x-guidance": {"coerce_one_of": True}}


def answer(engine: Any, constraint: Constraint | None, params: SamplingParams) -> list[Any]:
    """All samples of one request."""
    engine.add_request([7, 400, 31], params, constraint=constraint)
    done = []
    while engine.has_work:
        done += [one.completion for one in engine.step() if one.completion is not None]
    engine.check_idle()
    return done


@pytest.mark.parametrize("speculation", [None, SpeculationConfig(NgramDrafter)])
def test_every_answer_obeys_its_schema(make_engine: Any, speculation: Any) -> None:
    engine = make_engine(speculation=speculation)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, n=4)
    done = answer(engine, Constraint.json_schema(SCHEMA), params)
    assert len(done) == 4
    for one in done:
        assert one.finish_reason == "stop", one.text
        value = json.loads(one.text)
        assert set(value) == {"name", "age", "kind"}
        assert (
            re.fullmatch("[a-z]{1,8}", value["name"]) and 0 <= value["age"] <= 120 and value["kind"] in ("cat", "a/b")
        )


def test_expressions_and_grammars(make_engine: Any) -> None:
    engine = make_engine()
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=40)
    (date,) = answer(engine, Constraint("regex", r"20[0-9]{2}-[01][0-9]"), params)
    assert re.fullmatch(r"20[0-9]{2}-[01][0-9]", date.text) and date.finish_reason == "stop"
    (sum_,) = answer(engine, Constraint("lark", 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,2}/'), params)
    assert re.match(r"[0-9]{1,2}(\+[0-9]{1,2})*", sum_.text)


def test_the_unconstrained_beside_it_are_left_alone(make_engine: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    (alone,) = make_engine().generate([[5]], params)[0]
    engine = make_engine()
    engine.add_request([7], SamplingParams(max_tokens=10), constraint=Constraint("regex", "[ab]{30}"))
    assert engine.generate([[5]], params)[0][0].tokens == alone.tokens


@pytest.mark.parametrize(
    ("constraint", "named"),
    [
        (Constraint.json_schema({"type": "object", "unevaluatedProperties": False}), "unevaluatedProperties"),
        (Constraint.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Constraint.json_schema({"type": "strings"}), "strings"),
        (Constraint("json_schema", "{"), "json_schema"),
        (Constraint("regex", "(ab"), "regex"),
        (Constraint("lark", "start: MISSING"), "MISSING"),
        (Constraint("lark", "start: <|nobody|>"), "nobody"),
        (Constraint.json_schema({"not": {}, "x-guidance": {"lenient": True}}), '"not"'),
        (Constraint.json_schema({"oneOf": [{"type": "string"}, {"minLength": 1}], **COERCED}), "oneOf"),
        (Constraint.json_schema({"$ref": "#"}), "no text follows it"),
        (Constraint("regex", r"[^\s\S]"), "no text follows it"),
        (Constraint("lark", 'start: start "a"'), "no text follows it"),
        ({"type": "object"}, r"Constraint\.json_schema"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(make_engine: Any, constraint: Constraint, named: str) -> None:
    engine = make_engine()
    assert len(answer(engine, Constraint("regex", "a"), SamplingParams(max_tokens=3))) == 1
    with pytest.raises(ValueError, match=named):
        engine.add_request([1], constraint=constraint)
    assert not engine.has_work
    engine.check_idle()


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="yaml"):
        Constraint("yaml", "a: b")
    with pytest.raises(ValueError, match=r"dicts, lists.*set"):
        Constraint.json_schema({"enum": {1, 2}})


def test_a_grammar_calls_control_tokens_by_their_names(make_engine: Any) -> None:
    engine = make_engine()
    matcher = engine._matcher(Constraint("lark", 'start: "a" <|im_start|>'))
    (a,), (control,) = engine.tokenizer.encode("a"), engine.tokenizer.encode("<|im_start|>", special=True)
    assert [row.nonzero().flatten().tolist() for row in matcher.masks([a])] == [[a], [control]]
    spelled = engine._matcher(Constraint("regex", r"<\|im_start\|>")).masks(())[0]
    assert spelled.any() and not spelled[control], "its name written out is only text"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_ends_with_its_grammar_wherever_a_step_ends(make_engine: Any, ignore_eos: bool) -> None:
    engine = make_engine()
    (a,), (b,) = map(engine.tokenizer.encode, "ab")
    stop_ids = engine.tokenizer.stop_ids
    for tokens in ([a, b, a], [a, b, a, stop_ids[0]], [a, b, a, stop_ids[0], b]):
        matcher = engine._matcher(Constraint("regex", "aba"))
        one = Answer("it", 0, TextStream(engine.tokenizer), matcher)
        assert one.read(tokens, SamplingParams(ignore_eos=ignore_eos), stop_ids) == ("aba", FinishReason.STOP)
        assert one.num_tokens == 3


def test_an_automaton_that_outgrows_its_limits_ends_the_answer_as_no_success(make_engine: Any) -> None:
    engine = make_engine()
    never = tuple((token, -100) for token in engine.tokenizer.stop_ids)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=90, logit_bias=never)
    (one,) = answer(engine, Constraint("regex", "((a{0,50}b?){0,50}){0,50}"), params)
    assert one.finish_reason == "abort" and 0 < len(one.tokens) < 90


def test_masks_leave_the_matcher_where_it_was(make_engine: Any) -> None:
    engine = make_engine()
    matcher = engine._matcher(Constraint("regex", "ab?c"))
    tokens = [engine.tokenizer.encode(letter)[0] for letter in "abc"]
    first = matcher.masks(tokens)
    assert [bool(first[i, token]) for i, token in enumerate(tokens)] == [True, True, True]
    wrong = matcher.masks([tokens[2], tokens[0]])
    assert not wrong[0, tokens[2]] and not wrong[1:].any()
    assert matcher.masks(tokens).equal(first)
