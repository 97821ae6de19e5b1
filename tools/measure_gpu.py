"""Measures what this machine can do at most, GPU or processor: `python tools/measure_gpu.py`, or `make measure`.

Bandwidth of memory, matrix products by dtype, the cost of a launch, and the ridge points between them, which bound
prefill and decode. Takes well under a minute, needs no privileges and leaves every setting of the machine as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from labkit.probing import MachineBounds, machine_bounds
from labkit.probing.table import print_bounds

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: the GPU where there is one")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, in base units, instead of the table")] = False,
    plot: Annotated[Path | None, typer.Option(help="write a picture of the roofline, such as roofline.png")] = None,
    quick: Annotated[bool, typer.Option(help="in a few seconds, with fewer repeats")] = False,
    kept: Annotated[bool, typer.Option(help="show what was measured before, and measure only if nothing was")] = False,
) -> None:
    console, notes = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False)
    try:
        with notes.status("measuring") as status:
            bounds = machine_bounds(
                device, quick=quick, again=not kept, tell=lambda what: status.update(f"measuring {what}")
            )
        if plot is not None:
            write_plot(bounds, plot)
    except (OSError, ValueError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    if as_json:
        print(json.dumps(bounds.to_json(), indent=2))
    else:
        print_bounds(bounds, console)
    if plot is not None:
        notes.print(f"the roofline is in {plot}")


def write_plot(bounds: MachineBounds, file: Path) -> None:
    """Draws the roofline into a file, of the kind that its name says.

    Raises:
        ValueError: a kind that matplotlib doesn't write.
        OSError: the file can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from labkit.notebook.roofline import draw_roofline
    from labkit.notebook.style import panels, use_style

    use_style()
    axes = panels(width=8.0, height=4.5)
    draw_roofline(axes, bounds, [bounds.point_dtype, *(d for d in bounds.products if d != bounds.point_dtype)])
    axes.set_title(f"{bounds.name}: passes over weights in {bounds.point_dtype}")
    plt.savefig(file, dpi=150)


if __name__ == "__main__":
    app()
