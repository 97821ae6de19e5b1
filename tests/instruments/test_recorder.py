"""What the recorder counts and reports of kernels that do one thing each."""

from __future__ import annotations

import pytest
import torch

from grader.judge.numerics import check_close
from labkit.client import LabClient
from labkit.errors import StudentError, is_not_attempted
from labkit.loader import LabPackage
from tests.instruments.conftest import FOLDER


def _message(lab: LabClient, name: str, *args: object) -> str:
    with pytest.raises(StudentError) as caught:
        getattr(lab, name)(*args)
    return str(caught.value)


def test_a_fused_softmax_moves_each_byte_once_each_way(local: LabClient) -> None:
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    result, log = local.observe("softmax", x)
    check_close("softmax", result, x.double().softmax(-1), dtype=x.dtype, plain=x.softmax(-1), scale=1.0)
    (launch,) = log.launches
    assert (launch.kernel, launch.grid) == ("softmax_kernel", (64, 1, 1))
    assert (launch.tensor("x_ptr").bytes_loaded, launch.tensor("x_ptr").bytes_stored) == (256_000, 0)
    assert (launch.tensor("y_ptr").bytes_loaded, launch.tensor("y_ptr").bytes_stored) == (0, 256_000)
    assert (log.bytes_loaded, log.bytes_stored) == (256_000, 256_000)
    assert log.stray == () and log.flags == ()
    with pytest.raises(KeyError, match="x_ptr, y_ptr"):
        launch.tensor("z_ptr")


def test_a_launch_beside_launch_is_seen_too(local: LabClient) -> None:
    _, log = local.observe("bare_softmax", torch.zeros(2, 9))
    assert [launch.bytes_loaded for launch in log.of("softmax_kernel")] == [72]


def test_lanes_that_share_an_address_count_once(local: LabClient) -> None:
    packed = torch.tensor([0x76543210, 0x01234567], dtype=torch.int32)
    result, log = local.observe("nibbles", packed)
    assert result.tolist() == [*range(8), *reversed(range(8))]
    assert (log.bytes_loaded, log.bytes_stored) == (8, 64)


def test_atomics_count_both_ways(local: LabClient) -> None:
    result, log = local.observe("histogram", torch.tensor([0, 2, 2, 1], dtype=torch.int32), 3)
    assert result.tolist() == [1, 1, 2]
    counts = log.launches[0].tensor("counts_ptr")
    assert (counts.bytes_loaded, counts.bytes_stored) == (12, 12)


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("how", ["pointer", "descriptor"])
def test_blocks_count_what_lies_in_the_tensor(local: LabClient, how: str) -> None:
    x = torch.arange(20.0).view(5, 4)
    result, log = local.observe("row_sums", x, how)
    assert torch.equal(result, x.sum(1))
    assert (log.bytes_loaded, log.bytes_stored, log.stray, log.flags) == (80, 20, (), ())
    assert torch.equal(local.row_sums(x, how), result)


def test_lanes_may_choose_between_tensors(local: LabClient) -> None:
    result, log = local.observe("interleave", torch.zeros(4), torch.ones(4), 8)
    assert result.tolist() == [0, 1] * 4 and log.stray == ()
    first, second, _ = log.launches[0].tensors
    assert (first.bytes_loaded, second.bytes_loaded) == (16, 16)
    (stray,) = local.observe("interleave", torch.zeros(4), torch.ones(3), 8)[1].stray
    assert (stray.tensor, stray.offsets) == ("b_ptr", (3,))


def test_unmasked_accesses_are_told(local: LabClient) -> None:
    _, log = local.observe("unmasked_copy", torch.ones(8))
    x, y = log.launches[0].tensors
    assert (x.unmasked_loads, x.unmasked_stores, y.unmasked_loads, y.unmasked_stores) == (2, 0, 0, 2)


