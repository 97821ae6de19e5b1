"""The trusted side of a sandboxed submission: starts its worker, opens a client per test, says how each child ended."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from grader.isolation import wire
from grader.isolation.drain import Drain
from grader.isolation.sandbox import SUBMISSION, Limits, Tier, bwrap_fault, command, environment
from labkit.client import LabClient
from labkit.codec import Message
from labkit.errors import ProtocolFault, StudentError
from labkit.manifest import Manifest

# How Python, NumPy, torch and the system say that memory is out; a ValueError with such words is a student's own.
_MEMORY_ERRORS = ("MemoryError", "_ArrayMemoryError", "OutOfMemoryError")
_MEMORY_CARRIERS = ("RuntimeError", "OSError")
_MEMORY_WORDS = ("not enough memory", "can't allocate memory", "Cannot allocate memory")
_NEAR_LIMIT = 0.5
_GRACE_SECONDS = 1.0
_RSS_EVERY_SECONDS = 0.5


class Outcome(enum.Enum):
    """How a test's process failed to answer."""

    CPU_TIMEOUT = "cpu_timeout"
    WALL_TIMEOUT = "wall_timeout"
    MEMORY = "memory"
    OUTPUT = "output"
    EXITED = "exited"
    KILLED = "killed"
    PROTOCOL_FAULT = "protocol_fault"
    BUDGET = "budget"


class WorkerFailed(Exception):
    """The submission did not answer; `outcome` says in which way, the text says it to the student."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class WorkerNotStarted(RuntimeError):
    """The worker did not come up: the grader's trouble, never the student's."""


@dataclass(frozen=True)
class Probe:
    """What importing one module of a submission gave: no error, or what went wrong."""

    error: Exception | None


@dataclass(frozen=True)
class WorkerEvent:
    """Something that happened to the worker itself, for the instructor's eyes."""

    message: str


