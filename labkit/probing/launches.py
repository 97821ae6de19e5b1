"""What it costs to start one operator, apart from what it does."""

from __future__ import annotations

import torch

from labkit.probing.timing import Effort, Spread, WallClock, time_of

IN_A_ROW = 200
NO_GRAPHS = "CUDA graphs record what is launched on a GPU; a CPU calls its operators one by one"


def measure_launches(device: str, effort: Effort) -> tuple[dict[str, Spread], dict[str, str]]:
    """Seconds for each of many operators in a row, each on a single number.

    Returns:
        Seconds by `"operator"` and `"graph"`, where a CUDA graph replays them; and for what is missing, why.
    """
    number = torch.zeros(1, device=device)

    def row() -> None:
        for _ in range(IN_A_ROW):
            number.add_(1.0)

    def each(spread: Spread) -> Spread:
        return Spread(spread.median / IN_A_ROW, spread.low / IN_A_ROW, spread.high / IN_A_ROW, spread.repeats)

    # The host's time is the point here, so the wall clock counts on a GPU too.
    clock = WallClock(device)
    seconds = {"operator": each(time_of(row, clock, effort))}
    if device == "cpu":
        return seconds, {"graph": NO_GRAPHS}
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            row()
    except RuntimeError as error:
        return seconds, {"graph": f"this build can't record one: {str(error).splitlines()[0][:120]}"}
    seconds["graph"] = each(time_of(graph.replay, clock, effort))
    return seconds, {}
