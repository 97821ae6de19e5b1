"""Every number that the module works out, from its inputs; where it rounds, to the digits that it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from solutions.planning.capacity import Assumptions, Load, plan
from solutions.planning.hardware import H100, RTX_5060
from solutions.planning.model_shape import KNOWN, ModelShape, bytes_of
from solutions.planning.roofline import Serving

LLAMA_8B = KNOWN["llama-3-8b"]
LLAMA_70B = KNOWN["llama-3-70b"]
QWEN = KNOWN["qwen2.5-1.5b"]
KIB, GIB = 2**10, 2**30


def two_digits(value: float) -> float:
    """To two significant digits, as the module's rounded figures."""
    return float(f"{value:.1e}")


@pytest.mark.parametrize(
    ("name", "kib", "gib_at_32k"),
    [("qwen2.5-0.5b", 12, 0.4), ("qwen2.5-1.5b", 28, 0.9), ("llama-3-8b", 128, 4), ("llama-3-70b", 320, 10)],
)
def test_the_kv_table(name: str, kib: int, gib_at_32k: float) -> None:
    """Section 1.3: KiB exact, GiB to the digits given."""
    per_token = KNOWN[name].kv_bytes_per_token("bf16")
    assert per_token == kib * KIB
    assert round(per_token * 32 * KIB / GIB, 1) == gib_at_32k


def test_llama_8b_on_an_h100() -> None:
    """Section 1.2; two digits."""
    serving = Serving(LLAMA_8B, H100)
    assert round(H100.ridge("bf16")) == 295
    alone = serving.decode_step(1)
    assert round(alone.seconds * 1e3, 1) == 4.8 and alone.is_memory_bound
    assert two_digits(serving.decode_rate(1)) == 210
    kv = 64 * 2048 * serving.kv_bytes_per_token
    assert round(kv / 1e9, 1) == 17.2 and kv > serving.weight_bytes
    step = serving.decode_step(64, 2048)
    assert round(step.seconds * 1e3, 1) == 9.9 and step.is_memory_bound
    assert two_digits(serving.decode_rate(64, 2048)) == 6500
    assert round(step.compute * 1e3) == 1
    prefill = serving.prefill(1000)
    assert round(prefill.compute * 1e3) == 16 and not prefill.is_memory_bound
    assert serving.prefill_intensity(1000) == pytest.approx(1000)
    assert serving.decode_intensity(1) == pytest.approx(1)
    assert serving.decode_intensity(64, 2048) < 64 / 2


def test_the_rtx_5060() -> None:
    """Sections 1.2 and 6; two digits."""
    serving = Serving(QWEN, RTX_5060)
    assert round(serving.weight_bytes / 1e9, 1) == 3.1
    assert round(serving.decode_step(1).seconds * 1e3, 1) == 6.9
    assert serving.decode_rate(1) == pytest.approx(145, rel=0.005)
    packed = Serving(LLAMA_8B, RTX_5060, weights="int4")
    assert round(packed.weight_bytes / 1e9, 1) == 4.1
    assert two_digits(packed.decode_rate(1)) == 110
    low, high = (serving.tokens_that_fit(8e9 - serving.weight_bytes - room) for room in (3.5e9, 4e9))
    assert low < 130_000 < high
    assert pytest.approx(130_000, rel=0.01) == 64 * 2048
    step = serving.decode_step(32, 2048)
    assert round(32 * 2048 * serving.kv_bytes_per_token / 1e9, 1) == 1.9
    assert round(step.seconds * 1e3) == 11
    assert two_digits(32 / step.seconds) == 2900
    assert round(serving.model.flops_per_token() * 32 / 1e9) == 99


def test_the_memory_table() -> None:
    """Section 4.4: GB to the digits given."""
    rows = {LLAMA_8B: (16, 8, 4.1), LLAMA_70B: (141, 71, 36)}
    for model, (bf16, fp8, int4) in rows.items():
        assert round(model.weight_bytes("bf16") / 1e9) == bf16
        assert round(model.weight_bytes("fp8") / 1e9) == fp8
        assert round(model.weight_bytes("int4") / 1e9, 1 if int4 < 10 else 0) == int4


def test_the_kv_transfer() -> None:
    """Section 2.4: MB and GB per second, to the digits given."""
    per_token = LLAMA_70B.kv_bytes_per_token("bf16")
    assert round(1000 * per_token / 1e6) == 328
    assert two_digits(1000 * 1000 * per_token / 1e9) == 330


LOAD = Load(1000, 1000, 300)


def test_the_capacity_plan_step_by_step() -> None:
    """Section 6, steps 1 to 5."""
    assert round(LLAMA_70B.weight_bytes("bf16") / 1e9) == 141
    assert round(LLAMA_70B.flops_per_token() / 1e9) == 141
    attention = LLAMA_70B.flops_per_token(1000) / LLAMA_70B.flops_per_token() - 1
    assert 0.01 < attention < 0.025
    assert (LOAD.prefill_rate, LOAD.decode_rate, LOAD.decode_context) == (1e6, 3e5, 1150)
    done = plan(Serving(LLAMA_70B, H100), LOAD)
    assert round(done.prefill_gpus_at_peak, -1) == pytest.approx(285, abs=5)
    assert round(done.prompt_seconds * 1e3) == 36
    assert two_digits(done.prefill_gpus) == 360
    assert done.kv_tokens / 1e6 == pytest.approx(1.33, abs=0.01)
    assert two_digits(done.max_sequences) == pytest.approx(1150, rel=0.05)
    assert done.kv_transfer / 1e9 == pytest.approx(330, rel=0.01)
    assert round(done.kv_transfer / 1e9 / done.decode_replicas) == 22


