"""Task 3: what the target reads, what it forgets, where the text ends, and whatever a drafter may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from grader.judge.refusal import check_refused
from grader.judge.scripted import RecordingModel
from labkit.checkpoints import CheckpointError, bundled_folder
from labkit.drafting import Draft, Speculation
from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams
from labkit.scripted_drafter import ScriptedDrafter
from labkit.specs import Cached, Checkpoint, Markov

pytestmark = pytest.mark.task(3)

VOCAB = 13
PROMPT = [3, 1, 4]


def rule(tokens: list[int]) -> int:
    """What the recording target writes next: depends on the last token and on how many there are."""
    return (tokens[-1] * 3 + len(tokens)) % VOCAB


def text_after(prompt: list[int], count: int) -> list[int]:
    """What plain greedy decoding writes."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(rule(tokens))
    return tokens[len(prompt) :]


class Drafts:
    """A drafter that knows the target's text, and errs where it is told to.

    Args:
        errors: for each round the place of its first wrong draft, or None for no error; the last one repeats.
    """

    def __init__(self, *errors: int | None) -> None:
        self.errors = errors or (None,)
        self.calls: list[tuple[list[int], int, list[float]]] = []

    def spec(self) -> ScriptedDrafter:
        """The argument to pass to the lab in place of a drafter."""
        return ScriptedDrafter(self.propose)

    def propose(self, text: list[int], most: int, uniforms: list[float]) -> Draft:
        """The target's next tokens, the one at the place of the error replaced."""
        error = self.errors[min(len(self.calls), len(self.errors) - 1)]
        self.calls.append((text, most, uniforms))
        tokens = text_after(text, most)
        if error is not None and error < len(tokens):
            tokens[error] = (tokens[error] + 1) % VOCAB
        return Draft(tuple(tokens))


def run(lab: Any, model: RecordingModel, drafter: Any, count: int, **more: Any) -> Speculation:
    """One generation from `PROMPT`."""
    result = lab.speculate(model.spec(), drafter, PROMPT, count, **more)
    assert isinstance(result, Speculation), f"speculate must return a Speculation, got {type(result).__name__}"
    return result


def target(capacity: int = 100, held: list[int] | None = None) -> RecordingModel:
    """A target that writes by the rule."""
    return RecordingModel(VOCAB, capacity, rule, held)


def test_one_pass_a_round_on_new_tokens_only(lab: Any) -> None:
    model, drafter = target(), Drafts(None, 1, 0, None)
    result = run(lab, model, drafter.spec(), 12, num_drafts=3)
    text = text_after(PROMPT, 12)
    # All three kept and a bonus; one kept; none kept; all three; and one token is missing, which needs no draft.
    passes = [(len(PROMPT) + 3, PROMPT[0]), (4, text[3]), (4, text[5]), (4, text[6]), (1, text[10])]
    assert [(len(call), call[0]) for call in model.calls] == passes, (
        f"the target was run on {model.calls}; each round takes one pass over the newest token and its drafts, the "
        f"first one over the prompt: as (tokens, first token) {passes}"
    )
    assert [(r.drafted, r.accepted, r.emitted) for r in result.rounds] == [
        (3, 3, 4), (3, 1, 2), (3, 0, 1), (3, 3, 4), (0, 0, 1)
    ], f"rounds as (drafted, accepted, emitted) are wrong: {result.rounds}"  # fmt: skip
    assert list(result.tokens) == text


def test_the_cache_holds_exactly_what_was_kept(lab: Any) -> None:
    for errors in ((None,), (0,), (1,), (2,), (3,), (0, 2, None, 1, 3)):
        for held in ([], [5, 6]):
            model, drafter = target(held=held), Drafts(*errors)
            seen: list[list[int]] = []
            inner = drafter.propose

            def watch(
                text: list[int], most: int, draws: list[float], seen: Any = seen, model: Any = model,
                inner: Any = inner, held: list[int] = held,
            ) -> Draft:  # fmt: skip
                seen.append(list(model.tokens))
                read = model.tokens[len(held) :]
                assert read in ([], text[:-1]), (
                    f"before a round the target must remember all of the text but its last token: it remembers "
                    f"{read}, the text is {text}"
                )
                return inner(text, most, draws)

            result = run(lab, model, ScriptedDrafter(watch), 11, num_drafts=4)
            whole = [*PROMPT, *result.tokens]
            assert model.tokens == [*held, *whole[:-1]], (
                f"at the end the target must remember prompt and text but the last token, {whole[:-1]}; it remembers "
                f"{model.tokens[len(held) :]}"
            )
            assert len(seen) == len(result.rounds) - (len(drafter.calls) < len(result.rounds))


