"""A drafter that speaks another vocabulary: token by token where a map is given, refused otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.drafting import Draft, Drafter

TokenMap = Sequence[int | None]


def map_by_bytes(drafter: Sequence[bytes | None], target: Sequence[bytes | None]) -> list[int | None]:
    """For each token of the drafter the target's token of the same bytes, None where there is none.

    Control tokens have no bytes and are not mapped: equal names need not mean the same.

    Args:
        drafter: the bytes of each of its tokens by id, None for control tokens and padding.
        target: the same of the target. Of several tokens with the same bytes the lowest id counts, on either side.
    """
    ids = {text: token for token, text in reversed(list(enumerate(target))) if text}
    # Taken out when used, so that a second token of the same bytes finds nothing.
    return [ids.pop(text, None) if text else None for text in drafter]


def fit_vocabularies(
    drafter: Drafter,
    drafter_vocabulary: Sequence[bytes | None],
    target_vocabulary: Sequence[bytes | None],
    target_ids: TokenMap | None = None,
) -> Drafter:
    """A drafter for the target's vocabulary, or a refusal.

    Args:
        drafter: drafts in its own vocabulary.
        drafter_vocabulary: the bytes of its tokens by id, None for control tokens and padding.
        target_vocabulary: the same of the target.
        target_ids: the map to use if the vocabularies differ; see `VocabularyMapDrafter`.

    Returns:
        The drafter itself if one vocabulary is the other and padding, else one that maps.

    Raises:
        ValueError: the vocabularies differ by more than padding and no map is given, or it doesn't fit.
    """
    for token, (own, others) in enumerate(zip(drafter_vocabulary, target_vocabulary, strict=False)):
        if own != others and target_ids is None:
            raise ValueError(
                f"token {token} is {own!r} for the drafter and {others!r} for the target, so its drafts would be taken "
                "for other tokens; give target_ids, for example from map_by_bytes, or a drafter of the same family"
            )
    shorter = min(len(drafter_vocabulary), len(target_vocabulary))
    surplus = [*drafter_vocabulary[shorter:], *target_vocabulary[shorter:]]
    if target_ids is None and any(surplus):
        raise ValueError(
            f"the drafter has {len(drafter_vocabulary)} tokens and the target {len(target_vocabulary)}, and what one "
            "has more is no padding; give target_ids, for example from map_by_bytes"
        )
    if target_ids is None:
        return drafter
    if len(target_ids) != len(drafter_vocabulary):
        raise ValueError(
            f"target_ids must name {len(drafter_vocabulary)} tokens, one a drafter's, got {len(target_ids)}"
        )
    return VocabularyMapDrafter(drafter, target_ids, len(target_vocabulary))


class VocabularyMapDrafter:
    """Translates the text for a drafter, and its drafts for the target.

    The drafter's distributions are translated as a whole, so that each row still is what its token was drawn from. A
    token without counterpart becomes an id beyond the target's vocabulary. The target gives it probability 0, so it is
    judged, rejected and replaced like any other, and it ends the round. To leave it out, or to draw another one in its
    place without saying so in q, would favour the other tokens.

    Args:
        drafter: drafts in its own vocabulary.
        target_ids: for each token of the drafter the target's id, None where it has none; no id twice.
        vocab_size: of the target.
        unknown: the drafter's token to read in place of a token that only the target has. Without one, a text that
            holds such a token gets no drafts.

    Raises:
        ValueError: `target_ids` maps nothing, names an id outside the target's vocabulary or one twice, or `unknown`
            is no token of the drafter.
    """

    def __init__(self, drafter: Drafter, target_ids: TokenMap, vocab_size: int, unknown: int | None = None) -> None:
        check_count("vocab_size", vocab_size, 1)
        self._own_ids: dict[int, int] = {}
        for own, token in enumerate(target_ids):
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(f"target_ids[{own}] must be None or an id from 0 to {vocab_size - 1}, got {token!r}")
            if token in self._own_ids:
                raise ValueError(
                    f"target_ids maps the drafter's tokens {self._own_ids[token]} and {own} both to {token}; only one "
                    "of them can be what the drafter reads where the text has it"
                )
            self._own_ids[token] = own
        if not self._own_ids:
            raise ValueError("target_ids maps no token at all, so this drafter can say nothing to the target")
        if unknown is not None and unknown not in range(len(target_ids)):
            raise ValueError(f"unknown must be a drafter's token from 0 to {len(target_ids) - 1}, got {unknown!r}")
        self._drafter = drafter
        self._target_ids = list(target_ids)
        self._vocab_size = vocab_size
        self._unknown = unknown

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """What the drafter proposes for the translated text, in ids of the target.

        Args:
            tokens: the text so far in the target's ids, at least one.
            max_drafts: the most tokens to draft, at least 0.
            uniforms: one number in [0, 1) for each draft.

        Returns:
            Tokens and rows; ids from the target's `vocab_size` on stand for tokens that only the drafter has. Whatever
            is no draft stays none: what is wrong with it is the verifier's to find.

        Raises:
            ValueError: an empty text, an id that the target doesn't have, or `max_drafts` no int of at least 0.
        """
        text = check_tokens("tokens", tokens, self._vocab_size)
        check_count("max_drafts", max_drafts, 0)
        own = [self._own_ids.get(token, self._unknown) for token in text]
        readable = [token for token in own if token is not None]
        if len(readable) < len(own):
            return Draft(())
        draft = self._drafter.propose(readable, max_drafts, uniforms)
        translated = tuple(self._target_id(token) for token in draft.tokens)
        if draft.probs is None or draft.probs.dim() != 2:
            return Draft(translated, draft.probs)
        return Draft(translated, self._rows(draft.probs))

    def _target_id(self, token: int) -> int:
        """The target's id; one beyond its vocabulary for a token that it lacks, -1 for what is no token."""
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            return -1
        mapped = self._target_ids[token] if token < len(self._target_ids) else None
        return self._vocab_size + token if mapped is None else mapped

    def _rows(self, probs: Tensor) -> Tensor:
        """Rows over the drafter's tokens, moved to the target's ids and those beyond."""
        width = probs.shape[1]
        moved = probs.new_zeros(probs.shape[0], self._vocab_size + width)
        moved[:, torch.tensor([self._target_id(token) for token in range(width)], dtype=torch.int64)] = probs
        return moved
