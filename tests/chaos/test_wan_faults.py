"""Every fault of every role at every moment of a transfer over wide-area links, between processes.

The donor that is struck is one of three; the joiner has to finish from the others, and no more than the struck donor's
window may move again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.types import MIB
from tests.support.wan import Wan, emulated
from tests.support.wan.faults import DONORS, FAULTS, Scene
from tests.support.wan.peers import Site
from tests.support.wan.traffic import needs_namespaces

pytestmark = [pytest.mark.chaos, *needs_namespaces]

STATE_BYTES = 256 * MIB
AGAIN_BYTES = STATE_BYTES // 20
"""What may move again when a donor is lost."""
WITH_HEADERS = 1.06
"""Bytes on the wire to bytes of payload: headers, letters and what TCP repeats without loss."""


@pytest.fixture(scope="module")
def wan() -> Iterator[Wan]:
    with emulated(["j", *DONORS], every={"rtt": "40ms"}, congestion_control="cubic") as network:
        yield network


@pytest.fixture(scope="module")
def scene(wan: Wan) -> Iterator[Scene]:
    with Site(wan) as site:
        made = Scene(site, STATE_BYTES)
        made.warm_up()
        yield made


@pytest.mark.parametrize("moment", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_the_others_finish_when_a_donor_fails(wan: Wan, scene: Scene, fault: str, moment: float) -> None:
    wan.heal("all")
    wan.set("all", rate="0")
    scene.uplinks("200mbit")
    wan.stats(reset=True)
    result = scene.with_fault(fault, moment)
    assert result.error == ""
    assert scene.moved_bytes() <= WITH_HEADERS * (STATE_BYTES + AGAIN_BYTES)


@pytest.mark.parametrize("moment", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_what_was_verified_is_kept_when_the_only_donor_fails(wan: Wan, scene: Scene, fault: str, moment: float) -> None:
    """Another donor brings the rest to the same joiner."""
    wan.heal("all")
    wan.set("all", rate="0")
    scene.uplinks("400mbit")
    failed, rest = scene.alone_then_another(fault, moment)
    assert "NoDonorLeft" in failed.error
    assert failed.verified_bytes >= moment * STATE_BYTES
    assert rest.error == ""
    assert rest.reused_bytes == failed.verified_bytes
    assert rest.payload_bytes <= STATE_BYTES - rest.reused_bytes + AGAIN_BYTES


@pytest.mark.parametrize("moment", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("fault", ["cut", "frozen", "killed"])
def test_a_joiner_that_fails_goes_on_from_what_it_has(
    wan: Wan, scene: Scene, fault: str, moment: float, tmp_path: Path
) -> None:
    """The donors live and serve it again; one that was killed has its spool, the others their memory."""
    wan.heal("all")
    wan.set("all", rate="0")
    scene.uplinks("200mbit")
    wan.stats(reset=True)
    failed, result = scene.joiner_struck(fault, moment, tmp_path / "spool")
    assert failed is None or "NoDonorLeft" in failed.error
    assert result.error == ""
    # It was struck when the last of them was verified, perhaps before that one was in the spool.
    assert result.reused_bytes >= moment * STATE_BYTES - 4 * MIB
    assert result.payload_bytes <= STATE_BYTES - result.reused_bytes + AGAIN_BYTES


@pytest.mark.parametrize("moment", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("fault", ["cut", "frozen", "killed"])
def test_a_bystander_that_fails_is_nobodys_concern(wan: Wan, scene: Scene, fault: str, moment: float) -> None:
    wan.heal("all")
    wan.set("all", rate="0")
    scene.uplinks("200mbit")
    wan.stats(reset=True)
    result = scene.bystander_struck(fault, moment)
    assert (result.error, result.failures) == ("", {})
    assert result.payload_bytes <= STATE_BYTES + AGAIN_BYTES