@pytest.mark.parametrize(("shift", "length", "offsets"), [(3, 8, (8, 9, 10)), (-2, 8, (-2, -1)), (1 << 40, 2, None)])
def test_stray_loads_are_reported_with_program_and_offsets(
    local: LabClient, shift: int, length: int, offsets: tuple[int, ...] | None
) -> None:
    offsets = offsets or (shift, shift + 1)
    result, log = local.observe("copy", torch.ones(8), shift, length)
    assert result.sum() == length - len(offsets), "a stray lane loads `other`"
    (stray,) = log.stray
    assert (stray.kernel, stray.operation, stray.tensor) == ("copy_kernel", "load", "x_ptr")
    assert stray.offsets == offsets and stray.num_lanes == len(offsets)
    assert stray.program_id == ((1, 0, 0) if shift == 3 else (0, 0, 0))
    text = _message(local, "copy", torch.ones(8), shift, length)
    assert "copy_kernel, line " in text and f"outside x_ptr, at element offsets {offsets[0]}, {offsets[1]}" in text


def test_the_gaps_of_a_view_are_not_its_own(local: LabClient) -> None:
    view = torch.ones(3, 8)[:, :5]
    (stray,) = local.observe("read_view", view)[1].stray
    assert stray.offsets == (5, 6, 7)


def test_a_load_without_other_is_flagged_only_if_its_lanes_matter(local: LabClient) -> None:
    x = torch.arange(1.0, 10)
    for use in ("sum", "max"):
        (flag,) = local.observe("total", x, use)[1].flags
        assert (flag.kind, flag.kernel) == ("missing_other", "total_kernel")
        assert "7 lanes" in flag.text and "`other`" in str(flag)
    result, log = local.observe("total", x, "mask")
    assert result.item() == 45 and log.flags == ()
    assert not local.total(x, "sum").isfinite().all(), "undefined lanes must not look like zeros"


def test_a_shallow_dot_is_flagged(local: LabClient) -> None:
    for dtype, least in ((torch.float16, 16), (torch.float32, 16), (torch.int8, 32)):
        (flag,) = local.observe("gram", torch.ones(16, least // 2, dtype=dtype))[1].flags
        assert flag.kind == "dot_k" and f"K = {least // 2}" in flag.text and f"at least {least}" in flag.text
        assert local.observe("gram", torch.ones(16, least, dtype=dtype))[1].flags == ()


def test_an_overflowing_offset_is_flagged(local: LabClient) -> None:
    (flag,) = local.observe("first_of_rows", 1 << 29)[1].flags
    assert flag.kind == "int32_overflow" and "tl.int64" in flag.text
    assert local.observe("first_of_rows", 1 << 28)[1].flags == ()


def test_bf16_is_refused_and_flagged(local: LabClient) -> None:
    with pytest.raises(ValueError, match=r"softmax_kernel was given torch\.bfloat16 on a CPU"):
        local.softmax(torch.zeros(2, 4, dtype=torch.bfloat16))
    (flag,) = local.observe("double_in_bf16", torch.ones(4))[1].flags
    assert flag.kind == "bf16"
    assert "tl.float32" in _message(local, "double_in_bf16", torch.ones(4))


def test_an_unwritten_kernel_is_known_as_such(local: LabClient) -> None:
    with pytest.raises(NotImplementedError) as caught:
        local.stub(torch.ones(1))
    assert is_not_attempted(caught.value)
    assert str(caught.value).startswith("lab 97 task 1: stub_kernel is not written yet.")


def test_nothing_stays_patched(local: LabClient) -> None:
    from triton.runtime import interpreter

    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    local.observe("softmax", torch.zeros(2, 4))
    _message(local, "copy", torch.ones(8), 3, 8)
    assert "create_masked_load" not in vars(builder) and "device_assert" not in vars(semantic)
    assert interpreter.GridExecutor.__call__.__module__ == "triton.runtime.interpreter"


def test_accesses_are_told_in_the_order_of_programs() -> None:
    from labkit.instruments.recorder import Access, Recorder

    package = LabPackage("lab97", FOLDER, ["kernels"])
    package.mount()
    accesses: list[Access] = []
    with Recorder(strict=False, on_access=accesses.append):
        package.module("kernels").copy(torch.arange(6.0), 1, 5)
    package.unmount()
    assert [(a.operation, a.tensor, a.program_id[0], a.offsets.tolist()) for a in accesses] == [
        ("load", "x_ptr", 0, [1, 2, 3, 4]),
        ("store", "y_ptr", 0, [0, 1, 2, 3]),
        ("load", "x_ptr", 1, [5]),
        ("store", "y_ptr", 1, [4]),
    ]
    assert len({a.line for a in accesses}) == 1 and {a.kernel for a in accesses} == {"copy_kernel"}
