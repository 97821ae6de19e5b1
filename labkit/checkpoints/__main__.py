"""`python -m labkit.checkpoints fetch`: bring the bundled model into the cache."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import Progress

from labkit.checkpoints.bundled import fetch
from labkit.checkpoints.errors import CheckpointError


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m labkit.checkpoints", description="Models in the workbook's cache.")
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="download and convert the bundled model, once")
    fetching.add_argument("--again", action="store_true", help="replace the copy in the cache")
    given = parser.parse_args(arguments)
    try:
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("converting the model", total=None, visible=False)
            folder = fetch(lambda done, total: bar.update(task, completed=done, total=total, visible=True),
                           again=given.again)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"the bundled model is in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
