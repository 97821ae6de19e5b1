"""Calibration text as sequences: from a file or from what every machine has, and never what is evaluated on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from labkit.checkpoints import load_tokenizer
from labkit.texts import documents
from labkit.tokenizer import Tokenizer
from solutions.quantization.calibration import calibration_text, check_activations


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("smollm2")


def test_a_files_sequences_lie_apart_from_its_beginning_to_its_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    words = " ".join(f"word{index}" for index in range(400))
    file = tmp_path / "text.txt"
    file.write_text(words)
    ids = tokenizer.encode(words)
    found = calibration_text(str(file), tokenizer, 3, 50)
    assert found.name == "text.txt" and found.tokens.shape == (3, 50)
    assert found.tokens[0].tolist() == ids[:50] and found.tokens[2].tolist() == ids[-50:]
    assert found.digest != calibration_text(str(file), tokenizer, 3, 49).digest


def test_fewer_sequences_come_of_a_short_text_and_none_twice(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "short.txt"
    file.write_text("Ten words are not many, but here are ten.")
    ids = tokenizer.encode(file.read_text())
    found = calibration_text(str(file), tokenizer, 99, 4).tokens
    assert len(found) == len(ids) // 4
    with pytest.raises(ValueError, match="fewer than one sequence"):
        calibration_text(str(file), tokenizer, 99, len(ids) + 1)


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_no_calibration_text_is_evaluation_text(kind: str, tokenizer: Tokenizer) -> None:
    sequences = calibration_text(kind, tokenizer, 2, 40).tokens
    evaluation = "".join(documents(kind, "evaluation").values())
    assert all(tokenizer.decode(row.tolist()) not in evaluation for row in sequences)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00 not text" * 9)
    with pytest.raises(ValueError, match="not UTF-8"):
        calibration_text(str(tmp_path / "binary"), tokenizer, 1, 4)
    with pytest.raises(ValueError, match="cannot be read"):
        calibration_text(str(tmp_path), tokenizer, 1, 4)


def test_activations_that_are_not_finite_are_named_with_their_place() -> None:
    inputs = torch.ones(3, 5)
    check_activations("layer", inputs)
    inputs[2, 1] = torch.nan
    with pytest.raises(ValueError, match="layer reads nan at token 2, feature 1"):
        check_activations("layer", inputs)
