"""Task 10: what the names, types and shapes of a checkpoint's tensors tell, and what they don't."""

from __future__ import annotations

from typing import Any

import pytest

from grader.judge.refusal import check_refused
from labkit.checkpoint_audit import NONE_NEEDED, NOT_STATED, CheckpointAudit, StatedScheme

pytestmark = pytest.mark.task(10)

Tensors = dict[str, tuple[str, tuple[int, ...]]]

EMBEDDING: Tensors = {"model.embed_tokens.weight": ("F16", (100, 48)), "model.norm.weight": ("F16", (48,))}
EMBEDDING_WEIGHTS, EMBEDDING_BYTES = 4848, 9696
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def gptq_layer(name: str, rows: int, columns: int, bits: int, groups: int, g_idx: bool = True) -> Tensors:
    """GPTQ's tensors of a matrix `[rows, columns]`."""
    tensors: Tensors = {
        f"{name}.qweight": ("I32", (columns * bits // 32, rows)),
        f"{name}.qzeros": ("I32", (groups, rows * bits // 32)),
        f"{name}.scales": ("F16", (groups, rows)),
    }
    return tensors | ({f"{name}.g_idx": ("I32", (columns,))} if g_idx else {})


def awq_layer(name: str, rows: int, columns: int, groups: int) -> Tensors:
    """AWQ's tensors of a matrix `[rows, columns]` of 4 bits."""
    return {
        f"{name}.qweight": ("I32", (columns, rows // 8)),
        f"{name}.qzeros": ("I32", (groups, rows // 8)),
        f"{name}.scales": ("F16", (groups, rows)),
    }


def packed_layer(name: str, rows: int, words: int, groups: int, zero_point: bool = False) -> Tensors:
    """compressed-tensors' packed form."""
    tensors: Tensors = {
        f"{name}.weight_packed": ("I32", (rows, words)),
        f"{name}.weight_scale": ("BF16", (rows, groups)),
        f"{name}.weight_shape": ("I64", (2,)),
    }
    return tensors | ({f"{name}.weight_zero_point": ("I32", (-(-rows // 8), groups))} if zero_point else {})


def gptq_config(**entries: Any) -> dict[str, Any]:
    """A model's config with GPTQ's part."""
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False}
    return {"hidden_size": 48, "quantization_config": settings | entries}


def packed_config(*groups: dict[str, Any], ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """A model's config with compressed-tensors' part."""
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    settings = {"quant_method": "compressed-tensors", "config_groups": named, "ignore": list(ignore)}
    return {"quantization_config": settings}


def group(targets: list[str], bits: int = 4, size: int | None = 16, symmetric: bool = True) -> dict[str, Any]:
    """One of its groups."""
    strategy = "group" if size else "channel"
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": size, "symmetric": symmetric}
    return {"targets": targets, "weights": weights}


def look(lab: Any, config: dict[str, Any], tensors: Tensors) -> CheckpointAudit:
    """The report, which must be one."""
    report = lab.audit(config, tensors)
    assert isinstance(report, CheckpointAudit), f"audit returns a labkit CheckpointAudit, got {report!r}"
    return report


def check(report: CheckpointAudit, **right: Any) -> None:
    """Entries of a report."""
    for name, wanted in right.items():
        got = getattr(report, name)
        assert got == wanted, f"{name} should be {wanted!r}, got {got!r}"


def check_layers(report: CheckpointAudit, *right: tuple[str, int, int, bool | None, int, int]) -> None:
    """Name, bits, weights a scale, symmetric, weights and bytes of each quantized layer."""
    got = [(x.name, x.bits, x.group_size, x.symmetric, x.num_weights, x.num_bytes) for x in report.layers]
    names = "(name, bits, group_size, symmetric, num_weights, num_bytes)"
    assert got == list(right), f"quantized layers {names} should be {list(right)}, got {got}"


def entries(report: CheckpointAudit) -> list[tuple[str, str, str]]:
    """Contradictions as tuples."""
    return [(c.entry, c.stated, c.found) for c in report.contradictions]


def test_bytes_follow_from_type_and_shape(lab: Any) -> None:
    for dtype, shape, right in (
        ("F32", (3, 5), 60), ("BF16", (7,), 14), ("I64", (2,), 16), ("I8", (4, 4), 16), ("F8_E4M3", (9,), 9),
        ("F16", (), 2), ("Q4_0", (4, 32), 72), ("Q5_1", (32,), 24), ("Q8_0", (576, 64), 39168), ("Q4_K", (2, 256), 288),
        ("Q6_K", (1536, 2), 2520), ("IQ4_NL", (64,), 36), ("F32", (0, 4), 0),
    ):  # fmt: skip
        got = lab.stored_bytes(dtype, shape)
        assert got == right and isinstance(got, int), f"{dtype} {list(shape)} takes {right} bytes, got {got!r}"
    check_refused("an unknown type", lambda: lab.stored_bytes("Q9", (32,)), mentions="Q9")
    check_refused("half a block", lambda: lab.stored_bytes("Q4_K", (128,)))


def test_gptq_is_read_from_its_words(lab: Any) -> None:
    tensors = EMBEDDING | gptq_layer(Q, 64, 48, 4, 3) | gptq_layer(DOWN, 48, 96, 4, 6)
    report = look(lab, gptq_config(), tensors)
    # 64 · 48 / 2 bytes of codes, 3 groups with 64 zero points of half a byte and 64 scales, 48 indices.
    layers = ((Q, 4, 16, True, 3072, 1536 + 96 + 384 + 192), (DOWN, 4, 16, True, 4608, 2304 + 144 + 576 + 384))
    check_layers(report, *layers)
    num_weights, num_bytes = EMBEDDING_WEIGHTS + 7680, EMBEDDING_BYTES + 2208 + 3408
    check(report, format="gptq", high_precision=("model.embed_tokens",), contradictions=())
    check(report, num_weights=num_weights, num_bytes=num_bytes, bits_per_weight=8 * num_bytes / num_weights)
    for bits, groups, g_idx in ((3, 6, True), (3, 6, False), (8, 1, False), (2, 12, True), (8, 1, True)):
        size = -1 if groups == 1 else 96 // groups
        config = gptq_config(bits=bits, group_size=size, sym=False)
        report = look(lab, config, gptq_layer(Q, 64, 96, bits, groups, g_idx))
        what = f"{bits} bits, {groups} groups, {'with' if g_idx else 'without'} g_idx"
        got = [(x.bits, x.group_size, x.symmetric, x.num_weights) for x in report.layers]
        right = [(bits, 96 // groups, False, 6144)]
        assert got == right, f"{what}: (bits, group_size, symmetric, num_weights) are {right}, got {got}"
        check(report, contradictions=())
    # 96 inputs in groups of 36: two full ones and one of 24.
    report = look(lab, gptq_config(group_size=36), gptq_layer(Q, 64, 96, 4, 3))
    assert report.layers[0].group_size == 36, f"three groups are what 36 gives, got {report.layers[0].group_size}"
    check(report, contradictions=())


def test_awq_packs_along_the_outputs(lab: Any) -> None:
    tensors = EMBEDDING | awq_layer(Q, 64, 48, 3) | {"lm_head.weight": ("F16", (100, 48))}
    for settings in (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "zero_point": True},
    ):
        report = look(lab, {"quantization_config": settings}, tensors)
        check_layers(report, (Q, 4, 16, False, 3072, 1536 + 96 + 384))
        check(report, format="awq", high_precision=("model.embed_tokens", "lm_head"), contradictions=())


def test_packed_rows_are_as_long_as_their_groups(lab: Any) -> None:
    one = packed_config(group(["Linear"]))
    report = look(lab, one, EMBEDDING | packed_layer(Q, 64, 6, 3))
    check_layers(report, (Q, 4, 16, True, 3072, 1536 + 384 + 16))
    check(report, format="compressed-tensors", high_precision=("model.embed_tokens",), contradictions=())
    report = look(lab, packed_config(group(["Linear"], symmetric=False)), packed_layer(Q, 64, 6, 3, zero_point=True))
    check_layers(report, (Q, 4, 16, False, 3072, 1536 + 384 + 16 + 96))
    # 36 columns in groups of 12 take five words, of which the last is half empty.
    report = look(lab, packed_config(group(["Linear"], size=12)), packed_layer(Q, 64, 5, 3))
    assert [(x.group_size, x.num_weights) for x in report.layers] == [(12, 64 * 36)], (
        f"five words hold up to 40 codes, three groups of 12 hold 36 columns; got {report.layers}"
    )
    report = look(lab, packed_config(group(["Linear"], bits=8, size=None)), packed_layer(Q, 64, 12, 1))
    assert [(x.bits, x.group_size, x.num_weights) for x in report.layers] == [(8, 48, 3072)], f"got {report.layers}"
    check(report, contradictions=())
    # Codes of 5 bits run on across words: 64 of them take ten.
    report = look(lab, packed_config(group(["Linear"], bits=5, size=None)), packed_layer(Q, 32, 10, 1))
    assert [(x.bits, x.group_size, x.num_weights) for x in report.layers] == [(5, 64, 2048)], f"got {report.layers}"


def test_each_layer_has_its_own_group_of_settings(lab: Any) -> None:
    head = group(["re:.*lm_head"], bits=8, size=None)
    config = packed_config(group(["Linear"]), head, group([DOWN], bits=8, size=24))
    for layer, right in (
        (Q, StatedScheme(4, 16, True)), ("lm_head", StatedScheme(8, -1, True)), (DOWN, StatedScheme(8, 24, True)),
    ):  # fmt: skip
        got = lab.stated_scheme(config, layer)
        assert got == right, f"{layer}: a name or a pattern comes before a class, so {right}; got {got}"
    assert lab.stated_scheme(gptq_config(), Q) == StatedScheme(4, 16, True), "GPTQ says the same of every layer"
    assert lab.stated_scheme({}, Q) == StatedScheme(), "a config without quantization says nothing"
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}}
    assert lab.stated_scheme(awq, Q) == StatedScheme(4, 64, True), "no zero point means symmetric"
    old = {"quantization_config": {"quant_method": "awq", "w_bit": 3, "q_group_size": 128, "zero_point": True}}
    assert lab.stated_scheme(old, Q) == StatedScheme(3, 128, False), "older files say w_bit and q_group_size"
    tensors = packed_layer(Q, 64, 6, 3) | packed_layer(DOWN, 48, 24, 4) | packed_layer("lm_head", 100, 12, 1)
    report = look(lab, config, tensors)
    got_layers = [(x.name, x.bits, x.group_size, x.num_weights) for x in report.layers]
    right_layers = [(Q, 4, 16, 3072), (DOWN, 8, 24, 4608), ("lm_head", 8, 48, 4800)]
    assert got_layers == right_layers, f"mixed bits: {right_layers}, got {got_layers}"


def test_codes_of_one_byte_need_no_unpacking(lab: Any) -> None:
    int8: Tensors = {f"{Q}.weight": ("I8", (64, 48)), f"{Q}.weight_scale": ("F32", (64, 1))}
    report = look(lab, packed_config(group(["Linear"], bits=8, size=None)), EMBEDDING | int8)
    check_layers(report, (Q, 8, 48, True, 3072, 3072 + 256))
    check(report, format="compressed-tensors", contradictions=())
    fp8: Tensors = {f"{Q}.weight": ("F8_E4M3", (256, 384)), f"{Q}.weight_scale_inv": ("F32", (2, 3))}
    report = look(lab, {"quantization_config": {"quant_method": "fp8"}}, EMBEDDING | fp8)
    check_layers(report, (Q, 8, 16384, True, 98304, 98304 + 24))
    check(report, format="fp8", high_precision=("model.embed_tokens",))
    tensor: Tensors = {f"{Q}.weight": ("F8_E4M3", (64, 48)), f"{Q}.weight_scale": ("F32", ())}
    report = look(lab, {"quantization_config": {"quant_method": "fp8"}}, tensor)
    check_layers(report, (Q, 8, 3072, True, 3072, 3076))


def test_bitsandbytes_keeps_its_state_beside_the_codes(lab: Any) -> None:
    nf4: Tensors = {
        f"{Q}.weight": ("U8", (1536, 1)),
        f"{Q}.weight.absmax": ("U8", (48,)),
        f"{Q}.weight.nested_absmax": ("F32", (1,)),
        f"{Q}.weight.nested_quant_map": ("F32", (256,)),
        f"{Q}.weight.quant_map": ("F32", (16,)),
        f"{Q}.weight.quant_state.bitsandbytes__nf4": ("U8", (80,)),
        f"{Q}.bias": ("F16", (64,)),
    }
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    report = look(lab, config, EMBEDDING | nf4)
    check_layers(report, (Q, 4, 64, None, 3072, 1536 + 48 + 4 + 1024 + 64 + 80))
    check(report, format="bitsandbytes", num_weights=EMBEDDING_WEIGHTS + 3072 + 64, calibration=NONE_NEEDED, unknown=())
    int8: Tensors = {f"{Q}.weight": ("I8", (64, 48)), f"{Q}.SCB": ("F32", (64,)), f"{Q}.weight_format": ("U8", ())}
    report = look(lab, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, int8)
    check_layers(report, (Q, 8, 48, True, 3072, 3072 + 256 + 1))
    check(report, format="bitsandbytes")


def test_gguf_mixes_its_types(lab: Any) -> None:
    tensors: Tensors = {
        "token_embd.weight": ("Q8_0", (64, 100)), "output_norm.weight": ("F32", (64,)),
        "blk.0.attn_q.weight": ("Q5_0", (64, 64)), "blk.0.ffn_down.weight": ("Q4_K", (256, 64)),
        "blk.0.ffn_up.weight": ("F16", (64, 256)), "blk.0.attn_v.weight": ("IQ4_NL", (64, 32)),
    }  # fmt: skip
    config = {"general.architecture": "llama", "general.file_type": 15}
    report = look(lab, config, tensors)
    check_layers(
        report,
        ("token_embd", 8, 32, True, 6400, 6800), ("blk.0.attn_q", 5, 32, True, 4096, 2816),
        ("blk.0.ffn_down", 4, 32, False, 16384, 9216), ("blk.0.attn_v", 4, 32, None, 2048, 1152),
    )  # fmt: skip
    check(report, format="gguf", high_precision=("blk.0.ffn_up",), num_bytes=6800 + 256 + 2816 + 9216 + 32768 + 1152)
    check(report, calibration=NOT_STATED, unknown=("calibration", "method"))
    stated = look(lab, config | {"quantize.imatrix.dataset": "wiki.train.raw"}, tensors)
    check(stated, calibration="wiki.train.raw", unknown=("method",))


def test_a_plain_checkpoint_hides_nothing(lab: Any) -> None:
    gate: Tensors = {"model.gate_weight": ("F32", (2, 3))}
    tensors = EMBEDDING | {f"{Q}.weight": ("BF16", (64, 48)), "position_ids": ("I64", (1, 512))} | gate
    report = look(lab, {"hidden_size": 48}, tensors)
    check(report, format="plain", layers=(), calibration=NONE_NEEDED)
    check(report, high_precision=("model.embed_tokens", Q, "model.gate_weight"), unknown=())
    num_bytes = EMBEDDING_BYTES + 6144 + 4096 + 24
    check(report, num_weights=EMBEDDING_WEIGHTS + 3072 + 6, num_bytes=num_bytes)
    assert entries(report) == [], f"nothing is contradicted, got {entries(report)}"


def test_tensors_are_right_where_the_config_is_not(lab: Any) -> None:
    layer = gptq_layer(Q, 64, 96, 4, 3)
    report = look(lab, gptq_config(group_size=16), layer | gptq_layer(DOWN, 32, 96, 4, 3))
    assert report.layers[0].group_size == 32, f"3 groups of 96 inputs hold 32 each, got {report.layers[0].group_size}"
    right = [("group_size", "16", "32")]
    assert entries(report) == right, f"two layers, one contradiction {right}, got {entries(report)}"
    report = look(lab, gptq_config(bits=8, group_size=32), layer)
    assert report.layers[0].bits == 4 and entries(report) == [("bits", "8", "4")], (
        f"96 inputs in 12 words a column are 4 bits each, whatever the config says; got {entries(report)}"
    )
    report = look(lab, gptq_config(), awq_layer(Q, 64, 48, 3))
    check(report, format="awq")
    assert entries(report) == [("quant_method", "gptq", "awq")], f"the layout is AWQ's, got {entries(report)}"
    report = look(lab, packed_config(group(["Linear"])), packed_layer(Q, 64, 6, 3, zero_point=True))
    assert report.layers[0].symmetric is False, "stored zero points mean that codes are not symmetric"
    assert entries(report) == [("symmetric", "True", "False")], f"got {entries(report)}"
    report = look(lab, gptq_config(), EMBEDDING)
    assert entries(report) == [("quant_method", "gptq", "no quantized matrix")], f"got {entries(report)}"
    check(report, format="plain")
    for ignore in (("lm_head",), (r"re:.*lm_head$",)):
        tensors = packed_layer("lm_head", 100, 6, 3) | packed_layer(Q, 64, 6, 3)
        report = look(lab, packed_config(group(["Linear"]), ignore=ignore), tensors)
        got = [entry for entry, _, _ in entries(report)]
        assert got == ["ignore"] and "lm_head" in report.contradictions[0].stated, (
            f"the config leaves {ignore} alone, but its codes are there: {report.contradictions}"
        )


def test_what_is_not_stated_is_not_guessed(lab: Any) -> None:
    layer = gptq_layer(Q, 64, 48, 4, 3)
    report = look(lab, gptq_config(), layer)
    check(report, calibration=NOT_STATED, unknown=("calibration", "method"))
    text = report.text()
    assert "not stated" in text and "Ask whoever made it" in text, f"the report must say what it can't know: {text}"
    config = gptq_config()
    del config["quantization_config"]["sym"]
    report = look(lab, config, layer)
    assert report.layers[0].symmetric is None, "GPTQ stores zero points in any case, so they tell nothing"
    check(report, unknown=("calibration", "method", "symmetric"))
    for stated, right in (
        ("c4", "c4"),
        (["one", "two"], "2 texts of the maker's own"),
        (None, NOT_STATED),
        ([], NOT_STATED),
    ):
        check(look(lab, gptq_config(dataset=stated), layer), calibration=right)
    check(look(lab, gptq_config(calibration="stdlib prose, 128 x 512"), layer), calibration="stdlib prose, 128 x 512")
    check(look(lab, gptq_config() | {"calibration_dataset": "pile"}, layer), calibration="pile", unknown=("method",))


def test_a_checkpoint_with_holes_is_refused(lab: Any) -> None:
    layer = gptq_layer(Q, 64, 48, 4, 3)
    assert look(lab, gptq_config(), layer).layers[0].num_weights == 3072, "a good call finds 3072 weights"
    check_refused("no tensors", lambda: lab.audit({}, {}))
    check_refused("tensors without numbers", lambda: lab.audit({}, {"a.weight": ("F32", (0, 4))}))
    del layer[f"{Q}.scales"]
    check_refused("codes without scales", lambda: lab.audit(gptq_config(), layer), mentions=Q)
    check_refused("packed codes of unknown bits", lambda: lab.audit({}, packed_layer(Q, 64, 6, 3)), mentions=Q)
    check_refused("an unknown type", lambda: lab.audit({}, {"a.weight": ("F7", (3, 4))}), mentions="F7")
    lone = {f"{Q}.weight": ("I8", (64, 48))}
    check_refused("bytes without scales", lambda: lab.audit({}, lone), mentions=Q)
