"""Task 13, second half: from automaton to token masks and to text, judged token by token and byte by byte."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_equal
from grader.judge.refusal import check_refused
from grader.judge.regexes import Reader, matches, texts
from labkit.byte_automaton import DEAD, ByteAutomaton
from labkit.checkpoints import CheckpointError, bundled_folder, load_tokenizer
from labkit.config import ModelConfig
from labkit.sampling_params import SamplingParams
from labkit.specs import Checkpoint, TinyLlama, VocabularyBytes

pytestmark = pytest.mark.task(13)

INF = float("inf")
Edges = dict[tuple[int, bytes], int]


def automaton(edges: Edges, accepting: Sequence[int]) -> ByteAutomaton:
    """An automaton drawn by hand: where each of some bytes leads from a state."""
    states = 1 + max(max(start, goal) for (start, _), goal in edges.items())
    table = torch.full((states, 256), DEAD)
    for (start, data), goal in edges.items():
        table[start, list(data)] = goal
    return ByteAutomaton(table, torch.tensor([state in accepting for state in range(states)]))


# (ab)*(é|€)?: é is c3 a9, € is e2 82 ac. States: 0 start, 1 behind a, 2 within é, 3 and 4 within €, 5 the end.
LETTERS = automaton(
    {(0, b"a"): 1, (1, b"b"): 0, (0, b"\xc3"): 2, (2, b"\xa9"): 5, (0, b"\xe2"): 3, (3, b"\x82"): 4, (4, b"\xac"): 5},
    accepting=[0, 5],
)
STOP, CONTROL = 4, 9
VOCABULARY = [
    b"a", b"b", b"ab", b"aba", None, b"abb", b"\xc3", b"\xa9", b"\xe2\x82", None, b"\xac", b"b\xc3", b"bab\xc3\xa9",
    b"\xc3\xa9a", b"ab", b"", b"x", b"ax", b"\xe2\xac", b"\x82\xac", b"\xe2", b"\xff", b"aa", b"ba",
]


def allowed_tokens(mask: object) -> list[int]:
    """The ids that a mask allows."""
    assert isinstance(mask, Tensor) and mask.dtype == torch.bool, f"a mask is a bool tensor, got {mask!r}"
    assert mask.shape == (len(VOCABULARY),), f"a mask has a place for each token, got shape {list(mask.shape)}"
    return [int(token) for token in mask.nonzero()[:, 0]]


def right_tokens(state: int, stop_tokens: Sequence[int] = (STOP,)) -> list[int]:
    """The ids to allow in a state of `LETTERS`."""
    reached = Reader(LETTERS).next_states(VOCABULARY, state)
    reached = [DEAD if token in stop_tokens else after for token, after in enumerate(reached)]
    stops = list(stop_tokens) if bool(LETTERS.accepting[state]) else []
    return sorted({*stops, *(token for token, after in enumerate(reached) if after != DEAD)})


def masks_of(lab: Any, stop_tokens: Sequence[int] = (STOP,)) -> Any:
    """Masks of `LETTERS` over the small vocabulary."""
    return lab.TokenMasks(lab.TokenTrie(VOCABULARY), LETTERS, list(stop_tokens))


def test_every_token_is_read_to_its_end(lab: Any) -> None:
    trie, reader = lab.TokenTrie(VOCABULARY), Reader(LETTERS)
    for state in (0, 1, 2, 3, 4, 5, 0):
        got = trie.next_states(LETTERS, state)
        right = reader.next_states(VOCABULARY, state)
        check_equal(
            f"states after each of the tokens {VOCABULARY}, read from state {state},", got, torch.tensor(right),
            "A token leads somewhere only if all of its bytes do.",
        )
    draw = random.Random(5)
    for _ in range(20):
        table = torch.tensor([[draw.choice([DEAD, 0, 1, 2]) for _ in range(256)] for _ in range(3)])
        mine = ByteAutomaton(table, torch.tensor([True, False, True]))
        tokens = [bytes(draw.choices(b"ab\xc3\xa9", k=draw.randrange(1, 5))) for _ in range(draw.randrange(1, 30))]
        state = draw.randrange(3)
        right = Reader(mine).next_states(tokens, state)
        got = lab.TokenTrie(tokens).next_states(mine, state)
        check_equal(f"states after each of the tokens {tokens}, read from state {state},", got, torch.tensor(right))


def test_a_trie_serves_one_automaton_after_another(lab: Any) -> None:
    trie = lab.TokenTrie(VOCABULARY)
    other = automaton({(0, b"a"): 0, (0, b"b"): 1}, accepting=[1])
    for machine in (LETTERS, other, LETTERS):
        right = torch.tensor(Reader(machine).next_states(VOCABULARY, 0))
        check_equal("states after each token from state 0", trie.next_states(machine, 0), right)
    first, second = lab.TokenMasks(trie, LETTERS, [STOP]), lab.TokenMasks(trie, other, [STOP])
    got = allowed_tokens(first.mask(0)), allowed_tokens(second.mask(0)), allowed_tokens(first.mask(0))
    own = [token for token, after in enumerate(Reader(other).next_states(VOCABULARY, 0)) if after != DEAD]
    assert got == (right_tokens(0), own, right_tokens(0)), (
        f"state 0 of two regexes on one trie allows {right_tokens(0)}, {own} and again the first, got {got}"
    )


def test_impossible_vocabularies_and_states_are_refused(lab: Any) -> None:
    trie = lab.TokenTrie(VOCABULARY)
    assert trie.next_states(LETTERS, 1).tolist() == Reader(LETTERS).next_states(VOCABULARY, 1), "a good walk first"
    masks = lab.TokenMasks(trie, LETTERS, [STOP])
    assert allowed_tokens(masks.mask(1)) == right_tokens(1), "a good mask first"
    for what, call in (
        ("no tokens", lambda: lab.TokenTrie([])),
        ("a token of text", lambda: lab.TokenTrie([b"a", "b"])),
        ("state 6 of 6", lambda: trie.next_states(LETTERS, 6)),
        ("state -1", lambda: trie.next_states(LETTERS, -1)),
        ("the mask of state 6 of 6", lambda: masks.mask(6)),
        ("the mask of state -1", lambda: masks.mask(-1)),
        ("no stop token", lambda: lab.TokenMasks(trie, LETTERS, [])),
        ("a stop token outside the vocabulary", lambda: lab.TokenMasks(trie, LETTERS, [len(VOCABULARY)])),
    ):
        check_refused(what, call)


def test_tokens_are_allowed_where_they_can_be_completed(lab: Any) -> None:
    masks = masks_of(lab)
    for state in (0, 1, 2, 3, 4, 5):
        got = allowed_tokens(masks.mask(state))
        assert got == right_tokens(state), (
            f"in state {state} of (ab)*(é|€)? the tokens {right_tokens(state)} are allowed, got {got}; "
            f"the vocabulary is {list(enumerate(VOCABULARY))}, its stop token {STOP}"
        )


def test_parts_of_a_character_are_tokens_like_others(lab: Any) -> None:
    masks = masks_of(lab)
    start, within = allowed_tokens(masks.mask(0)), allowed_tokens(masks.mask(2))
    assert 6 in start and 8 in start and 20 in start, "c3 begins é; e2 82 and e2 begin €: all can be completed"
    assert 18 not in start and 21 not in start and 7 not in start, "nothing in the regex begins with e2 ac, ff or a9"
    assert within == [7], f"behind c3 only a9 can follow, and nothing can stop; got {within}"
    assert allowed_tokens(masks.mask(3)) == [19] and allowed_tokens(masks.mask(4)) == [10], "€ goes on byte by byte"


def test_a_text_may_stop_exactly_where_it_is_whole(lab: Any) -> None:
    masks = masks_of(lab)
    for state in range(6):
        got, right = allowed_tokens(masks.mask(state)), state in (0, 5)
        assert (STOP in got) == right, (
            f"state {state} is {'' if right else 'not '}accepting, but the stop token is "
            f"{'' if STOP in got else 'not '}allowed"
        )
        assert CONTROL not in got and 15 not in got, "control tokens and tokens without a byte are never allowed"
    # Token 1 is spelled b, which the regex could read behind an a; as a stop token it is no text.
    stops = [STOP, 1, CONTROL]
    several = masks_of(lab, stops)
    for state in (0, 1, 5):
        got, right_ids = allowed_tokens(several.mask(state)), right_tokens(state, stops)
        assert got == right_ids, f"with the stop tokens {stops}, state {state} allows {right_ids}, got {got}"
    assert several.next_state(0, 1) is None, "a stop token ends the text, whatever its bytes"


def test_masks_stay_with_their_states(lab: Any) -> None:
    masks = masks_of(lab)
    for state in (1, 0, 1, 5, 0, 2, 5, 1, 4, 0):
        got = allowed_tokens(masks.mask(state))
        assert got == right_tokens(state), f"in mixed order, state {state} allows {right_tokens(state)}, got {got}"


def test_a_token_leads_to_the_state_behind_all_its_bytes(lab: Any) -> None:
    masks, reader = masks_of(lab), Reader(LETTERS)
    for state in range(6):
        for token in right_tokens(state):
            data = VOCABULARY[token]
            right = None if token == STOP else reader.run(data or b"", state)
            got = masks.next_state(state, token)
            assert got == right, f"token {token} ({data!r}) leads from state {state} to {right}, got {got}"
        refused = sorted(set(range(len(VOCABULARY))) - set(right_tokens(state)))
        for token in [*refused, -1, len(VOCABULARY)]:
            check_refused(f"token {token} in state {state}", lambda s=state, t=token: masks.next_state(s, t))


def test_a_constraint_follows_the_tokens_drawn(lab: Any) -> None:
    masks = masks_of(lab)
    for seed in range(12):
        draw = random.Random(seed)
        constraint, data, ended = lab.TokenConstraint(masks), b"", False
        for _ in range(12):
            state = Reader(LETTERS).run(data)
            assert constraint.is_complete == bool(LETTERS.accepting[state]), (
                f"after {data!r} is_complete is {constraint.is_complete}; (ab)*(é|€)? says otherwise"
            )
            got = allowed_tokens(constraint.mask())
            assert got == right_tokens(state), f"after {data!r} the tokens {right_tokens(state)} are allowed, got {got}"
            token = draw.choice(got)
            constraint.advance(token)
            if token == STOP:
                ended = True
                break
            data += VOCABULARY[token] or b""
        if ended:
            assert constraint.is_complete, "a text that a stop token has ended is complete"
            assert allowed_tokens(constraint.mask()) == [], "behind a stop token nothing is allowed"
            check_refused("a token behind the stop token", lambda c=constraint: c.advance(2))
            check_refused("a second stop token", lambda c=constraint: c.advance(STOP))


def test_a_refused_token_changes_nothing(lab: Any) -> None:
    constraint = lab.TokenConstraint(masks_of(lab))
    for taken, state in ((2, 0), (0, 1), (11, 2), (7, 5)):
        constraint.advance(taken)
        for refused in (5, 16, 17, CONTROL, 15, -1, len(VOCABULARY), *([] if state in (0, 5) else [STOP])):
            check_refused(f"token {refused} in state {state}", lambda t=refused: constraint.advance(t))
            got = allowed_tokens(constraint.mask())
            assert got == right_tokens(state), (
                f"token {refused} was refused, but the constraint has moved: it allows {got}, should allow "
                f"{right_tokens(state)} as before"
            )
            assert constraint.is_complete == (state in (0, 5)), "is_complete has changed with a refused token"


def test_requests_with_one_regex_go_separate_ways(lab: Any) -> None:
    masks = masks_of(lab)
    first, second = lab.TokenConstraint(masks), lab.TokenConstraint(masks)
    first.advance(0)
    assert allowed_tokens(first.mask()) == right_tokens(1), "the first request is behind its a"
    assert allowed_tokens(second.mask()) == right_tokens(0), "the second request hasn't begun"
    second.advance(STOP)
    third = lab.TokenConstraint(masks)
    assert allowed_tokens(first.mask()) == right_tokens(1), "the first request goes on, the second has ended"
    assert allowed_tokens(third.mask()) == right_tokens(0), "a third one starts at the beginning"


def test_only_allowed_tokens_stay_possible(lab: Any) -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        logits = torch.tensor([[1.5, -2.0, 0.0, 9.0, -INF], [-60000.0, 3.0, -5.0, -1.0, 2.0]], dtype=dtype)
        masks = torch.tensor([[True, False, True, False, True], [True, False, True, False, False]])
        before = logits.clone()
        got = lab.mask_logits(logits, masks)
        right = torch.tensor([[1.5, -INF, 0.0, -INF, -INF], [-60000.0, -INF, -5.0, -INF, -INF]], dtype=dtype)
        check_equal("mask_logits", got, right, "What isn't allowed becomes -inf, the rest stays as it is.")
        check_equal("the logits given, which belong to the caller,", logits, before)
    odd = lab.mask_logits(torch.tensor([[INF, 1.0, float("nan")]]), torch.tensor([[False, True, False]]))
    check_equal("inf and NaN where nothing is allowed", odd, torch.tensor([[-INF, 1.0, -INF]]))


def test_a_row_without_a_token_is_refused_by_number(lab: Any) -> None:
    logits = torch.tensor([[1.0, 2.0, -INF], [3.0, -INF, 4.0]])
    good = torch.tensor([[True, False, True], [True, True, False]])
    check_equal("good rows", lab.mask_logits(logits, good), torch.tensor([[1.0, -INF, -INF], [3.0, -INF, -INF]]))
    nothing = torch.tensor([[True, True, True], [False, False, False]])
    check_refused("a mask that allows nothing", lambda: lab.mask_logits(logits, nothing), mentions="row 1")
    ruled_out = torch.tensor([[False, False, True], [True, True, True]])
    check_refused("only -inf is allowed", lambda: lab.mask_logits(logits, ruled_out), mentions="row 0")
    check_refused("a mask of another width", lambda: lab.mask_logits(logits, good[:, :2]))
    check_refused("one mask for two rows", lambda: lab.mask_logits(logits, good[:1]))
    check_refused("a mask of ints", lambda: lab.mask_logits(logits, good.long()))


def test_the_mask_comes_before_the_choice(lab: Any) -> None:
    seen: list[tuple[list[float], int]] = []

    def likeliest(logits: Tensor, step: int) -> int:
        seen.append((logits.tolist(), step))
        return int(logits.argmax())

    constraint = lab.TokenConstraint(masks_of(lab))
    sampler = lab.ConstrainedSampler(likeliest, constraint)
    # Token 16 is likeliest of all and never allowed; of the others the first is liked most, stopping least.
    logits = torch.arange(len(VOCABULARY), 0, -1).float()
    logits[16], logits[STOP] = 99.0, -5.0
    state, out = 0, []
    for step, (right, after) in enumerate(((0, 1), (1, 0), (0, 1), (1, 0)), start=7):
        out.append(sampler(logits, step))
        wanted = [value if token in right_tokens(state) else -INF for token, value in enumerate(logits.tolist())]
        assert out[-1] == right, f"the likeliest allowed token is {right}, got {out[-1]}"
        assert seen[-1] == (wanted, step), f"choose must get the masked logits and step {step}, got {seen[-1]}"
        state = after
        assert allowed_tokens(constraint.mask()) == right_tokens(state), f"after {out} the constraint must have moved"
    assert len(seen) == 4, f"choose was called {len(seen)} times for 4 tokens"


def test_a_failed_choice_leaves_the_constraint(lab: Any) -> None:
    answers = [0, 16, 1]
    constraint = lab.TokenConstraint(masks_of(lab))
    sampler = lab.ConstrainedSampler(lambda logits, step: answers.pop(0), constraint)
    logits = torch.zeros(len(VOCABULARY))
    assert sampler(logits, 0) == 0, "a good choice comes first"
    check_refused("a choice that isn't allowed", lambda: sampler(logits, 1))
    assert allowed_tokens(constraint.mask()) == right_tokens(1), "the refused token must not count"
    check_refused("logits that rule out all that is allowed", lambda: sampler(torch.full_like(logits, -INF), 1))
    check_refused("logits of another vocabulary", lambda: sampler(logits[:-1], 1))
    check_refused("logits of a batch", lambda: sampler(logits.unsqueeze(0), 1))
    assert answers == [1], "where no token is left, there is nothing to choose"
    assert sampler(logits, 1) == 1 and allowed_tokens(constraint.mask()) == right_tokens(0), "and then it goes on"


def test_masks_allow_what_some_text_goes_on_with(lab: Any) -> None:
    # All texts of these regexes are short, so a beginning is good if and only if one of the texts begins with it.
    # The alphabet holds every character that the tokens can spell, so no regex knows of one that isn't tried.
    alphabet = "ab1éì€₩"
    vocabulary = [
        b"a", b"b", b"1", b"ab", b"a1", b"b\xc3", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xa9a", b"\xac1", b"aa",
        "é€".encode(), None,
    ]
    stop = len(vocabulary) - 1
    trie = lab.TokenTrie(vocabulary)
    for pattern in ("a{2,3}|b", "(a|ab)(1|é)?", "[^a]{1,2}", "[ab1é]{0,2}€", r"(é|€\d){2}", r"\w?[^\w]", "(ab?){2}|1.",
                    "[a€]{2}b?"):
        whole = [text.encode() for text in texts(alphabet, 4) if matches(pattern, text)]
        masks = lab.TokenMasks(trie, lab.compile_regex(pattern), [stop])
        for seed in range(3):
            draw, data = random.Random(seed), b""
            constraint = lab.TokenConstraint(masks)
            while True:
                got = [int(token) for token in constraint.mask().nonzero()[:, 0]]
                right = [i for i, t in enumerate(vocabulary) if t and any(w.startswith(data + t) for w in whole)]
                right += [stop] if data in whole else []
                assert got == right, f"{pattern} after {data!r}: tokens {right} can go on, the mask allows {got}"
                token = draw.choice(got)
                constraint.advance(token)
                if token == stop:
                    break
                data += vocabulary[token] or b""


JSON_LIKE = (
    r'\{"name": "([^"\\\x00-\x1f]|\\["\\/bfnrt]){1,12}", "born": \d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01]), '
    r'"tags": \[("[^"\\\x00-\x1f]{1,6}"(, "[^"\\\x00-\x1f]{1,6}"){0,3})?\]\}'
)


def skip_without_model(lab: Any) -> None:
    """Skip where the bundled model is missing; what isn't written yet fails before that."""
    constraint = lab.TokenConstraint(lab.TokenMasks(lab.TokenTrie([b"a", None]), lab.compile_regex("a"), [1]))
    constraint.advance(0)
    assert constraint.mask().tolist() == [False, True], "behind the a of the regex a there is only the stop"
    try:
        bundled_folder()
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")


