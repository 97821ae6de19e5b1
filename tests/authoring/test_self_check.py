"""The self-check: a sound lab has no faults, and each way to be unsound is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from grader.authoring.self_check import differences, leaks, manifest_faults, self_check
from grader.authoring.stubs import write_stubs
from labkit.manifest import Interface, Manifest


def test_a_sound_lab_has_no_faults(halves: Manifest) -> None:
    write_stubs(halves)
    told: list[str] = []
    assert self_check(halves, progress=told.append) == []
    assert len(told) == 2


def test_edited_work_behind_its_stub_is_a_remark_and_no_fault(halves: Manifest) -> None:
    write_stubs(halves)
    mine = halves.folder / "numbers.py"
    mine.write_text(mine.read_text() + "\n# mine\n")
    reference = halves.solutions / "numbers.py"
    reference.write_text(reference.read_text().replace("rounded down", "rounded downwards"))
    told: list[str] = []
    assert self_check(halves, progress=told.append) == []
    assert [text for text in told if "make update" in text and "numbers.py" in text]


def swap(manifest: Manifest, old: str, new: str, name: str = "tests/test_halves.py") -> None:
    """Edit a file of the lab's folder."""
    path = manifest.folder / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def break_reference(manifest: Manifest) -> None:
    """The reference no longer does what the tests ask for."""
    path = manifest.solutions / "numbers.py"
    path.write_text(path.read_text().replace("(number, 2)", "(number, 3)"))


BROKEN: list[tuple[str, Callable[[Manifest], object], str]] = [
    ("a wrong reference", break_reference, "the reference fails test_half"),
    (
        "a test that asks for nothing",
        lambda lab: swap(lab, "box = lab.Box()", "return"),
        "an untouched stub passes test_box",
    ),
    (
        "a test that hides the stub's message",
        lambda lab: swap(lab, "    box = lab.Box()", "    failed = False\n    try:\n        lab.Box().size\n"
                         "    except Exception:\n        failed = True\n    assert not failed\n    box = lab.Box()"),
        "test_box fails without naming the task",
    ),
    (
        "a wrong marker",
        lambda lab: swap(lab, "task(2)", "task(1)"),
        "is marked task 1, but",
    ),
    ("a stale stub", lambda lab: (lab.folder / "boxes.py").unlink(), "boxes.py is out of date"),
    ("tests that don't run", lambda lab: swap(lab, "import pytest", "import no_such_module"), "could not run"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("break_it", "said"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
)
def test_an_unsound_lab_is_found_out(
    halves: Manifest, break_it: Callable[[Manifest], object], said: str
) -> None:
    write_stubs(halves)
    break_it(halves)
    faults = self_check(halves)
    assert any(said in fault for fault in faults), faults


def test_the_manifest_is_compared_with_what_exists(halves: Manifest) -> None:
    first, second = halves.tasks
    tasks = (
        replace(first, tests=("test_third",), hints=("a", " ", "c")),
        replace(second, points=0, tests=(), hints=("a",)),
    )
    cls = halves.interface.classes["Box"]
    interface = Interface(
        {"half": "numbers", "third": "numbers"}, {"Box": replace(cls, methods=("take",)), "Bag": cls}
    )
    faults = "\n".join(manifest_faults(replace(halves, tasks=tasks, interface=interface)))
    for said in (
        "lists the test test_third", "defines test_half, which lab.toml lists under no task", "task 2: no points",
        "task 2: no tests", "task 1: needs hints in 3 levels", "task 2: needs hints", "the function third",
        "has Box.take", "the class Bag",
    ):  # fmt: skip
        assert said in faults


SOLUTION = '''def f(a: int) -> int:
    """What."""
    # BEGIN SOLUTION
    return a * 12345 + sum(range(a)) - 7
    # END SOLUTION


# BEGIN SOLUTION
def helper() -> None:
    """Only the reference has it."""


# END SOLUTION
'''
STUB = 'def f(a: int) -> int:\n    """What."""\n    raise NotImplementedError\n'


def test_signatures_and_docstrings_are_compared() -> None:
    assert not list(differences(SOLUTION, STUB))
    for old, new in (
        ("a: int", "b: int"),
        ("-> int", "-> str"),
        ("What.", "How."),
        ("def f", "@cache\ndef f"),
    ):
        assert list(differences(SOLUTION, STUB.replace(old, new))) == [
            "signature or docstring of f differs between reference and stub"
        ]
    assert list(differences(SOLUTION, "x = 1\n")) == ["the stub lacks f"]


def test_lines_of_the_solution_are_found_in_the_stub() -> None:
    assert not list(leaks(SOLUTION, STUB))
    leaking = STUB + "# as in\n#\nreturn_it = 1\nreturn a * 12345 + sum(range(a)) - 7\n"
    assert list(leaks(SOLUTION, leaking)) == [
        "the stub shows a line of the solution: return a * 12345 + sum(range(a)) - 7"
    ]


@pytest.mark.parametrize(
    ("line", "telling"),
    [
        ("batch, heads, num_queries, head_dim = q.shape", False),
        ("block_size, kv_heads = blocks.shape[1], blocks.shape[2]", False),
        ("out = torch.empty(q.shape, dtype=q.dtype, device=q.device)", False),
        ("for row, length in enumerate(lengths.tolist()):", False),
        ("end = min(num_keys, last_row + q.shape[2])", True),
        ("for start in range(0, end, BLOCK_K):", True),
    ],
)
def test_reading_sizes_gives_nothing_away(line: str, telling: bool) -> None:
    body = f"{line}\n        pass" if line.endswith(":") else line
    solution = SOLUTION.replace("return a * 12345 + sum(range(a)) - 7", body)
    assert bool(list(leaks(solution, f"{STUB}{line}\n"))) == telling


def test_inherited_members_count_as_there(halves: Manifest) -> None:
    source = halves.solutions / "boxes.py"
    text = source.read_text(encoding="utf-8")
    given = (
        "from labkit.paged_scheduler import PagedScheduler\n"
        "class Shelf(PagedScheduler): pass\nclass Bin(Box): pass\n"
    )
    source.write_text(text + "\n\n" + given, encoding="utf-8")
    sibling = halves.solutions / "numbers.py"
    lines = "\n\nfrom .boxes import Box\nclass Crate(Box): pass\n"
    sibling.write_text(sibling.read_text(encoding="utf-8") + lines, encoding="utf-8")
    box = halves.interface.classes["Box"]
    classes = {
        "Box": box,
        "Bin": box,
        "Crate": replace(box, module="numbers"),
        "Shelf": replace(box, methods=("remove",), properties=("no_such",)),
    }
    faults = list(manifest_faults(replace(halves, interface=Interface({"half": "numbers"}, classes))))
    assert len(faults) == 1 and "Shelf.no_such" in faults[0], faults
