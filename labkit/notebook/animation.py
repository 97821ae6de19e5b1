"""Short animations: a picture that is drawn anew for each frame, stored as one small GIF."""

from __future__ import annotations

import io
from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

from labkit.checks import check_count

COLOURS = 64
LAST_FRAME_SECONDS = 2.5
"""The end is what one looks at before it begins again."""


def animate(
    draw: Callable[[Axes, int], None],
    frames: int,
    *,
    title: str,
    width: float = 7.0,
    height: float = 3.0,
    seconds: float = 0.2,
) -> None:
    """Shows an animation as the output of a cell.

    Args:
        draw: draws the frame of a number, from 0, on empty axes. It sets the same limits in each.
        frames: how many there are.
        title: what it shows, for those who can't see it.
        width: of the picture, in inches.
        height: likewise.
        seconds: of a frame.
    """
    from IPython.display import display

    display({"image/gif": as_gif(draw, frames, width, height, seconds), "text/plain": title}, raw=True)


def as_gif(draw: Callable[[Axes, int], None], frames: int, width: float, height: float, seconds: float) -> bytes:
    """The animation as a file; arguments as for `animate`.

    Raises:
        ValueError: no frames.
    """
    check_count("frames", frames, 1)
    figure = plt.figure(figsize=(width, height))
    pictures = []
    for number in range(frames):
        figure.clear()
        draw(figure.subplots(), number)
        with io.BytesIO() as file:
            figure.savefig(file, format="png")
            with Image.open(file) as picture:
                pictures.append(picture.convert("RGB"))
    plt.close(figure)
    # One palette for all frames, else colours flicker; one that keeps what few pixels have, such as a thin line.
    sheet = Image.new("RGB", (pictures[0].width, pictures[0].height * frames))
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (0, number * picture.height))
    palette = sheet.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
    first, *rest = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    durations = [round(1000 * seconds)] * (frames - 1) + [round(1000 * LAST_FRAME_SECONDS)]
    with io.BytesIO() as file:
        first.save(file, "GIF", save_all=True, append_images=rest, duration=durations, loop=0, optimize=True)
        return file.getvalue()
