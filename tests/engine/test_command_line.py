"""The engine's commands: what they show is what was written, and what can't be done ends in a line and code 2."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from labkit.manifest import ROOT
from solutions.engine.__main__ import app


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "solutions.engine", *map(str, words)]


def test_what_was_written_is_shown_as_it_is() -> None:
    """Brackets, a backslash at the end and names of emoji mean something to the library that prints."""
    for text in ("[red]x[/red] \\[b] :tada:", "C:\\"):
        result = CliRunner().invoke(app, ["generate", text, "--max-tokens", "1", "--blocks", "8"])
        assert result.exit_code == 0 and result.output.startswith(text), result.output
        assert "[/]" not in result.output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["serve", "--api-key", ""], "--api-key is empty"),
        (["serve", "--patience", "inf"], "patience"),
        (["serve", "--host", "no.such.invalid"], "no.such.invalid"),
        (["generate", "a", "--blocks", "100000000000"], "lower --blocks"),
        (["generate", "\udcff", "--max-tokens", "1"], "half of a character"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], named: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and named in result.output, result.output


def test_a_line_that_is_no_text_is_refused() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command("chat"), input=b"\xff\n", capture_output=True, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 2 and b"Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(("signals", "patience"), [((signal.SIGTERM,), "1"), ((signal.SIGINT, signal.SIGINT), "600")])
def test_a_signal_ends_what_is_streamed_and_a_taken_port_is_named(
    signals: tuple[signal.Signals, ...], patience: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = command("serve", "--port", port, "--patience", patience)
    serving = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                assert serving.poll() is None and time.monotonic() < until
                time.sleep(0.1)
        refused = CliRunner().invoke(app, ["serve", "--port", port])
        assert refused.exit_code == 2 and f"port {port}: Address already in use" in refused.output
        body = {"model": "smollm2", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            for one in signals:
                serving.send_signal(one)
                time.sleep(0.3)
            *_, last, end = [line for line in lines if line]
        assert end == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        assert serving.wait(30) in (0, 130, -signal.SIGTERM)
        assert serving.stdout is not None and b"Traceback" not in serving.stdout.read()
    finally:
        serving.kill()
        serving.wait()
