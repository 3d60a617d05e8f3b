"""Transfers that break off, between real processes: what was verified is not fetched again, and versions never mix."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.transfer_ends import Ends, attempt, ends, outcome, ready, restored

pytestmark = pytest.mark.timeout(300)
"""Several processes each: a machine that is busy with other work starts them slowly."""

NUM_MIB = 64
SMALL_WINDOW = {"min_window_bytes": 4 << 20, "max_window_bytes": 8 << 20, "near_window_share": 0.02}
"""What is in flight when donors die is less than what is missing."""
AGAIN = 0.35
"""Most that may move a second time after 70 % were verified."""


def test_all_donors_gone_at_70_percent_and_a_new_one_later() -> None:
    with ends() as both:
        donors = [both.donor(f"d{i}", 2 * NUM_MIB) for i in range(2)]
        joiner = both.joiner("j0", 2 * NUM_MIB, planner=SMALL_WINDOW)
        since = attempt(joiner, *donors, halt_at=0.7)
        halted = joiner.wait_said("halted", since=since)
        assert 0.7 <= halted["verified_bytes"] / ready(donors[0])["num_bytes"] < 0.8
        for donor in donors:
            donor.signal(signal.SIGKILL)
            donor.end()
        joiner.command(do="go_on")
        failed = outcome(joiner, since)
        assert (failed["say"], failed.get("error")) == ("failed", "NoDonorLeft")
        done = restored(joiner, both.donor("d2", 2 * NUM_MIB))
        assert done["payload_bytes"] + done["reused_bytes"] == done["num_bytes"]
        assert 0 < done["payload_bytes"] <= AGAIN * done["num_bytes"]


def killed_at_70_percent(both: Ends, spool: Path) -> None:
    """Start a donor and a joiner with a spool, and kill both when 70 % are verified."""
    donor = both.donor("d0", NUM_MIB)
    joiner = both.joiner("j0", NUM_MIB, spool=str(spool), planner=SMALL_WINDOW)
    since = attempt(joiner, donor, halt_at=0.7)
    joiner.wait_said("halted", since=since)
    for process in (joiner, donor):
        process.signal(signal.SIGKILL)
        process.end()


def test_a_killed_joiner_goes_on_from_its_spool(tmp_path: Path) -> None:
    """Field report: gensyn-ai/rl-swarm#377, each retry fetched everything again."""
    with ends() as both:
        killed_at_70_percent(both, tmp_path / "spool")
        again = both.joiner("j0", NUM_MIB, spool=str(tmp_path / "spool"))
        done = restored(again, both.donor("d1", NUM_MIB))
        assert done["payload_bytes"] + done["reused_bytes"] == done["num_bytes"]
        assert 0 < done["payload_bytes"] <= AGAIN * done["num_bytes"]


def test_a_killed_joiner_takes_what_did_not_change_into_the_next_version(tmp_path: Path) -> None:
    with ends() as both:
        killed_at_70_percent(both, tmp_path / "spool")
        again = both.joiner("j0", NUM_MIB, spool=str(tmp_path / "spool"))
        done = restored(again, both.donor("d1", NUM_MIB, changed_every=4, version=2))
        total = done["num_bytes"]
        assert done["payload_bytes"] + done["reused_bytes"] == total
        # A quarter changed: of the 70 % at least 40 can be used, whichever they were.
        assert done["reused_bytes"] >= 0.4 * total
        assert done["payload_bytes"] >= 0.25 * total, "what changed was fetched"


def test_a_joiner_whose_run_moved_on_takes_what_did_not_change() -> None:
    with ends() as both:
        donor = both.donor("d0", NUM_MIB)
        joiner = both.joiner("j0", NUM_MIB, planner=SMALL_WINDOW)
        since = attempt(joiner, donor, halt_at=0.7)
        joiner.wait_said("halted", since=since)
        donor.signal(signal.SIGKILL)
        donor.end()
        joiner.command(do="go_on")
        assert outcome(joiner, since)["say"] == "failed"
        done = restored(joiner, both.donor("d1", NUM_MIB, changed_every=4, version=2))
        assert done["reused_bytes"] >= 0.4 * done["num_bytes"]
        assert done["payload_bytes"] >= 0.25 * done["num_bytes"]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_spool_is_not_believed(tmp_path: Path) -> None:
    with ends() as both:
        spool = tmp_path / "spool"
        killed_at_70_percent(both, spool)
        size = spool.stat().st_size
        for at in range(1000, size, 8 << 20):  # every second chunk
            flip(spool, at)
        done = restored(both.joiner("j0", NUM_MIB, spool=str(spool)), both.donor("d1", NUM_MIB))
        assert 0.2 * done["num_bytes"] <= done["reused_bytes"] <= 0.5 * done["num_bytes"]
