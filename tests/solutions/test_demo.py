"""The demo: its figures add up, its text is what the tokens say, and bad input is a sentence."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from labkit.checkpoints import CheckpointError, Model, bundled_folder, load
from labkit.sampling_params import SamplingParams
from solutions.demo import Figures, answer, app, weight_bytes_per_step

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Model:
    """The bundled model."""
    try:
        bundled_folder()
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")
    return load("smollm2")


def test_figures_add_up() -> None:
    figures = Figures(ttft=0.2, tpot=0.05, num_tokens=11, bytes_per_step=5e8, bandwidth=2e10)
    assert figures.seconds == pytest.approx(0.7)
    assert figures.bandwidth_share == pytest.approx(0.5)
    for part in ("TTFT 200 ms", "TPOT 50.0 ms", "15.7 tokens/s", "50% of this machine's 20.0 GB/s", "500 MB a step"):
        assert part in str(figures)


def test_an_answer_of_one_token_has_no_tpot() -> None:
    figures = Figures(ttft=0.2, tpot=None, num_tokens=1, bytes_per_step=5e8, bandwidth=2e10)
    assert figures.seconds == 0.2
    assert str(figures) == "TTFT 200 ms"


def test_answer_streams_the_models_text(model: Model) -> None:
    pieces: list[str] = []
    figures = answer(model, "What is the capital of France?", 8, GREEDY, 2e10, pieces.append)
    assert "Paris" in "".join(pieces)
    assert len(pieces) == figures.num_tokens + 1, "one piece a token, and the end of the text"
    assert figures.num_tokens <= 8
    weights = weight_bytes_per_step(model)
    assert weights == pytest.approx(134.5e6 * 4, rel=1e-3), "every weight once in fp32, the tied table included"
    prompt = len(model.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}]))
    kv_tokens = (figures.bytes_per_step - weights) / 46_080
    assert prompt < kv_tokens < prompt + figures.num_tokens


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"), [("  ", 5, "prompt is empty"), ("Hi", 9_000, "context 8192")]
)
def test_what_cannot_be_answered_is_refused(model: Model, prompt: str, max_tokens: int, words: str) -> None:
    pieces: list[str] = []
    with pytest.raises(ValueError, match=words):
        answer(model, prompt, max_tokens, GREEDY, 2e10, pieces.append)
    assert pieces == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "no-such-model"], "no model is called 'no-such-model'"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--max-tokens", "0"], "max-tokens"),
    ],
)
def test_bad_options_are_one_sentence(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["Hi", *options])
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
