"""A donor's link that does not do what was agreed, for tests in which the donor is a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch

from recovery.errors import DonorLost
from recovery.transport.link import Link, Transfer


class _Silent:
    """A send that never happens: it ends when the link is shut."""

    def __init__(self, shut: threading.Event) -> None:
        self._shut = shut

    def wait(self, timeout_seconds: float) -> None:
        self._shut.wait(timeout_seconds)
        raise DonorLost("the link was shut")


class _Faulty:
    """Sends as agreed but for the messages from number ``first`` on, ``count`` of them.

    ``kind``: ``short`` (a byte less), ``long`` (a thousand more), ``other`` (every bit inverted), ``silent`` (nothing).
    """

    def __init__(self, link: Link, fault: dict[str, Any], say: Callable[..., None]) -> None:
        self._link = link
        self._kind = fault["kind"]
        self._first = int(fault.get("first", 0))
        self._count = int(fault.get("count", 1 << 30))
        self._say = say
        self._number = 0
        self._lock = threading.Lock()
        self._shut = threading.Event()

    def send(self, lane: int, tag: int, data: torch.Tensor) -> Transfer:
        with self._lock:
            number, self._number = self._number, self._number + 1
        if not self._first <= number < self._first + self._count:
            return self._link.send(lane, tag, data)
        self._say("fault", fault=self._kind, number=number, num_bytes=data.numel())
        match self._kind:
            case "short":
                return self._link.send(lane, tag, data[:-1].clone())
            case "long":
                return self._link.send(lane, tag, torch.cat([data, data.new_zeros(1000)]))
            case "other":
                return self._link.send(lane, tag, ~data)
            case "silent":
                return _Silent(self._shut)
            case kind:
                raise ValueError(kind)

    def shut(self, reason: str) -> None:
        self._link.shut(reason)
        self._shut.set()

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)


def faulty(link: Link, fault: dict[str, Any], say: Callable[..., None]) -> Link:
    """Return ``link`` with a fault; ``say`` tells of each message that it hit."""
    return cast(Link, _Faulty(link, fault, say))
