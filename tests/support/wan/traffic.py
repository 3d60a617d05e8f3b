"""Runs ``flow`` in the hosts of an emulated network and reads what it found; marks tests that need one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.processes import ChildProcess
from tests.support.wan.network import Wan
from tests.support.wan.permission import why_not_permitted

needs_namespaces = [
    pytest.mark.wan,
    pytest.mark.skipif(bool(why_not_permitted()), reason=why_not_permitted() or "permitted"),
]
"""For ``pytestmark``: skipped only where namespaces are not permitted."""

NO_MEMORY = {"net.ipv4.tcp_no_metrics_save": "1"}
"""A flow must not learn from the one before it."""


@contextmanager
def flow(wan: Wan, host: str, mode: str, **options: str | int | float) -> Iterator[ChildProcess]:
    """A traffic program in a host; ended with the block."""
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    child = ChildProcess(["-m", "tests.support.wan.flow", mode, *words], prefix=wan.prefix(host))
    try:
        yield child
    finally:
        child.close()


def result(child: ChildProcess, seconds: float = 60.0) -> dict[str, Any]:
    """Return the program's result."""
    found: dict[str, Any] = json.loads(child.line("{", seconds))
    return found


def transfer(wan: Wan, sender: str, receiver: str, *, seconds: float, skip: float, flows: int = 1) -> dict[str, Any]:
    """Move TCP data for a while and return what the receiver counted."""
    with flow(wan, receiver, "receive", seconds=seconds + 8, skip=skip) as server:
        server.line("ready")
        with flow(wan, sender, "send", to=wan.address(receiver), seconds=seconds, flows=flows) as client:
            client.wait(seconds + 30)
        return result(server)
