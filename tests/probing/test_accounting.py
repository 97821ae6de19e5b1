"""What is counted: bytes that are moved, operations that are done, buffers that no cache serves, settings put back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grader.judge.numerics import check_close, check_equal
from labkit.probing import bandwidth, buffers, launches, products
from labkit.probing.precision import float32_products
from labkit.probing.timing import Call, Effort, Spread, WallClock

MIB = 2**20
ONCE = Effort(seconds=1e-6, fewest=1, sample_seconds=1e-9)


class SecondClock:
    """Every call takes a second; they are really made."""

    def seconds(self, call: Call, count: int) -> float:
        """As `Clock`."""
        for _ in range(count):
            call()
        return float(count)


def test_a_copy_moves_each_byte_twice_and_reads_and_writes_once() -> None:
    buffer = torch.rand(1000)
    rates = bandwidth.measure_bandwidth(buffer, SecondClock(), ONCE)
    assert {kind: rate.median for kind, rate in rates.items()} == {"read": 4000, "write": 4000, "copy": 8000}


def test_each_kind_touches_what_it_says() -> None:
    buffer, other = torch.rand(1000), torch.zeros(1000)
    calls = bandwidth._calls(buffer, other)
    assert set(calls) == set(bandwidth.KINDS)
    before = buffer.clone()
    calls["write"][0]()
    assert bool((other == 1.5).all())
    calls["copy"][0]()
    assert torch.equal(other, buffer)
    assert calls["read"][0]() == buffer.sum()  # type: ignore[comparison-overlap]
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "fp8"])
def test_a_product_is_one_of_matrices_and_counted_by_closed_forms(dtype: str) -> None:
    m, k, n = 32, 64, 48
    left, right = products.random_matrix(m, k, dtype, "cpu", 0), products.random_matrix(n, k, dtype, "cpu", 1)
    made = products.product(left, right, dtype)
    assert made.flops == 2 * m * n * k
    size, result = {"fp32": (4, 4), "bf16": (2, 2), "fp16": (2, 2), "int8": (1, 4), "fp8": (1, 2)}[dtype]
    assert made.num_bytes == (m * k + n * k) * size + m * n * result
    try:
        got = made.call()
    except RuntimeError as error:
        pytest.skip(f"not verified here: this CPU's torch has no product in {dtype}: {error}")
    exact = left.double() @ right.double().T
    if dtype == "int8":
        check_equal("the product", got, exact.to(torch.int32))
    else:
        wanted = torch.bfloat16 if dtype == "fp8" else left.dtype
        check_close("the product", got, exact, scale=float(exact.abs().max()), dtype=wanted)


def test_the_fastest_side_counts_and_a_slow_dtype_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = []

    class Slow:
        """A thousand FLOP per second, but for a slow start at every size."""

        def seconds(self, call: Call, count: int) -> float:
            """As `Clock`."""
            sides.append(len(call()))  # type: ignore[arg-type]
            return count * 2 * sides[-1] ** 3 / 1e9

    rates, missing = products.measure_products("cpu", Slow(), Effort(seconds=3.0, fewest=3), ("fp32",))
    assert rates["fp32"].median == pytest.approx(1e9) and not missing
    assert max(sides) == 512, "8 times what 512 takes is more than a second, so 1024 is not tried"


def test_what_cannot_be_multiplied_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nand a stack")

    monkeypatch.setattr(torch, "mm", refuse)
    rates, missing = products.measure_products("cpu", WallClock("cpu"), ONCE, ("fp16", "tf32"))
    assert not rates and set(missing) == {"fp16", "tf32"}
    assert missing["fp16"] == (
        "torch has no such product for this device: \"addmm_impl_cpu_\" not implemented for 'Half'"
    )
    assert "a CPU has none" in missing["tf32"]


@pytest.mark.parametrize(("here", "refused"), [((7, 5), {"tf32", "fp8"}), ((8, 6), {"fp8"}), ((12, 0), set())])
def test_an_old_card_is_not_asked_for_what_it_would_emulate(
    here: tuple[int, int], refused: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: here)
    found = set()
    for dtype in products.DTYPES:
        try:
            products._check(dtype, "cuda")
        except products.NoSuchProductError as error:
            assert f"this card has {here[0]}.{here[1]}" in str(error)
            found.add(dtype)
    assert found == refused


def test_random_contents_are_neither_zeros_nor_the_same_twice() -> None:
    for dtype in products.DTYPES:
        matrix = products.random_matrix(16, 32, dtype, "cpu", 0).float()
        assert matrix.unique().numel() > 50, dtype
        assert not torch.equal(matrix, products.random_matrix(16, 32, dtype, "cpu", 1).float())


@pytest.mark.parametrize("prepare", [
    lambda: None,
    lambda: torch.set_float32_matmul_precision("medium"),
    lambda: torch.set_float32_matmul_precision("high"),
], ids=["default", "medium", "high"])  # fmt: skip
def test_settings_are_put_back_even_after_an_error(prepare: Callable[[], None]) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        prepare()
        wanted = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
        with pytest.raises(KeyError), float32_products("tf32"):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            raise KeyError
        with float32_products("ieee"):
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"  # type: ignore[attr-defined]
        assert (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32) == wanted
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_launch_is_one_of_many_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "time_of", lambda call, clock, effort: call() or Spread(2.0, 1.0, 4.0, 3))
    seconds, missing = launches.measure_launches("cpu", ONCE)
    assert seconds == {"operator": Spread(0.01, 0.005, 0.02, 3)}
    assert "one by one" in missing["graph"]


@pytest.mark.parametrize(("cache", "free", "device", "size"), [
    (32 * MIB, 16_000 * MIB, "cpu", 256),
    (384 * MIB, 64_000 * MIB, "cpu", 3072),  # a server's cache outgrows the usual buffer
    (None, 16_000 * MIB, "cpu", 256),
    (16 * MIB, 1_000 * MIB, "cpu", 125),  # an eighth of what is free
    (50 * MIB, 70_000 * MIB, "cuda", 1024),
    (128 * MIB, 6_000 * MIB, "cuda", 750),
])  # fmt: skip
def test_a_buffer_is_many_times_the_cache_and_an_eighth_of_memory_at_most(
    cache: int | None, free: int, device: str, size: int
) -> None:
    assert buffers.buffer_bytes(cache, free, device) == size * MIB


def test_too_little_memory_is_refused_with_what_would_be_enough() -> None:
    with pytest.raises(ValueError, match="until 512 MiB are free"):
        buffers.buffer_bytes(32 * MIB, 300 * MIB, "cpu")


def test_parts_of_the_last_level_are_added_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers.os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    for core, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        for index, (level, size, cores) in enumerate([(1, "48K", str(core)), (3, "32768K", shared)]):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("size", size), ("shared_cpu_list", cores)):
                (folder / name).write_text(f"{value}\n")
    assert buffers._of_linux(tmp_path) == 64 * MIB
    assert buffers._of_linux(tmp_path / "nowhere") is None
