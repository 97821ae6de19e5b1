"""What hostile code tries from inside the sandbox, and what becomes of it. One attack a case."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from grader.isolation import scratch
from grader.isolation.proxy import Outcome, SubmissionWorker, WorkerFailed
from labkit.errors import ProtocolFault, StudentError

Start = Callable[[str], SubmissionWorker]

ENDINGS = {
    "exit in a call": ("import os\ndef f(): os._exit(0)", Outcome.EXITED),
    "exit on import": ("import os\nos._exit(0)", Outcome.EXITED),
    "endless loop": ("def f():\n while True: pass", Outcome.CPU_TIMEOUT),
    "endless loop that catches everything": (
        "import signal\nsignal.signal(signal.SIGXCPU, lambda *a: None)\n"
        "def f():\n while True:\n  try:\n   while True: pass\n  except BaseException: pass",
        Outcome.CPU_TIMEOUT,
    ),
    "endless loop in C": ("import re\ndef f(): re.match('(a+)+$', 'a' * 60 + 'b')", Outcome.CPU_TIMEOUT),
    "memory": ("def f():\n x = []\n while True: x.append(bytearray(1 << 24))", Outcome.MEMORY),
    "memory in one tensor": ("import torch\ndef f(): return torch.ones(1 << 40)", Outcome.MEMORY),
    "killing itself": ("import os\ndef f(): os.kill(os.getpid(), 9)", Outcome.KILLED),
    "crash": ("import ctypes\ndef f(): ctypes.string_at(0)", Outcome.KILLED),
    "closing every descriptor": ("import os\ndef f(): os.closerange(0, 100)", Outcome.EXITED),
    "noise on every descriptor": (
        "import os\ndef f():\n for fd in range(64):\n  try: os.write(fd, b'x' * 4096)\n  except OSError: pass",
        Outcome.PROTOCOL_FAULT,
    ),
    "flood of output": (
        "def f():\n while True: print('x' * 65536, flush=True)",
        Outcome.OUTPUT,
    ),
}


@pytest.mark.parametrize("attack", ENDINGS)
def test_a_test_that_does_not_answer_ends_with_its_reason(start: Start, attack: str) -> None:
    source, outcome = ENDINGS[attack]
    worker = start(source)
    with worker.test() as lab:
        with pytest.raises(WorkerFailed) as caught:
            lab.f()
        assert caught.value.outcome is outcome, caught.value
        with pytest.raises(WorkerFailed):
            lab.f()


def test_code_that_sleeps_is_ended_by_the_clock(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start("import time\ndef f(): time.sleep(1000)\ndef g(): return 1")
    monkeypatch.setattr(worker, "limits", dataclasses.replace(worker.limits, wall_seconds=2.0))
    with worker.test() as lab, pytest.raises(WorkerFailed, match="no answer within 2 seconds") as caught:
        lab.f()
    assert caught.value.outcome is Outcome.WALL_TIMEOUT
    with worker.test() as lab:
        assert lab.g() == 1


def test_the_next_test_starts_afresh(start: Start) -> None:
    worker = start("import os\nCOUNT = []\ndef f(): os._exit(0)\ndef g(): COUNT.append(1); return len(COUNT)")
    for _ in range(2):
        with worker.test() as lab, pytest.raises(WorkerFailed):
            lab.f()
        with worker.test() as lab:
            assert lab.g() == 1


NOTES = """
import os
def f():
    for folder in ("/tmp", "/dev/shm"):
        os.chdir(folder)
        open("note", "w").write("from the last test")
        os.symlink("/submission/code.py", "link")
        os.mkdir("closed")
        for _ in range(3000):
            os.mkdir("deep")
            os.chdir("deep")
        open("note", "w").write("deep down")
        os.chdir(folder)
        os.mkdir("closed/inner", 0o000)
        os.chmod("closed", 0o000)
    return len(os.listdir("/tmp"))
def g():
    return [sorted(os.listdir(folder)) for folder in ("/tmp", "/dev/shm")]
