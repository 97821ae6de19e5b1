"""Methods side by side on one model: bits, bytes, perplexity with paired intervals, speed, and the calibration text."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.checkpoints import Model, load
from labkit.decoder import Decoder, full_attention
from labkit.evaluation import Interval
from labkit.machine import facts
from labkit.texts import KINDS, documents
from solutions.quantization.calibration import Calibration, calibration_text
from solutions.quantization.methods import Settings
from solutions.quantization.packed_linear import PackedDecoder
from solutions.quantization.paired import fair_pairs, paired_bootstrap, split_blocks
from solutions.quantization.perplexity import perplexity, token_losses
from solutions.quantization.pipeline import check_settings, find_method, quantize_model
from solutions.quantization.quantized_model import QuantizedModel
from solutions.quantization.rivals import Losses, Texts, beside_another
from solutions.quantization.speed import Speed, measure_speed

BASELINE = "as given"
DEFAULT = (
    "rtn", "gptq@prose", "gptq@code", "awq@prose", "awq@code", "gptq:3@prose", "nf4", "mxfp4", "nvfp4", "q4_0", "q4_k",
    "w4a4", "quarot", "q6_k", "q8_0", "smoothquant@prose", "fp8", "llm.int8",
)  # fmt: skip
BLOCK_TOKENS, RESAMPLES = 32, 2_000
_LINE = 118

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Measurement:
    """How much is measured.

    Args:
        tokens: of evaluation text, half of them prose and half code.
        window: tokens that the model reads at once; each document is cut to one window.
        sequences: of calibration text.
        length: tokens of each.
        group_size: for rtn, gptq and awq.
        seed: of the bootstrap.
    """

    tokens: int = 4096
    window: int = 512
    sequences: int = 8
    length: int = 256
    group_size: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        name: `method[:bits][@calibration]`.
        bits: of a weight in the linear layers, scales included.
        num_bytes: of the whole model.
        losses: of each evaluation document, by kind of text.
        speed: packed, beside the model as given in float32; None if no packed product runs it here.
    """

    name: str
    bits: float
    num_bytes: float
    losses: dict[str, list[Tensor]]
    speed: Speed | None


def compare_methods(
    model_name: str,
    names: Sequence[str],
    measurement: Measurement,
    progress: Progress | None = None,
    against: str | None = None,
) -> str:
    """Measure methods on one model.

    Args:
        model_name: as in `labkit.checkpoints.load`.
        names: `method[:bits][@calibration]`, for instance "gptq:3@code"; none takes `DEFAULT`.
        measurement: how much.
        progress: called as `progress(done, total, name)`.
        against: another model, to be put beside the methods by the memory that it takes.

    Returns:
        The report in markdown.

    Raises:
        ValueError: an unknown method or text, or settings that the model doesn't allow; before anything is measured.
    """
    wanted = [_parse(name, measurement) for name in (names or DEFAULT)]
    model = load(model_name)
    other = None if against is None else load(against)
    for _, method, settings, _ in wanted:
        check_settings(model.config, method, settings)
    texts = {kind: _documents(model, kind, measurement) for kind in KINDS}
    report = progress or (lambda done, total, name: None)
    report(0, len(wanted) + 1, BASELINE)
    whole = sum(weight.numel() for weight in model.decoder.weights.values())
    rows = [Row(BASELINE, 16.0, 2.0 * whole, _losses(model.decoder, texts, measurement), None)]
    calibrations: dict[str, Calibration] = {}
    for index, (name, method, settings, source) in enumerate(wanted):
        report(index + 1, len(wanted) + 1, name)
        if source is not None and source not in calibrations:
            calibrations[source] = calibration_text(source, model.tokenizer, measurement.sequences, measurement.length)
        # A decoder of its own, since quantizing replaces weights; the tensors are shared.
        copy = Decoder(model.config, model.decoder.weights)
        quantized = quantize_model(copy, method, settings, None if source is None else calibrations[source])
        rows.append(_row(name, quantized, model.decoder, texts, measurement))
    more: list[str] = []
    if against is not None and other is not None:

        def score(decoder: Decoder, retold: Texts) -> Losses:
            return _losses(decoder, retold, measurement)

        sizes = {row.name: (row.num_bytes, row.losses) for row in rows}
        more = beside_another(against, other, model.tokenizer, texts, sizes, score)
    report(len(wanted) + 1, len(wanted) + 1, "done")
    return _markdown(model_name, rows, measurement, more)


def _parse(name: str, measurement: Measurement) -> tuple[str, str, Settings, str | None]:
    """`gptq:3@code` -> its name, method, settings and calibration text."""
    rest, at, source = name.partition("@")
    method, colon, bits = rest.partition(":")
    found = find_method(method)
    if colon and not bits.isdigit():
        raise ValueError(f"{name!r}: behind the colon stand bits, for instance gptq:3")
    if at and source not in KINDS:
        raise ValueError(f"{name!r}: behind @ stands the calibration text, {' or '.join(KINDS)}")
    if found.calibrated is True and not at:
        source = KINDS[0]
    settings = Settings(bits=int(bits) if colon else 4, group_size=measurement.group_size)
    return name, method, settings, (source or None) if found.calibrated else None


