"""Peak memory of real donor and joiner processes, by resident bytes: a joiner never holds a state twice."""

from __future__ import annotations

import pytest

from recovery.types import MIB
from tests.support.transfer_ends import ends, outcome, ready, report, restored

pytestmark = pytest.mark.timeout(300)
"""Several processes each: a machine that is busy with other work starts them slowly."""

WINDOW_BYTES = 16 * MIB
ALLOWANCE_BYTES = 64 * MIB
PLANNER = {"max_window_bytes": WINDOW_BYTES}

long = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("num_mib", "seal"),
    [
        pytest.param(256, False, id="256 MiB"),
        pytest.param(256, True, marks=long, id="256 MiB, sealed"),
        pytest.param(2048, False, marks=long, id="2 GiB"),
        pytest.param(2048, True, marks=long, id="2 GiB, sealed"),
    ],
)
def test_a_transfer_takes_the_state_a_window_and_64_mib(num_mib: int, seal: bool) -> None:
    """The donor reserves nothing here: what it lends ends with its next outer step."""
    with ends() as both:
        donor = both.donor("d0", num_mib, snapshots={"budget_bytes": 0})
        joiner = both.joiner("j0", num_mib, planner=PLANNER, joiner={"seal": seal})
        before = joiner.wait_said("ready")["before_state"]
        num_bytes = ready(donor)["num_bytes"]
        assert num_bytes >= num_mib * MIB
        idle = report(donor, "reset_peak")["rss"]
        done = restored(joiner, donor)
        assert done["payload_bytes"] == num_bytes
        at_joiner, at_donor = report(joiner), report(donor)
        assert at_joiner["peak"] - before > 0.95 * num_bytes, "the measure sees the state"
        assert at_joiner["peak"] - before <= num_bytes + WINDOW_BYTES + ALLOWANCE_BYTES
        assert at_donor["vault_bytes"] == 0
        assert at_donor["peak"] - idle <= ALLOWANCE_BYTES


@pytest.mark.parametrize("num_mib", [256, pytest.param(2048, marks=long)])
def test_a_donor_that_steps_meanwhile_takes_what_its_guard_reserved_and_64_mib(num_mib: int) -> None:
    """Reserved is the worst case, once for all joiners, and touched before the lease is given: see the vault."""
    with ends() as both:
        donor = both.donor("d0", num_mib)
        joiner = both.joiner("j0", num_mib, planner=PLANNER)
        ready(donor)
        donor.command(do="step")  # gradients are the loop's own memory: made before anything is measured
        stepped = donor.wait_said("stepped")
        idle = report(donor, "reset_peak")["rss"]
        since = len(joiner.heard)
        lent = {**ready(donor), "version": stepped["version"], "fingerprint": stepped["fingerprint"]}
        joiner.command(do="attempt", donors=[lent], halt_at=0.5)
        joiner.wait_said("halted", since=since)
        told = len(donor.heard)
        donor.command(do="step")
        assert donor.wait_said("stepped", since=told)["fingerprint"] != stepped["fingerprint"]
        joiner.command(do="go_on")
        done = outcome(joiner, since)
        assert (done["say"], done.get("fingerprint")) == ("done", stepped["fingerprint"]), "the version that was lent"
        at_donor = report(donor)
        assert 0 < at_donor["vault_bytes"] <= done["num_bytes"] + 4 * MIB
        assert at_donor["peak"] - idle <= at_donor["vault_bytes"] + ALLOWANCE_BYTES
