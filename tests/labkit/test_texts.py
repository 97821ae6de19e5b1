"""The texts that every machine has: there, long enough, and never in two parts."""

from __future__ import annotations

import pytest

from labkit.texts import KINDS, PARTS, documents, part_of


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_has_text_and_no_document_is_in_two(kind: str) -> None:
    parts = {part: documents(kind, part) for part in PARTS}
    for part, texts in parts.items():
        assert sum(map(len, texts.values())) > 30_000, f"{part} is too short to calibrate, train or measure on"
        assert list(texts) == sorted(texts)
        assert {part_of(name) for name in texts} == {part}
    names = [name for texts in parts.values() for name in texts]
    assert len(names) == len(set(names))


def test_a_document_stays_in_its_part_on_every_machine() -> None:
    assert [part_of(name) for name in ("assert", "heapq.py", "textwrap.py")] == [
        "training",
        "calibration",
        "evaluation",
    ]


@pytest.mark.parametrize(("kind", "part"), [("poetry", "training"), ("prose", "test"), ("code", "")])
def test_other_kinds_and_parts_are_refused_by_name(kind: str, part: str) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        documents(kind, part)
