"""A small made-up lab, so that the transports are tested on code that misbehaves in every way we care about."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.manifest import Manifest, load_manifest

MANIFEST = """
[lab]
id = "99"
title = "toy"
solutions = "toy"
modules = ["sums", "things"]
banned = ["torch.nn.functional.scaled_dot_product_attention"]

[[task]]
number = 1
title = "sums"
goal = "Add."
points = 10
modules = ["sums"]
tests = ["test_add"]
hints = ["a", "b", "c"]

[[task]]
number = 2
title = "things"
goal = "Make things."
points = 10
requires = [1]
modules = ["things"]
tests = ["test_box", "test_box_uses_add"]
hints = ["a", "b", "c"]

[interface.functions]
add = "sums"
fill = "sums"
overrun = "sums"
fail = "sums"
leave = "sums"
twice = "sums"
stub = "sums"
cube = "sums"
count_to = "things"
opened = "things"

[interface.classes.Box]
module = "things"
methods = ["put", "take"]
properties = ["size"]
"""

SUMS = '''
def add(a, b): return a + b
def fill(t, value): t.fill_(value)
def overrun(t): t.as_strided((t.untyped_storage().size() // 4,), (1,), 0).zero_()
def fail(kind, message="why"): raise {"ValueError": ValueError, "KeyError": KeyError, "IndexError": IndexError,
    "TypeError": TypeError, "NotImplementedError": NotImplementedError, "Custom": type("Custom", (ValueError,), {}),
    "RuntimeError": RuntimeError, "SystemExit": SystemExit}[kind](message)
def leave(t):
    t.add_(1)
    raise ValueError("after the change")
def twice(f, x): return f(f(x))
def cube(x): return x ** 3
def stub():
    try:
        raise NotImplementedError("lab 99 task 1: stub is not written yet. Add.")
    except NotImplementedError as error:
        raise RuntimeError("wrapped") from error
'''

THINGS = '''
from .sums import add
class Box:
    def __init__(self): self._items = []; self.hidden = "secret"
    def put(self, item): self._items.append(item); return add(len(self._items), 0)
    def take(self): return self._items.pop()
    @property
    def size(self): return len(self._items)
    def __len__(self): return len(self._items)
    def __getitem__(self, i): return self._items[i]
    def __iter__(self): return iter(self._items)
    def __call__(self, x): return [x, len(self._items)]
CLOSED = []
def count_to(n):
    try:
        yield from range(n)
    finally:
        CLOSED.append(n)
def opened(box): return [box.size, list(CLOSED)]
'''


@pytest.fixture
def toy(tmp_path: Path) -> Manifest:
    """The manifest of lab 99; its modules lie in its `solutions` folder."""
    folder = tmp_path / "labs" / "99_toy"
    solutions = tmp_path / "solutions" / "toy"
    for made in (folder, solutions):
        made.mkdir(parents=True)
    (folder / "lab.toml").write_text(MANIFEST)
    (solutions / "sums.py").write_text(SUMS)
    (solutions / "things.py").write_text(THINGS)
    return load_manifest("99", tmp_path)
