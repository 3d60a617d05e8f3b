"""The command ``recovery demo``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from recovery.demo import display
from recovery.demo.orchestrator import run_demo
from recovery.demo.scenario import ScenarioSettings
from recovery.errors import BadConfiguration


def demo(
    workers: Annotated[int, typer.Option(help="Workers in all; the last one joins mid-run. At least 3.")] = 4,
    outer_steps: Annotated[int, typer.Option(help="Outer steps before everything is killed, at least.")] = 20,
    inner_steps: Annotated[int, typer.Option(help="Inner steps between two outer steps.")] = 12,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the loss curves, the record and the logs. Without it nothing stays.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the initial weights and of the flipped bits.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the working folder with the checkpoints.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line: events, then the result.")] = False,
) -> None:
    """Train a small language model with DiLoCo while workers join, die, are damaged and come back; prove it went right.

    Starts a coordinator and worker processes on this machine. Ends with a table of what was proved; the exit code is 0
    only if all of it was.
    """
    try:
        settings = ScenarioSettings(workers=workers, outer_steps=outer_steps, inner_steps=inner_steps, seed=seed)
        if out is not None:
            _check_folder(out)
    except BadConfiguration as error:
        typer.echo(f"recovery demo: {error}", err=True)
        raise typer.Exit(2) from error
    shown = display.choose(sys.stdout, as_json=as_json, inner_steps=inner_steps, outer_steps=outer_steps)
    raise typer.Exit(run_demo(settings, shown, out=out, keep=keep))


def _check_folder(out: Path) -> None:
    """Return if files can be written to ``out``, which is made: now, and not when the story is over."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise BadConfiguration(f"--out {out} cannot be written ({error.strerror}): name another folder") from error
