"""Long pure-Python loops off the training thread: in turns with whoever else wants the interpreter."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

TURN = 128
"""Tensors or values handled between two offers of the interpreter: well under a millisecond."""

T = TypeVar("T")


def give_turn() -> None:
    """Whoever waits for the interpreter gets it now, not after a whole switch interval of 5 ms."""
    time.sleep(0)


def in_turns(items: Iterable[T], wanted: bool = True) -> Iterator[T]:
    """Yield ``items``; between some of them, if ``wanted``, the interpreter is offered to other threads."""
    for count, item in enumerate(items):
        yield item
        if wanted and count % TURN == TURN - 1:
            give_turn()