@pytest.mark.parametrize(
    ("batch", "kv_gb", "memory", "compute", "step", "rate"),
    [(128, 48, 7.1, 4.6, 9, 14), (256, 96, 8.9, 9.1, 12, 21), (512, 193, 12.5, 18.3, 21, 24)],
)
def test_the_batches_of_step_four(
    batch: int, kv_gb: int, memory: float, compute: float, step: float, rate: float
) -> None:
    """The floors to the digits given; steps "plus overhead" lie 15 to 35 % above them."""
    serving = Serving(LLAMA_70B, H100, num_gpus=8, mfu=0.5)
    assert round(batch * 1150 * serving.kv_bytes_per_token / 1e9) == kv_gb
    floors = serving.decode_step(batch, 1150)
    assert floors.memory * 1e3 == pytest.approx(memory, abs=0.06)
    assert floors.compute * 1e3 == pytest.approx(compute, abs=0.06)
    assert 1.1 < step / (floors.seconds * 1e3) < 1.35
    assert batch / step == pytest.approx(rate, rel=0.03)


def test_replicas_cost_and_levers() -> None:
    """Steps 5 and 6; a real step is taken for a third longer than its floor of 9.1 ms, which gives the module's 12."""
    assumed = Assumptions()
    done = plan(Serving(LLAMA_70B, H100), LOAD, assumed)
    assert round(done.tpot * 1e3) == 12
    assert two_digits(done.replica_rate) == 21_000
    assert done.decode_replicas == 15
    assert done.decode_gpus == pytest.approx(150)
    assert two_digits(done.gpus) == 510
    assert done.dollars_per_hour == pytest.approx(1275, rel=0.01)
    assert round(done.dollars_per_million_output, 1) == 1.2
    assert done.dollars_per_million_total == pytest.approx(0.27, abs=0.01)
    fp8 = plan(Serving(LLAMA_70B, H100, weights="fp8", compute="fp8"), LOAD, assumed)
    assert fp8.prefill_gpus == pytest.approx(180, rel=0.02)
    assert fp8.step.memory * 1e3 == pytest.approx(6.2, abs=0.05)
    assert fp8.step.compute * 1e3 == pytest.approx(4.6, abs=0.05)
    assert fp8.decode_replicas == 10
    assert 0.5 < fp8.gpus / done.gpus < 0.6, "about half"
    cached = plan(Serving(LLAMA_70B, H100), replace(LOAD, prefix_hit_rate=0.5), assumed)
    assert cached.prefill_gpus == pytest.approx(done.prefill_gpus / 2)
    assert cached.decode_gpus == done.decode_gpus


def test_speculation_multiplies_the_rate() -> None:
    """Section 3.2: 3.36 tokens a round and 2.8 times the speed at 0.8, 4 drafts and c = 0.05."""
    plain = plan(Serving(LLAMA_70B, H100), LOAD)
    fast = plan(Serving(LLAMA_70B, H100), LOAD, Assumptions(acceptance_rate=0.8))
    assert round(fast.replica_rate / plain.replica_rate, 1) == 2.8
    assert fast.decode_replicas < plain.decode_replicas


def test_the_largest_batch_within_the_latency_is_chosen() -> None:
    serving = Serving(LLAMA_70B, H100)
    chosen = [plan(serving, LOAD, Assumptions(batch=None, tpot=limit)).batch for limit in (0.0097, 0.0125, 0.025)]
    assert chosen == [128, 256, 512]


def test_parameters_are_counted_from_a_configuration() -> None:
    from labkit.checkpoints import load_decoder

    shape = ModelShape.from_config("smollm2", load_decoder("smollm2").config)
    assert round(shape.parameters / 1e6, 1) == 134.5
    assert shape.parameters == pytest.approx(KNOWN["smollm2"].parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Load(0, 1, 1), "requests_per_second"),
        (lambda: Load(1, 1, 1, prefix_hit_rate=1.0), "prefix_hit_rate"),
        (lambda: Assumptions(mfu=0.0), "mfu"),
        (lambda: Assumptions(acceptance_rate=1.0), "acceptance_rate"),
        (lambda: bytes_of("fp7"), "fp7"),
        (lambda: H100.flops("int4"), "int4"),
        (lambda: RTX_5060.ridge("bf16"), "measure_gpu"),
        (lambda: plan(Serving(LLAMA_70B, H100), LOAD, Assumptions(gpus_per_replica=1)), "no sequence fits"),
        (lambda: plan(Serving(LLAMA_70B, H100), LOAD, Assumptions(batch=4096)), "doesn't fit"),
        (lambda: plan(Serving(LLAMA_70B, H100), LOAD, Assumptions(batch=None, tpot=0.001)), "the floor is"),
    ],
)
def test_what_cannot_be_planned_is_refused(make: object, named: str) -> None:
    assert plan(Serving(LLAMA_70B, H100), LOAD).gpus > 0
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]
