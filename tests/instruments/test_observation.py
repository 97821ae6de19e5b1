"""What a test learns of a call: the same on both transports, and enough to tell a kernel's work from another's."""

from __future__ import annotations

from unittest import SkipTest

import pytest
import torch

from labkit import launch
from labkit.client import LabClient
from labkit.instruments.operators import doing_the_job


def _heads() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 2, 7, 4, generator=generator) for _ in range(3)]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("softmax", [torch.arange(12.0).view(3, 4)]),
        ("copy", [torch.ones(8), 3, 8]),
        ("total", [torch.ones(9), "sum"]),
        ("first_of_rows", [1 << 29]),
        ("gram", [torch.ones(16, 8)]),
        ("composed_attention", _heads()),
    ],
)
def test_the_log_is_equal_on_both_transports(
    local: LabClient, sandboxed: LabClient, name: str, args: list[object]
) -> None:
    (here, log), (there, other) = local.observe(name, *args), sandboxed.observe(name, *args)
    assert log == other
    assert torch.equal(here.isnan(), there.isnan()) and torch.equal(here.nan_to_num(), there.nan_to_num())
    assert log.launches or name == "composed_attention"


def test_library_attention_is_caught_whatever_it_is_called(local: LabClient) -> None:
    _, log = local.observe("attention_by_another_name", *_heads())
    (found,) = doing_the_job(log.operators, "attention")
    assert "scaled_dot_product" in found and log.launches == ()


def test_attention_put_together_from_operators_is_caught(local: LabClient) -> None:
    _, log = local.observe("composed_attention", *_heads())
    assert doing_the_job(log.operators, "attention") == ()
    assert set(doing_the_job(log.operators, "matmul", "softmax")) == {"aten.bmm", "aten._softmax"}
    assert log.allocated(lambda shape: shape[-2:] == (7, 7)), "the scores are a T×T tensor"
    with pytest.raises(ValueError, match="no job is called cooking"):
        doing_the_job(log.operators, "cooking")


def test_what_runs_inside_a_launch_is_no_operator(local: LabClient) -> None:
    _, log = local.observe("softmax", torch.zeros(3, 4))
    assert log.operators == ("aten.empty_like",)
    assert [allocation.num_bytes for allocation in log.allocations] == [48]


def test_without_launches_only_a_decorative_kernel_answers(local: LabClient, sandboxed: LabClient) -> None:
    x = torch.arange(12.0).view(3, 4) / 10
    for lab in (local, sandboxed):
        right = lab.softmax(x)
        assert lab.without_launches("softmax", x).isnan().all()
        assert lab.without_launches("bare_softmax", x).isnan().all()
        assert torch.equal(lab.without_launches("decorative_softmax", x), lab.decorative_softmax(x))
        assert torch.equal(lab.softmax(x), right), "launches are on again"


def test_natively_an_observation_is_skipped_not_passed(local: LabClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.VARIABLE, "0")
    with pytest.raises(SkipTest, match="not verified here"):
        local.observe("softmax", torch.zeros(1, 4))
