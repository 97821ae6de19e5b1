"""The client and the service, joined in one process: calls, handles, callbacks, errors, in-place changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from labkit.client import LabClient, local_lab
from labkit.errors import OutOfViewWrite, ProtocolFault, StudentError
from labkit.manifest import Manifest
from labkit.specs import Markov


@pytest.fixture
def toy_lab(toy: Manifest) -> Iterator[LabClient]:
    with local_lab(toy, toy.solutions) as client:
        yield client


def test_functions_are_called_by_value(toy_lab: LabClient) -> None:
    x = torch.ones(2, 3)
    result = toy_lab.add(x, b=x)
    assert torch.equal(result, 2 * x) and result.data_ptr() != x.data_ptr()


def test_in_place_changes_come_back_even_from_a_call_that_raises(toy_lab: LabClient) -> None:
    x = torch.zeros(4, 4)
    toy_lab.fill(x[:, 1], 3.0)
    assert torch.equal(x[:, 1], torch.full((4,), 3.0)) and x.sum() == 12
    with pytest.raises(ValueError, match="after the change"):
        toy_lab.leave(x)
    assert x.sum() == 28


def test_a_write_outside_the_view_is_reported(toy_lab: LabClient) -> None:
    x = torch.ones(4, 4)
    with pytest.raises(OutOfViewWrite):
        toy_lab.overrun(x[:, :2])
    assert torch.equal(x, torch.ones(4, 4))


@pytest.mark.parametrize("kind", ["ValueError", "KeyError", "IndexError", "TypeError", "NotImplementedError"])
def test_plain_errors_cross_by_type_with_their_message(toy_lab: LabClient, kind: str) -> None:
    with pytest.raises(Exception, match="why") as caught:
        toy_lab.fail(kind)
    assert type(caught.value).__name__ == kind and caught.value.args == ("why",)
    assert caught.value.from_lab and "sums.py" in caught.value.traceback_text  # type: ignore[attr-defined]


def test_other_errors_cross_as_student_errors_and_subclasses_as_their_base(toy_lab: LabClient) -> None:
    with pytest.raises(ValueError, match="why") as caught:
        toy_lab.fail("Custom")
    assert type(caught.value) is ValueError
    for kind in ("RuntimeError", "SystemExit"):
        with pytest.raises(StudentError, match=f"{kind}: why") as raised:
            toy_lab.fail(kind)
        assert raised.value.type_name == kind and "sums.py" in raised.value.traceback_text


def test_the_original_exception_is_behind_the_one_that_crossed(toy_lab: LabClient) -> None:
    with pytest.raises(StudentError) as caught:
        toy_lab.fail("RuntimeError")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_stub_is_recognised_through_wrapped_exceptions(toy_lab: LabClient) -> None:
    with pytest.raises(NotImplementedError, match="lab 99 task 1: stub is not written yet"):
        toy_lab.stub()


def test_objects_stay_where_they_are_and_answer_through_handles(toy_lab: LabClient) -> None:
    box = toy_lab.Box()
    assert box.put([1, 2]) == 1 and box.put("x") == 2
    assert box.size == len(box) == 2 and box[0] == [1, 2] and list(box) == [[1, 2], "x"]
    assert box(7) == [7, 2] and toy_lab.opened(box)[0] == 2
    assert box.take() == "x" and box.size == 1
    with pytest.raises(IndexError):
        box[5]


def test_only_declared_names_can_be_reached(toy_lab: LabClient) -> None:
    box = toy_lab.Box()
    for name in ("hidden", "_items", "__dict__x", "append"):
        with pytest.raises(AttributeError, match="not in the lab's interface"):
            getattr(box, name)
    with pytest.raises(AttributeError, match="read-only"):
        box.size = 3
    with pytest.raises(AttributeError, match="interface"):
        toy_lab.unknown  # noqa: B018
    assert box != toy_lab.Box()


def test_generators_are_handles_that_end_and_close(toy_lab: LabClient) -> None:
    assert list(toy_lab.count_to(3)) == [0, 1, 2]
    counter = toy_lab.count_to(9)
    assert next(counter) == 0
    counter.close()
    assert toy_lab.opened(toy_lab.Box())[1] == [3, 9]


def test_functions_of_the_test_are_called_on_its_own_side(toy_lab: LabClient) -> None:
    seen = []

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return 2 * x

    assert toy_lab.twice(double, torch.tensor(3)) == 12
    assert [int(x) for x in seen] == [3, 6]


def test_an_error_in_the_tests_own_function_is_raised_as_it_was(toy_lab: LabClient) -> None:
    def refuse(x: object) -> None:
        raise AssertionError("mine")

    with pytest.raises(AssertionError, match="mine"):
        toy_lab.twice(refuse, 1)
    assert toy_lab.add(1, 1) == 2


def test_vjp_gives_gradients_of_lab_code(toy_lab: LabClient) -> None:
    x = torch.tensor([1.0, 2.0])
    (gradient,) = toy_lab.vjp("cube", [x], torch.ones(2))
    assert torch.equal(gradient, 3 * x**2) and not x.requires_grad


def test_specs_arrive_built(toy_lab: LabClient) -> None:
    box = toy_lab.Box()
    box.put(Markov(((0.5, 0.5), (1.0, 0.0)), capacity=4))
    model = box[0]
    with pytest.raises(AttributeError, match="interface"):
        model.append([0])


def test_dropped_handles_are_released_on_the_other_side(toy_lab: LabClient) -> None:
    objects = toy_lab._transport._service._objects  # type: ignore[attr-defined]
    for _ in range(20):
        toy_lab.Box()
    toy_lab.add(1, 1)
    assert len(objects) <= 1


def test_a_request_of_unknown_kind_is_a_fault(toy_lab: LabClient) -> None:
    with pytest.raises((ProtocolFault, StudentError), match="unknown operation"):
        toy_lab._request({"op": "__class__"})
