"""A request: what is known of its text, how much of that is computed, and where its keys and values lie."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from solutions.kv_cache.block_table import BlockTable

from .sampling_params import SamplingParams


class Status(Enum):
    """Where a request is.

    WAITING ──admitted──► RUNNING ──ended──► FINISHED
       ▲                     │
       └──── preempted ──────┘    (with blocks in host memory if preemption swaps)

    A beam that has computed all it knows is RESTING until the other beams of its search have done so, too. It keeps its
    blocks as long as nobody needs them.
    """

    WAITING = "waiting"
    RUNNING = "running"
    RESTING = "resting"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended, in the words of the OpenAI API where that has any."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was.

    Args:
        token: its id.
        logprob: natural logarithm of its probability under the model's distribution, before temperature and filters.
        top: the most likely tokens and theirs, falling.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Times:
    """When things happened to a request, in seconds of `time.monotonic`; None if they have not."""

    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None


@dataclass(eq=False)
class Request:
    """One answer in the making. `n` samples of a prompt are `n` requests that share its blocks.

        tokens         prompt ─────────────► output ──►
        num_computed   ██████████████████████░            keys and values of these lie in the table's blocks
        missing                              ▲ ▲ ▲        what a step computes: these, and drafts behind them

    Args:
        request_id: unique among those that live.
        prompt: token ids, at least one.
        params: what it asks for.
        table: its blocks.
        priority: smaller is more urgent.
        arrival: number in the order of arrival; of equal priority the first comes first.
        salt: separates tenants in the prefix cache.
        adapter: name of the adapter that its tokens are computed with; None for the plain model.
        is_beam: whether a search chooses its tokens.

    Of its blocks the first `num_findable` are those that the prefix cache finds for its text; `host_blocks` hold what
    it had computed when it was swapped out. `num_cached` tokens of its prompt were computed for others before. It
    arrived in the scheduler's step `waiting_since`, from which its rank among those who wait follows.

    Until its prompt is computed, the first of several samples is the `leader` of its `siblings`; then they start.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    table: BlockTable
    priority: int = 0
    arrival: int = 0
    salt: str | None = None
    adapter: str | None = None
    is_beam: bool = False

    status: Status = Status.WAITING
    tokens: list[int] = field(init=False)
    num_computed: int = 0
    host_blocks: tuple[int, ...] = ()
    num_cached: int = 0
    num_findable: int = 0
    waiting_since: int = 0
    siblings: list[Request] = field(default_factory=list)
    leader: Request | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    times: Times = field(default_factory=Times)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_missing(self) -> int:
        """Tokens that are known and not yet computed; at least one while it lives."""
        return len(self.tokens) - self.num_computed

    @property
    def max_length(self) -> int:
        """The length at which it must end, prompt included."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest token are computed."""
        return self.num_missing == 1 and self.num_output > 0


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    Args:
        request_id: of the request; samples of one prompt share the part before the last dot.
        index: which sample of its prompt.
        text: the answer, without what stopped it.
        tokens: its token ids, without the token that stopped it.
        finish_reason: "stop", "length" or "abort".
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: tokens of the prompt that the prefix cache had.
        logprobs: one for each token, if they were asked for.
        score: of a beam search; see `Hypothesis`.
    """

    request_id: str
    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    score: float | None = None


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)
