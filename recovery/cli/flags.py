"""Calling a typer application so that its help shows flags as what they are: ``--json``, not ``--json <bool>``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperOption


def call(app: typer.Typer, arguments: Sequence[str], *, prog_name: str) -> None:
    """Run an application; it ends with SystemExit, or with the error of a command."""
    command = typer.main.get_command(app)
    _strip(command)
    command(args=list(arguments), prog_name=prog_name)


def _strip(command: Any) -> None:
    """Take the type away from every flag of a command and its sub-commands: it is no value that one writes."""
    context = command.context_class(command, **command.context_settings)
    help_option = command.get_help_option(context)
    options: Iterable[Any] = (*command.params, *([help_option] if help_option is not None else []))
    for option in options:
        if isinstance(option, TyperOption) and option.is_flag:
            option.metavar = ""
    for child in getattr(command, "commands", {}).values():
        _strip(child)
