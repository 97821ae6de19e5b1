"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch

from labkit.checkpoints.loading import Model
from labkit.checks import check_tokens

from .answer import Answer
from .back_end import choose_device, make_runner
from .beam_search import BeamSearch, BeamSearchParams
from .beam_searches import BeamSearches
from .detokenizer import TextStream
from .drafting.drafters import make_speculator
from .drawing import Drawing
from .engine_config import EngineConfig
from .grammar import Constraint, GrammarCompiler, Matcher
from .kv_manager import KVManager
from .memory.kv_formats import BY_BLOCK
from .memory.kv_memory import kv_memory
from .metrics import Metrics
from .models.adapters import AdaptedWeights, Adapters
from .models.loading import LoadedModel
from .request import Completion, FinishReason, Request, Status, TokenLogprob
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .step import Step
from .weights.loading import PLAIN, load

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Progress:
    """What a step has brought one request.

    Args:
        request_id: whose it is.
        index: which sample of its prompt.
        text: the piece of text that can be shown now; may be empty.
        tokens: the tokens that the answer grew by.
        logprobs: one for each of them, if asked for.
        completion: the whole answer, with the step that ends it.
    """

    request_id: str
    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    completion: Completion | None = None


class Engine:
    """Serves many requests on one model.

    Args:
        model: a name or path as in `labkit.checkpoints.load`, of any family in `models.loading`, or a model that is
            loaded already.
        config: what it is made of; by default the sizes of `EngineConfig`.

    Raises:
        ValueError: a configuration that can't work.
        CheckpointError: the model or an adapter can't be loaded.
    """

    def __init__(self, model: str | Model | LoadedModel, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        self._adapters = Adapters(config.adapters)
        if isinstance(model, LoadedModel):
            loaded, lies_on = model, model.model.device.type
            if config.device not in (None, lies_on):
                raise ValueError(f"device is {config.device!r}, and the model was loaded to {lies_on!r}")
            if config.adapters:
                raise ValueError(
                    "adapters need the weights of a model; give its name or path, or what labkit has loaded"
                )
        else:
            cpu_only = config.weights not in PLAIN or config.kv_dtype in BY_BLOCK or bool(config.adapters)
            adapt = partial(AdaptedWeights, adapters=self._adapters) if config.adapters else None
            loaded = load(model, config.weights, config.packing, choose_device(config.device, cpu_only), adapt)
        context = min(config.scheduler.max_context, loaded.model.max_context)
        self.config = replace(config, scheduler=replace(config.scheduler, max_context=context))
        self.tokenizer = loaded.tokenizer
        self.metrics = Metrics()
        self._vocab_size = loaded.model.vocab_size
        self._stop_ids = frozenset(loaded.tokenizer.stop_ids)
        self._memory = KVManager(
            config.num_blocks, config.block_size, config.prefix_cache, config.num_host_blocks,
            seals_blocks=config.kv_dtype in BY_BLOCK,
        )  # fmt: skip
        self._scheduler = Scheduler(self.config.scheduler, self._memory)
        self._speculator, features = make_speculator(
            config.speculation, loaded.model, lambda: self.num_running, config.num_blocks, config.block_size,
            config.num_host_blocks, trees=config.kv_dtype not in BY_BLOCK,
        )  # fmt: skip
        pool = kv_memory(
            config.kv_dtype, loaded.model.kv_shape, config.num_blocks, config.block_size, config.num_host_blocks,
            loaded.model.dtype, loaded.model.device, config.scheduler.max_running,
            0 if self._speculator is None else self._speculator.num_drafts,
        )  # fmt: skip
        self.kv_bytes_per_token = pool.num_bytes / (config.num_blocks * config.block_size)
        """Bytes of the KV pool, all that it keeps besides included, for each token that it has room for."""
        self._weight_bytes = loaded.model.num_bytes_read if loaded.model.is_static else None
        self._token_bytes = pool.num_bytes_per_token
        self._tokens_read = loaded.model.num_tokens_read
        self._runner = make_runner(
            loaded.model, pool, config.scheduler.max_running, context, features, attention=config.attention,
            cuda_graphs=config.cuda_graphs, compile=config.compile, adapters=bool(config.adapters),
        )  # fmt: skip
        self._drawing = Drawing(self._speculator, self._runner.draw, self._runner.device)
        self._answers: dict[Request, Answer] = {}
        self._groups: dict[str, list[Request]] = {}
        self._searches = BeamSearches(self._scheduler, loaded.tokenizer.decode)
        self._grammars: GrammarCompiler | None = None
        self._names = (f"request-{number}" for number in count())

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return not self._scheduler.is_idle

    @property
    def device(self) -> torch.device:
        """Where steps are computed."""
        return self._runner.device

    def decode_bytes(self, length: int) -> int | None:
        """Bytes that a step has to read to give one request its next token.

        Args:
            length: tokens of its text.

        Returns:
            None if weights are codes, adapters change them, or a router chooses among them.
        """
        if self._weight_bytes is None:
            return None
        return self._weight_bytes + round(self._tokens_read(length) * self._token_bytes)

    @property
    def num_running(self) -> int:
        """Requests with blocks."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks."""
        return self._scheduler.num_waiting

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0,
        salt: str | None = None, constraint: Constraint | None = None, adapter: str | None = None,
    ) -> str:  # fmt: skip
        """Takes in a request; `step` works on it from now on.

        Args:
            prompt: text, or token ids.
            params: what it asks for.
            request_id: its name; made up if not given.
            priority: smaller is more urgent.
            salt: requests share cached prefixes only with those of an equal salt.
            constraint: what its answer must look like.
            adapter: name of the adapter to compute it with; None for the plain model.

        Returns:
            Its name.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, a name that is taken, a constraint that can't be
                followed, an unknown adapter, a priority that is no int, or a request that could never run. Nothing has
                changed then.
        """
        params = _settings(params)
        self._adapters.check(adapter)
        ids, name = self._ids(prompt), self._name(request_id)
        for token, _ in params.logit_bias:
            if token >= self._vocab_size:
                raise ValueError(f"logit_bias names token {token}; ids run from 0 to {self._vocab_size - 1}")
        matchers = [self._matcher(constraint) for _ in range(params.n)]
        requests = [
            Request(
                f"{name}.{index}", ids, replace(params, seed=params.seed + index), self._memory.new_table(),
                priority=priority, salt=salt, adapter=adapter,
            )
            for index in range(params.n)
        ]  # fmt: skip
        self._add(name, requests)
        for index, request in enumerate(requests):
            self._answers[request] = Answer(name, index, TextStream(self.tokenizer, params.stop), matchers[index])
        return name

    def add_beam_search(
        self, prompt: Prompt, params: BeamSearchParams | None = None, *, request_id: str | None = None,
        priority: int = 0, salt: str | None = None, adapter: str | None = None,
    ) -> str:  # fmt: skip
        """Takes in a search for likely texts; `step` works on it, and brings all its answers when it is done.

        Args:
            prompt: text, or token ids.
            params: what it looks for.
            request_id: as in `add_request`, and the others likewise.

        Returns:
            Its name.

        Raises:
            ValueError: as `add_request`.
        """
        params = params or BeamSearchParams()
        self._adapters.check(adapter)
        ids, name = self._ids(prompt), self._name(request_id)
        settings = SamplingParams(temperature=0.0, max_tokens=params.max_tokens)
        requests = [
            Request(
                f"{name}.{index}", ids, settings, self._memory.new_table(), priority=priority, salt=salt,
                adapter=adapter, is_beam=True,
            )
            for index in range(params.beam_width)
        ]  # fmt: skip
        self._add(name, requests)
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._stop_ids)
        self._searches.start(name, BeamSearch(params, requests, ends))
        return name

    def abort(self, request_id: str) -> list[Completion]:
        """Ends a request and all its samples at once; an unknown or ended one is no error.

        Returns:
            What had been written by then, one for each sample that was alive.
        """
        if request_id in self._searches:
            return self._close_search(request_id)
        ended = []
        for request in reversed(self._groups.get(request_id, [])):  # those that wait for the first go before it
            if request.status is not Status.FINISHED:
                self._scheduler.finish(request, FinishReason.ABORT)
                ended.append(self._close(request))
        return ended[::-1]

    def step(self) -> list[Progress]:
        """Computes one step.

        Returns:
            What it has brought, for each request that got tokens. Without work, nothing.
        """
        if not self.has_work:
            return []
        step = self._scheduler.schedule(None if self._speculator is None else self._speculator.propose)
        self._count(step)
        if not step.work:
            return []
        masks = self._drawing.begin_masks(step, self._matcher_of)
        self._adapters.begin(step.work)
        logits = self._runner.run(step)
        rows = self._drawing.rows(step)
        verdicts = self._drawing.draw(logits, rows, masks) if rows else {}
        emitted = {request: list(verdict.tokens) for request, verdict in verdicts.items()}
        paths = {request: verdict.path for request, verdict in verdicts.items()}
        self.metrics.num_accepted_tokens += sum(len(path) for path in paths.values())
        kept = [row for row in rows if row.node in (-1, *paths[row.request])]
        reports = self._drawing.reports(logits, kept, emitted)
        self._runner.keep(self._scheduler.commit(step, emitted, paths))
        progress = [self._advance(request, tokens, reports.get(request, ())) for request, tokens in emitted.items()]
        return progress + [
            Progress(name, one.index, one.text, one.tokens, (), one)
            for name in self._searches.advance(step, logits)
            for one in self._close_search(name)
        ]

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[list[Completion]]:
        """Answers prompts, all at once.

        Args:
            prompts: one or many.
            params: for all of them, or one for each.

        Returns:
            For each prompt its `n` answers, in order.

        Raises:
            ValueError: as `add_request`; none of the prompts is answered then.
        """
        several = _several(prompts)
        given: Sequence[object] = params if isinstance(params, (list, tuple)) else [params] * len(several)
        settings = [_settings(one) for one in given]
        if len(settings) != len(several):
            raise ValueError(f"{len(several)} prompts need as many params, got {len(settings)}")
        return self._serve([
            (partial(self.add_request, prompt, one), one.n) for prompt, one in zip(several, settings, strict=True)
        ])  # fmt: skip

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams | None = None
    ) -> list[list[Completion]]:
        """Searches for the likeliest answers to prompts, all at once.

        Args:
            prompts: one or many.
            params: what all of them look for.

        Returns:
            For each prompt its `num_answers` answers, the best first, with their scores.

        Raises:
            ValueError: as `add_request`; none of the prompts is answered then.
        """
        params = params or BeamSearchParams()
        return self._serve([
            (partial(self.add_beam_search, prompt, params), params.num_answers) for prompt in _several(prompts)
        ])  # fmt: skip

    def check_idle(self) -> None:
        """With nothing to do, every block must be free or cached.

        Raises:
            AssertionError: blocks have leaked, or there is something to do.
        """
        assert not self.has_work, "the engine is at work"
        self._memory.check_idle()

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise ValueError(f"prompt must be a text or a list of token ids, got {prompt!r}")
        ids = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        return tuple(check_tokens("prompt", ids, self._vocab_size))

    def _name(self, wanted: str | None) -> str:
        if wanted is None:
            return next(name for name in self._names if name not in self._groups)
        if wanted in self._groups:
            raise ValueError(f"a request named {wanted!r} is being served; take another name")
        return wanted

    def _add(self, name: str, requests: list[Request]) -> None:
        """Hands requests of one prompt to the scheduler; the others start when the first has computed it."""
        first, *others = requests
        first.siblings = others
        for other in others:
            other.leader = first
        self._scheduler.add(first)
        self._groups[name] = requests

    def _serve(self, wishes: Sequence[tuple[Callable[[], str], int]]) -> list[list[Completion]]:
        """Takes in requests, all or none, and steps until each has its number of answers.

        Whatever breaks it off, an interrupt from the keyboard or a drafter that fails, none of them is left behind.
        """
        names: list[str] = []
        try:
            for add, _ in wishes:
                names.append(add())
            done: dict[str, list[Completion]] = {name: [] for name in names}
            while any(len(done[name]) < wanted for name, (_, wanted) in zip(names, wishes, strict=True)):
                for progress in self.step():
                    if progress.completion is not None and progress.request_id in done:
                        done[progress.request_id].append(progress.completion)
        except BaseException:  # a notebook's interrupt, too, must leave nothing behind that is served on
            for name in names:
                self.abort(name)
            raise
        return [sorted(done[name], key=lambda one: one.index) for name in names]

    def _close_search(self, name: str) -> list[Completion]:
        """Ends a search, and tells what it has found."""
        found, (first, *_) = self._searches.close(name), self._groups.pop(name)
        self.metrics.num_generated_tokens += sum(len(one.tokens) for one in found)
        self.metrics.count_finished(first)
        return found

    def _matcher(self, constraint: Constraint | None) -> Matcher | None:
        """Follows one answer; the vocabulary is made ready for it when the first constraint comes."""
        if constraint is None:
            return None
        if not isinstance(constraint, Constraint):
            raise ValueError(f"constraint must be a Constraint, such as Constraint.json_schema(…), got {constraint!r}")
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self._vocab_size)
        return self._grammars.start(constraint)

    def _matcher_of(self, request: Request) -> Matcher | None:
        """Of a request whose answer is constrained."""
        return self._answers[request].matcher if request in self._answers else None

    def _advance(self, request: Request, tokens: Sequence[int], reports: Sequence[TokenLogprob]) -> Progress:
        """Takes a request's new tokens into its text, and ends it where it must end."""
        now = time.monotonic()
        request.times.first_token = request.times.first_token or now
        request.times.last_token = now
        request.logprobs += reports
        self.metrics.num_generated_tokens += len(tokens)
        answer = self._answers[request]
        before = answer.num_tokens
        piece, reason = answer.read(tokens, request.params, self._stop_ids)
        told = answer.num_tokens - before
        completion = None
        if reason is not None:
            self._scheduler.finish(request, reason)
            completion = self._close(request)
        # What ended the answer, and what was accepted behind it, are no part of it.
        return Progress(answer.group, answer.index, piece, tuple(tokens[:told]), tuple(reports[:told]), completion)

    def _close(self, request: Request) -> Completion:
        """The answer of a request that has ended; the engine forgets the request."""
        answer = self._answers.pop(request)
        if self._speculator is not None:
            self._speculator.forget(request)
        self.metrics.count_finished(request)
        group = self._groups[answer.group]
        if all(one.status is Status.FINISHED for one in group):
            del self._groups[answer.group]
        assert request.finish_reason is not None
        return Completion(
            request.request_id, answer.index, answer.text.text, tuple(request.output[: answer.num_tokens]),
            request.finish_reason.value, len(request.prompt), request.num_cached,
            tuple(request.logprobs[: answer.num_tokens]) if request.params.logprobs is not None else None,
        )  # fmt: skip

    def _count(self, step: Step) -> None:
        self.metrics.num_steps += 1
        self.metrics.num_computed_tokens += step.num_tokens
        self.metrics.num_preemptions += len(step.preempted)
        self.metrics.num_drafted_tokens += sum(work.num_drafts for work in step.work)


def _settings(params: object) -> SamplingParams:
    """What was asked for, or what goes without saying; refuses the likes of a dict, and lab 07's smaller settings."""
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(f"params must be solutions.engine.SamplingParams or None, got {params!r}")
    return params or SamplingParams()


def _several(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or many as a list; a list of numbers is one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a text, a list of token ids, or a list of either, got {prompts!r}")
    found = list(prompts)
    if found and all(isinstance(item, int) for item in found):
        return [[item for item in found if isinstance(item, int)]]
    if any(isinstance(item, int) for item in found):
        raise ValueError("prompts mix token ids with texts or lists; give one prompt or a list of prompts")
    return [item for item in found if not isinstance(item, int)]
