"""The codec: what crosses arrives equal, aliases stay aliases, and nothing malformed gets through."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.codec import DTYPES, Decoder, Encoder, Message
from labkit.errors import OutOfViewWrite, ProtocolFault
from labkit.sampling_params import SamplingParams


def round_trip(value: Any, **options: Any) -> Any:
    """Encodes, passes through real JSON and real bytes, decodes."""
    encoder = Encoder()
    message = encoder.message({"ok": encoder.encode(value)})
    arrived = Message(json.loads(json.dumps(message.header, allow_nan=False)), [bytes(b) for b in message.buffers])
    return Decoder(arrived, **{"snapshot": True, **options}).decode(arrived.header["ok"])


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
trees = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(trees)
@settings(max_examples=200, deadline=None)
def test_plain_values_arrive_equal_and_of_the_same_type(value: Any) -> None:
    arrived = round_trip(value)
    assert arrived == value and type(arrived) is type(value)


def test_floats_that_json_lacks_arrive() -> None:
    nan, inf, minus_zero = round_trip([math.nan, -math.inf, -0.0])
    assert math.isnan(nan) and inf == -math.inf and math.copysign(1, minus_zero) == -1


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_arrives_bit_for_bit(name: str) -> None:
    bits = torch.arange(240, dtype=torch.int64).to(torch.uint8)
    tensor = (bits % 2 if name == "bool" else bits).view(DTYPES[name]).reshape(2, -1)
    arrived = round_trip(tensor)
    assert arrived.dtype == tensor.dtype and arrived.shape == tensor.shape
    assert torch.equal(arrived.view(torch.uint8), tensor.view(torch.uint8))


@given(st.permutations([0, 1, 2]), st.tuples(*[st.integers(0, 3)] * 3), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_strided_tensors_arrive_with_their_strides(order: Any, start: Any, step: int, dim: int) -> None:
    base = torch.randn(5, 6, 7).permute(*order)
    view = base[tuple(slice(s, None, step) for s in start)].select(dim, 0)
    assert torch.equal(round_trip(view), view)
    as_sent = round_trip(view, snapshot=False)
    assert torch.equal(as_sent, view) and as_sent.stride() == view.stride()


def test_results_are_plain_contiguous_tensors() -> None:
    class Liar(torch.Tensor):
        def __eq__(self, other: object) -> bool:  # type: ignore[override]
            return True

    arrived = round_trip(torch.randn(3, 4).t().as_subclass(Liar))
    assert type(arrived) is torch.Tensor and arrived.is_contiguous() and not arrived.requires_grad


def test_subclasses_of_plain_values_arrive_as_plain_values() -> None:
    class Five(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    arrived = round_trip([Five(5)])
    assert type(arrived[0]) is int and arrived != [6]


def test_arrays_dtypes_and_records_arrive() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[::-1]
    arrived = round_trip({"a": array, "d": torch.float16, "s": SamplingParams(top_k=3)})
    assert np.array_equal(arrived["a"], array) and arrived["a"].dtype == np.float32
    assert arrived["d"] is torch.float16 and arrived["s"] == SamplingParams(top_k=3)


def test_tensors_that_share_storage_still_share_it() -> None:
    base = torch.zeros(4, 4)
    first, second = round_trip([base[:, :2], base[1:]], snapshot=False)
    first[1, 0] = 7
    assert second[0, 0] == 7


def _changed_in_place(tensor: torch.Tensor, change: Any) -> None:
    encoder = Encoder()
    message = encoder.message({"ok": encoder.encode(tensor)})
    decoder = Decoder(message, snapshot=False)
    change(decoder.decode(message.header["ok"]))
    encoder.write_back([[0, 0]], [decoder.storages[0].numpy().tobytes()])


def test_in_place_changes_come_back_into_the_view_alone() -> None:
    base = torch.zeros(4, 6)
    _changed_in_place(base[1:3, ::2], lambda view: view.add_(1))
    expected = torch.zeros(4, 6)
    expected[1:3, ::2] = 1
    assert torch.equal(base, expected)


def test_a_write_beside_the_view_is_an_error_and_changes_nothing() -> None:
    base = torch.zeros(4, 6)
    with pytest.raises(OutOfViewWrite):
        _changed_in_place(base[:, :3], lambda view: view.as_strided((4, 6), (6, 1), 0)[:, :4].fill_(1))
    assert not base.any()


def test_memory_between_views_is_not_shown() -> None:
    secret = torch.full((4, 6), 42.0)
    arrived = round_trip(secret[:, :3], snapshot=False)
    assert not (arrived.as_strided((3, 6), (6, 1), 0)[:, 3:] == 42.0).any()


@pytest.mark.parametrize("value", [{1, 2}, object(), lambda: None, torch.zeros(2, device="meta")])
def test_what_cannot_cross_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="cross"):
        Encoder().encode(value)


MALFORMED = [
    {"t": "tensor", "dtype": "float32", "shape": [9], "stride": [1], "offset": 0, "storage": 0},
    {"t": "tensor", "dtype": "float32", "shape": [-1], "stride": [1], "offset": 0, "storage": 0},
    {"t": "tensor", "dtype": "float32", "shape": [2], "stride": [-1], "offset": 1, "storage": 0},
    {"t": "tensor", "dtype": "float32", "shape": [2, 2], "stride": [1], "offset": 0, "storage": 0},
    {"t": "tensor", "dtype": "float32", "shape": [1 << 40], "stride": [0], "offset": 0, "storage": 0},
    {"t": "tensor", "dtype": "pickle", "shape": [1], "stride": [1], "offset": 0, "storage": 0},
    {"t": "tensor", "dtype": "float32", "shape": [1], "stride": [1], "offset": 0, "storage": 5},
    {"t": "tensor", "dtype": "float32", "shape": "1", "stride": [1], "offset": 0, "storage": 0},
    {"t": "data", "cls": "os:system", "v": {}},
    {"t": "data", "cls": "labkit.codec:Encoder", "v": {}},
    {"t": "data", "cls": "labkit.sampling_params:SamplingParams", "v": {"temperature": -1}},
    {"t": "data", "cls": "labkit.checkpoints.__main__:X", "v": {}},
    {"t": "enum", "cls": "labkit.codec:Message", "v": "x"},
    {"t": "callback", "v": 0},
    {"t": "handle", "v": 0},
    {"t": "float", "v": "one"},
    {"t": "dict", "v": [[[1], 2]]},
    {"t": "dict", "v": 3},
    {"t": "bytes", "v": 9},
    {"t": "nothing"},
    {"t": 3},
    {},
    1.5,
]


@pytest.mark.parametrize("node", MALFORMED, ids=lambda node: json.dumps(node)[:60])
def test_malformed_results_are_protocol_faults(node: Any) -> None:
    message = Message({"ok": node, "num_storages": 1}, [bytes(32)])
    with pytest.raises(ProtocolFault):
        Decoder(message, snapshot=True).decode(node)


def test_deep_nesting_is_a_protocol_fault() -> None:
    node: Any = []
    for _ in range(200):
        node = [node]
    with pytest.raises(ProtocolFault):
        Decoder(Message({}), snapshot=True).decode(node)


def test_small_buffers_cannot_pose_as_more_memory_than_one_message_may_take() -> None:
    buffer = bytearray(16)
    node = {"t": "tensor", "dtype": "uint8", "shape": [1 << 28], "stride": [0], "offset": 0, "storage": 0}
    decoder = Decoder(Message({"num_storages": 1}, [buffer]), snapshot=True)
    with pytest.raises(ProtocolFault, match="MiB"):
        decoder.decode([node] * 5)
