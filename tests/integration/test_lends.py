"""Conversations that lend something else than an outer base, over real gloo links."""

from __future__ import annotations

import pytest
import torch

from recovery.errors import DonorRefused, MisuseError, NoDonorLeft
from recovery.events import Recorder
from recovery.protocol.ports import DonorPeer, JoinerConversation, Role
from recovery.protocol.session import JOURNAL, OUTER, PRIVATE, SCALARS, JoinerConfig, JoinerSession
from recovery.types import MIB, Version
from tests.integration.test_transfer import Wires, big, outer_state, private_state
from tests.support.memory_donor import VERSION, Destinations, MemoryDonor, MemorySnapshots, attempt

NEXT = VERSION.next()
ENTRY = {"tokens": 12, "gradients": [big(9 * MIB, 11), big(64, 12), torch.tensor(0.5)]}
SCALARS_VALUE = {"inner_optimizer": {"state": {}, "param_groups": [{"lr": 0.125, "params": ["w"]}]}}


def donors(wires: Wires, count: int, *, keeping: int | None = None) -> list[MemoryDonor]:
    """Donors of which the first ``keeping`` have the entry that leads to the next version."""
    return [
        MemoryDonor(
            MemorySnapshots(
                f"d{i}",
                outer_state(),
                private_state(),
                journal={NEXT: ENTRY} if keeping is None or i < keeping else {},
                scalars=SCALARS_VALUE,
            ),
            wires.donor_end,
        )
        for i in range(count)
    ]


def fetch(wires: Wires, asked: list[MemoryDonor], lends: Role, version: Version) -> tuple[JoinerSession, Destinations]:
    by_name = {donor.peer.name: donor for donor in asked}
    destinations = Destinations()

    def dial(peer: DonorPeer) -> JoinerConversation:
        return by_name[peer.name].dial()

    session = JoinerSession(
        attempt(asked, want_private=False, lends=lends, version=version),
        JoinerConfig(),
        dial=dial,
        open_link=wires.joiner_end,
        on_manifest=destinations,
        events=Recorder(),
    )
    return session, destinations


@pytest.mark.parametrize(("count", "keeping"), [(1, 1), (3, 3), (3, 1)])
def test_a_journal_entry_comes_from_all_who_keep_it(count: int, keeping: int) -> None:
    wires = Wires()
    asked = donors(wires, count, keeping=keeping)
    session, destinations = fetch(wires, asked, JOURNAL, NEXT)
    result = session.run()
    for donor in asked:
        donor.join()
    assert result.first.cut.version == NEXT
    assert result.private is None
    assert destinations.holds("journal", ENTRY)
    assert len(result.failures) == count - keeping
    assert all(isinstance(error, DonorRefused) for error in result.failures.values())


def test_an_entry_that_nobody_keeps_is_refused_by_all() -> None:
    wires = Wires()
    asked = donors(wires, 2, keeping=0)
    session, _ = fetch(wires, asked, JOURNAL, NEXT)
    with pytest.raises(NoDonorLeft, match="keeps no entry"):
        session.run()
    for donor in asked:
        donor.join()
    assert [type(error) for error in session.machine.failures.values()] == [DonorRefused, DonorRefused]


@pytest.mark.parametrize(("lends", "inner_step"), [(PRIVATE, 7), (SCALARS, 9)])
def test_what_is_captured_at_a_cut_comes_without_a_base(lends: Role, inner_step: int) -> None:
    wires = Wires()
    (donor,) = asked = donors(wires, 1)
    session, destinations = fetch(wires, asked, lends, VERSION)
    result = session.run()
    donor.join()
    assert (result.first.cut.version, result.first.cut.inner_step) == (VERSION, inner_step)
    assert donor.snapshots.private_requests == [VERSION]
    values = private_state() if lends == PRIVATE else SCALARS_VALUE
    assert all(destinations.holds(name, value) for name, value in values.items())
    assert [part.name for part in result.first.parts] == list(values)
    if lends == SCALARS:
        assert result.payload_bytes == 0


def test_what_is_captured_at_a_cut_is_asked_of_one_donor() -> None:
    with pytest.raises(MisuseError, match="one donor"):
        attempt(donors(Wires(), 2), want_private=False, lends=PRIVATE)
    with pytest.raises(MisuseError, match="one donor"):
        attempt(donors(Wires(), 1), want_private=True, lends=SCALARS)
    assert attempt(donors(Wires(), 2), want_private=False).first == OUTER