"""


def test_no_test_leaves_a_note_for_the_next(start: Start) -> None:
    worker = start(NOTES)
    events = len(worker.events)
    with worker.test() as lab:
        # Where the workbook itself lies under /tmp, it is mounted there, and stays.
        at_first = lab.g()
    for _ in range(2):
        with worker.test() as lab:
            assert lab.f() == len(at_first[0]) + 4
        with worker.test() as lab:
            assert lab.g() == at_first
    assert len(worker.events) == events, "the sandbox had to be started again"


def test_a_mess_too_large_to_remove_costs_only_its_sandbox(start: Start) -> None:
    mess = "import os\ndef f():\n for i in range(400_000): os.symlink('x', f'/tmp/{i}')\n return 1\n"
    worker = start(mess + "def g(): return len(os.listdir('/tmp'))")
    with worker.test() as lab:
        at_first = lab.g()
    # The file system or the processor's time may run out before all is there.
    with worker.test() as lab, contextlib.suppress(StudentError, WorkerFailed):
        lab.f()
    with worker.test() as lab:
        assert lab.g() == at_first


MOUNTS = r"""
24 30 0:22 / /proc rw,nosuid - proc proc rw
31 30 0:27 / /tmp rw,relatime - tmpfs tmpfs rw
32 31 8:1 /book /tmp/my\040book/.venv ro,nosuid - ext4 /dev/sda1 rw
33 31 8:1 /python /tmp/my\040book/python ro,nosuid - ext4 /dev/sda1 rw
34 31 8:1 /lib /tmp/lib ro,nosuid - ext4 /dev/sda1 rw
35 30 8:1 /tmpfiles /tmpfiles ro,nosuid - ext4 /dev/sda1 rw
""".strip()


def test_what_is_mounted_in_a_temporary_folder_stays(tmp_path: Path) -> None:
    kept = scratch.kept_names(MOUNTS)
    assert kept == {
        "/tmp": frozenset({"my book", "lib"}), "/tmp/my book": frozenset({".venv", "python"}), "/dev/shm": frozenset(),
    }  # fmt: skip
    (tmp_path / "stays" / "deep").mkdir(parents=True)
    (tmp_path / "goes" / "deep").mkdir(parents=True)
    scratch.empty(str(tmp_path), frozenset({"stays"}))
    assert [path.name for path in tmp_path.rglob("*")] == ["stays", "deep"]


def test_emptying_follows_no_link_and_knows_its_limits(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    (folder / "sub" / "sub").mkdir(parents=True)
    for place in (folder, folder / "sub"):
        (place / "link").symlink_to(outside)
        (place / "file").write_text("x")
    scratch.empty(str(folder))
    assert list(folder.iterdir()) == [] and (outside / "precious").read_text() == "mine"
    (folder / "file").write_text("x")
    with pytest.raises(TimeoutError, match="emptied"):
        scratch.empty(str(folder), seconds=-1.0)


REFUSED = {
    "fork": "import os\ndef f(): os.fork()",
    "subprocess": "import subprocess\ndef f(): subprocess.run(['/bin/true'])",
    "exec": "import os\ndef f(): os.execv('/bin/true', ['true'])",
    "TCP": "import socket\ndef f(): socket.create_connection(('127.0.0.1', 22), 1)",
    "UDP": "import socket\ndef f(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "Unix socket": "import socket\ndef f(): socket.socket(socket.AF_UNIX)",
    "kill the worker": "import os\ndef f(): os.kill(os.getppid(), 9)",
    "kill all": "import os\ndef f(): os.kill(-1, 9)",
    "worker's memory": "import os\ndef f(): open(f'/proc/{os.getppid()}/mem', 'r+b').read(1)",
    "write the submission": "def f(): open('/submission/code.py', 'a')",
    "write labkit": "import labkit.codec as c\ndef f(): open(c.__file__, 'a')",
    "write Python": "import torch\ndef f(): open(torch.__file__, 'a')",
    "write the root": "def f(): open('/x', 'w')",
    "fill the disk": "def f():\n with open('/tmp/x', 'wb') as o:\n  while True: o.write(bytes(1 << 20)); o.flush()",
    "shared memory": "import mmap\ndef f(): mmap.mmap(-1, 1 << 33)",
    "passwords": "def f(): open('/etc/passwd')",
}


@pytest.mark.parametrize("attack", REFUSED)
def test_what_lab_code_has_no_use_for_is_refused(start: Start, attack: str) -> None:
    with start(REFUSED[attack]).test() as lab, pytest.raises((StudentError, WorkerFailed)) as caught:
        lab.f()
    if isinstance(caught.value, StudentError):
        assert caught.value.type_name in (
            "PermissionError",
            "OSError",
            "FileNotFoundError",
            "BlockingIOError",
        ), caught.value
    else:
        assert caught.value.outcome is Outcome.MEMORY


def test_nothing_of_the_workbook_but_labkit_can_be_seen(start: Start) -> None:
    worker = start(
        "import os\n"
        "def f():\n"
        " names = set()\n"
        " for top in ('/', '/workbook', '/workbook/grader/isolation', '/submission', '/root', '/home', '/etc'):\n"
        "  try: names |= {os.path.join(top, n) for n in os.listdir(top)}\n"
        "  except OSError: pass\n"
        " return sorted(names), dict(os.environ), os.getuid()\n"
        "def g(name): __import__(name)"
    )
    with worker.test() as lab:
        seen, environment, uid = lab.f()
        for name in ("solutions", "grader.judge", "grader.suite", "tests"):
            with pytest.raises((StudentError, ValueError)):
                lab.g(name)
    assert uid == 65534
    assert {path for path in seen if path.startswith("/workbook/")} <= {
        "/workbook/labkit",
        "/workbook/grader",
        "/workbook/.cache",
        *(f"/workbook/grader/isolation/{name}.py" for name in ("worker", "wire", "scratch", "seccomp")),
    }
    assert "/submission/code.py" in seen and "/etc/passwd" not in seen
    assert not set(environment) & (
        set(os.environ)
        - {"PATH", "HOME", "LANG", "OMP_NUM_THREADS", "PWD", "LC_CTYPE"}
        - {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "WORKBOOK_CACHE"}
    )


FORGED = {
    "a huge length": "import struct\nFRAME = struct.pack('!II', 0xffffffff, 0)",
    "too many buffers": "import struct\nFRAME = struct.pack('!II', 2, 0xffffffff)",
    "a huge buffer": "import struct\nFRAME = struct.pack('!IIQ', 2, 1, 1 << 60) + b'{}'",
    "no JSON": "import struct\nFRAME = struct.pack('!II', 3, 0) + b'{]}'",
    "nested JSON": "import struct\nFRAME = struct.pack('!II', 200000, 0) + b'[' * 200000",
    "no object": "import struct\nFRAME = struct.pack('!II', 2, 0) + b'[]'",
    "a callback never given": 'import struct\nB = b\'{"callback": 7, "args": [], "kwargs": {}}\'\n'
    "FRAME = struct.pack('!II', len(B), 0) + B",
    "a class to import": 'import struct\nB = b\'{"ok": {"t": "data", "cls": "os:system", "v": {}}}\'\n'
    "FRAME = struct.pack('!II', len(B), 0) + B",
}


@pytest.mark.parametrize("forgery", FORGED)
def test_forged_frames_are_protocol_faults(start: Start, forgery: str) -> None:
    source = FORGED[forgery] + (
        "\nimport os\ndef f():\n for fd in range(3, 64):\n  try: os.write(fd, FRAME)\n  except OSError: pass\n return 1"
    )
    with start(source).test() as lab, pytest.raises((WorkerFailed, ProtocolFault)) as caught:
        lab.f()
    if isinstance(caught.value, WorkerFailed):
        assert caught.value.outcome is Outcome.PROTOCOL_FAULT


def test_patches_stay_in_the_sandbox(start: Start) -> None:
    worker = start(
        "import torch, builtins, json, os\n"
        "torch.allclose = torch.equal = torch.testing.assert_close = lambda *a, **k: True\n"
        "builtins.isinstance = lambda *a: True\n"
        "def f(x): return x * 0"
    )
    with worker.test() as lab:
        try:
            wrong = lab.f(torch.ones(3))
        except (StudentError, WorkerFailed, ProtocolFault):
            return
        assert not torch.equal(wrong, torch.ones(3))


def test_threads_work_and_threads_without_end_do_not(start: Start) -> None:
    worker = start(
        "import threading\n"
        "def f():\n"
        " t = threading.Thread(target=lambda: None); t.start(); t.join(); return 1\n"
        "def g():\n"
        " def spin():\n"
        "  while True: pass\n"
        " for _ in range(50): threading.Thread(target=spin, daemon=True).start()\n"
        " return 1"
    )
    with worker.test() as lab:
        assert lab.f() == 1
    with worker.test() as lab, pytest.raises(WorkerFailed) as caught:
        lab.g()
        while True:
            lab.f()
    assert caught.value.outcome is Outcome.CPU_TIMEOUT


def test_the_budget_of_a_submission_is_counted_over_its_tests(start: Start) -> None:
    worker = start("def f():\n while True: pass")
    worker.cpu_seconds = worker.limits.total_cpu_seconds - 0.5
    with worker.test() as lab, pytest.raises(WorkerFailed):
        lab.f()
    with pytest.raises(WorkerFailed) as caught, worker.test():
        pass
    assert caught.value.outcome is Outcome.BUDGET


def test_nothing_is_left_running(start: Start, held: tuple[Path, SubmissionWorker]) -> None:
    worker = start(
        "import threading, time\ndef f(): threading.Thread(target=time.sleep, args=(500,)).start(); return 1"
    )
    # Other files' workers may be alive; this one's sandbox names its folder.
    sandboxes = [p for p in psutil.Process().children() if str(held[0].resolve()) in p.cmdline()]
    before = [each for sandbox in sandboxes for each in (sandbox, *sandbox.children(recursive=True))]
    assert len(before) > 1
    with worker.test() as lab:
        assert lab.f() == 1
    worker.__exit__(None, None, None)
    _, alive = psutil.wait_procs(before, timeout=5)
    assert not alive
