"""Runs the notebooks of labs and module and stores what they show: `python -m labkit.notebook`."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from nbclient.exceptions import CellExecutionError

from labkit.manifest import ROOT
from labkit.notebook.execution import execute, find_notebooks, store

app = typer.Typer(add_completion=False)


@app.command()
def main(
    lab: Annotated[str | None, typer.Option(help="two digits: the notebook of that lab alone")] = None,
    module: Annotated[str | None, typer.Option(help="two digits: that notebook of the module alone")] = None,
    impl: Annotated[str, typer.Option(help="whose code they use")] = "solutions",
) -> None:
    """Execute every source from a clean kernel and write the .ipynb beside it."""
    try:
        sources = find_notebooks(lab or None, module or None)
    except ValueError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    # Where nobody watches, one line a notebook is enough.
    watched = sys.stdout.isatty()
    back = "\r" if watched else ""
    for source in sources:
        name, start = source.relative_to(ROOT), time.monotonic()

        def tell(done: int, count: int, name: object = name) -> None:
            if watched:
                typer.echo(f"\r{name}: cell {done + 1} of {count}", nl=False)

        try:
            notebook = execute(source, impl=impl, tell=tell)
        except CellExecutionError as error:
            typer.secho(f"{back}{name}: {error}", fg="red", err=True)
            raise typer.Exit(1) from error
        store(source, notebook)
        size = source.with_suffix(".ipynb").stat().st_size
        typer.echo(f"{back}{name}: {len(notebook.cells)} cells, {size / 1e3:.0f} kB, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    app()
