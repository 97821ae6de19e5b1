"""The sandboxed process: imports slow libraries once, then forks a child for each test.

Only the child runs lab code. It gets one socket to the test that it serves, limits and a filter of system calls.
Nothing here is trusted: whatever a child sends, and whatever becomes of this process, is judged on the other side.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from grader.isolation import scratch, wire
from labkit.codec import Message
from labkit.loader import LabPackage
from labkit.manifest import Interface, LabClass
from labkit.service import Service

_PR_SET_DUMPABLE = 4


def main(control_fd: int) -> None:
    """Takes orders until the other side hangs up.

    Args:
        control_fd: a Unix socket of whole messages: JSON, and the child's own socket with "fork".
    """
    control = socket.socket(fileno=control_fd)
    import torch

    torch.set_num_threads(1)
    import labkit.specs  # noqa: F401  (specs arrive by name; the children must not each import the decoder)

    # Children share this user: without this one of them could write into this process's memory.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    lab = json.loads(control.recv(1 << 20))
    if lab["kernels"]:
        importlib.import_module("labkit.instruments.observation")  # and with it Triton
    if lab["filter"]:
        import pyseccomp  # noqa: F401  (finding the library starts a process, which children may not)
    written = scratch.kept_names(Path("/proc/self/mountinfo").read_text())
    control.send(b'{"ready": true}')
    child = 0
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            return
        order = json.loads(data)
        if order["op"] == "fork":
            child = os.fork()
            if child == 0:
                control.close()
                _serve(socket.socket(fileno=descriptors[0]), lab)
            os.close(descriptors[0])
            control.send(b'{"forked": true}')
        else:
            control.send(json.dumps(_reap(child, order["alone"], order["grace"])).encode())
            if order["alone"]:  # then these folders are the sandbox's own
                for folder, names in written.items():
                    # If this fails the process ends, and with it the sandbox; the next test gets a new one.
                    scratch.empty(folder, names)


def _reap(child: int, alone: bool, grace: float) -> dict[str, Any]:
    """Ends whatever a test has left running.

    Args:
        child: the process of the test.
        alone: whether this worker has a PID namespace to itself, so that everything in it may be killed.
        grace: seconds to wait for the child to end by itself.

    Returns:
        How the child ended ("status" as from `waitpid`) and the CPU seconds that it used.
    """
    deadline = time.monotonic() + grace
    pid, status, usage = os.wait4(child, os.WNOHANG)
    while pid == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
        pid, status, usage = os.wait4(child, os.WNOHANG)
    killed = pid == 0
    if killed:
        os.kill(child, signal.SIGKILL)
        pid, status, usage = os.wait4(child, 0)
    if alone:
        try:
            os.kill(-1, signal.SIGKILL)
            while True:
                os.wait()
        except (ProcessLookupError, ChildProcessError):
            pass
    return {"status": status, "killed": killed, "cpu": usage.ru_utime + usage.ru_stime}


def _serve(sock: socket.socket, lab: dict[str, Any]) -> NoReturn:
    """Serves one test, then ends the process without running what lab code left for its end."""
    code = 1
    random.seed(0)  # unseeded code scores the same in every run
    np.random.seed(0)
    try:
        _restrict(lab["limits"], lab["filter"])
        package = LabPackage(lab["package"], Path(lab["folder"]), lab["modules"])
        package.mount()
        classes = {name: LabClass(**entry) for name, entry in lab["classes"].items()}
        service = Service(package, Interface(lab["functions"], classes))

        def call_back(message: Message) -> Message:
            wire.send(sock, message)
            return wire.receive(sock)

        while True:
            wire.send(sock, service.handle(wire.receive(sock), call_back))
    except wire.Closed:
        code = 0
    finally:
        os._exit(code)


def _restrict(limits: dict[str, Any], filtered: bool) -> None:
    cpu = limits["cpu_seconds"]
    # The soft limit's signal can be caught, the hard one's cannot.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (limits["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if filtered:
        from grader.isolation import seccomp

        seccomp.install(os.getpid())


if __name__ == "__main__":
    main(int(sys.argv[1]))
