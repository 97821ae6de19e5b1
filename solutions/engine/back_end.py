"""What steps are computed with: a device, kernels, recorded or compiled steps; as asked for, and as there is."""

from __future__ import annotations

import torch

from labkit.launch import triton_fault

from .graphs.compiled_step import compiled, compiler_fault
from .graphs.cuda_graphs import Again, CudaGraphs, Recorder
from .graphs.padded_decoding import PaddedDecoding, as_it_is, as_wide_as_can_be, next_eight, power_above
from .memory.features import FeaturePool
from .memory.kv_memory import KVMemory
from .memory.kv_pool import KVPool
from .model_runner import ModelRunner
from .models.blocks import Decoder

ATTENTIONS = ("torch", "triton")
DEVICES = ("cpu", "cuda")


def choose_device(name: str | None, cpu_only: bool = False) -> torch.device:
    """The device of a name.

    Args:
        name: "cpu" or "cuda"; None means a GPU if there is one and it will do.
        cpu_only: whether something is wanted that a GPU can't do.

    Raises:
        ValueError: another name, or there is no GPU.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() and not cpu_only else "cpu")
    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)} or None, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device; use 'cpu'")
    return torch.device(name)


def make_runner(
    model: Decoder, pool: KVMemory, max_rows: int, max_context: int, features: FeaturePool | None = None, *,
    attention: str | None = None, cuda_graphs: bool | None = None, compile: bool = False, adapters: bool = False,
) -> ModelRunner:  # fmt: skip
    """A runner as it is asked for, where model and pool lie.

    Args:
        model: what computes.
        pool: with a scratch slot if it is a `KVPool`.
        max_rows: requests of a step.
        max_context: tokens of a text.
        features: as in `ModelRunner`.
        attention: "torch", or "triton" for kernels, also for what is computed row by row and for drawing tokens; None
            takes these on a GPU where they can be had.
        cuda_graphs: whether pure decodes are recorded; None records on a GPU where that can be done.
        compile: whether pure decodes are compiled by torch.
        adapters: whether requests may have any; the rows that an adapter changes are others in every step.

    Raises:
        ValueError: what is asked for can't be had; the message says why.
    """
    if attention not in (None, *ATTENTIONS):
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)} or None, got {attention!r}")
    recorder = _recorder(model, pool, cuda_graphs, compile, adapters)
    if not isinstance(pool, KVPool):
        if attention == "triton":
            raise ValueError("attention 'triton' can't be had for KIVI, which has an attention of its own; use 'torch'")
        # Imported here: others need nothing of lab 13.
        from .attention.kivi_attention import KiviAttention

        return ModelRunner(model, pool, features, KiviAttention)
    if not _use_kernels(attention, compile, pool):
        if recorder is None:
            return ModelRunner(model, pool, features)
        if compile and (fault := compiler_fault(model.device)):
            raise ValueError(f"compile can't be had here: {fault}; leave it off")
        wrap = compiled if compile else as_it_is
        # A recorded step is one for each size, a compiled one is for many.
        width = power_above if isinstance(recorder, CudaGraphs) else next_eight
        decoding = PaddedDecoding(
            model, pool, max_rows, max_context, recorder, width=width, features=features, compile=wrap
        )
        return ModelRunner(model, pool, features, decoding=decoding)
    # Imported here: only kernels need Triton.
    from .attention.kernel_attention import KernelDecodeAttention, attention_of
    from .kernels.fused_draw import draw_fused
    from .kernels.row_kernels import KernelRows

    model = model.with_rows(KernelRows(model.dtype, model.device))
    if recorder is None:
        return ModelRunner(model, pool, features, attention_of, draw=draw_fused)
    decoding = PaddedDecoding(
        model, pool, max_rows, max_context, recorder, KernelDecodeAttention, as_wide_as_can_be, features
    )  # fmt: skip
    decoding.warm_up()
    return ModelRunner(model, pool, features, attention_of, decoding, draw_fused)


def _recorder(
    model: Decoder, pool: KVMemory, cuda_graphs: bool | None, compile: bool, adapters: bool
) -> Recorder | None:
    """How pure decodes are kept; None if they are computed like all other steps."""
    fault = None
    if not model.is_static:
        fault = "experts, which are looked for by what a router says"
    elif adapters:
        fault = "adapters, whose rows are not among what a recorded step reads"
    elif not isinstance(pool, KVPool) or pool.parts(0) is None:
        fault = "keys and values in codes, which are looked at before they are rounded"
    if fault and (cuda_graphs or compile):
        raise ValueError(f"cuda_graphs and compile need steps that ask the device nothing; leave them off with {fault}")
    if cuda_graphs or (cuda_graphs is None and model.device.type == "cuda" and not fault):
        return CudaGraphs(model.device)
    return Again() if compile else None


def _use_kernels(attention: str | None, compile: bool, pool: KVPool) -> bool:
    if attention == "torch" or (attention is None and pool.device.type != "cuda"):
        return False
    fault = "torch compiles what torch computes" if compile else triton_fault()
    if fault is None:
        from .attention.kernel_attention import kernels_fault

        fault = kernels_fault(pool)
    if fault is not None and attention == "triton":
        raise ValueError(f"attention 'triton' can't be had here: {fault}; use 'torch'")
    return fault is None