def test_greedy_text_is_the_target_s_own(lab: Any) -> None:
    for errors in ((None,), (0,), (1,), (0, None), (2, 0, 1)):
        for most in (0, 1, 2, 5, 40):
            for count in (1, 2, 3, 17):
                got = run(lab, target(), Drafts(*errors).spec(), count, num_drafts=most)
                assert list(got.tokens) == text_after(PROMPT, count), (
                    f"{count} tokens with {most} drafts, errors at {errors}: got {got.tokens}, plain decoding writes "
                    f"{text_after(PROMPT, count)}"
                )


def test_the_drafter_gets_the_whole_text_and_its_own_random_numbers(lab: Any) -> None:
    drafter = Drafts(1)
    result = run(lab, target(), drafter.spec(), 8, num_drafts=3, params=SamplingParams(temperature=0, seed=77))
    assert drafter.calls, "the drafter was never asked"
    place = 0
    for (text, most, draws), round_ in zip(drafter.calls, result.rounds, strict=False):
        assert text == [*PROMPT, *result.tokens[:place]], f"the drafter was given {text} at place {place}"
        left = 8 - place
        assert most == min(3, left - 1), f"with {left} tokens to go at most {left - 1} drafts are worth it, not {most}"
        right = [uniform(77, 3 * (place + i)) for i in range(most)]
        assert draws == right, f"draft i at place {place} is drawn with uniform(seed, 3 * (place + i)), got {draws}"
        place += round_.emitted


def test_a_stop_token_ends_the_text_inside_a_round(lab: Any) -> None:
    text = text_after(PROMPT, 20)
    for place in (0, 1, 2, 3, 4, 5):
        stop = text[place]
        first = text.index(stop)
        for errors in ((None,), (1,)):
            model = target()
            got = run(lab, model, Drafts(*errors).spec(), 20, num_drafts=3, stop_tokens=(stop,))
            assert list(got.tokens) == text[: first + 1], (
                f"the stop token {stop} comes at place {first}: the text is {text[: first + 1]}, got {list(got.tokens)}"
            )
            assert model.tokens == [*PROMPT, *text[:first]], (
                f"what was drafted behind the stop token must not stay in the cache: {model.tokens}"
            )
            assert sum(r.emitted for r in got.rounds) == first + 1, f"emitted tokens don't add up: {got.rounds}"
            assert all(r.accepted <= r.emitted for r in got.rounds), f"more accepted than emitted: {got.rounds}"


def test_the_length_cap_holds_inside_a_round(lab: Any) -> None:
    for count in range(1, 9):
        model = target()
        got = run(lab, model, Drafts().spec(), count, num_drafts=3)
        assert list(got.tokens) == text_after(PROMPT, count), f"asked for {count} tokens, got {len(got.tokens)}"
        assert max(len(call) for call in model.calls[1:] or [[]]) <= 4


def test_a_text_that_just_fits_is_not_refused(lab: Any) -> None:
    for count in (1, 2, 5, 6):
        room = len(PROMPT) + count - 1
        model = target(capacity=room)
        watched = model.append

        def bounded(tokens: list[int], model: Any = model, watched: Any = watched, room: int = room) -> Tensor:
            assert len(model.tokens) + len(tokens) <= room, f"there is room for {room} tokens, more were appended"
            return watched(tokens)

        model.append = bounded  # type: ignore[method-assign]
        got = run(lab, model, Drafts().spec(), count, num_drafts=4)
        assert list(got.tokens) == text_after(PROMPT, count), f"{count} tokens just fit, got {list(got.tokens)}"
    check_refused("one token too many", lambda: run(lab, target(capacity=8), Drafts().spec(), 7, num_drafts=4))