class SubmissionWorker:
    """One submission in its sandbox. A context manager: the sandbox ends with it.

    Args:
        manifest: the lab.
        folder: the submission's modules, nothing else.
        tier: how it is held.
        limits: what it may use.
    """

    def __init__(self, manifest: Manifest, folder: Path, tier: Tier, limits: Limits | None = None) -> None:
        self._manifest = manifest
        self._folder = folder
        self._tier = tier
        self.limits = limits or Limits()
        self.cpu_seconds = 0.0
        self.events: list[WorkerEvent] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._drain: Drain | None = None

    def __enter__(self) -> SubmissionWorker:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def output(self) -> str:
        """What the submission printed since its worker was last started, shortened in the middle."""
        return self._drain.text if self._drain is not None else ""

    def probe(self) -> dict[str, Probe]:
        """Imports each module of the lab once, each in a process of its own."""
        return {module: Probe(self._import_error(module)) for module in self._manifest.modules}

    def _import_error(self, module: str) -> Exception | None:
        try:
            with self.test() as client:
                client.import_module(module)
        except Exception as error:
            return error
        return None

    @contextlib.contextmanager
    def test(self) -> Iterator[LabClient]:
        """A client over a fresh process of the submission, for one test.

        Raises:
            WorkerFailed: from the client's calls, if the submission misbehaves; at once, if its budget is used up.
            WorkerNotStarted: if the worker cannot be brought up again.
        """
        if self.cpu_seconds >= self.limits.total_cpu_seconds:
            budget = f"{self.limits.total_cpu_seconds:.0f}"
            raise WorkerFailed(Outcome.BUDGET, f"the submission has used up its {budget} seconds of processor time")
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._order({"op": "fork"}, [theirs.fileno()])
            transport = PipeTransport(self, ours)
            try:
                yield LabClient(transport, self._manifest.interface)
            finally:
                ours.close()
                transport.end()

    def reap(self, grace: float) -> dict[str, Any] | None:
        """Ends the current test's process; how it ended, or None if the worker itself is gone."""
        if self._control is None:
            return None
        try:
            ended = self._order({"op": "reap", "alone": self._tier is Tier.BWRAP, "grace": grace})
        except WorkerFailed:
            return None
        self.cpu_seconds += float(ended["cpu"])
        return ended

    def check_tree(self) -> None:
        """Looks at memory and output of everything the submission runs.

        Raises:
            WorkerFailed: if it uses or prints more than it may.
        """
        if self._drain is not None and self._drain.total_bytes > self.limits.output_bytes:
            self._stop()
            raise WorkerFailed(Outcome.OUTPUT, f"printed more than {self.limits.output_bytes >> 20} MiB")
        if self._tree_bytes() > self.limits.memory_bytes + (2 << 30):
            self._stop()
            raise WorkerFailed(Outcome.MEMORY, f"used more than {self.limits.memory_bytes >> 20} MiB of memory")

    def _tree_bytes(self) -> int:
        total = 0
        if self._process is not None:
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        total += process.memory_info().rss
        return total

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                command(self._tier, self._folder, theirs.fileno(), self.limits),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**environment(self._tier), "PATH": "/usr/local/bin:/usr/bin:/bin"},
                cwd="/",
            )
        assert self._process.stdout is not None
        self._drain = Drain(self._process.stdout)
        self._control = ours
        ours.settimeout(self.limits.start_seconds)
        try:
            ours.send(json.dumps(self._greeting()).encode())
            ready = json.loads(ours.recv(1 << 16) or b"{}")
        except (OSError, ValueError):
            ready = {}
        if ready != {"ready": True}:
            self._stop()
            raise WorkerNotStarted(f"the worker did not start: {self.output[-2000:] or 'it said nothing'}")

    def _greeting(self) -> dict[str, Any]:
        interface = self._manifest.interface
        return {
            "package": f"lab{self._manifest.id}",
            "folder": SUBMISSION if self._tier is Tier.BWRAP else str(self._folder.resolve()),
            "modules": list(self._manifest.modules),
            "functions": interface.functions,
            "classes": {name: dataclasses.asdict(entry) for name, entry in interface.classes.items()},
            "kernels": self._manifest.interpreter,
            "limits": dataclasses.asdict(self.limits),
            "filter": self._tier is Tier.BWRAP or bwrap_fault() is None,
        }

    def _order(self, order: dict[str, Any], descriptors: list[int] | None = None) -> dict[str, Any]:
        """Sends an order to the worker and returns its answer; a worker that is gone is started again once."""
        for attempt in range(2):
            if self._control is None:
                self._start()
            assert self._control is not None
            try:
                self._control.settimeout(self.limits.wall_seconds)
                socket.send_fds(self._control, [json.dumps(order).encode()], descriptors or [])
                answer = json.loads(self._control.recv(1 << 16) or b"null")
                if isinstance(answer, dict):
                    return answer
            except (OSError, ValueError):
                pass
            self._stop()
            self.events.append(WorkerEvent(f"the worker was gone when asked to {order['op']}; attempt {attempt + 1}"))
            if order["op"] != "fork":
                break
        raise WorkerFailed(Outcome.KILLED, "the submission ended the process that holds it")

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class PipeTransport:
    """Messages to one test's process.

    Args:
        worker: the submission's worker, which says how the process ended.
        sock: connected to the process.
    """

    def __init__(self, worker: SubmissionWorker, sock: socket.socket) -> None:
        self._worker = worker
        self._sock = sock
        self._seconds_left = worker.limits.wall_seconds
        self._failure: WorkerFailed | None = None
        self._reaped = False
        self._looked = 0.0

    def request(self, message: Message, on_callback: Callable[[Message], Message]) -> Message:
        """Sends a request and returns its reply; answers callbacks that come in between.

        Raises:
            WorkerFailed: if no reply comes; again on every later request of the same test.
            ProtocolFault: if what comes is no frame.
        """
        if self._failure is not None:
            raise self._failure
        try:
            reply = self._exchange(message)
            while "callback" in reply.header:
                reply = self._exchange(on_callback(reply))
            return self._checked(reply)
        except wire.Closed:
            self._failure = self._ended(_GRACE_SECONDS)
        except wire.DeadlinePassed:
            failure = self._ended(0.0)
            seconds = f"{self._worker.limits.wall_seconds:.0f}"
            late = WorkerFailed(Outcome.WALL_TIMEOUT, f"gave no answer within {seconds} seconds")
            self._failure = failure if failure.outcome is Outcome.CPU_TIMEOUT else late
        except ProtocolFault as fault:
            self._failure = WorkerFailed(Outcome.PROTOCOL_FAULT, f"sent a malformed answer: {fault}")
        except WorkerFailed as failure:
            self._failure = failure
        raise self._failure from None

    def _exchange(self, message: Message) -> Message:
        """Sends and receives; only the time that the other side takes counts, not what the test computes itself."""
        begun = time.monotonic()
        deadline = begun + self._seconds_left
        wire.send(self._sock, message, deadline)
        reply = wire.receive(self._sock, deadline, self._look)
        self._seconds_left -= time.monotonic() - begun
        return reply

    def cause(self) -> BaseException | None:
        """The original exception stays in the sandbox."""
        return None

    def close(self) -> None:
        """Hangs up; the process then ends by itself or is ended by `end`."""
        self._sock.close()

    def end(self) -> None:
        """Makes sure that the process is gone and its time counted."""
        if not self._reaped:
            self._reaped = True
            self._worker.reap(_GRACE_SECONDS if self._failure is None else 0.0)

    def _look(self) -> None:
        if time.monotonic() - self._looked > _RSS_EVERY_SECONDS:
            self._looked = time.monotonic()
            self._worker.check_tree()

    @staticmethod
    def _checked(reply: Message) -> Message:
        error = reply.header.get("error")
        if not isinstance(error, dict):
            return reply
        name, message = str(error.get("name")), str(error.get("message"))
        if name in _MEMORY_ERRORS or (name in _MEMORY_CARRIERS and any(word in message for word in _MEMORY_WORDS)):
            raise WorkerFailed(Outcome.MEMORY, "asked for more memory than it may use")
        return reply

    def _ended(self, grace: float) -> WorkerFailed:
        """How the process came to hang up, in words for its author."""
        self._reaped = True
        ended = self._worker.reap(grace)
        if ended is None:
            return WorkerFailed(Outcome.KILLED, "the submission ended the process that holds it")
        limit = self._worker.limits.cpu_seconds
        status = int(ended["status"])
        signal_number = status & 0x7F
        # The kernel's limit counts clock ticks, which on a busy machine run ahead of the time that it reports.
        enough = limit if ended["killed"] else _NEAR_LIMIT * limit
        if signal_number == signal.SIGXCPU or (signal_number == signal.SIGKILL and ended["cpu"] >= enough):
            return WorkerFailed(Outcome.CPU_TIMEOUT, f"computed for more than {limit} seconds")
        if signal_number and not ended["killed"]:
            name = signal.Signals(signal_number).name
            return WorkerFailed(Outcome.KILLED, f"the process died of {name} instead of returning")
        if ended["killed"]:
            return WorkerFailed(Outcome.PROTOCOL_FAULT, "closed its connection instead of returning")
        return WorkerFailed(Outcome.EXITED, f"ended the process (exit status {status >> 8}) instead of returning")


__all__ = [
    "Limits",
    "Outcome",
    "Probe",
    "StudentError",
    "SubmissionWorker",
    "Tier",
    "WorkerEvent",
    "WorkerFailed",
    "WorkerNotStarted",
]
