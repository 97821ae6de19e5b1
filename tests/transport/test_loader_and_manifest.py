"""Mounting packages and reading manifests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from labkit.banned import find_banned
from labkit.client import local_lab
from labkit.loader import LabPackage
from labkit.manifest import Manifest, ManifestError, available_labs, load_manifest


def test_an_edit_within_the_same_second_and_of_the_same_size_is_seen(toy: Manifest) -> None:
    source = toy.solutions / "sums.py"
    for operator, expected in [("+", 5), ("-", 1), ("*", 6)]:
        source.write_text(source.read_text().replace("a + b", f"a {operator} b").replace("a - b", f"a {operator} b"))
        with local_lab(toy, toy.solutions) as lab:
            assert lab.add(3, 2) == expected
    assert not list(toy.solutions.rglob("*.pyc"))


def test_unmounting_leaves_nothing_behind(toy: Manifest) -> None:
    finders = list(sys.meta_path)
    with local_lab(toy, toy.solutions) as lab:
        lab.Box()
        assert "lab99.things" in sys.modules
    assert not [name for name in sys.modules if name.startswith("lab99")] and sys.meta_path == finders


def test_a_second_mount_replaces_the_first(toy: Manifest, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sums.py").write_text("def add(a, b): return 'other'")
    with local_lab(toy, toy.solutions), local_lab(toy, other) as second:
        assert second.add(1, 1) == "other"


def test_modules_outside_the_manifest_cannot_be_imported(toy: Manifest) -> None:
    (toy.solutions / "extra.py").write_text("x = 1")
    (toy.solutions / "sums.py").write_text("from .extra import x\ndef add(a, b): return x")
    with (
        local_lab(toy, toy.solutions) as lab,
        pytest.raises(Exception, match="extra is not part of the lab; its modules are sums, things"),
    ):
        lab.add(1, 1)


def test_a_missing_folder_and_a_missing_file_are_named(toy: Manifest, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        LabPackage("lab99", tmp_path / "nowhere", ["sums"])
    (toy.solutions / "sums.py").unlink()
    with local_lab(toy, toy.solutions) as lab, pytest.raises(Exception, match=r"sums.py is missing"):
        lab.add(1, 1)


def test_the_manifest_answers(toy: Manifest, tmp_path: Path) -> None:
    assert available_labs(tmp_path) == {"99": toy.folder} and toy.points == 20
    assert toy.task(2).requires == (1,) and toy.task_of_test("test_add") is toy.task(1)
    assert toy.task_of_test("test_none") is None
    with pytest.raises(ValueError, match=r"no task 7; its tasks are 1, 2"):
        toy.task(7)
    with pytest.raises(ValueError, match=r"no lab '12'; labs here: 99"):
        load_manifest("12", tmp_path)


BROKEN = {
    'id = "99"': ('id = "98"', "folder"),
    "number = 2": ("number = 1", "numbered"),
    '"test_box",': '"test_add",',
    "requires = [1]": ("requires = [2]", "only earlier"),
    "points = 10": ("points = 0", "needs points"),
    'modules = ["things"]': ('modules = ["thongs"]', "unknown modules"),
    'properties = ["size"]': ('properties = ["put"]', "both method and property"),
    'title = "toy"': ("title = toy", "TOMLDecodeError"),
    'solutions = "toy"': ("", "KeyError"),
}


@pytest.mark.parametrize("old", BROKEN)
def test_a_manifest_that_contradicts_itself_is_refused(toy: Manifest, tmp_path: Path, old: str) -> None:
    new, complaint = BROKEN[old] if isinstance(BROKEN[old], tuple) else (BROKEN[old], "twice")
    path = toy.folder / "lab.toml"
    path.write_text(path.read_text().replace(old, new))
    load_manifest.cache_clear()
    with pytest.raises(ManifestError, match=complaint):
        load_manifest("99", tmp_path)


USES = {
    "import torch.nn.functional as F\nF.scaled_dot_product_attention(q, k, v)": 2,
    "from torch.nn.functional import scaled_dot_product_attention as mine": 1,
    "from torch.nn import functional\nf = getattr(functional, 'scaled_dot_product_attention')": 2,
    "\n\nfrom solutions.kv_cache import attention": 3,
    "import grader.judge": 1,
    "torch._C._nn.scaled_dot_product_attention": 1,
}


@pytest.mark.parametrize("source", USES)
def test_banned_names_are_found_under_any_alias(toy: Manifest, source: str) -> None:
    (toy.solutions / "sums.py").write_text(source)
    uses = find_banned(toy.solutions, ["sums"], toy.banned)
    assert [use.line for use in uses] == [USES[source]]


def test_prose_about_a_banned_name_is_no_use(toy: Manifest) -> None:
    (toy.solutions / "sums.py").write_text('"""Unlike scaled_dot_product_attention, …"""\nfrom .grader import x')
    assert not find_banned(toy.solutions, ["sums", "missing"], toy.banned)
