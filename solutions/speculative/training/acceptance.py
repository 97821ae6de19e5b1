"""Stage 4: how often a finished head's drafts are kept, at work, on texts that no training has seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from labkit.checkpoints import Model
from labkit.drafting import Round
from labkit.texts import KINDS, documents
from labkit.trained_heads import DraftModel, TrainedHead, load_head

from ..eagle import EagleHead
from ..eagle3 import Eagle3Head
from ..feature_drafter import FeatureDrafter
from ..feature_model import FeatureModel
from ..loop import GREEDY, speculate
from ..measuring import acceptance_by_place, acceptance_estimate
from ..medusa import MedusaDrafter
from ..model_drafter import ModelDrafter
from ..mtp import MtpHead
from ..tree_loop import speculate_tree
from .objectives import MEDUSA_HEADS

GIVEN = 96
"""Tokens of an evaluation text that are given, from its middle: beginnings are much alike."""
NUM_DRAFTS = 3


def measured_acceptance(
    name: str,
    model: Model,
    folder: Path,
    texts: int,
    new_tokens: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, dict[str, float | list[float | None]]]:
    """Greedy runs of the target with a head, three drafts a round.

    Args:
        name: of the head.
        model: the target.
        folder: where the head lies.
        texts: of each kind.
        new_tokens: of each text.
        progress: called with texts done and all.

    Returns:
        For evaluation texts of either kind the share of judged drafts that were kept, over all places and place by
        place. Workloads are measured by `benchmarks.speculative`.

    Raises:
        ValueError: the head is missing or damaged.
    """
    head = load_head(name, model.decoder, folder)
    given = {kind: _passages(model, kind, texts) for kind in KINDS}
    found: dict[str, dict[str, float | list[float | None]]] = {}
    done = 0
    for kind, those in given.items():
        rounds: list[Round] = []
        for prompt in those:
            rounds += _rounds(name, head, model, prompt, new_tokens)
            done += 1
            progress(done, texts * len(given))
        places = acceptance_by_place(rounds, NUM_DRAFTS)
        found[kind] = {
            "acceptance": round(acceptance_estimate(rounds), 3),
            "by_place": [None if share is None else round(share, 3) for share in places],
        }
    return found


def _passages(model: Model, kind: str, count: int) -> list[list[int]]:
    """Passages from the middle of the first evaluation texts of a kind."""
    found = []
    for text in list(documents(kind, "evaluation").values())[:count]:
        ids = model.tokenizer.encode(text)
        found.append(ids[len(ids) // 2 :][:GIVEN])
    return found


def _rounds(name: str, head: TrainedHead, model: Model, prompt: list[int], new_tokens: int) -> tuple[Round, ...]:
    """The rounds of one text."""
    layers = head.layers or (model.config.num_layers,)
    target = FeatureModel(model.decoder, len(prompt) + new_tokens + NUM_DRAFTS, layers)
    if name == "medusa":
        line = [(0,) * length for length in range(1, MEDUSA_HEADS + 1)]
        medusa = MedusaDrafter(target, head.weights, line, model.config.vocab_size, head.target_ids)
        return speculate_tree(target, medusa, prompt, new_tokens).rounds
    if name == "draft":
        drafter: ModelDrafter | FeatureDrafter = ModelDrafter(DraftModel(head, len(prompt) + new_tokens), GREEDY)
    else:
        kind = {"eagle": EagleHead, "eagle3": Eagle3Head, "mtp": MtpHead}[name]
        drafter = FeatureDrafter(target, kind(head.config, head.weights, head.target_ids), GREEDY)
    return speculate(target, drafter, prompt, new_tokens, GREEDY, NUM_DRAFTS).rounds
