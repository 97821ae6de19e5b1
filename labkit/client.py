"""The side that tests: `lab.some_function(…)`, wherever the code under test runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol
from unittest import SkipTest

from torch import Tensor

from labkit.codec import Decoder, Encoder, Exported, Message
from labkit.errors import CROSSING_TYPES, ProtocolFault, StudentError
from labkit.instruments.access_log import AccessLog
from labkit.loader import LabPackage
from labkit.manifest import Interface, Manifest
from labkit.native import native_device
from labkit.service import Service


class Transport(Protocol):
    """Carries messages to a `Service` and back."""

    def request(self, message: Message, on_callback: Callable[[Message], Message]) -> Message:
        """Sends a request and returns its reply; answers callbacks that come in between."""

    def cause(self) -> BaseException | None:
        """The exception behind the last error reply, where it is at hand."""

    def close(self) -> None:
        """Ends the service."""


class LocalTransport:
    """The service in this very process, so that debuggers and tracebacks reach the code under test.

    Args:
        package: the code under test; mounted here, unmounted on close.
        interface: what may be reached in it.
        device: where it is given its tensors.
    """

    def __init__(self, package: LabPackage, interface: Interface, device: str = "cpu") -> None:
        self._package = package
        self._service = Service(package, interface, device)
        package.mount()

    def request(self, message: Message, on_callback: Callable[[Message], Message]) -> Message:
        """Serves the request by a plain call."""
        return self._service.handle(message, on_callback)

    def cause(self) -> BaseException | None:
        """The original exception of the last error reply."""
        return self._service.last_error

    def close(self) -> None:
        """Unmounts the package."""
        self._package.unmount()


class LabClient:
    """Calls the functions and classes of a lab's interface; also usable as a context manager.

    Attributes that the interface declares are callable: functions return values, classes return a `Handle`.

    Args:
        transport: leads to the code under test.
        interface: the names that may be used.
    """

    def __init__(self, transport: Transport, interface: Interface) -> None:
        self._transport = transport
        self._interface = interface
        self._callables: list[Callable[..., Any]] = []
        self._callback_error: BaseException | None = None
        self._dropped: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if self._interface.module_of(name) is None:
            raise AttributeError(f"{name!r} is not in the lab's interface: {self._interface}")
        return lambda *args, **kwargs: self._request({"op": "call", "name": name}, args, kwargs)

    def vjp(self, name: str, inputs: Sequence[Tensor], grad_output: Tensor, **kwargs: Any) -> list[Tensor]:
        """Gradients of a lab function by its own autograd.

        Args:
            name: the function, called with the inputs in order.
            inputs: tensors to differentiate by.
            grad_output: gradient of its output, of the output's shape.

        Returns:
            One gradient for each input, zeros where it has no influence.
        """
        return self._request({"op": "vjp", "name": name}, (list(inputs), grad_output), kwargs)

    def observe(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, AccessLog]:
        """Calls a lab function and records what its kernels do to memory, and which operators run besides.

        The record is made beside the code under test, which could forge it: let it take points away, never prove an
        answer right.

        Args:
            name: the function.
            args: its arguments.
            kwargs: its arguments by name.

        Returns:
            The function's result, and the log.

        Raises:
            unittest.SkipTest: kernels run natively here, where nothing can be counted.
        """
        try:
            reply = self._request({"op": "observe", "name": name}, args, kwargs)
        except StudentError:
            if type(self._transport.cause()).__name__ == "NotInterpreted":
                raise SkipTest(f"not verified here: {self._transport.cause()}") from None
            raise
        if not isinstance(reply, tuple) or len(reply) != 2 or not isinstance(reply[1], AccessLog):
            raise ProtocolFault("an observation without a log")
        return reply

    def without_launches(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a lab function whose kernels are kept from running: a right answer then was not theirs.

        Args:
            name: the function.
            args: its arguments.
            kwargs: its arguments by name.
        """
        return self._request({"op": "without_launches", "name": name}, args, kwargs)

    def import_module(self, name: str) -> None:
        """Imports a module of the lab, for what that raises."""
        self._request({"op": "import", "name": name})

    def close(self) -> None:
        """Ends the service behind the transport."""
        self._transport.close()

    def __enter__(self) -> LabClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, header: dict[str, Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self._dropped:
            dropped, self._dropped = self._dropped, []
            self._request({"op": "release"}, dropped)
        self._callback_error = None
        encoder = Encoder(export_callable=self._export_callable)
        header = {**header, "args": encoder.encode(_exported(list(args))), "kwargs": encoder.encode(kwargs or {})}
        reply = self._transport.request(encoder.message(header), self._on_callback)
        if self._callback_error is not None:
            raise self._callback_error
        encoder.write_back(_pairs(reply.header.get("changed", [])), reply.buffers)
        if "error" in reply.header:
            self._raise(reply.header["error"])
        if reply.header.get("stop") is True:
            raise StopIteration
        if "ok" not in reply.header:
            raise ProtocolFault("a reply with neither result nor error")
        return self._decode(reply, reply.header["ok"])

    def _decode(self, message: Message, node: Any) -> Any:
        decoder = Decoder(message, snapshot=True, import_handle=lambda number: Handle(self, number))
        return decoder.decode(node)

    def _raise(self, error: Any) -> NoReturn:
        if not isinstance(error, dict) or not all(isinstance(v, str) for v in error.values()):
            raise ProtocolFault("a malformed error")
        kind, message = error.get("type", ""), error.get("message", "")
        raised: Exception
        if kind in CROSSING_TYPES:
            raised = CROSSING_TYPES[kind](message)
            raised.from_lab = True  # type: ignore[attr-defined]
            raised.traceback_text = error.get("traceback", "")  # type: ignore[attr-defined]
        else:
            raised = StudentError(error.get("name", "Exception"), message, error.get("traceback", ""))
        raise raised from self._transport.cause()

    def _export_callable(self, function: Callable[..., Any]) -> int:
        if function not in self._callables:
            self._callables.append(function)
        return self._callables.index(function)

    def _on_callback(self, message: Message) -> Message:
        number = message.header.get("callback")
        if type(number) is not int or not 0 <= number < len(self._callables):
            raise ProtocolFault("a call of a function that the test never gave")
        args = self._decode(message, message.header.get("args"))
        kwargs = self._decode(message, message.header.get("kwargs"))
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise ProtocolFault("a callback with malformed arguments")
        encoder = Encoder()
        try:
            return encoder.message({"ok": encoder.encode(self._callables[number](*args, **kwargs))})
        except Exception as error:
            self._callback_error = self._callback_error or error
            return Message({"error": {"type": type(error).__name__}})

    def _drop(self, number: int) -> None:
        self._dropped.append(number)


class Handle:
    """An object that the code under test returned. It stays there; calls travel.

    Methods and properties are those that the interface declares; calling it, `len`, indexing, iteration, `next` and
    `close` work where the object has them. Two handles never compare equal, even for the same object.
    """

    def __init__(self, client: LabClient, number: int) -> None:
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        interface = self._client._interface
        if name in interface.methods:
            return lambda *args, **kwargs: self._do("method", args, kwargs, name=name)
        if name in interface.properties:
            return self._do("get", name=name)
        declared = ", ".join(sorted(interface.methods | interface.properties))
        raise AttributeError(f"{name!r} is not in the lab's interface; members of its objects: {declared}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name!r} cannot be set from a test; objects of a lab are read-only here")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("invoke", args, kwargs)

    def __len__(self) -> int:
        return self._do("len")

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", (key,))

    def __iter__(self) -> Handle:
        return self._do("iter")

    def __next__(self) -> Any:
        return self._do("next")

    def close(self) -> None:
        """Closes the object, as a generator or a file is closed."""
        self._do("close")

    def __del__(self) -> None:
        # The next request tells the other side: sending one from a finalizer could cut into another.
        self._client._drop(self._number)

    def _do(self, op: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, **header: Any) -> Any:
        return self._client._request({"op": op, "handle": self._number, **header}, args, kwargs)


def local_lab(manifest: Manifest, folder: Path) -> LabClient:
    """A lab whose code runs in this process.

    Args:
        manifest: the lab.
        folder: where its modules lie: the student's, the reference's or any other.

    Raises:
        FileNotFoundError: if there is no such folder.
    """
    package = LabPackage(f"lab{manifest.id}", folder, manifest.modules)
    return LabClient(LocalTransport(package, manifest.interface, native_device(manifest)), manifest.interface)


def _exported(value: Any) -> Any:
    """Replaces handles in an argument tree by the numbers that stand for them."""
    if isinstance(value, Handle):
        return Exported(value._number)
    if isinstance(value, (list, tuple)):
        items = [_exported(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _exported(item) for key, item in value.items()}
    return value


def _pairs(value: Any) -> list[list[int]]:
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) for pair in value
    ):
        raise ProtocolFault("a malformed list of changes")
    return value