def test_random_walks_over_the_real_vocabulary_match(lab: Any) -> None:
    skip_without_model(lab)
    tokenizer = load_tokenizer("smollm2")
    stop = tokenizer.stop_ids[0]
    trie = lab.TokenTrie(VocabularyBytes("smollm2"))
    for pattern, walks in ((JSON_LIKE, 2), (r"[^\x00-\x7f]{3,9}", 3), ("(é|ж|[一-龥]|😀){5}", 2), (r"\W{2,6}.", 3)):
        masks = lab.TokenMasks(trie, lab.compile_regex(pattern), [stop])
        split = 0
        for seed in range(walks):
            draw, constraint, drawn = random.Random(seed), lab.TokenConstraint(masks), []
            while stop not in drawn:
                allowed = constraint.mask().nonzero()[:, 0]
                assert len(allowed), f"{pattern}: stuck behind {tokenizer.decode(drawn)!r}"
                drawn.append(int(allowed[draw.randrange(len(allowed))]))
                constraint.advance(drawn[-1])
            data = b"".join(tokenizer.token_bytes(token) for token in drawn)
            text = tokenizer.decode(drawn)
            assert text.encode() == data, f"{pattern}: the tokens {drawn} spell {data!r}, which is no UTF-8"
            assert matches(pattern, text), f"{pattern} does not match {text!r}, spelled by the tokens {drawn}"
            split += any("\ufffd" in tokenizer.decode([token]) for token in drawn)
        assert split or pattern == JSON_LIKE, f"{pattern}: no walk came by a token that is part of a character"