def test_a_stop_condition_is_asked_after_each_token(lab: Any) -> None:
    text = text_after(PROMPT, 9)
    asked: list[list[int]] = []

    def finished(tokens: list[int]) -> bool:
        asked.append(list(tokens))
        return len(tokens) == 6

    got = run(lab, target(), Drafts(None, 1).spec(), 9, num_drafts=3, finished=finished)
    assert list(got.tokens) == text[:6], f"the condition holds at 6 tokens: {text[:6]}, got {list(got.tokens)}"
    assert asked == [text[:n] for n in range(1, 7)], f"the condition is asked once after each token; it saw {asked}"


def test_masks_follow_the_drafts(lab: Any) -> None:
    def allowed(text: list[int]) -> Tensor:
        """No token may follow its own successor's number."""
        mask = torch.ones(VOCAB, dtype=torch.bool)
        mask[(text[-1] + 2) % VOCAB] = False
        mask[len(text) % VOCAB] = False
        return mask

    def masked(text: list[int]) -> int:
        return int(model.logits_after(text).masked_fill(~allowed(text), -torch.inf).argmax())

    model = target()
    right = list(PROMPT)
    for _ in range(14):
        right.append(masked(right))
    for drafts in (3, 6):
        for honest in (True, False):
            # An honest drafter knows the mask; the other drafts by the bare rule and runs into it.
            def propose(text: list[int], most: int, draws: list[float], honest: bool = honest) -> Draft:
                out = list(text)
                for _ in range(most):
                    out.append(masked(out) if honest else rule(out))
                return Draft(tuple(out[len(text) :]))

            model = target()
            got = run(lab, model, ScriptedDrafter(propose), 14, num_drafts=drafts, allowed=allowed)
            assert list(got.tokens) == right[3:], (
                f"with a mask the target alone writes {right[3:]}, got {list(got.tokens)}: row i of the pass is masked "
                "by the text with the first i drafts, the row of the bonus token, too"
            )
    # Sampled: a draft that the mask forbids is judged with p = 0, and not dropped, which would favour the others.
    chain = ((0.2, 0.3, 0.5), (0.2, 0.3, 0.5), (0.2, 0.3, 0.5))
    q = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)
    counts = torch.zeros(3)
    runs = 600
    for seed in range(runs):
        got = lab.speculate(
            Markov(chain, 9), ScriptedDrafter(lambda text, most, draws: Draft((inverse(q[0], draws[0]),), q)), [1], 2,
            SamplingParams(seed=seed), num_drafts=1, allowed=lambda text: torch.tensor([False, True, True]),
        )  # fmt: skip
        counts[got.tokens[0]] += 1
    # Exactly 0.375 and 0.625. Dropping forbidden drafts gives 0.525: nine standard deviations away.
    share = float(counts[1] / runs)
    assert counts[0] == 0, "a forbidden token was emitted"
    assert abs(share - 0.375) < 5 * (0.375 * 0.625 / runs) ** 0.5, (
        f"of the allowed tokens the target wants token 1 in 0.375 of cases, it came in {share:.3f}; false alarms have "
        "the rate 6e-7"
    )


def inverse(row: Tensor, u: float) -> int:
    """The token that a uniform stands for."""
    return min(int((row.cumsum(0) <= u).sum()), int(row.nonzero().max()))