def _documents(model: Model, kind: str, measurement: Measurement) -> list[list[int]]:
    """Token ids of evaluation documents, each cut to one window, until there are enough."""
    found: list[list[int]] = []
    left = measurement.tokens // len(KINDS)
    for text in documents(kind, "evaluation").values():
        ids = model.tokenizer.encode(text[: 12 * measurement.window])[: min(measurement.window, left)]
        if len(ids) >= 2:
            found.append(ids)
            left -= len(ids)
        if left < 2:
            return found
    raise ValueError(
        f"this Python has too little {kind} to evaluate on {measurement.tokens} tokens; ask for fewer --tokens"
    )


def _losses(decoder: Decoder, texts: Texts, measurement: Measurement) -> dict[str, list[Tensor]]:
    def logits(tokens: list[int]) -> Tensor:
        with torch.no_grad():
            return decoder(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0]

    window = measurement.window
    return {kind: [token_losses(logits, ids, window, window // 2) for ids in found] for kind, found in texts.items()}


def _row(
    name: str, model: QuantizedModel, given: Decoder, texts: dict[str, list[list[int]]], measurement: Measurement
) -> Row:
    losses = _losses(model.decoder(), texts, measurement)
    packed = PackedDecoder(model)
    speed = measure_speed(given, packed) if set(packed.packed) == set(model.linears) else None
    return Row(name, model.bits_per_weight(), model.num_bytes(), losses, speed)


def _difference(first: Row, second: Row, kind: str, seed: int) -> Interval:
    blocks = [split_blocks(row.losses[kind], BLOCK_TOKENS) for row in (first, second)]
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(RESAMPLES, len(blocks[0]), generator=generator, dtype=torch.float64)
    return paired_bootstrap(blocks[0], blocks[1], uniforms)


def _percent(interval: Interval) -> str:
    """A difference of losses as that of perplexities: exp(Δ) − 1."""
    low, middle, high = (100 * torch.tensor([interval.low, interval.estimate, interval.high]).expm1()).tolist()
    return f"{middle:+.2f} % [{low:+.2f}, {high:+.2f}]"


def _markdown(model_name: str, rows: list[Row], measurement: Measurement, more: list[str]) -> str:
    baseline, machine = rows[0], facts()
    preface = (
        f"Perplexity on {measurement.tokens} tokens of text that no method was calibrated on, half prose, half code, "
        f"at most {measurement.window} tokens of context. Behind it the change against the weights as they were given, "
        f"with a 95 % interval of a paired bootstrap ({RESAMPLES} resamples of blocks of {BLOCK_TOKENS} tokens). "
        f"Calibration: {measurement.sequences} × {measurement.length} tokens of the text behind @. Bits count scales "
        f"and zero points in the linear layers; MB count everything, unquantized tensors in 16 bits. Speeds are those "
        f"of packed layers on this CPU, as ratios to the float32 model in the same rounds, median (least – most); – "
        f"where torch has no packed product, and quality alone was simulated."
    )
    lines = [
        f"# Quantization methods compared on {model_name}",
        "",
        *textwrap.wrap(preface, _LINE),
        "",
        "| method | bits | MB | perplexity, prose | perplexity, code | decode | prefill |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.name, f"{row.bits:.2f}", f"{row.num_bytes / 1e6:.1f}"]
        for kind in KINDS:
            cell = f"{perplexity(row.losses[kind]):.3f}"
            if row is not baseline:
                cell += f", {_percent(_difference(baseline, row, kind, measurement.seed))}"
            cells.append(cell)
        speed = row.speed
        cells += ["–", "–"] if speed is None else [str(speed.decode), str(speed.prefill)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += _pairs(rows, measurement) + _mismatch(rows, measurement) + more
    note = (
        f"Machine: {machine.cpu}, {torch.get_num_threads()} thread(s), load average {os.getloadavg()[0]:.1f} over the "
        f"last minute (anything above the threads disturbs the speeds); torch {torch.__version__}. Not verified here: "
        f"speed on a GPU."
    )
    lines += ["", *textwrap.wrap(note, _LINE), ""]
    return "\n".join(lines)


def _pairs(rows: list[Row], measurement: Measurement) -> list[str]:
    """Methods of equal size against one another."""
    by_name = {row.name: row for row in rows}
    pairs = [pair for pair in fair_pairs({row.name: row.bits for row in rows}, BASELINE) if BASELINE not in pair]
    if not pairs:
        return []
    lines = ["", "At equal bits (within 0.1), how much larger the second one's perplexity is:", "",
             "| first | second | prose | code |", "|---|---|---|---|"]  # fmt: skip
    for first, second in pairs:
        cells = [_percent(_difference(by_name[first], by_name[second], kind, measurement.seed)) for kind in KINDS]
        lines.append(f"| {first} | {second} | {' | '.join(cells)} |")
    return lines


def _mismatch(rows: list[Row], measurement: Measurement) -> list[str]:
    """What it costs to be calibrated on the other kind of text."""
    by_name = {row.name: row for row in rows}
    methods = [m for m in dict.fromkeys(name.partition("@")[0] for name in by_name)
               if all(f"{m}@{kind}" in by_name for kind in KINDS)]  # fmt: skip
    if not methods:
        return []
    lines = ["", "Calibrated on the other kind of text, how much larger the perplexity is:", "",
             "| method | on prose, calibrated on code | on code, calibrated on prose |", "|---|---|---|"]  # fmt: skip
    for method in methods:
        prose, code = by_name[f"{method}@prose"], by_name[f"{method}@code"]
        cells = [
            _percent(_difference(prose, code, "prose", measurement.seed)),
            _percent(_difference(code, prose, "code", measurement.seed)),
        ]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines
