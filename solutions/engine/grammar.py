"""Structured output: what may follow, by a JSON schema, an expression or a grammar. The automata are llguidance's.

Lab 07's stretch task builds the readable version of what happens here, from the expression to the mask.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from labkit.tokenizer import Tokenizer

KINDS = ("json_schema", "regex", "lark")


@dataclass(frozen=True)
class Constraint:
    """What an answer must look like.

    Args:
        kind: "json_schema", "regex" or "lark".
        text: the schema as JSON, the expression, or the grammar.

    Raises:
        ValueError: another kind.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a constraint is one of {', '.join(KINDS)}, got {self.kind!r}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Constraint:
        """Of a schema as Python has it.

        Raises:
            ValueError: it holds what JSON has no form for.
        """
        try:
            return cls("json_schema", json.dumps(schema))
        except TypeError as error:
            raise ValueError(
                f"a JSON schema consists of dicts, lists, texts, numbers, bools and None: {error}"
            ) from None


class GrammarCompiler:
    """Makes matchers over one tokenizer's vocabulary.

    Args:
        tokenizer: of the model.
        vocab_size: width of the model's logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)), n_vocab=vocab_size, eos_token=list(tokenizer.stop_ids)
        )
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def start(self, constraint: Constraint) -> Matcher:
        """A matcher at the beginning of an answer.

        Raises:
            ValueError: the schema, expression or grammar can't be used, or there is no text that follows it; the
                message names the keyword or place.
        """
        try:
            grammar = {
                "json_schema": lambda text: LLMatcher.grammar_from_json_schema(
                    text, overrides={"whitespace_pattern": r"[ \n]{0,4}"}
                ),
                "regex": LLMatcher.grammar_from_regex,
                "lark": LLMatcher.grammar_from_lark,
            }[constraint.kind](constraint.text)
        except Exception as error:
            raise ValueError(f"this {constraint.kind} can't be used: {error}") from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        # What llguidance only warns of, it doesn't keep to: a schema may ask for that by its own "x-guidance".
        if matcher.is_error() or (warnings := matcher.get_grammar_warnings()):
            raise ValueError(f"this {constraint.kind} can't be used: {matcher.get_error() or '; '.join(warnings)}")
        matcher.compute_bitmask()
        if matcher.is_error():
            why = matcher.get_error().partition("\n")[0]
            raise ValueError(f"this {constraint.kind} can't be used: no text follows it ({why})")
        return Matcher(matcher, self._vocab_size, self._threads)


class Matcher:
    """Follows one answer through its grammar, and says what may come next.

    Args:
        matcher: of llguidance.
        vocab_size: width of the masks.
        threads: where masks are computed while the model runs.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, threads: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._threads = threads

    def begin_masks(self, drafts: Sequence[int], parents: Sequence[int] = ()) -> Future[Tensor]:
        """Starts to compute the masks of a step beside the forward pass; see `masks`."""
        return self._threads.submit(self.masks, list(drafts), list(parents))

    def masks(self, drafts: Sequence[int], parents: Sequence[int] = ()) -> Tensor:
        """What may follow the answer, then the answer with each of the drafts: bool `[drafts + 1, vocab_size]`.

        Behind a draft that the grammar forbids nothing is allowed: it is never reached.

        Args:
            drafts: their ids.
            parents: for each the index of the one that it follows, -1 for the answer itself; empty for a line.
        """
        masks = torch.zeros(len(drafts) + 1, self._vocab_size, dtype=torch.bool)
        children: dict[int, list[int]] = {}
        for index, parent in enumerate(parents or range(-1, len(drafts) - 1)):
            children.setdefault(parent, []).append(index)

        def visit(node: int) -> None:
            masks[node + 1] = self._mask()
            for child in children.get(node, []):
                token = drafts[child]
                if masks[node + 1, token] and not self._matcher.is_stopped() and self._matcher.consume_token(token):
                    visit(child)
                    self._matcher.rollback(1)

        visit(-1)
        return masks

    def accept(self, token: int) -> bool:
        """The answer has grown by a token. Returns whether nothing can follow any more."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())

    @property
    def has_failed(self) -> bool:
        """Whether llguidance has given up: the automaton of an answer may outgrow its limits half way."""
        return bool(self._matcher.is_error())

    def _mask(self) -> Tensor:
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        return bits.flatten()[: self._vocab_size].bool()


class _Vocabulary:
    """A tokenizer in the form that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id = tokenizer.stop_ids[0]
        self.bos_token_id = None
        found = tokenizer.vocabulary_bytes(vocab_size)
        self.special_token_ids = [token for token, data in enumerate(found) if data is None]
        # llguidance wants bytes for every id; a grammar calls control tokens by their names.
        self.tokens = [_name(tokenizer, token) if data is None else data for token, data in enumerate(found)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text)


def _name(tokenizer: Tokenizer, token: int) -> bytes:
    """Of a control token; none if the tokenizer doesn't have that id."""
    try:
        return tokenizer.token_bytes(token, special=True)
    except ValueError:
        return b""
