"""How large an engine is, what it holds its numbers in, and by what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .drafting.speculation import SpeculationConfig
from .scheduler import SchedulerConfig
from .weights.packing import Packing


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is made of; `Engine` refuses what can't be had.

    Args:
        scheduler: limits of a step.
        num_blocks: blocks of the pool.
        block_size: tokens in a block.
        num_host_blocks: blocks in host memory, for preemption by swap.
        prefix_cache: "hash", "radix" or "none".
        weights: how they are held, a name in `weights.formats`; a `LoadedModel` keeps its own.
        packing: how quantized ones run.
        kv_dtype: how keys and values are stored: "fp32", "bf16", "fp16", "int8", "fp8", "kivi4" or "kivi2"; None for
            the model's type.
        speculation: who drafts: a name in `speculation.DRAFTERS`, or more to say about it; None or "none" for plain
            decoding.
        adapters: folders of adapters in peft's layout, by the names that requests ask by.
        device: "cpu" or "cuda"; None means a GPU if there is one, and a CPU for weights in codes, KIVI and adapters. A
            `LoadedModel` stays where it is.
        attention: "torch" or "triton"; see `back_end.make_runner`, as for all that follows.
        cuda_graphs: whether steps in which all decode are recorded, and replayed in one launch.
        compile: whether such steps are compiled by torch.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_blocks: int = 1024
    block_size: int = 16
    num_host_blocks: int = 0
    prefix_cache: str = "hash"
    weights: str = "fp32"
    packing: Packing = field(default_factory=Packing)
    kv_dtype: str | None = None
    speculation: SpeculationConfig | str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    attention: str | None = None
    cuda_graphs: bool | None = None
    compile: bool = False
