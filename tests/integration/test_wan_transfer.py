"""Transfers between processes over emulated wide-area links: loss, several donors, donors that fail, trickles.

Every donor and the joiner are processes in hosts of their own. The full product of faults and moments
is in ``tests/chaos/test_wan_faults.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.protocol.planner import PlannerConfig, most_again_bytes
from recovery.types import KIB, MIB
from tests.support.wan import Wan, emulated
from tests.support.wan.faults import DONORS, Scene
from tests.support.wan.peers import Site
from tests.support.wan.traffic import needs_namespaces

pytestmark = needs_namespaces

STATE_BYTES = 24 * MIB
WINDOW_BYTES = 12 * MIB
"""What may be in flight from one donor at these rates, rounded up to whole chunks."""
LATE_BYTES = 4 * MIB
"""What may be asked of two at the end because it comes late."""
WITH_HEADERS = 1.1
"""Bytes on the wire to bytes of payload: headers, letters and what TCP repeats."""


@pytest.fixture(scope="module")
def wan() -> Iterator[Wan]:
    with emulated(["j", *DONORS], every={"rtt": "20ms"}, congestion_control="cubic") as network:
        yield network


@pytest.fixture(scope="module")
def scene(wan: Wan) -> Iterator[Scene]:
    with Site(wan) as site:
        made = Scene(site, STATE_BYTES)
        made.warm_up()
        yield made


@pytest.fixture(autouse=True)
def links(wan: Wan) -> None:
    """Every test begins on links that are whole."""
    wan.heal("all")
    wan.set("all", rate="0", rtt="20ms", loss="0")
    wan.stats(reset=True)


@pytest.mark.parametrize("congestion_control", ["bbr", None])
def test_a_far_and_lossy_donor_brings_every_byte(scene: Scene, congestion_control: str | None) -> None:
    donors = scene.donors(1, congestion_control=congestion_control)
    joiner = scene.joiner(congestion_control=congestion_control)
    scene.wan.set("all", rate="200mbit", rtt="80ms", loss="0.1%")
    joiner.begin(donors, bbr=congestion_control is not None)
    result = joiner.result()
    assert result.error == ""
    # However slow the machine: what the donor owes already is asked of it again within bounds.
    again_bytes = result.payload_bytes - STATE_BYTES
    assert result.total_bytes == STATE_BYTES
    assert 0 <= again_bytes <= most_again_bytes(STATE_BYTES, PlannerConfig())
    assert result.lanes == (16 if congestion_control else 64)
    assert scene.wan.stats().hosts["d0"].up.drop_loss > 0, "the link lost packets"


def test_three_donors_behind_their_uplinks_share_the_work(scene: Scene) -> None:
    scene.uplinks("100mbit")
    joiner = scene.joiner()
    joiner.begin(scene.donors())
    result = joiner.result()
    assert result.error == ""
    assert STATE_BYTES <= result.payload_bytes <= STATE_BYTES + LATE_BYTES
    assert min(result.arrived.values()) > 0.2 * STATE_BYTES


def test_a_slow_donor_is_asked_for_less(scene: Scene) -> None:
    for host, rate in zip(DONORS, ("100mbit", "100mbit", "10mbit"), strict=True):
        scene.wan.set(host, up=rate)
    joiner = scene.joiner()
    joiner.begin(scene.donors())
    result = joiner.result()
    assert result.error == ""
    assert result.arrived["d2"] < min(result.arrived["d0"], result.arrived["d1"]) / 2


@pytest.mark.parametrize(("fault", "moment"), [("killed", 0.5), ("frozen", 0.1), ("cut", 0.9), ("throttled", 0.5)])
def test_the_others_finish_when_a_donor_fails(scene: Scene, fault: str, moment: float) -> None:
    scene.uplinks("50mbit")
    result = scene.with_fault(fault, moment)
    assert result.error == ""
    assert scene.moved_bytes() <= WITH_HEADERS * (STATE_BYTES + WINDOW_BYTES)


def test_a_joiner_that_was_killed_goes_on_from_its_spool(scene: Scene, tmp_path: Path) -> None:
    scene.uplinks("50mbit")
    _, result = scene.joiner_struck("killed", 0.5, tmp_path / "spool")
    assert result.error == ""
    # It was killed when the last of them was verified, perhaps before that one was in the spool.
    assert result.reused_bytes >= 0.5 * STATE_BYTES - 4 * MIB
    assert result.payload_bytes <= STATE_BYTES - result.reused_bytes + LATE_BYTES


def test_a_bystander_that_freezes_is_nobodys_concern(scene: Scene) -> None:
    scene.uplinks("50mbit")
    result = scene.bystander_struck("frozen", 0.5)
    assert (result.error, result.failures) == ("", {})
    assert result.payload_bytes <= STATE_BYTES + LATE_BYTES


def test_a_trickle_succeeds(scene: Scene) -> None:
    """A donor that sends 5 KB/s makes progress, though a piece takes longer than the progress deadline."""
    (donor,) = scene.donors(1, state_bytes=16 * KIB)
    donor.set_rate(5_000)
    joiner = scene.joiner()
    joiner.begin([donor], progress_seconds=1.5)
    result = joiner.result()
    assert result.error == ""
    assert result.payload_bytes == 16 * KIB


def test_nothing_at_all_fails_by_its_progress_deadline(scene: Scene) -> None:
    scene.wan.set("d0", up="50mbit")
    joiner = scene.joiner()
    joiner.begin(scene.donors(1), marks=(0.3,), progress_seconds=1.5)
    joiner.reached(0.3)
    scene.wan.cut("d0:j")
    result = joiner.result()
    assert "NoDonorLeft" in result.error
    assert "no progress for" in result.error
    assert result.verified_bytes >= 0.3 * STATE_BYTES
    assert scene.wan.stats().hosts["d0"].up.drop_cut > 0, "the cut reached its victim"
