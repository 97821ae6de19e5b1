"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import torch
from torch import Tensor

from labkit.checkpoints.loading import Model
from labkit.checks import check_tokens

from .adapters import AdaptedWeights, Adapters
from .back_end import choose_device, make_runner
from .beam_search import BeamSearch, BeamSearchParams
from .detokenizer import TextStream
from .drafters import make_speculator
from .grammar import Constraint, GrammarCompiler, Matcher
from .judging import Verdict
from .kv_formats import BY_BLOCK
from .kv_manager import KVManager
from .kv_memory import kv_memory
from .metrics import Metrics
from .models.loading import LoadedModel
from .request import Completion, FinishReason, Request, Status, TokenLogprob
from .sampler import Row, adjust_logits, distribution, logprobs_of, sample
from .sampling_params import SamplingParams
from .scheduler import Scheduler, SchedulerConfig
from .speculation import SpeculationConfig
from .step import Step
from .weights.loading import PLAIN, load
from .weights.packing import Packing

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class EngineConfig:
    """How large the engine is.

    Args:
        scheduler: limits of a step.
        num_blocks: blocks of the pool.
        block_size: tokens in a block.
        num_host_blocks: blocks in host memory, for preemption by swap.
        prefix_cache: "hash", "radix" or "none".
        weights: how they are held, a name in `weights.formats`; a `LoadedModel` keeps its own.
        packing: how quantized ones run.
        kv_dtype: how keys and values are stored: "fp32", "bf16", "fp16", "int8", "fp8", "kivi4" or "kivi2"; None for
            the model's type.
        speculation: who drafts: a name in `speculation.DRAFTERS`, or more to say about it; None or "none" for plain
            decoding.
        adapters: folders of adapters in peft's layout, by the names that requests ask by.
        device: "cpu" or "cuda"; None means a GPU if there is one, and a CPU for weights in codes, KIVI and adapters. A
            `LoadedModel` stays where it is.
        attention: "torch" or "triton"; see `back_end.make_runner`, as for all that follows.
        cuda_graphs: whether steps in which all decode are recorded, and replayed in one launch.
        compile: whether such steps are compiled by torch.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_blocks: int = 1024
    block_size: int = 16
    num_host_blocks: int = 0
    prefix_cache: str = "hash"
    weights: str = "fp32"
    packing: Packing = field(default_factory=Packing)
    kv_dtype: str | None = None
    speculation: SpeculationConfig | str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    attention: str | None = None
    cuda_graphs: bool | None = None
    compile: bool = False


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


@dataclass
class _Answer:
    """The engine's side of a request: its text."""

    group: str
    index: int
    text: TextStream
    matcher: Matcher | None = None
    num_tokens: int = 0
    """Tokens that belong to the answer: all but the one that stopped it."""


