"""Two hundred transfers between the same two processes leave nothing behind."""

from __future__ import annotations

import threading
import time

import pytest

from recovery.types import MIB
from tests.support.fleet import WAIT_SECONDS, Worker
from tests.support.transfer_ends import Said, attempt, ends, ready, report

SMALL_MIB = 8


def transfers(joiner: Worker, donor: Worker, count: int) -> None:
    """Have so many transfers take place, each of every byte."""
    since = attempt(joiner, donor, times=count)
    report(joiner)  # answered when they are over
    done = [message for message in joiner.heard[since:] if message["say"] in ("done", "failed")]
    assert len(done) == count
    assert all(message["say"] == "done" and message["payload_bytes"] == message["num_bytes"] for message in done)


def settled(process: Worker, then: Said) -> Said:
    """Return a report with no more descriptors and threads than ``then``.

    gloo's and gRPC's own threads give back what they were told to a little later; what piled up would stay.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        now = report(process)
        if now["descriptors"] <= then["descriptors"] and now["threads"] <= then["threads"]:
            return now
        assert time.monotonic() < deadline, (process.name, then, now)
        threading.Event().wait(0.1)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seal", [False, True], ids=["plain", "sealed"])
def test_transfer_200_leaves_no_more_than_transfer_20(seal: bool) -> None:
    with ends() as both:
        donor = both.donor("d0", SMALL_MIB)
        joiner = both.joiner("j0", SMALL_MIB, joiner={"lanes": 2, "seal": seal})
        ready(donor)
        transfers(joiner, donor, 20)
        early = {process.name: settled(process, report(process)) for process in (donor, joiner)}
        transfers(joiner, donor, 180)
        for process in (donor, joiner):
            then, now = early[process.name], settled(process, early[process.name])
            assert now["rss"] - then["rss"] <= 16 * MIB, (process.name, then, now)
