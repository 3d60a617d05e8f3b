"""Runs the system's tools."""

from __future__ import annotations

import subprocess

from tests.support.wan.errors import WanError


def output_of(*command: str, text: str | None = None) -> str:
    """Run a command, with ``text`` as its standard input, and return what it printed.

    Raises:
        WanError: it is not installed, or failed; with what it said.
    """
    try:
        done = subprocess.run(command, input=text or "", capture_output=True, text=True, check=False)
    except OSError as error:
        raise WanError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise WanError(f"{' '.join(command)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
