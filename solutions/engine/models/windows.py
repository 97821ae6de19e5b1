"""Layers that attend to the newest tokens only: which they are, and how far they see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.checks import check_count

Windows = Sequence[int | None]
"""For each layer the tokens that a query sees, its own included; None means all. Empty: no layer has a window.

Attention reads no block that lies before a window. Such blocks stay with their request all the same: all layers share
one block table, a layer without a window still reads them, and the prefix cache hands them to others."""

_KINDS = ("full_attention", "sliding_attention")


def window_of(windows: Windows, layer: int, num_layers: int) -> int | None:
    """The window of a layer.

    Raises:
        ValueError: not one window for each layer.
    """
    if len(windows) not in (0, num_layers):
        raise ValueError(f"windows must name one for each of the {num_layers} layers, got {len(windows)}")
    return windows[layer] if windows else None


def read_windows(entries: Mapping[str, Any], num_layers: int) -> Windows:
    """The windows that a `config.json` asks for.

    Args:
        entries: its content. `layer_types` says it layer by layer; without it, all layers from `max_window_layers` on
            have the window, which is all layers if there is no such entry.
        num_layers: decoder layers.

    Raises:
        ValueError: a window below 1, layers with a window and no window, or a kind of layer that is not known.
    """
    window, kinds = entries.get("sliding_window"), entries.get("layer_types")
    if window is None or not entries.get("use_sliding_window", True):
        if kinds and "sliding_attention" in kinds:
            off = "sliding_window is null" if window is None else "use_sliding_window is false"
            raise ValueError(f"layer_types has sliding_attention, but {off}; change one of them")
        return ()
    check_count("sliding_window", window, 1)
    if kinds is None:
        first = entries.get("max_window_layers", 0)
        return [None if layer < first else window for layer in range(num_layers)]
    unknown = sorted({str(kind) for kind in kinds} - set(_KINDS))
    if unknown:
        raise ValueError(f"layer_types {', '.join(unknown)} are not supported; supported are {' and '.join(_KINDS)}")
    return [window if kind == "sliding_attention" else None for kind in kinds]
