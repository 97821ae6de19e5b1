"""The independent oracle: transformers in float64, and the rule for ties in greedy runs.

Two things in transformers go through float32 in a float64 model: the softmax of its eager attention, hence SDPA here
(on whole sequences, where its causal mask is the right one), and RMSNorm, which is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from grader.judge.numerics import check_form, error_bound, largest_error
from labkit.config import ModelConfig
from labkit.transformers_model import build_transformers_model

MOST_TIES = 0.001


class ReadAhead:
    """Logits of a causal model by context, with whole sequences run once for all their prefixes.

    Args:
        run: maps a sequence to logits `[tokens, vocab_size]`, recomputed from its first token.
    """

    def __init__(self, run: Callable[[list[int]], Tensor]) -> None:
        self._run = run
        self._sequence: list[int] = []
        self._rows = torch.empty(0, 0)

    def ahead(self, tokens: list[int]) -> None:
        """Run a sequence whose prefixes will be asked for, unless it begins the one that was run last."""
        if tokens != self._sequence[: len(tokens)]:
            self._sequence, self._rows = list(tokens), self._run(tokens)

    def after(self, tokens: list[int]) -> Tensor:
        """Logits `[vocab_size]` of the token that follows."""
        self.ahead(tokens)
        return self._rows[len(tokens) - 1]


class Oracle:
    """A model in transformers' own implementation, float64, without a cache.

    Args:
        config: shape of the model.
        weights: under their Hugging Face names.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        model = build_transformers_model(config, weights, torch.float64)
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_rms_norm, module.weight, config.norm_eps)
        self._model = model

    def logits(self, tokens: list[int]) -> Tensor:
        """float64 `[len(tokens), vocab_size]` of a whole sequence, recomputed from its first token."""
        with torch.no_grad():
            return self._model(torch.tensor([tokens]), use_cache=False).logits[0]


def _rms_norm(weight: Tensor, eps: float, x: Tensor) -> Tensor:
    """RMSNorm in the dtype of its input: transformers' own goes through float32 whatever the model's dtype is."""
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


@dataclass
class GreedyJudge:
    """Compares a greedy run with the oracle's token by token, as its `choose` function.

    At each step it compares the logits it is given with the oracle's, and answers with the oracle's token. Where the
    two top tokens differ, the run was wrong, unless the oracle's own preference is smaller than the logit error that
    the dtype explains: then it is a tie, which is counted, and the run goes on from the oracle's token.

    Args:
        oracle: logits of the independent model.
        prompt: tokens before the first generated one.
        plain: logits of a plain uncached run in the judged dtype; sets the error that the dtype explains.
        dtype: of the judged run.
    """

    oracle: ReadAhead
    prompt: list[int]
    plain: ReadAhead
    dtype: torch.dtype = torch.float32
    tokens: list[int] = field(default_factory=list)
    ties: int = 0
    worst_error: float = 0.0

    def read_ahead(self, tokens: list[int]) -> None:
        """Run both models once over the tokens that will probably be generated, ids of the vocabulary all."""
        for model in (self.oracle, self.plain):
            model.ahead([*self.prompt, *tokens])

    def choose(self, logits: object, step: int) -> int:
        """The oracle's token; raises AssertionError where the given logits don't lead to it."""
        context = self.prompt + self.tokens
        reference = self.oracle.after(context)
        given_logits = check_form(f"the logits at step {step}", logits, tuple(reference.shape), self.dtype)
        bound = error_bound(reference, self.plain.after(context), float(reference.abs().max()), self.dtype)
        error = largest_error(given_logits, reference)
        right, given = int(reference.argmax()), int(given_logits.argmax())
        if not error <= bound:
            raise AssertionError(
                f"after {len(self.tokens)} generated tokens the logits are off by {error:.3g} "
                f"({self.dtype} explains {bound:.3g}); they prefer token {given}, recomputing everything gives "
                f"{right}. Look at the position of the newest token and at what its query may attend to."
            )
        self.worst_error = max(self.worst_error, error)
        if given != right:
            gap = float(reference[right] - reference[given])
            if gap > 2 * bound:
                raise AssertionError(f"step {step}: token {given} was preferred to {right} by the oracle's {gap:.3g}")
            self.ties += 1
        self.tokens.append(right)
        return right

    def check_ties(self, total: int) -> None:
        """Fail if more than one token in a thousand was a tie (one is always allowed); print how many were."""
        print(f"{self.ties} near-ties in {total} tokens; largest logit error {self.worst_error:.2g}")
        if self.ties > max(1, MOST_TIES * total):
            raise AssertionError(f"{self.ties} of {total} tokens were near-ties: too many to be chance")
