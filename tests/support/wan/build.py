"""Compiles the link daemon once for each version of its source."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tests.support.wan.commands import output_of

SOURCE = Path(__file__).with_name("wanlink.c")


def cache_folder() -> Path:
    """Return where compiled daemons are kept: ``$WAN_CACHE_DIR``, or below the user's cache folder."""
    if chosen := os.environ.get("WAN_CACHE_DIR"):
        return Path(chosen)
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path.home() / ".cache") / "diloco-recovery" / "wan"


def daemon_binary() -> Path:
    """Return the compiled daemon, built first if need be. Several processes may build it at once.

    Raises:
        WanError: gcc is not installed, or refuses.
    """
    binary = cache_folder() / f"wanlink-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if not binary.exists():
        binary.parent.mkdir(parents=True, exist_ok=True)
        partial = binary.with_suffix(f".{os.getpid()}")
        try:
            output_of("gcc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(partial), str(SOURCE))
            partial.rename(binary)  # whoever looks sees a whole file or none
        finally:
            partial.unlink(missing_ok=True)
    return binary
