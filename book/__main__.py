"""Command line of the book: `python -m book` builds one site from handouts, notebooks and code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from labkit.paths import repo_root

from .building import BookError, build

app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="where the site goes")] = Path(".out/book"),
    jobs: Annotated[int, typer.Option(min=1, help="processes of the builder")] = 2,
) -> None:
    """Build one site from handouts, notebooks and code."""
    console = Console()
    try:
        with console.status("building the book; the first time takes a minute or two"):
            result = build(repo_root(), out.resolve(), jobs)
    except BookError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from error
    console.print(f"{result.pages} pages; open [bold]{result.front}[/bold]")


if __name__ == "__main__":
    app()
