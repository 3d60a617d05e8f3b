"""What goes wrong with an emulated network."""

from __future__ import annotations


class WanError(Exception):
    """Something that the caller can put right, in words; of what was begun nothing is left behind."""


class Interrupted(BaseException):
    """A signal asks the command to stop; the instance that it was setting up is removed first."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number
