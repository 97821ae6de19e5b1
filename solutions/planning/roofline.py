"""How long a pass takes at least: the arithmetic at its peak, or the bytes at full bandwidth, whichever is longer."""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import Hardware
from .model_shape import ModelShape


@dataclass(frozen=True)
class StepTime:
    """The two floors of a pass.

    Args:
        compute: seconds of the arithmetic.
        memory: seconds of the reads.
        overhead: seconds that neither explains: launches, scheduling, all-reduces.
    """

    compute: float
    memory: float
    overhead: float = 0.0

    @property
    def seconds(self) -> float:
        """The longer of the two, and the overhead."""
        return max(self.compute, self.memory) + self.overhead

    @property
    def is_memory_bound(self) -> bool:
        """Whether more bandwidth would help and more arithmetic would not."""
        return self.memory > self.compute


@dataclass(frozen=True)
class Serving:
    """A model on some accelerators that work as one (tensor parallelism).

    Args:
        model: what is served.
        hardware: on what.
        num_gpus: accelerators that share the weights.
        weights: dtype of the weights.
        kv: dtype of keys and values.
        compute: dtype that the matrix products run in.
        mfu: share of the arithmetic's peak that real kernels reach.
        bandwidth_share: share of the bandwidth that they reach.
        overhead: seconds a step.
    """

    model: ModelShape
    hardware: Hardware
    num_gpus: int = 1
    weights: str = "bf16"
    kv: str = "bf16"
    compute: str = "bf16"
    mfu: float = 1.0
    bandwidth_share: float = 1.0
    overhead: float = 0.0

    @property
    def flops(self) -> float:
        """FLOP per second that all of them reach together."""
        return self.num_gpus * self.hardware.flops(self.compute) * self.mfu

    @property
    def bandwidth(self) -> float:
        """Bytes per second that all of them read together."""
        return self.num_gpus * self.hardware.bandwidth * self.bandwidth_share

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights."""
        return self.model.weight_bytes(self.weights)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token."""
        return self.model.kv_bytes_per_token(self.kv)

    def decode_step(self, batch: float, num_context: float = 0.0) -> StepTime:
        """One token for each of `batch` sequences with `num_context` cached tokens each; section 1.2.

        Without a known peak of the arithmetic only the memory counts.
        """
        num_bytes = self.weight_bytes + batch * num_context * self.kv_bytes_per_token
        knows_peak = self.compute in self.hardware.peak
        compute = self.model.flops_per_token() * batch / self.flops if knows_peak else 0.0
        return StepTime(compute, num_bytes / self.bandwidth, self.overhead)

    def decode_rate(self, batch: float, num_context: float = 0.0) -> float:
        """Tokens per second of all sequences together."""
        return batch / self.decode_step(batch, num_context).seconds

    def prefill(self, num_tokens: float) -> StepTime:
        """A prompt, or several of so many tokens together."""
        compute = self.model.flops_per_token() * num_tokens / self.flops
        return StepTime(compute, self.weight_bytes / self.bandwidth, self.overhead)

    def decode_intensity(self, batch: float, num_context: float = 0.0) -> float:
        """FLOP per byte of a decode step: about the batch in 2-byte weights, and less with every cached token."""
        num_bytes = self.weight_bytes + batch * num_context * self.kv_bytes_per_token
        return self.model.flops_per_token() * batch / num_bytes

    def prefill_intensity(self, num_tokens: float) -> float:
        """FLOP per byte of a prefill."""
        return self.model.flops_per_token() * num_tokens / self.weight_bytes

    def tokens_that_fit(self, reserved: float = 0.0) -> float:
        """Tokens whose keys and values fit beside the weights; negative if the weights alone don't fit.

        Args:
            reserved: bytes for activations, graphs and whatever else, of all accelerators together.
        """
        room = self.num_gpus * self.hardware.memory - reserved - self.weight_bytes
        return room / self.kv_bytes_per_token
