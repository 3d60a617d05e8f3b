"""Ends processes by handles (pidfds) that cannot come to mean another process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.wan.errors import WanError

_KILL_SECONDS = 5.0


def end(handles: Sequence[int], grace_seconds: float) -> None:
    """Ask the processes behind ``handles`` to end, kill them after ``grace_seconds``; the handles are closed."""
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, _KILL_SECONDS)):
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
        deadline = time.monotonic() + seconds
        alive = list(handles)
        while alive and (left := deadline - time.monotonic()) > 0:
            ended = select.select(alive, [], [], left)[0]
            alive = [handle for handle in alive if handle not in ended]
        if not alive:
            break
    for handle in handles:
        os.close(handle)


def process_with_argument(pid_file: Path, argument: str) -> tuple[int, int] | None:
    """Return pid and handle of the process that a file names; None unless it runs and has ``argument``.

    The argument tells it from a process that got the same pid later.
    """
    try:
        pid = int(pid_file.read_text())
        handle = os.pidfd_open(pid)
    except (OSError, ValueError):
        return None
    try:
        if argument.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid, handle
    except OSError:
        pass  # it ended meanwhile
    os.close(handle)
    return None


def inhabitants(namespace_files: Iterable[Path]) -> list[int]:
    """Return handles of all processes that live in these namespaces.

    Raises:
        WanError: this process lives in one of them.
    """
    wanted = {_identity(file) for file in namespace_files} - {None, _identity(Path("/proc/1/ns/net"))}
    if _identity(Path("/proc/self/ns/net")) in wanted:
        raise WanError("run this from outside the instance's namespaces")
    handles = []
    for pid in filter(str.isdigit, (entry.name for entry in Path("/proc").iterdir())):
        own = Path(f"/proc/{pid}/ns/net")
        if _identity(own) not in wanted:
            continue
        try:
            handle = os.pidfd_open(int(pid))
        except OSError:
            continue  # it ended meanwhile
        if _identity(own) in wanted:  # still so, hence the pid was not given to another process
            handles.append(handle)
        else:
            os.close(handle)
    return handles


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