def quickest(repeats: int, call: Callable[[], object]) -> float:
    """Seconds of the quickest of some calls: what else the machine does can only add to it."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def test_real_masks_are_ready_in_time(lab: Any) -> None:
    skip_without_model(lab)
    vocabulary = load_tokenizer("smollm2").vocabulary_bytes()
    machine = lab.compile_regex(JSON_LIKE)
    trie, reader = lab.TokenTrie(VocabularyBytes("smollm2")), Reader(machine)
    text = b'{"name": "Emmy Noether", "born": 1882-03-23, "tags": ["tensor", "rings"]}'
    states = sorted({reader.run(text[:length]) for length in range(0, len(text), 4)})
    masks = lab.TokenMasks(trie, machine, [2])
    narrow = []
    for state in states:
        right = torch.tensor(reader.next_states(vocabulary, state)) != DEAD
        right[2] = reader.accepting[state]
        check_equal(f"the mask of the real vocabulary in state {state}", masks.mask(state), right)
        if int(right.sum()) < 500:
            narrow.append(state)

    def masks_in(chosen: list[int], held: Any) -> None:
        for state in chosen:
            held.mask(state)

    plain = quickest(2, lambda: [reader.next_states(vocabulary, state) for state in narrow]) / len(narrow)
    first = quickest(3, lambda: masks_in(narrow, lab.TokenMasks(trie, machine, [2]))) / len(narrow)
    again = quickest(3, lambda: masks_in(states, masks)) / len(states)
    told = f"a plain loop over all tokens and their bytes takes {plain * 1e3:.2f} ms"
    assert first < plain / 3, (
        f"where few tokens are allowed, a new mask takes {first * 1e3:.2f} ms; {told}. Share the steps through common "
        "beginnings: where one is dead, nothing behind it needs a look."
    )
    assert again < plain / 3, f"the mask of a state met before takes {again * 1e3:.2f} ms; {told}. Keep the masks."


@pytest.mark.integration
def test_your_own_engine_writes_what_matches(lab: Any) -> None:
    # A tiny model on a vocabulary of its own first, so that this fails without the parts even where no model lies.
    config = ModelConfig.tiny(num_layers=2)
    vocabulary: list[bytes | None] = [bytes([48 + index]) for index in range(config.vocab_size - 1)]
    trie = lab.TokenTrie([*vocabulary, None])
    stop = config.vocab_size - 1
    masks = lab.TokenMasks(trie, lab.compile_regex("[1-3]{2}(A|BC)[a-z]{3}"), [stop])
    for seed in range(3):
        model = lab.CachedDecoder(TinyLlama(config, 1), lab.KVCache(config, 20))
        sampler = lab.ConstrainedSampler(lab.Sampler(SamplingParams(top_k=3, seed=seed)), lab.TokenConstraint(masks))
        tokens = lab.generate(model, [5, 7], 12, sampler, [stop])
        text = b"".join(vocabulary[token] for token in tokens[:-1]).decode()
        assert tokens[-1] == stop and matches("[1-3]{2}(A|BC)[a-z]{3}", text), f"a tiny model wrote {text!r}"
    skip_without_model(lab)
    tokenizer = load_tokenizer("smollm2")
    prompt = tokenizer.encode("The first person walked on the Moon on the day (ISO 8601) ")
    pattern = r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
    masks = lab.TokenMasks(
        lab.TokenTrie(VocabularyBytes("smollm2")), lab.compile_regex(pattern), tokenizer.stop_ids
    )
    spec = Checkpoint("smollm2")
    model = lab.CachedDecoder(spec, lab.KVCache(spec.build().config, len(prompt) + 12))
    sampler = lab.ConstrainedSampler(lab.Sampler(SamplingParams(temperature=0.0)), lab.TokenConstraint(masks))
    text = tokenizer.decode(lab.generate(model, prompt, 12, sampler, tokenizer.stop_ids))
    assert matches(pattern, text), f"the real model wrote {text!r}, which is no date"
