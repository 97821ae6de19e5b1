"""Stage 3b: gradient descent for one head, in steps that depend on their number alone, so that it can be resumed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.decoder import Decoder
from labkit.trained_heads.loading import output_matrix
from labkit.trained_heads.packing import quantized

from .features import Features
from .objectives import Batch, Guesses, Objective
from .store import read_tensors, write_tensors

ROW_OF_TEXTS = 16
"""Of so many texts one is held out, and never trained on."""
MOST_HELD_OUT = 48
"""Texts that are looked at to see how a training goes."""


@dataclass(frozen=True)
class Plan:
    """How long and how fast.

    Args:
        steps: of the optimizer.
        texts: of a step.
        judged: rows of a step whose distributions are compared, chosen by chance; all would cost more than the head.
        learning_rate: at its highest.
        warm_up: steps until then; from there it falls as a cosine.
        feature_weight: of the distance to the target's features, for heads that are to come near them.
        packed_from: the share of the steps after which the head computes with its matrices as they will be packed.
        checkpoint_every: steps between two points that a broken run goes on from.
        bfloat16: matrix products in bfloat16.
        seed: of the choice of texts and rows.
    """

    steps: int
    texts: int = 8
    judged: int = 384
    learning_rate: float = 1e-3
    warm_up: int = 30
    feature_weight: float = 0.1
    packed_from: float = 0.6
    checkpoint_every: int = 100
    bfloat16: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Fit:
    """A trained head.

    Args:
        weights: as they were trained; `pack` makes of them what is stored.
        agreement: for each place of a draft, how often the held-out text's next favourite was guessed once all places
            before it were, by step at which that was measured.
        plans: the step from which on a plan of so many steps was followed; more than one if a run was gone on with to
            another length.
        by_rank: for each place how often the favourite was the head's first choice, its second and so on, whatever
            became of the places before.
        seconds: spent on the steps, breaks left out.
    """

    weights: dict[str, Tensor]
    agreement: dict[int, list[float]]
    plans: list[tuple[int, int]]
    by_rank: list[list[float]]
    seconds: float


class Fitting:
    """A head in training.

    Args:
        objective: of the head.
        features: the texts.
        target: what the head drafts for; its embeddings and output matrix are used as they are.
        target_ids: the draft vocabulary.
        plan: how long and how fast.
        path: of the point that a broken run goes on from.

    Raises:
        ValueError: too few texts, or a point of another run.
    """

    def __init__(
        self, objective: Objective, features: Features, target: Decoder, target_ids: Tensor, plan: Plan, path: Path
    ) -> None:
        places = range(len(features.tokens))
        self._train = [place for place in places if place % ROW_OF_TEXTS and len(features.tokens[place]) > 8]
        held_out = [place for place in places if not place % ROW_OF_TEXTS and len(features.tokens[place]) > 8]
        self._held_out = held_out[:: max(1, len(held_out) // MOST_HELD_OUT)][:MOST_HELD_OUT]
        if not self._train or not self._held_out:
            raise ValueError(f"there must be at least {ROW_OF_TEXTS} texts of 9 tokens, got {len(features.tokens)}")
        self._objective, self._features, self._plan, self._path = objective, features, plan, path
        self._target = target
        self._output = output_matrix(target)[target_ids]
        self._target_ids = target_ids
        self._weights = {name: w.detach().clone().requires_grad_() for name, w in objective.start.items()}
        self._optimizer = torch.optim.AdamW(
            self._weights.values(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self._favourites: dict[int, Tensor] = {}
        self._step, self._seconds = 0, 0.0
        self._agreement: dict[int, list[float]] = {}
        self._plans = [(0, plan.steps)]
        if path.is_file():
            self._resume()

    def run(self, progress: Callable[[int, int, str], object]) -> Fit:
        """Train until the plan's last step.

        Args:
            progress: called after each step with steps done, all steps, and a word on how it goes.
        """
        plan = self._plan
        while self._step < plan.steps:
            start = time.perf_counter()
            loss = self._one_step()
            self._step += 1
            self._seconds += time.perf_counter() - start
            if self._step % plan.checkpoint_every == 0 or self._step == plan.steps:
                self._agreement[self._step] = self.agreement()
                self._save()
            latest = self._agreement[max(self._agreement)] if self._agreement else []
            progress(self._step, plan.steps, f"loss {loss:.3f}, held out {' '.join(f'{a:.2f}' for a in latest)}")
        weights = {name: w.detach() for name, w in self._weights.items()}
        return Fit(weights, self._agreement, self._plans, self.by_rank(), self._seconds)

    def agreement(self) -> list[float]:
        """How often the head guesses the target's favourite on held-out texts, place by place; as it is packed."""
        right: list[int] = []
        judged: list[int] = []
        for guesses, batch, favourite in self._look():
            before: Tensor | None = None
            for place, guess in enumerate(guesses):
                rows, wanted = _judgeable(guess, batch, favourite)
                hit = self._choices(guess, 1)[:, : wanted.shape[1], 0] == wanted
                if before is not None:
                    # The draft before this one was made for the row before; Medusa's heads all read the same row.
                    shift = int(guess.ahead == guesses[0].ahead)
                    rows &= F.pad(before, (shift, 0))[:, : rows.shape[1]]
                hit &= rows
                right[place : place + 1] = [sum(right[place : place + 1]) + int(hit.sum())]
                judged[place : place + 1] = [sum(judged[place : place + 1]) + int(rows.sum())]
                before = hit
        return [round(hits / max(rows, 1), 4) for hits, rows in zip(right, judged, strict=True)]

    def by_rank(self, ranks: int = 5) -> list[list[float]]:
        """How often the target's favourite is the first, second, ... choice of the head, place by place."""
        counts: dict[int, Tensor] = {}
        judged: dict[int, int] = {}
        for guesses, batch, favourite in self._look():
            for place, guess in enumerate(guesses):
                rows, wanted = _judgeable(guess, batch, favourite)
                hits = self._choices(guess, ranks)[:, : wanted.shape[1]] == wanted[..., None]
                counts[place] = counts.get(place, torch.zeros(ranks)) + (hits & rows[..., None]).sum((0, 1))
                judged[place] = judged.get(place, 0) + int(rows.sum())
        return [[round(count / max(judged[place], 1), 4) for count in counts[place].tolist()] for place in counts]

    def _look(self) -> Iterator[tuple[list[Guesses], Batch, Tensor]]:
        """The head's guesses on held-out texts, and the target's favourites after each of their tokens."""
        for start in range(0, len(self._held_out), self._plan.texts):
            batch = self._batch(self._held_out[start : start + self._plan.texts])
            # Asked of the whole vocabulary, which is too dear to be done at every point.
            if start not in self._favourites:
                self._favourites[start] = self._target.head(batch.final).argmax(-1)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self._plan.bfloat16):
                guesses = self._objective.guess(self._used(packed=True), batch)
            yield guesses, batch, self._favourites[start]

    def _choices(self, guess: Guesses, count: int) -> Tensor:
        """The likeliest tokens of each row, `[texts, rows, count]`, as ids of the target."""
        return self._target_ids[F.linear(guess.hidden.float(), self._output).topk(count).indices]

    def _one_step(self) -> float:
        plan = self._plan
        chance = torch.Generator().manual_seed(plan.seed * 1_000_003 + self._step)
        chosen = torch.randint(len(self._train), (plan.texts,), generator=chance).tolist()
        batch = self._batch([self._train[index] for index in chosen])
        for group in self._optimizer.param_groups:
            group["lr"] = plan.learning_rate * _schedule(self._step, plan)
        with torch.autocast("cpu", torch.bfloat16, enabled=plan.bfloat16):
            guesses = self._objective.guess(self._used(self._step >= plan.packed_from * plan.steps), batch)
            losses = [self._loss(guess, batch, chance) for guess in guesses]
        loss = torch.stack(losses).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights.values(), 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def _used(self, packed: bool) -> dict[str, Tensor]:
        """The weights to compute with; packed ones pass their gradients straight through the rounding."""
        own = dict(self._weights)
        if packed:
            own = {name: w if w.dim() == 1 else w + (quantized(w) - w).detach() for name, w in own.items()}
        return {
            **own,
            "embed_tokens.weight": self._target.weights["model.embed_tokens.weight"],
            "lm_head.weight": self._output,
        }

    def _loss(self, guess: Guesses, batch: Batch, chance: torch.Generator) -> Tensor:
        """Cross-entropy with the target on the draft vocabulary, and the distance to its features."""
        rows, wanted = _judgeable(guess, batch, batch.final)
        places = rows.nonzero()
        some = places[torch.randint(len(places), (min(self._plan.judged, len(places)),), generator=chance)]
        hidden, features = guess.hidden[some[:, 0], some[:, 1]], wanted[some[:, 0], some[:, 1]]
        with torch.no_grad():
            p = F.linear(features, self._output).float().softmax(-1)
        loss = -(p * F.linear(hidden, self._output).float().log_softmax(-1)).sum(-1).mean()
        if guess.features is not None:
            own = guess.features[some[:, 0], some[:, 1]].float()
            loss = loss + self._plan.feature_weight * F.smooth_l1_loss(own, features)
        return loss

    def _batch(self, places: list[int]) -> Batch:
        lengths = torch.tensor([len(self._features.tokens[place]) for place in places])
        tokens = torch.nn.utils.rnn.pad_sequence([self._features.tokens[place] for place in places], batch_first=True)
        hidden = torch.nn.utils.rnn.pad_sequence([self._features.hidden[place] for place in places], batch_first=True)
        return Batch(tokens, hidden.float(), lengths)

    def _save(self) -> None:
        state = {f"weight {name}": w.detach() for name, w in self._weights.items()}
        for (name, _), entry in zip(self._weights.items(), self._optimizer.state_dict()["state"].values(), strict=True):
            state |= {f"{kind} {name}": tensor for kind, tensor in entry.items()}
        about = {"step": self._step, "seconds": self._seconds, "agreement": self._agreement, "plans": self._plans}
        about |= self._identity()
        write_tensors(self._path, state, about)

    def _resume(self) -> None:
        state, about = read_tensors(self._path)
        if _but_length(about) != _but_length(self._identity()):
            raise ValueError(
                f"{self._path} is of a run with another plan or other texts; remove it to begin anew, or give the same "
                "options again (but for the steps, which may change)"
            )
        entries = {}
        with torch.no_grad():
            for index, (name, weight) in enumerate(self._weights.items()):
                weight.copy_(state[f"weight {name}"])
                entries[index] = {kind: state[f"{kind} {name}"].clone() for kind in ("step", "exp_avg", "exp_avg_sq")}
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": entries})
        self._step, self._seconds = about["step"], about["seconds"]
        self._plans = [tuple(entry) for entry in about.get("plans", [(0, about["plan"]["steps"])])]
        if self._plans[-1][1] != self._plan.steps:
            self._plans.append((self._step, self._plan.steps))
        self._agreement = {int(step): places for step, places in about["agreement"].items()}

    def _identity(self) -> dict[str, Any]:
        """What a point belongs to."""
        shapes = {name: list(w.shape) for name, w in self._weights.items()}
        return json.loads(
            json.dumps({"plan": asdict(self._plan), "texts": len(self._features.tokens), "shapes": shapes})
        )


def _but_length(about: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for a point to be gone on from: all but how far the run is to go."""
    plan = {name: value for name, value in about.get("plan", {}).items() if name != "steps"}
    return {"plan": plan, "texts": about.get("texts"), "shapes": about.get("shapes")}


def _judgeable(guess: Guesses, batch: Batch, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows of a guess mean something, `[texts, rows]`, and what the target has there."""
    wanted = wanted[:, guess.ahead :]
    rows = torch.arange(wanted.shape[1])
    return (rows >= guess.first) & (rows + guess.ahead < batch.lengths[:, None]), wanted


def _schedule(step: int, plan: Plan) -> float:
    """The share of the highest learning rate: up in a line, then down as a cosine to a twentieth."""
    if step < plan.warm_up:
        return (step + 1) / plan.warm_up
    done = (step - plan.warm_up) / max(1, plan.steps - plan.warm_up)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2
