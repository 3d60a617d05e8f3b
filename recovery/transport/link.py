"""The contract of a link: payload from one donor to one joiner over numbered lanes, and a way to end every wait.

A link has two ends. The donor's end only sends, the joiner's end only receives; a link that let a donor receive would
let a stranger end the donor's process. Every link passes ``tests/contract/test_link.py``.
"""

from __future__ import annotations

from typing import Protocol

import torch

from recovery.errors import MisuseError

MAX_TAG_STEPS = 1 << 24
"""Pull ids are taken modulo this in a tag, so that a tag stays within 31 bits for up to 127 lanes."""

MAX_LANES = 64


class Transfer(Protocol):
    """One posted send or receive.

    The memory of a posted operation belongs to the link until ``wait`` has returned or raised, or the link has been
    shut *and* closed. The link keeps the tensor alive for as long.
    """

    def wait(self, timeout_seconds: float) -> None:
        """Return when the bytes have moved; may be called once, by any one thread.

        A send is over when the bytes are with the operating system or the far end, not when they are verified.

        Raises:
            DonorLost: the link broke or was shut, or the timeout passed. The link is of no further use: a timeout
                breaks it too. *If it raises* on a receive, any part of the memory may have been written.
            MisuseError: a second call.
        """


class Link(Protocol):
    """One end of a link. Posting calls return at once; they may come from several threads, one for each lane."""

    @property
    def lanes(self) -> int:
        """Number of independent ordered streams, 1 to ``MAX_LANES``."""

    def send(self, lane: int, tag: int, data: torch.Tensor) -> Transfer:
        """Post a send of ``data`` (1-d contiguous uint8, at least one byte). Donor's end only.

        Messages of one lane arrive in the order of sending. ``tag`` must be ``lane_tag(...)`` of the same lane, must
        not be in use, and names the receive that takes the bytes; a send without one stays posted.

        Raises:
            DonorLost: the link is broken or shut.
            MisuseError: called on the joiner's end, or with a tensor or tag of another form.
        """

    def receive(self, lane: int, tag: int, into: torch.Tensor) -> Transfer:
        """Post a receive of exactly ``into``'s bytes. Joiner's end only.

        A message that is longer than ``into`` may end this process; a shorter one leaves the tail untouched and is not
        reported: verify what arrived.

        Raises: as ``send``.
        """

    def shut(self, reason: str) -> None:
        """Break the link: every blocked and later wait on it raises ``DonorLost(reason)`` within milliseconds.

        One exception: gloo does not wake a wait for a message of which a part has moved when its connection ends, so
        on a gloo link that one wait for each lane may stay until its own timeout. On return no posted receive can be
        written any more either way, so nobody needs to wait for such a wait.

        Any thread, any number of times; the first reason stays. Does not block.
        """

    def close(self) -> None:
        """Shut, then give back sockets and memory. Twice without harm. No wait may be in progress but such a one."""

    def endpoints(self) -> list[str]:
        """Return ``local>remote`` of each socket in lane order of no meaning; empty where there are no sockets."""

    def bytes_moved(self) -> int:
        """Return a count that grows whenever payload makes progress, also within a message.

        At the joiner: bytes that arrived; at the donor: bytes that the far end took. Only growth means anything.
        """

    def round_trip_seconds(self) -> float | None:
        """Return the round trip that the link measured itself, or None if it cannot."""


def lane_tag(lane: int, lanes: int, pull_id: int) -> int:
    """Return a pull's message tag: it selects the lane (tag mod lanes) and names the pull among those in flight."""
    return lane + lanes * (pull_id % MAX_TAG_STEPS)


def check_message(lane: int, lanes: int, tag: int, data: torch.Tensor) -> None:
    """Refuse what must not be posted.

    Raises:
        MisuseError: a lane out of range, a tag of another lane, or data that is not 1-d contiguous CPU uint8.
    """
    if not 0 <= lane < lanes or tag % lanes != lane or not 0 <= tag < 1 << 31:
        raise MisuseError(f"tag {tag} does not belong to lane {lane} of {lanes}")
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous() or data.device.type != "cpu":
        raise MisuseError(f"payload must be 1-d contiguous uint8 on the CPU, not {data.dtype} {tuple(data.shape)}")
    if data.numel() == 0:
        raise MisuseError("payload must have at least one byte")