class Engine:
    """Serves many requests on one model.

    Args:
        model: a name or path as in `labkit.checkpoints.load`, of any family in `models.loading`, or a model that is
            loaded already.
        config: sizes and limits.

    Raises:
        ValueError: a configuration that can't work.
        CheckpointError: the model can't be loaded.
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
        self._runner = make_runner(
            loaded.model, pool, config.scheduler.max_running, context, features, attention=config.attention,
            cuda_graphs=config.cuda_graphs, compile=config.compile, adapters=bool(config.adapters),
        )  # fmt: skip
        self._answers: dict[Request, _Answer] = {}
        self._groups: dict[str, list[Request]] = {}
        self._searches: dict[str, BeamSearch] = {}
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
        return None if self._weight_bytes is None else self._weight_bytes + round(length * self._token_bytes)

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
                followed, an unknown adapter, or a request that could never run. Nothing has changed then.
        """
        params = params or SamplingParams()
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
            self._answers[request] = _Answer(name, index, TextStream(self.tokenizer, params.stop), matchers[index])
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
        self._searches[name] = BeamSearch(params, requests, ends)
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
        masks = self._begin_masks(step)
        self._adapters.begin(step.work)
        logits = self._runner.run(step)
        rows = self._rows(step)
        verdicts = self._draw(logits, rows, masks) if rows else {}
        emitted = {request: list(verdict.tokens) for request, verdict in verdicts.items()}
        paths = {request: verdict.path for request, verdict in verdicts.items()}
        reports = self._reports(logits, [row for row in rows if row.node in (-1, *paths[row.request])], emitted)
        self._runner.keep(self._scheduler.commit(step, emitted, paths))
        progress = [self._advance(request, tokens, reports.get(request, ())) for request, tokens in emitted.items()]
        return progress + self._search_on(step, logits)

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
        settings = [params] * len(several) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(settings) != len(several):
            raise ValueError(f"{len(several)} prompts need as many params, got {len(settings)}")
        return self._serve([
            (partial(self.add_request, prompt, one), (one or SamplingParams()).n)
            for prompt, one in zip(several, settings, strict=True)
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
            AssertionError: blocks have leaked.
        """
        assert not self.has_work, "the engine is at work"
        self._memory.check_idle()

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        ids = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        return tuple(check_tokens("prompt", ids, self._vocab_size))

    def _name(self, wanted: str | None) -> str:
        name = next(self._names) if wanted is None else wanted
        if name in self._groups:
            raise ValueError(f"a request named {name!r} is being served; take another name")
        return name

    def _add(self, name: str, requests: list[Request]) -> None:
        """Hands requests of one prompt to the scheduler; the others start when the first has computed it."""
        first, *others = requests
        first.siblings = others
        for other in others:
            other.leader = first
        self._scheduler.add(first)
        self._groups[name] = requests

    def _serve(self, wishes: Sequence[tuple[Callable[[], str], int]]) -> list[list[Completion]]:
        """Takes in requests, all or none, and steps until each has its number of answers."""
        names: list[str] = []
        try:
            for add, _ in wishes:
                names.append(add())
        except ValueError:
            for name in names:
                self.abort(name)
            raise
        done: dict[str, list[Completion]] = {name: [] for name in names}
        while any(len(done[name]) < wanted for name, (_, wanted) in zip(names, wishes, strict=True)):
            for progress in self.step():
                if progress.completion is not None and progress.request_id in done:
                    done[progress.request_id].append(progress.completion)
        return [sorted(done[name], key=lambda one: one.index) for name in names]

    def _search_on(self, step: Step, logits: Tensor) -> list[Progress]:
        """Gives searches their beams' logits, lets those go on that have all, and tells what the others found."""
        index = 0
        for work in step.work:
            if work.num_rows and work.request.is_beam:
                self._searches[_group(work.request)].offer(work.request, logits[index])
            index += work.num_rows
        for search in self._searches.values():
            if search.is_due:
                self._scheduler.branch(search.decide())
        return [
            Progress(name, one.index, one.text, one.tokens, (), one)
            for name in [name for name, search in self._searches.items() if search.is_done]
            for one in self._close_search(name)
        ]

    def _close_search(self, name: str) -> list[Completion]:
        """Ends a search; its answers, the best first, as far as there are any."""
        search, first = self._searches.pop(name), self._groups.pop(name)[0]
        answers = search.answers()
        for beam in search.beams:
            self._scheduler.finish(beam, FinishReason.ABORT)
        self.metrics.num_generated_tokens += sum(len(one.tokens) for one in answers)
        self.metrics.count_finished(first)
        return [
            Completion(
                f"{name}.{index}", index, self.tokenizer.decode(one.tokens), one.tokens, one.reason.value,
                len(first.prompt), first.num_cached, score=one.score,
            )
            for index, one in enumerate(answers)
        ]  # fmt: skip

    def _matcher(self, constraint: Constraint | None) -> Matcher | None:
        """Follows one answer; the vocabulary is made ready for it when the first constraint comes."""
        if constraint is None:
            return None
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self._vocab_size)
        return self._grammars.start(constraint)

    def _rows(self, step: Step) -> list[Row]:
        """Whose next tokens the rows of the logits are to give."""
        rows, index = list[Row](), 0
        for work in step.work:
            if work.gives_token and not work.request.is_beam:
                for node, path in enumerate(work.paths, start=-1):
                    drafts = tuple(work.drafts[i] for i in path)
                    rows.append(Row(index + node + 1, work.request, drafts, node))
                # Samples of one prompt start from the same logits, each with its own random numbers.
                rows += [Row(index, one) for one in work.request.siblings if one.status is not Status.FINISHED]
            index += work.num_rows
        return rows

    def _begin_masks(self, step: Step) -> dict[Request, Future[Tensor]]:
        """Starts the masks of all that is constrained, to be ready when the forward pass is."""
        masks = {}
        for work in step.work:
            for request in (work.request, *work.request.siblings) if work.gives_token else ():
                matcher = self._answers[request].matcher if request in self._answers else None
                if matcher is not None:
                    own = request is work.request
                    masks[request] = matcher.begin_masks(work.drafts, work.parents) if own else matcher.begin_masks(())
        return masks

    def _draw(self, logits: Tensor, rows: list[Row], masks: dict[Request, Future[Tensor]]) -> dict[Request, Verdict]:
        """The tokens that each request grows by, and which drafts are among them."""
        wanted = [row.index for row in rows]
        # Each row once, in order, is what a step of decodes wants; then nothing has to be copied.
        is_whole = not masks and wanted == list(range(len(logits)))
        adjusted = adjust_logits(logits if is_whole else logits[self._indices(wanted)], rows)
        allowed = {
            place: masks[row.request].result()[row.node + 1] for place, row in enumerate(rows) if row.request in masks
        }
        # Behind a draft that the grammar forbids nothing is allowed, and nothing will be read either.
        allowed = {place: mask for place, mask in allowed.items() if bool(mask.any())}
        if allowed:
            forbidden = ~torch.stack(list(allowed.values())).to(adjusted.device)
            constrained = self._indices(list(allowed))
            adjusted[constrained] = adjusted[constrained].masked_fill(forbidden, -torch.inf)
        drawn = sample(adjusted, rows, self._runner.draw)
        places: dict[Request, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(row.request, []).append(place)
        verdicts = {}
        for request, own in places.items():
            if self._speculator is None:
                verdicts[request] = Verdict((drawn[own[0]],))
                continue
            if len(own) > 1:
                self._speculator.observe(request, logits[self._indices([rows[place].index for place in own])])
            verdicts[request] = self._speculator.judge(
                request, [drawn[place] for place in own], partial(self._distributions, adjusted, rows, own)
            )
            self.metrics.num_accepted_tokens += len(verdicts[request].path)
        return verdicts

    def _distributions(self, logits: Tensor, rows: list[Row], places: list[int]) -> Tensor:
        """What some of the rows are drawn from; drafts of chance are judged on the host."""
        return distribution(logits[self._indices(places)], [rows[place] for place in places]).cpu()

    def _reports(
        self, logits: Tensor, rows: list[Row], emitted: dict[Request, list[int]]
    ) -> dict[Request, list[TokenLogprob]]:
        """What is to be told of the new tokens, for those that asked."""
        told = [
            (row, wanted)
            for row in rows
            if (wanted := row.request.params.logprobs) is not None and len(row.drafts) < len(emitted[row.request])
        ]
        reports: dict[Request, list[TokenLogprob]] = {}
        if told:
            own = logits[self._indices([row.index for row, _ in told])]
            tokens = [emitted[row.request][len(row.drafts)] for row, _ in told]
            found = logprobs_of(own, tokens, [wanted for _, wanted in told])
            for (row, _), report in zip(told, found, strict=True):
                reports.setdefault(row.request, []).append(report)
        return reports

    def _indices(self, values: list[int]) -> Tensor:
        """Where to look in tensors of the device."""
        return torch.tensor(values, device=self.device)

    def _advance(self, request: Request, tokens: Sequence[int], reports: Sequence[TokenLogprob]) -> Progress:
        """Takes a request's new tokens into its text, and ends it where it must end."""
        now = time.monotonic()
        request.times.first_token = request.times.first_token or now
        request.times.last_token = now
        request.logprobs += reports
        self.metrics.num_generated_tokens += len(tokens)
        answer = self._answers[request]
        if answer.matcher is not None:
            answer.matcher.accept(tokens)
        before = answer.num_tokens
        piece, reason = self._read(request, answer, tokens)
        told = answer.num_tokens - before
        completion = None
        if reason is not None:
            self._scheduler.finish(request, reason)
            if reason is FinishReason.LENGTH:
                piece += answer.text.finish()
            completion = self._close(request)
        # What ended the answer, and what was accepted behind it, are no part of it.
        return Progress(answer.group, answer.index, piece, tuple(tokens[:told]), tuple(reports[:told]), completion)

    def _read(self, request: Request, answer: _Answer, tokens: Sequence[int]) -> tuple[str, FinishReason | None]:
        """The text that new tokens release, and why the answer ends with them, if it does."""
        params, piece = request.params, ""
        for token in tokens:
            if token in params.stop_token_ids or (token in self._stop_ids and not params.ignore_eos):
                return piece + answer.text.finish(), FinishReason.STOP
            answer.num_tokens += 1
            piece += answer.text.feed(token)
            if answer.text.stopped:
                return piece, FinishReason.STOP
            if answer.matcher is not None and answer.matcher.is_complete and token == tokens[-1]:
                return piece + answer.text.finish(), FinishReason.STOP
            if answer.num_tokens == params.max_tokens:
                return piece, FinishReason.LENGTH
        return piece, None

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


def _group(request: Request) -> str:
    """The name that all requests of a prompt share."""
    return request.request_id.rpartition(".")[0]


def _several(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or many as a list; a list of numbers is one."""
    if isinstance(prompts, str):
        return [prompts]
    found = list(prompts)
    if found and all(isinstance(item, int) for item in found):
        return [[item for item in found if isinstance(item, int)]]
    if any(isinstance(item, int) for item in found):
        raise ValueError("prompts mix token ids with texts or lists; give one prompt or a list of prompts")
    return [item for item in found if not isinstance(item, int)]
