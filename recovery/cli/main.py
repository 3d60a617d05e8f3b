"""The command ``recovery``: puts the sub-commands together and turns errors into one line and an exit code.

Exit codes: 0 done, 1 an error, 2 wrong usage, 3 ``verify`` found differences, 130 interrupted. The commands of an
operator and the coordinator do not import torch; those that do (``demo``, ``ckpt``) are imported when called.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from recovery.cli.flags import call
from recovery.errors import RecoveryError

ERROR = 1
INTERRUPTED = 130

# Sub-commands that load torch: name, module, and what it exports: a typer application or a command's function.
_HEAVY = (
    ("demo", "recovery.demo.cli", "demo", "Train a model while workers join, die and come back; prove it went right."),
    ("ckpt", "recovery.cli.ckpt", "app", "Look at, verify and convert checkpoints on disk."),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code. Every error of this package is one line on standard error."""
    try:
        call(build(), arguments, prog_name="recovery")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except RecoveryError as error:
        sys.stderr.write(f"error: {_one_line(error)}\n")
        return ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): nothing is left to say, not even at interpreter shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except OSError as error:
        # A file or folder that the caller named: unreadable, a loop of links, a full disk.
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return ERROR
    return 0


def build() -> typer.Typer:
    """Return the application with every sub-command that is installed."""
    from recovery.cli import coordinator, operations

    app = typer.Typer(
        name="recovery",
        help="Live recovery for DiLoCo workers: the coordinator, and what operators do to a running run.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    coordinator.register(app)
    operations.register(app)
    for name, module, attribute, summary in _HEAVY:
        if importlib.util.find_spec(module) is not None:
            app.command(
                name,
                help=summary,
                # Everything behind the name, --help included, belongs to the sub-command.
                context_settings={
                    "allow_extra_args": True,
                    "ignore_unknown_options": True,
                    "help_option_names": [],
                },
            )(_forward(name, module, attribute))
    return app


def _forward(name: str, module: str, attribute: str) -> Any:
    def forward(context: typer.Context) -> None:
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            command, found = found, typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            found.command()(command)
        call(found, context.args, prog_name=f"recovery {name}")

    return forward


def _one_line(error: RecoveryError) -> str:
    return " ".join(str(error).split()) or error.kind


if __name__ == "__main__":
    main()
