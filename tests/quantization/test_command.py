"""The command line: a checkpoint from beginning to end, and mistakes that end in one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from labkit.checkpoints import bundled_folder, folder
from labkit.config import ModelConfig
from labkit.decoder import random_weights
from solutions.quantization import work
from solutions.quantization.__main__ import app
from solutions.quantization.loading import load_quantized
from solutions.quantization.packed_linear import PackedDecoder

TEXT = "Quantization maps a real value to an integer, with a scale and perhaps a zero point. " * 40


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face's layout: two narrow layers and the real tokenizer."""
    path = tmp_path_factory.mktemp("model")
    config = dataclasses.replace(
        ModelConfig.from_huggingface(bundled_folder()),
        hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_context=128,
    )  # fmt: skip
    folder.write(path, config, random_weights(config, 2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_folder() / name, path / name)
    (path / "text.txt").write_text(TEXT)
    return path


def gptq(model: Path, out: Path, *more: str) -> Result:
    return run("quantize", str(model), "--method", "gptq", "--group-size", "32", "--calibration",
               str(model / "text.txt"), "--sequences", "4", "--length", "48", "--out", str(out), *more)  # fmt: skip


def test_one_command_makes_a_checkpoint_that_loads_runs_and_is_audited(model: Path, tmp_path: Path) -> None:
    result = gptq(model, tmp_path / "out", "--format", "gptq")
    assert result.exit_code == 0, result.output
    assert "gptq in the gptq layout, 4.5" in result.output
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"config.json", "model.safetensors", "quantize_config.json", "quantization.json",
                     "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    assert json.loads((tmp_path / "out" / "quantization.json").read_text())["calibration"] == "text.txt"
    assert len(PackedDecoder(load_quantized(tmp_path / "out")).packed) == 14
    report = run("audit", str(tmp_path / "out"))
    assert report.exit_code == 0 and "text.txt" in report.output and "gptq" in report.output, report.output


def test_the_same_command_goes_on_after_an_interruption(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert gptq(model, whole).exit_code == 0
    quantize_model = work.quantize_model

    def interrupted(*arguments, **options):  # type: ignore[no-untyped-def]
        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        return quantize_model(*arguments[:5], stop, **options)

    monkeypatch.setattr(work, "quantize_model", interrupted)
    stopped = gptq(model, halves)
    assert stopped.exit_code == 130 and "goes on with the next" in stopped.output
    assert not (halves / "config.json").exists()
    monkeypatch.undo()
    assert gptq(model, halves).exit_code == 0
    assert (halves / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


MISTAKES = [
    (["--method", "hqq"], "method must be one of"),
    (["--method", "nf4"], "comparison only"),
    (["--group-size", "128"], "fitting sizes are 16, 32"),
    (["--calibration", "nowhere.txt"], "nowhere.txt cannot be read"),
    (["--format", "awq", "--bits", "3"], "AWQ layout has 4 bits"),
    (["--format", "gguf", "--group-size", "16"], "groups of 32"),
    (["--format", "gguf", "--group-size", "32"], "tokenizer of a GGUF file"),
    (["--format", "tarball"], "format must be one of"),
    (["--head-bits", "8"], "--head-bits is 16"),
    (["--sequences", "4", "--length", "100000"], "fewer than one sequence"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[" ".join(options) for options, _ in MISTAKES])
def test_a_mistake_ends_in_one_line_that_says_what_to_do(
    model: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    given = ["--group-size", "32", "--calibration", str(model / "text.txt"), "--length", "48", *options]
    result = run("quantize", str(model), "--out", str(tmp_path / "out"), *given)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert message in result.output.replace("\n", " "), result.output
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_finished_checkpoint_is_never_overwritten(model: Path, tmp_path: Path) -> None:
    assert gptq(model, tmp_path).exit_code == 0
    before = (tmp_path / "model.safetensors").read_bytes()
    again = gptq(model, tmp_path)
    assert again.exit_code == 2 and "finished checkpoint" in again.output
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_weights_that_are_not_finite_are_named(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    config = folder.read_config(broken)
    weights = folder.read_weights(broken, config)
    weights["model.layers.1.mlp.down_proj.weight"][0, 7] = torch.inf
    (broken / folder.WEIGHTS).unlink()
    folder.write(broken, config, weights)
    result = gptq(broken, tmp_path / "out")
    assert result.exit_code == 2 and "model.layers.1.mlp.down_proj.weight must be finite" in result.output


def test_compare_writes_a_table_of_all_methods_asked_for(model: Path, tmp_path: Path) -> None:
    names = "rtn,gptq@prose,gptq@code,gptq:3@prose,q8_0,nf4"
    sizes = "--tokens 256 --window 64 --sequences 2 --length 64 --group-size 32".split()
    file = tmp_path / "table.md"
    result = run("compare", "--model", str(model), "--methods", names, *sizes, "--out", str(file))
    assert result.exit_code == 0, result.output
    table = file.read_text()
    # The first table ends with an empty line.
    lines = [line for line in table.partition("\n\nAt equal bits")[0].splitlines() if line.startswith("|")]
    rows = {line.split("|")[1].strip(): line for line in lines}
    assert set(names.split(",")) | {"as given"} <= set(rows)
    assert "| 4.50 |" in rows["gptq@code"] and "| 3.50 |" in rows["gptq:3@prose"] and "| 8.50 |" in rows["q8_0"]
    # Each differs from the weights as given: by more with fewer bits.
    changes = {name: float(rows[name].split("|")[4].split(",")[1].split("%")[0]) for name in names.split(",")}
    assert abs(changes["q8_0"]) < abs(changes["gptq:3@prose"])
    assert "×" in rows["rtn"] and "×" not in rows["nf4"]
    assert "| gptq@prose | gptq@code |" in table, "equal bits are compared in pairs"
    assert "calibrated on the other kind of text" in table.lower()


def test_compare_puts_another_model_beside_them_by_memory(model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(model, small)
    config = dataclasses.replace(folder.read_config(model), num_layers=1)
    (small / folder.WEIGHTS).unlink()
    folder.write(small, config, random_weights(config, 3))
    sizes = "--methods rtn --tokens 256 --window 64 --group-size 32".split()
    tables = {}
    for other in (small, model):
        result = run("compare", "--model", str(model), *sizes, "--against", str(other))
        assert result.exit_code == 0, result.output
        lines = result.output.partition("Beside ")[2].splitlines()
        tables[other] = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]
    assert [row[0] for row in tables[small]] == ["rtn", str(small), "as given"], "sorted by memory"
    by_name = {row[0]: row for row in tables[model]}
    assert by_name[str(model)][1:] == by_name["as given"][1:], "the same model has the same bits a byte"
    # Random weights over 49,152 tokens: about log2 of that for a token of some bytes.
    assert all(2 < float(cell) < 16 for row in tables[small] for cell in row[2:])
    assert tables[small][1][2:] != tables[small][2][2:]


def test_compare_refuses_what_it_does_not_know(model: Path) -> None:
    for names, message in (("rtn,hqq", "method must be one of"), ("gptq@poetry", "prose or code"),
                           ("gptq:x", "gptq:3")):  # fmt: skip
        result = run("compare", "--model", str(model), "--methods", names)
        assert result.exit_code == 2 and message in result.output, result.output


def test_audit_of_no_checkpoint_says_so(tmp_path: Path) -> None:
    result = run("audit", str(tmp_path))
    assert result.exit_code == 2 and "holds no checkpoint" in result.output