NAN, EVEN = torch.full((3, 5), torch.nan), torch.full((3, 5), 0.2)
HANDED_OVER: list[tuple[str, Draft, int, int]] = [
    ("nothing", Draft(()), 3, 0),
    ("three sure tokens", Draft((1, 2, 3)), 3, 3),
    ("more than was asked for", Draft((1, 2, 3)), 2, 2),
    ("three drawn tokens", Draft((1, 2, 3), EVEN), 3, 3),
    ("NaN from the start", Draft((1, 2, 3), NAN), 3, 0),
    ("NaN in the second row", Draft((1, 2, 3), torch.cat([EVEN[:1], NAN[:1], EVEN[:1]])), 3, 1),
    ("a sum of 1.2 in the last row", Draft((1, 2, 3), torch.cat([EVEN[:2], EVEN[:1] * 1.2])), 3, 2),
    ("a negative number", Draft((1, 2, 3), torch.tensor([[0.6, 0.6, -0.2, 0.0, 0.0]] * 3)), 3, 0),
    ("a token that its row can't draw", Draft((1, 0, 1), torch.tensor([[0.0, 0.5, 0.5]] * 3)), 3, 1),
    ("a token outside its own rows", Draft((1, 7, 1), EVEN), 3, 1),
    ("a negative id", Draft((1, -1, 2)), 3, 1),
    ("two rows for three tokens", Draft((1, 2, 3), EVEN[:2]), 3, 0),
    ("one axis too few", Draft((1, 2, 3), EVEN[0]), 3, 0),
    ("sure of a token that the target lacks", Draft((1, 99, 2)), 3, 3),
    ("infinity", Draft((1,), torch.tensor([[torch.inf, 0.5, 0.5]])), 1, 0),
]


def test_what_a_drafter_may_hand_over(lab: Any) -> None:
    for what, draft, most, right in HANDED_OVER:
        got = lab.usable_drafts(draft, most)
        assert got == right, f"{what}: {right} drafts can be judged, got {got!r}"
    got = lab.draft_probs(Draft((1, 7)), 2, 5)
    check_equal("sure tokens, one beyond the target's five", got, torch.nn.functional.one_hot(torch.tensor([1, 7]), 8)
                .double(), "One row a token, 1 at it, wide enough for both vocabularies.")  # fmt: skip
    advice = "Rows keep their numbers; the shorter vocabulary is filled up with zeros."
    got = lab.draft_probs(Draft((1, 2, 3), EVEN), 2, 7)
    right = torch.cat([EVEN[:2].double(), torch.zeros(2, 2, dtype=torch.float64)], 1)
    check_close("rows of five on a target of seven", got, right, scale=1.0, dtype=torch.float64, advice=advice)
    got = lab.draft_probs(Draft((1, 2, 3), EVEN), 3, 4)
    check_close("rows of five on a target of four", got, EVEN.double(), scale=1.0, dtype=torch.float64, advice=advice)


def test_what_of_a_run_is_judged(lab: Any) -> None:
    numbers = [[lab.place_uniform(SamplingParams(seed=9), place, use) for use in range(3)] for place in (0, 4, 5)]
    right = [[uniform(9, 3 * place + use) for use in range(3)] for place in (0, 4, 5)]
    assert numbers == right, f"places 0, 4 and 5 use {right}, got {numbers}"

    def allowed(text: list[int]) -> Tensor:
        # Behind token t only t + 1 and t + 2 may follow.
        return torch.tensor([token - text[-1] in (1, 2) for token in range(6)])

    bad = torch.stack([torch.full((6,), 1 / 6), torch.full((6,), torch.nan), torch.full((6,), 1 / 6)])
    for what, draft, most, mask, drafts in (
        ("all", Draft((1, 2, 3)), 4, None, [1, 2, 3]), ("too many", Draft((1, 2, 3)), 2, None, [1, 2]),
        ("none", Draft(()), 4, allowed, []), ("a bad row", Draft((1, 2, 3), bad), 4, None, [1]),
        ("an id outside", Draft((1, 6, 3)), 4, None, [1, 6]), ("all allowed", Draft((1, 3, 4)), 4, allowed, [1, 3, 4]),
        ("one forbidden", Draft((1, 4, 5)), 4, allowed, [1, 4]), ("the first one", Draft((4, 5)), 4, allowed, [4]),
    ):  # fmt: skip
        got, masks = lab.judgeable_drafts(draft, most, [5, 0], 6, mask)
        assert list(got) == drafts, (
            f"{what}: {draft.tokens} behind a text, at most {most}: {drafts} are judged, got {got}"
        )
        readable = [token for i, token in enumerate(drafts) if token < 6 and (
            mask is None or bool(mask([5, 0, *drafts[:i]])[token])
        )]  # fmt: skip
        texts = [[5, 0, *readable[:i]] for i in range(len(readable) + 1)]
        right = [torch.ones(6, dtype=torch.bool) if mask is None else mask(text) for text in texts]
        assert len(masks) == len(right), f"{what}: masks behind the text and {readable}, got {len(masks)}"
        for one, wanted in zip(masks, right, strict=True):
            check_equal(f"{what}: a mask", one, wanted, "The mask of a place follows from the drafts before it.")


