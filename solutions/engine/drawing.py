"""From a step's logits to the tokens that each request grows by: constraints, draws, drafts judged, reports."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from .drafting.judging import Verdict
from .drafting.speculation import Speculator
from .grammar import Matcher
from .request import Request, Status, TokenLogprob
from .sampler import Draw, Row, adjust_logits, distribution, logprobs_of, sample
from .step import Step

Matchers = Callable[[Request], Matcher | None]
"""The constraint that a request's answer follows, if it follows one."""


class Drawing:
    """Draws the tokens of a step.

    Args:
        speculator: judges drafts; None if nobody drafts.
        draw: takes one token from each row of a batch of distributions.
        device: where logits lie.
    """

    def __init__(self, speculator: Speculator | None, draw: Draw, device: torch.device) -> None:
        self._speculator = speculator
        self._draw = draw
        self._device = device

    def rows(self, step: Step) -> list[Row]:
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

    def begin_masks(self, step: Step, matchers: Matchers) -> dict[Request, Future[Tensor]]:
        """Starts the masks of all that is constrained, to be ready when the forward pass is."""
        masks = {}
        for work in step.work:
            for request in (work.request, *work.request.siblings) if work.gives_token else ():
                matcher = matchers(request)
                if matcher is not None:
                    own = request is work.request
                    masks[request] = matcher.begin_masks(work.drafts, work.parents) if own else matcher.begin_masks(())
        return masks

    def draw(self, logits: Tensor, rows: list[Row], masks: dict[Request, Future[Tensor]]) -> dict[Request, Verdict]:
        """Draws, and judges drafts.

        Args:
            logits: of the step, `[logits, vocab_size]`; several of `rows` may read one of them.
            rows: as `rows` gives them.
            masks: as `begin_masks` gives them.

        Returns:
            The tokens that each request grows by, and which drafts are among them.

        Raises:
            ValueError: as `sample`.
        """
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
        drawn = sample(adjusted, rows, self._draw)
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
        return verdicts

    def _distributions(self, logits: Tensor, rows: list[Row], places: list[int]) -> Tensor:
        """What some of the rows are drawn from; drafts of chance are judged on the host."""
        return distribution(logits[self._indices(places)], [rows[place] for place in places]).cpu()

    def reports(
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
        return torch.tensor(values, device=self._device)
