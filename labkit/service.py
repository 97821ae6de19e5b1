"""The side that owns the code under test: takes requests, calls lab functions, keeps the objects they return."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from labkit.codec import Decoder, Encoder, Message
from labkit.errors import CROSSING_TYPES, ProtocolFault, not_attempted_text
from labkit.loader import LabPackage
from labkit.manifest import Interface
from labkit.protocols import Spec

Callback = Callable[[Message], Message]
"""Sends a callback request to the test's side and waits for its reply."""


class CallbackFailed(Exception):
    """A function of the test's raised; the test's side knows what."""


class Service:
    """Answers requests about one mounted lab.

    Args:
        package: the mounted code under test.
        interface: what may be reached in it.
        device: where it is given its tensors.
    """

    def __init__(self, package: LabPackage, interface: Interface, device: str = "cpu") -> None:
        self._device = device
        self._package = package
        self._interface = interface
        self._objects: dict[int, Any] = {}
        self._next_handle = 0
        self.last_error: BaseException | None = None

    def handle(self, request: Message, callback: Callback) -> Message:
        """Serves one request; whatever the code under test raises becomes an error reply."""
        self.last_error = None
        try:
            return self._serve(request, callback)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit from lab code must not end the process that serves it
            self.last_error = error
            return Message({"error": self._describe(error)})

    def _serve(self, request: Message, callback: Callback) -> Message:
        operation = getattr(self, f"_do_{request.header.get('op')}", None)
        if operation is None:
            raise ProtocolFault(f"unknown operation {request.header.get('op')!r}")
        arguments = Decoder(
            request,
            snapshot=False,
            import_callable=lambda number: self._import_callable(number, callback),
            import_handle=self._object,
            finish=lambda value: value.build() if isinstance(value, Spec) else value,
            device=self._device,
        )
        args = arguments.decode(request.header.get("args", []))
        kwargs = arguments.decode(request.header.get("kwargs", {"t": "dict", "v": []}))
        before = [storage.clone() for storage in arguments.storages]
        header: dict[str, Any] = {}
        encoder = Encoder(export_object=self._export, bring_home=True)
        try:
            header["ok"] = encoder.encode(operation(request.header, args, kwargs))
        except StopIteration:
            header["stop"] = True
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.last_error = error
            header["error"] = self._describe(error)
        reply = encoder.message(header)
        # In-place changes come back even from a call that raised: a test asks whether state was left alone.
        changed = []
        for index, (old, new) in enumerate(zip(before, arguments.storages, strict=True)):
            if not torch.equal(old, new):
                changed.append([index, len(reply.buffers)])
                reply.buffers.append(new.cpu().numpy().tobytes())
        reply.header["changed"] = changed
        return reply

    def _do_call(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self._function(header["name"])(*args, **kwargs)

    def _do_import(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        self._package.module(header["name"])

    def _do_vjp(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        inputs, grad_output = args
        inputs = [tensor.requires_grad_() for tensor in inputs]
        output = self._function(header["name"])(*inputs, **kwargs)
        return list(torch.autograd.grad(output, inputs, grad_output, materialize_grads=True, allow_unused=True))

    def _do_observe(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        from labkit.instruments import observation  # needs Triton, which most labs don't

        return observation.observe(self._function(header["name"]), args, kwargs)

    def _do_without_launches(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        from labkit.instruments import observation

        return observation.without_launches(self._function(header["name"]), args, kwargs)

    def _do_method(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return getattr(self._object(header["handle"]), self._declared(header["name"], self._interface.methods))(
            *args, **kwargs
        )

    def _do_get(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        name = self._declared(header["name"], self._interface.properties)
        return getattr(self._object(header["handle"]), name)

    def _do_invoke(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self._object(header["handle"])(*args, **kwargs)

    def _do_len(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return len(self._object(header["handle"]))

    def _do_item(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self._object(header["handle"])[args[0]]

    def _do_iter(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return iter(self._object(header["handle"]))

    def _do_next(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return next(self._object(header["handle"]))

    def _do_close(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        self._object(header["handle"]).close()

    def _do_release(self, header: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        for number in args:
            self._objects.pop(number, None)

    def _function(self, name: str) -> Callable[..., Any]:
        module = self._interface.module_of(name)
        if module is None:
            raise ProtocolFault(f"{name} is not part of the lab's interface")
        return getattr(self._package.module(module), name)

    @staticmethod
    def _declared(name: str, allowed: frozenset[str]) -> str:
        if name not in allowed:
            raise ProtocolFault(f"{name} is not part of the lab's interface")
        return name

    def _object(self, number: int) -> Any:
        if number not in self._objects:
            raise ProtocolFault(f"there is no object {number}")
        return self._objects[number]

    def _export(self, value: object) -> int:
        self._objects[self._next_handle] = value
        self._next_handle += 1
        return self._next_handle - 1

    def _import_callable(self, number: int, callback: Callback) -> Callable[..., Any]:
        def call_back(*args: Any, **kwargs: Any) -> Any:
            encoder = Encoder(export_object=self._export, bring_home=True)
            header = {"callback": number, "args": encoder.encode(list(args)), "kwargs": encoder.encode(kwargs)}
            reply = callback(encoder.message(header))
            if "ok" not in reply.header:
                raise CallbackFailed("a function that the test gave raised an error")
            return Decoder(reply, snapshot=True, device=self._device).decode(reply.header["ok"])

        return call_back

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """The part of an exception that crosses: type, message, and a traceback without our own frames."""
        kind = next((name for name, cls in CROSSING_TYPES.items() if isinstance(error, cls)), "StudentError")
        message = _text_of(error.args[0] if isinstance(error, KeyError) and error.args else error)
        if stub_text := not_attempted_text(error):
            kind, message = "NotImplementedError", stub_text
        return {
            "type": kind,
            "name": type(error).__name__,
            "message": message,
            "traceback": self._traceback(error),
        }

    def _traceback(self, error: BaseException) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename.startswith(str(self._package.folder))]
        lines = traceback.format_list(own or frames[-1:]) + traceback.format_exception_only(error)
        return "".join(lines).replace(f"{self._package.folder}/", "")


def _text_of(value: object) -> str:
    try:
        return str(value)[:10_000]
    except Exception:  # an exception of the student's may fail to print itself
        return "(an exception whose text cannot be shown)"