def test_a_round_ends_with_the_text(lab: Any) -> None:
    for tokens, generated, most, stop, right in (
        ([5, 6, 7], [1], 9, (), ([5, 6, 7], False)), ([5, 6, 7], [1], 3, (), ([5, 6], True)),
        ([5, 6, 7], [1], 4, (), ([5, 6, 7], True)), ([5, 6, 7], [], 9, (6,), ([5, 6], True)),
        ([5, 6, 7], [6], 9, (7, 5), ([5], True)), ([5, 6, 7], [6], 9, (6, 7), ([5, 6], True)),
        ([4], [], 1, (), ([4], True)),
    ):  # fmt: skip
        tokens_left, ended = lab.until_the_end(tokens, generated, most, stop)
        assert (list(tokens_left), ended) == right, (
            f"{tokens} behind {generated}, at most {most}, stop at {stop}: {right}, got {tokens_left, ended}"
        )
    asked: list[list[int]] = []

    def finished(text: list[int]) -> bool:
        asked.append(list(text))
        return len(text) == 3

    got, ended = lab.until_the_end([5, 6, 7], [1], 9, (), finished)
    assert (list(got), ended) == ([5, 6], True) and asked == [[1, 5], [1, 5, 6]], (
        f"the condition is asked with all that was generated, after each token, until it says yes: {asked}, got {got}"
    )


def test_a_bad_drafter_costs_speed_only(lab: Any) -> None:
    text = text_after(PROMPT, 10)

    def drafts(tokens: Callable[[int], tuple[int, ...]], probs: Callable[[int], Tensor | None]) -> ScriptedDrafter:
        return ScriptedDrafter(lambda text, most, draws: Draft(tokens(most), probs(most)))

    bad = {
        "nothing": drafts(lambda n: (), lambda n: None),
        "ids outside": drafts(lambda n: (VOCAB,) * n, lambda n: None),
        "negative ids": drafts(lambda n: (-1,) * n, lambda n: None),
        "NaN": drafts(lambda n: (1,) * n, lambda n: torch.full((n, VOCAB), torch.nan)),
        "far too many": drafts(lambda n: (1,) * 50, lambda n: None),
        "a wider vocabulary": drafts(lambda n: (VOCAB + 1,) * n, lambda n: torch.full((n, VOCAB + 2), 1 / (VOCAB + 2))),
        "a narrower vocabulary": drafts(lambda n: (1,) * n, lambda n: torch.full((n, 4), 0.25)),
        "one axis too few": drafts(lambda n: (1,) * n, lambda n: torch.full((VOCAB,), 1 / VOCAB)),
        "rows for nothing": drafts(lambda n: (), lambda n: torch.full((n, VOCAB), 1 / VOCAB)),
    }
    good = run(lab, target(), Drafts().spec(), 10, num_drafts=3)
    assert len(good.rounds) == 3, f"a perfect drafter needs 3 rounds for 10 tokens, took {len(good.rounds)}"
    for what, drafter in bad.items():
        model = target()
        got = run(lab, model, drafter, 10, num_drafts=3)
        assert list(got.tokens) == text, f"a drafter that hands over {what}: {list(got.tokens)}, should be {text}"
        assert model.tokens == [*PROMPT, *text[:-1]], f"a drafter that hands over {what} left junk in the cache"


TARGET = ((0.5, 0.2, 0.2, 0.1), (0.1, 0.6, 0.1, 0.2), (0.3, 0.0, 0.3, 0.4), (0.25, 0.25, 0.25, 0.25))
DRAFTER = ((0.1, 0.5, 0.2, 0.2), (0.3, 0.2, 0.3, 0.2), (0.1, 0.3, 0.3, 0.3), (0.7, 0.1, 0.1, 0.1))


