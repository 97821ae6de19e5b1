"""The command line: tables that hold what they promise, and errors in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from solutions.simulate.__main__ import app
from solutions.simulate.fitting import FittedTime


def invoke(*words: str) -> tuple[int, str]:
    """Exit code and output, on a wide terminal."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_scenario_is_a_table_with_its_lesson() -> None:
    code, output = invoke("scenarios", "experts")
    assert code == 0, output
    for words in ("experts: ", "evenly wanted", "in order", "8 places for copies", "TPOT p50 (ms)", "popularity"):
        assert words in output
    code, output = invoke("scenarios", "weather")
    assert code == 2 and "no scenario 'weather'" in output and "long-prompts" in output


def test_a_run_tells_all_that_a_dashboard_would(tmp_path: Path) -> None:
    words = ("run", "--rate", "8", "--seconds", "5", "--replicas", "2", "--prefix", "64", "--router", "by-prefix")
    code, output = invoke(*words)
    assert code == 0, output
    for word in ("TTFT", "TPOT", "E2E", "longest stall", "p99", "waiting", "KV occupancy", "cache hits", "goodput"):
        assert word in output
    assert invoke(*words)[1] == output != invoke(*words, "--seed", "1")[1]
    times, trace = tmp_path / "times.json", tmp_path / "trace.jsonl"
    FittedTime(4, 0.125, 0.0, 0.0, 0.0, 0.0, 0.0).save(times)
    trace.write_text('{"seconds": 0, "input": 20, "output": 9}\n')
    code, output = invoke("run", "--step-time", str(times), "--trace", str(trace), "--blocks", "9")
    # One chunk and eight further tokens, an eighth of a second each.
    assert code == 0 and "1 requests in 1.1 simulated seconds" in output and "0.125" in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "gpt"), "no model 'gpt'"),
        (("--model", "llama-3-70b"), "leave no room"),
        (("--gpu", "rtx-5060", "--model", "smollm2"), "measure_gpu"),
        (("--router", "random"), "no router 'random'"),
        (("--input", "5x"), "lengths are written"),
        (("--trace", "/no/such/file"), "can't be read"),
        (("--step-time", "/no/such/file"), "calibrate --out"),
        (("--blocks", "2"), "the context holds 128"),
        (("--token-budget", "10"), "token_budget"),
    ],
)
def test_what_cannot_run_is_refused_in_words(words: tuple[str, ...], said: str) -> None:
    code, output = invoke("run", "--seconds", "2", *words)
    assert code == 2 and said in output.replace("\n", " "), output
