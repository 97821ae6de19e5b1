"""The beam searches under way: what a step brings them, and what they have found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .beam_search import BeamSearch
from .request import Completion, FinishReason, Request
from .scheduler import Scheduler
from .step import Step


class BeamSearches:
    """Searches by name.

    Args:
        scheduler: of their beams.
        decode: the text of token ids.
    """

    def __init__(self, scheduler: Scheduler, decode: Callable[[Sequence[int]], str]) -> None:
        self._scheduler = scheduler
        self._decode = decode
        self._searches: dict[str, BeamSearch] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._searches

    def start(self, name: str, search: BeamSearch) -> None:
        """Takes in a search whose beams the scheduler has; their names are `name` with a number behind a dot."""
        self._searches[name] = search

    def advance(self, step: Step, logits: Tensor) -> list[str]:
        """Gives searches their beams' logits, and lets those go on that have all.

        Args:
            step: that was committed.
            logits: `[rows, vocab_size]`, in the order of the step's work.

        Returns:
            Names of those that are done.
        """
        index = 0
        for work in step.work:
            if work.num_rows and work.request.is_beam:
                self._searches[_name_of(work.request)].offer(work.request, logits[index])
            index += work.num_rows
        for search in self._searches.values():
            if search.is_due:
                self._scheduler.branch(search.decide())
        return [name for name, search in self._searches.items() if search.is_done]

    def close(self, name: str) -> list[Completion]:
        """Ends a search and all its beams; its answers, the best first, as far as there are any."""
        search = self._searches.pop(name)
        first, answers = search.beams[0], search.answers()
        for beam in search.beams:
            self._scheduler.finish(beam, FinishReason.ABORT)
        return [
            Completion(
                f"{name}.{index}", index, self._decode(one.tokens), one.tokens, one.reason.value, len(first.prompt),
                first.num_cached, score=one.score,
            )
            for index, one in enumerate(answers)
        ]  # fmt: skip


def _name_of(beam: Request) -> str:
    """Of its search."""
    return beam.request_id.rpartition(".")[0]