def replay(seed: int, last: int, count: int, k: int) -> list[int]:
    """The text that the rule and the random numbers of the places lead to, one token after another."""
    p, q = torch.tensor(TARGET).double(), torch.tensor(DRAFTER).double()
    text: list[int] = []
    while len(text) < count:
        place, context, ended = len(text), (text or [last])[-1], False
        for i in range(min(k, count - place - 1)):
            draft = inverse(q[context], uniform(seed, 3 * (place + i)))
            if uniform(seed, 3 * (place + i) + 1) < p[context, draft] / q[context, draft]:
                text.append(draft)
                context = draft
            else:
                excess = (p[context] - q[context]).clamp(min=0)
                text.append(inverse(excess / excess.sum(), uniform(seed, 3 * (place + i) + 2)))
                ended = True
                break
        if not ended and len(text) < count:
            text.append(inverse(p[context], uniform(seed, 3 * len(text) + 2)))
    return text


def test_sampled_text_follows_the_target(lab: Any) -> None:
    q = torch.tensor(DRAFTER, dtype=torch.float64)

    def propose(text: list[int], most: int, draws: list[float]) -> Draft:
        tokens = list(text)
        for i in range(most):
            tokens.append(inverse(q[tokens[-1]], draws[i]))
        return Draft(tuple(tokens[len(text) :]), q[tokens[len(text) - 1 : -1]])

    drafted = accepted = 0
    for seed in range(40):
        got = lab.speculate(
            Markov(TARGET, 40), ScriptedDrafter(propose), [seed % 4], 9, SamplingParams(seed=seed),
            num_drafts=1 + seed % 4,
        )  # fmt: skip
        right = replay(seed, seed % 4, 9, 1 + seed % 4)
        assert list(got.tokens) == right, (
            f"seed {seed}: the rule with the random numbers of each place writes {right}, got {list(got.tokens)}"
        )
        drafted += sum(r.drafted for r in got.rounds)
        accepted += sum(r.accepted for r in got.rounds)
    assert 0.3 < accepted / drafted < 0.9


def test_impossible_requests_run_nothing(lab: Any) -> None:
    model, drafter = target(), Drafts()
    good = run(lab, model, drafter.spec(), 4, num_drafts=2)
    assert list(good.tokens) == text_after(PROMPT, 4)
    model, drafter = target(capacity=20), Drafts()

    def ask(*args: Any, **more: Any) -> Any:
        return lab.speculate(model.spec(), drafter.spec(), *args, **more)

    check_refused("an empty prompt", lambda: ask([], 4))
    check_refused("an id outside the vocabulary", lambda: ask([1, VOCAB], 4))
    check_refused("no new tokens", lambda: ask(PROMPT, 0))
    check_refused("-1 drafts", lambda: ask(PROMPT, 4, num_drafts=-1))
    check_refused("18 new tokens behind 3 in a cache of 20 and 21 needed", lambda: ask(PROMPT, 19))
    assert not model.calls and not model.truncations and not drafter.calls, "a refused call must run nothing"


@pytest.mark.integration
def test_your_own_rule_drives_the_real_model(lab: Any) -> None:
    try:
        bundled_folder()
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")
    prompt = list(range(1000, 1012))
    plain = lab.speculate(Cached(Checkpoint("smollm2"), 64), ScriptedDrafter(lambda *_: Draft(())), prompt, 8)
    text = list(plain.tokens)

    def propose(given: list[int], most: int, draws: list[float]) -> Draft:
        place = len(given) - len(prompt)
        guess = text[place : place + most]
        return Draft((*guess[:2], *[7] * (len(guess) - 2)))

    fast = lab.speculate(Cached(Checkpoint("smollm2"), 64), ScriptedDrafter(propose), prompt, 8, num_drafts=3)
    assert list(fast.tokens) == text, f"speculation wrote {list(fast.tokens)}, plain decoding {text}"
    assert len(plain.rounds) == 8 and len(fast.rounds) <= 4, (
        f"8 tokens took {len(plain.rounds)} passes without drafts and {len(fast.rounds)} with two good ones a round"
    )
