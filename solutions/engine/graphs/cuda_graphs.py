"""Recorded steps: a decode step of a small batch is hundreds of launches, each dearer to ask for than to carry out.

A CUDA graph is the list of what was launched once, with every address and number in it; replaying it is one launch. So
what is recorded must read all that changes from memory that stays where it is, and must not ask the device anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Compute = Callable[[], Tensor]
"""A step over static inputs; its result lies on the device."""


class Recorder(Protocol):
    """Makes a step that can be run again."""

    def record(self, compute: Compute) -> Compute:
        """Computes a step for the first time.

        Args:
            compute: reads its inputs where they lie. What the first call reads must be harmless to compute.

        Returns:
            Computes it again on what lies there by then. A result may lie where an earlier one did, of this step or
            of another that the same recorder made.
        """


class Again:
    """Records nothing: every run calls the step's own code."""

    def record(self, compute: Compute) -> Compute:
        """See `Recorder`."""
        return compute


class CudaGraphs:
    """Records on a GPU; a `Recorder`.

    All graphs share one pool of memory, for never do two of them run at a time: what the first and largest needs for
    its intermediate results does for all.

    Args:
        device: where.

    Raises:
        ValueError: it is no CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"CUDA graphs need device 'cuda', and the model lies on {str(device)!r}; leave them off")
        self._device = device
        self._pool: Any = None

    def record(self, compute: Compute) -> Compute:
        """See `Recorder`."""
        with torch.cuda.device(self._device):
            # What happens in a first run only, such as compiling kernels and making workspaces, must not be recorded.
            # It runs beside the main stream, since recording is forbidden there.
            side, main = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                compute()
                compute()
            main.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = compute()
            self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
