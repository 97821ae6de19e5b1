"""What the audit of a quantized checkpoint reports, and what storage types take."""

from __future__ import annotations

from dataclasses import dataclass

NOT_STATED = "not stated"
NONE_NEEDED = "none needed"

UNKNOWNS = {
    "calibration": "On what text it was calibrated: the checkpoint does not say. Ask whoever made it.",
    "method": "By which method the codes were found: a layout says how numbers are stored, and GPTQ, AWQ, plain "
    "rounding and others share it.",
    "symmetric": "Whether codes are symmetric: zero points are stored either way, and only their values would tell.",
}
"""What an audit may have to leave open, and how to say so."""

TYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of a number, by the names that safetensors uses; GGUF has some of them, too."""

HIGH_PRECISION = ("F64", "F32", "F16", "BF16")
"""Types of numbers that are not quantized."""


@dataclass(frozen=True)
class GgufType:
    """A block type of GGUF.

    Args:
        elements: weights of a block.
        num_bytes: of a block.
        bits: of a code.
        group_size: weights that share the innermost scale.
        symmetric: True without a minimum or zero point; None where codes stand for levels of a table.
    """

    elements: int
    num_bytes: int
    bits: int
    group_size: int
    symmetric: bool | None


GGUF_TYPES = {
    "Q4_0": GgufType(32, 18, 4, 32, True), "Q4_1": GgufType(32, 20, 4, 32, False),
    "Q5_0": GgufType(32, 22, 5, 32, True), "Q5_1": GgufType(32, 24, 5, 32, False),
    "Q8_0": GgufType(32, 34, 8, 32, True), "Q2_K": GgufType(256, 84, 2, 16, False),
    "Q3_K": GgufType(256, 110, 3, 16, True), "Q4_K": GgufType(256, 144, 4, 32, False),
    "Q5_K": GgufType(256, 176, 5, 32, False), "Q6_K": GgufType(256, 210, 6, 16, True),
    "IQ4_NL": GgufType(32, 18, 4, 32, None), "IQ4_XS": GgufType(256, 136, 4, 32, None),
    "MXFP4": GgufType(32, 17, 4, 32, None),
}  # fmt: skip
"""Block types by their names in GGUF."""


@dataclass(frozen=True)
class StatedScheme:
    """What a config says of a layer's weights; None where it says nothing.

    Args:
        bits: of a code.
        group_size: weights of a row that share a scale; -1 for a whole row.
        symmetric: without zero points.
    """

    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None


@dataclass(frozen=True)
class StoredLayer:
    """A quantized matrix as it lies in the file.

    Args:
        name: of the layer, without the names of its tensors.
        bits: of a code.
        group_size: weights that share a scale.
        symmetric: None where it can't be told, or codes stand for levels of a table.
        num_weights: of the matrix.
        num_bytes: of everything that it takes: codes, scales, zero points, indices.
    """

    name: str
    bits: int
    group_size: int
    symmetric: bool | None
    num_weights: int
    num_bytes: int


@dataclass(frozen=True)
class Contradiction:
    """The config says one thing, the tensors another.

    Args:
        entry: what it is about: "bits", "group_size", "symmetric", "quant_method" or "ignore".
        stated: what the config says.
        found: what the tensors say.
    """

    entry: str
    stated: str
    found: str


@dataclass(frozen=True)
class CheckpointAudit:
    """What can be told of a checkpoint without reading a single weight.

    Args:
        format: "compressed-tensors", "gptq", "awq", "bitsandbytes", "fp8", "gguf" or "plain".
        layers: the quantized matrices, in the order of the file.
        high_precision: names of the matrices that were left in floats of 16 bits and more.
        num_weights: of all tensors together.
        num_bytes: of all tensors together.
        calibration: the data as the checkpoint names them, `NOT_STATED`, or `NONE_NEEDED`.
        contradictions: each once, in the order in which they turn up.
        unknown: keys of `UNKNOWNS`, in that order.
    """

    format: str
    layers: tuple[StoredLayer, ...]
    high_precision: tuple[str, ...]
    num_weights: int
    num_bytes: int
    calibration: str
    contradictions: tuple[Contradiction, ...]
    unknown: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        """Of the whole checkpoint: all its bytes by all its weights."""
        return 8 * self.num_bytes / self.num_weights

    def text(self) -> str:
        """The report for people."""
        lines = [
            f"format: {self.format}",
            f"bits per weight: {self.bits_per_weight:.3f} ({self.num_bytes:,} bytes, {self.num_weights:,} weights)",
            *_summary(self.layers),
            f"in high precision: {', '.join(self.high_precision) or 'no matrix'}",
            f"calibration: {self.calibration}",
        ]
        lines += [f"contradiction in {c.entry}: the config says {c.stated}, the tensors {c.found}"
                  for c in self.contradictions]  # fmt: skip
        lines += [f"unknown: {UNKNOWNS[key]}" for key in self.unknown]
        return "\n".join(lines)


def _summary(layers: tuple[StoredLayer, ...]) -> list[str]:
    """A line for each kind of quantized layer."""
    kinds: dict[tuple[int, int, bool | None], list[StoredLayer]] = {}
    for layer in layers:
        kinds.setdefault((layer.bits, layer.group_size, layer.symmetric), []).append(layer)
    lines = []
    for (bits, group_size, symmetric), members in kinds.items():
        how = {True: "symmetric", False: "with zero point or minimum", None: "symmetric or not: can't be told"}
        stored = 8 * sum(layer.num_bytes for layer in members) / sum(layer.num_weights for layer in members)
        lines.append(
            f"quantized: {len(members)} matrices, {bits} bits, {group_size} weights a scale, {how[symmetric]}, "
            f"{stored:.3f} bits per weight with scales"
        )
    return lines
