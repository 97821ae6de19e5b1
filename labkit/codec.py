"""Values ⇄ messages: the one encoding that both transports use.

A message is a JSON-able header and a list of raw buffers. Tensors that share a storage travel as one buffer, so that
aliasing survives the journey and in-place changes can come back. Bytes of that buffer that no tensor covers hold a
canary: whoever changes them wrote outside the view that was given.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.errors import ProtocolFault
from labkit.storage import ALIGNMENT, MAX_TENSOR_BYTES, Buffer, Storage, View, flat_bytes

MAX_DEPTH = 32
MAX_NODES = 1_000_000
MAX_RANK = 16

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2"
    ).split()
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class Message:
    """What crosses: a JSON-able header and the raw buffers that it refers to by index."""

    header: dict[str, Any]
    buffers: list[Buffer] = field(default_factory=list)


class Encoder:
    """Turns values into header nodes and collects their buffers.

    Args:
        export_callable: given a function, returns the number by which the other side may call it back.
        export_object: given any object that is no plain value, returns the number of its handle.
        bring_home: copy tensors of other devices to the CPU.

    Without one of the first two, such values are refused with TypeError.
    """

    def __init__(
        self,
        export_callable: Callable[[Callable[..., Any]], int] | None = None,
        export_object: Callable[[object], int] | None = None,
        bring_home: bool = False,
    ) -> None:
        self._bring_home = bring_home
        self._export_callable = export_callable
        self._export_object = export_object
        self._storages: dict[int, Storage] = {}
        self._order: list[Storage] = []
        self._bytes: list[Buffer] = []

    def encode(self, value: object) -> Any:
        """The header node of a value. Tensors and bytes are buffered until `message`."""
        return self._node(value, 0)

    def message(self, header: dict[str, Any]) -> Message:
        """Packs the header and everything encoded so far."""
        storages = [storage.pack() for storage in self._order]
        return Message({**header, "num_storages": len(storages)}, [*storages, *self._bytes])

    def write_back(self, changed: list[list[int]], buffers: list[Buffer]) -> None:
        """Brings in-place changes home: pairs of [storage index, buffer index] from a reply."""
        for storage_index, buffer_index in changed:
            if not (0 <= storage_index < len(self._order) and 0 <= buffer_index < len(buffers)):
                raise ProtocolFault("a reply names a storage or buffer that does not exist")
            self._order[storage_index].unpack(buffers[buffer_index])

    def _node(self, value: object, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"a value nested deeper than {MAX_DEPTH} levels cannot cross")
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return {"t": "array", "v": self._tensor(_tensor_of_array(value))}
        if isinstance(value, np.generic):
            return self._node(value.item(), depth)
        if isinstance(value, torch.dtype):
            return {"t": "dtype", "v": _dtype_name(value)}
        if isinstance(value, enum.Enum) and _is_ours(type(value)):
            return {"t": "enum", "cls": _class_name(type(value)), "v": value.name}
        if isinstance(value, (bool, int, str, float)):
            return self._scalar(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            self._bytes.append(bytes(value))
            return {"t": "bytes", "v": len(self._bytes) - 1}
        if isinstance(value, list):
            return [self._node(item, depth + 1) for item in list.__iter__(value)]
        if isinstance(value, tuple):
            return {"t": "tuple", "v": [self._node(item, depth + 1) for item in tuple.__iter__(value)]}
        if isinstance(value, dict):
            items = [[self._node(k, depth + 1), self._node(v, depth + 1)] for k, v in dict.items(value)]
            return {"t": "dict", "v": items}
        if isinstance(value, Exported):
            return {"t": "handle", "v": value.number}
        if _is_ours(type(value)) and _is_frozen_dataclass(type(value)):
            names = [f.name for f in dataclasses.fields(value) if f.init]  # type: ignore[arg-type]
            fields = {name: self._node(getattr(value, name), depth + 1) for name in names}
            return {"t": "data", "cls": _class_name(type(value)), "v": fields}
        if callable(value) and self._export_callable is not None:
            return {"t": "callback", "v": self._export_callable(value)}
        if self._export_object is not None:
            return {"t": "handle", "v": self._export_object(value)}
        raise TypeError(f"a {type(value).__name__} cannot cross to lab code; pass plain values, tensors or a spec")

    @staticmethod
    def _scalar(value: bool | int | str | float) -> Any:
        # A subclass may lie about itself: only the plain value of the base class crosses.
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        plain = float.__float__(value)
        return {"t": "float", "v": plain.hex()}

    def _tensor(self, value: Tensor) -> dict[str, Any]:
        with torch._C.DisableTorchFunctionSubclass():
            tensor = value.detach().cpu() if self._bring_home else value.detach()
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                raise TypeError(f"only dense CPU tensors cross, not {tensor.layout} on {tensor.device}")
            if tensor.is_conj() or tensor.is_neg():
                tensor = tensor.resolve_conj().resolve_neg()
            storage = tensor.untyped_storage()
            node = {
                "t": "tensor",
                "dtype": _dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "offset": 0,
            }
            key = storage.data_ptr() or -len(self._order) - 1
            if key not in self._storages:
                self._storages[key] = Storage(storage)
                self._order.append(self._storages[key])
            node["storage"] = self._order.index(self._storages[key])
            self._storages[key].tensors.append((tensor, node))
            return node


@dataclass(frozen=True)
class Exported:
    """Stands for an object that lives on the other side, by the number of its handle."""

    number: int


class Decoder:
    """Turns header nodes and buffers back into values.

    Args:
        message: what arrived. Nothing in it is trusted; whatever breaks the rules raises ProtocolFault.
        snapshot: rebuild every tensor as a plain contiguous one of its own (for results). Otherwise tensors keep
            their strides and share storages as the sender's did (for arguments).
        import_callable: makes a function of a callback number.
        import_handle: makes an object of a handle number.
        finish: called on each labkit dataclass, e.g. to build a spec.
        device: where tensors are put.
    """

    def __init__(
        self,
        message: Message,
        *,
        snapshot: bool,
        import_callable: Callable[[int], Callable[..., Any]] | None = None,
        import_handle: Callable[[int], Any] | None = None,
        finish: Callable[[Any], Any] | None = None,
        device: str = "cpu",
    ) -> None:
        self._snapshot = snapshot
        self._import_callable = import_callable
        self._import_handle = import_handle
        self._finish = finish
        self._nodes = 0
        self._copied_bytes = 0
        count = message.header.get("num_storages", 0)
        if type(count) is not int or not 0 <= count <= len(message.buffers):
            raise ProtocolFault("the number of storages is wrong")
        if any(len(buffer) % ALIGNMENT for buffer in message.buffers[:count]):
            raise ProtocolFault("a storage has an odd size")
        self._device = device
        self.storages = [flat_bytes(buffer).to(device) for buffer in message.buffers[:count]]
        self._bytes = message.buffers[count:]

    def decode(self, node: Any) -> Any:
        """The value of a header node.

        Raises:
            ProtocolFault: if the node is malformed.
        """
        return self._value(node, 0)

    def _value(self, node: Any, depth: int) -> Any:
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise ProtocolFault("a message is nested too deeply or holds too many values")
        if node is None or type(node) in (bool, int, str):
            return node
        if type(node) is list:
            return [self._value(item, depth + 1) for item in node]
        if type(node) is not dict or type(node.get("t")) is not str:
            raise ProtocolFault("a value of unknown form")
        reader = getattr(self, f"_read_{node['t']}", None)
        if reader is None:
            raise ProtocolFault(f"a value of unknown kind {node['t'][:40]!r}")
        try:
            return reader(node.get("v", node), node, depth)
        except (ProtocolFault, NotImplementedError):
            raise
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
            if self._finish is not None and node["t"] == "data":
                raise  # an argument of ours that refuses its own fields: the test wants to see why
            raise ProtocolFault(f"a malformed {node['t']}: {error}") from error

    def _read_float(self, value: Any, node: Any, depth: int) -> float:
        return float.fromhex(value)

    def _read_dtype(self, value: Any, node: Any, depth: int) -> torch.dtype:
        return DTYPES[value]

    def _read_bytes(self, value: Any, node: Any, depth: int) -> bytes:
        return bytes(self._bytes[_index(value)])

    def _read_tuple(self, value: Any, node: Any, depth: int) -> tuple[Any, ...]:
        return tuple(self._value(item, depth + 1) for item in value)

    def _read_dict(self, value: Any, node: Any, depth: int) -> dict[Any, Any]:
        return {self._value(k, depth + 1): self._value(v, depth + 1) for k, v in value}

    def _read_enum(self, value: Any, node: Any, depth: int) -> enum.Enum:
        cls = self._class(node["cls"])
        if not issubclass(cls, enum.Enum):
            raise ProtocolFault("an enum of unknown class")
        return cls[value]

    def _read_data(self, value: Any, node: Any, depth: int) -> Any:
        cls = self._class(node["cls"])
        if not _is_frozen_dataclass(cls):
            raise ProtocolFault("a record of unknown class")
        made = cls(**{str(name): self._value(item, depth + 1) for name, item in value.items()})
        return self._finish(made) if self._finish is not None else made

    def _read_callback(self, value: Any, node: Any, depth: int) -> Callable[..., Any]:
        if self._import_callable is None:
            raise ProtocolFault("a function where none is allowed")
        return self._import_callable(_index(value))

    def _read_handle(self, value: Any, node: Any, depth: int) -> Any:
        if self._import_handle is None:
            raise ProtocolFault("an object where none is allowed")
        return self._import_handle(_index(value))

    def _read_array(self, value: Any, node: Any, depth: int) -> np.ndarray:
        return self._read_tensor(value, value, depth).numpy()

    def _read_tensor(self, value: Any, node: Any, depth: int) -> Tensor:
        shape, stride = _sizes(node["shape"]), _sizes(node["stride"])
        if len(shape) != len(stride) or len(shape) > MAX_RANK:
            raise ProtocolFault("a tensor's shape and strides do not agree")
        view = View(DTYPES[node["dtype"]], shape, stride, _index(node["offset"]))
        flat = self.storages[_index(node["storage"])]
        if view.end * view.dtype.itemsize > flat.numel():
            raise ProtocolFault("a tensor reaches beyond its buffer")
        # Strides of 0 let a small buffer pose as a huge tensor: bound what a copy of it would take.
        self._copied_bytes += torch.Size(shape).numel() * view.dtype.itemsize
        if self._copied_bytes > MAX_TENSOR_BYTES:
            raise ProtocolFault(f"tensors that take more than {MAX_TENSOR_BYTES >> 20} MiB")
        if view.end == view.offset:
            return torch.empty(shape, dtype=view.dtype, device=self._device)
        tensor = view.of(flat)
        return tensor.clone(memory_format=torch.contiguous_format) if self._snapshot else tensor

    def _class(self, name: Any) -> type:
        if type(name) is not str or not re.fullmatch(r"labkit(\.\w+)*:\w+", name):
            raise ProtocolFault("a class from outside labkit")
        module_name, class_name = name.split(":")
        # Only arguments may cause an import: importing runs code, and a result must not choose what runs.
        if self._finish is not None and not self._snapshot:
            importlib.import_module(module_name)
        cls = getattr(sys.modules.get(module_name), class_name, None)
        if not isinstance(cls, type) or not _is_ours(cls):
            raise ProtocolFault(f"labkit has no class {name}")
        return cls


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ProtocolFault("an index that is no index")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not list:
        raise ProtocolFault("a shape that is no list")
    return tuple(_index(value) for value in values)


def _tensor_of_array(array: np.ndarray) -> Tensor:
    if any(stride < 0 for stride in array.strides) or not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(np.asarray(array))


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _DTYPE_NAMES:
        raise TypeError(f"tensors of {dtype} cannot cross; allowed: {', '.join(DTYPES)}")
    return _DTYPE_NAMES[dtype]


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "labkit"


def _is_frozen_dataclass(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
