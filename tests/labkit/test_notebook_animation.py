"""Animations: every frame is drawn once, on its own, and the file stays small."""

from __future__ import annotations

import io

import pytest
from matplotlib.axes import Axes
from PIL import Image

from labkit.notebook.animation import LAST_FRAME_SECONDS, as_gif


def test_each_frame_is_drawn_anew_and_the_last_stands_longest() -> None:
    drawn = []

    def draw(axes: Axes, number: int) -> None:
        assert not axes.patches, "the frame before is still there"
        axes.bar([0], [number + 1])
        axes.set_ylim(0, 5)
        drawn.append(number)

    file = as_gif(draw, 5, 3.0, 2.0, seconds=0.1)
    assert drawn == [0, 1, 2, 3, 4]
    with Image.open(io.BytesIO(file)) as picture:
        assert picture.format == "GIF" and picture.n_frames == 5
        durations = []
        for number in range(5):
            picture.seek(number)
            durations.append(picture.info["duration"])
    assert durations == [100] * 4 + [1000 * LAST_FRAME_SECONDS]
    assert len(file) < 20_000


def test_no_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="frames must be an int of at least 1, got 0"):
        as_gif(lambda axes, number: None, 0, 3.0, 2.0, 0.1)
