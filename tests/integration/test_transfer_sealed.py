"""Sealed transfers over real gloo links: nothing readable on the wire, and no end is talked out of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from protos.recovery.v1 import peer_pb2
from protos.recovery.v1.peer_pb2 import DonorLetter
from recovery.errors import DonorRefused, NoDonorLeft
from recovery.events import ChunkRefetched, Recorder
from recovery.protocol import joiner_io as io
from recovery.protocol.joiner import JoinerMachine
from recovery.protocol.session import DonorConfig, JoinerConfig
from recovery.transport.link import Link, Transfer
from recovery.types import MIB, KeyValue
from tests.integration.test_transfer import Wires, outer_state, private_state, run_joiner
from tests.support.certificates import Authority
from tests.support.fleet import Fleet
from tests.support.memory_donor import HOST, Destinations, MemoryDonor, MemorySnapshots, attempt

SEALED = JoinerConfig(seal=True)


class Tap:
    """Sees what a donor gives to the wire, and may change it there."""

    def __init__(self, link: Link, damage: int = 0) -> None:
        self._link = link
        self._left = damage
        self.seen: list[bytes] = []

    def send(self, lane: int, tag: int, data: torch.Tensor) -> Transfer:
        self.seen.append(data.numpy().tobytes())
        if self._left and data.numel() > 1000:
            self._left -= 1
            data = data.clone()
            data[500] ^= 4
        return self._link.send(lane, tag, data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)


def tapped(wires: Wires, taps: list[Tap], damage: int = 0):  # type: ignore[no-untyped-def]
    def open_link(store: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> Link:
        taps.append(Tap(wires.donor_end(store, scope, host, lanes, cancelled), damage))
        return taps[-1]  # type: ignore[return-value]

    return open_link


@pytest.mark.parametrize("sealed", [True, False])
def test_the_wire_carries_nothing_readable(sealed: bool) -> None:
    wires, taps, destinations = Wires(), list[Tap](), Destinations()
    outer, private = outer_state(), private_state()
    donors = [MemoryDonor(MemorySnapshots(f"d{i}", outer, private), tapped(wires, taps)) for i in range(2)]
    result = run_joiner(donors, wires, destinations, config=JoinerConfig(seal=sealed)).run()
    for donor in donors:
        donor.join()
    assert all(destinations.holds(name, value) for name, value in {**outer, **private}.items())
    assert result.failures == {}
    wire = b"".join(b"".join(tap.seen) for tap in taps)
    large: torch.Tensor = outer["outer_params"]["large"]  # type: ignore[index]
    samples = [large[at : at + 16].numpy().tobytes() for at in range(0, large.numel() - 16, 1 << 18)]
    assert [sample in wire for sample in samples] == [not sealed] * len(samples)


def test_a_bit_changed_on_the_wire_counts_as_a_bad_piece_and_is_fetched_again() -> None:
    wires, taps, destinations, recorder = Wires(), list[Tap](), Destinations(), Recorder()
    outer = outer_state()
    donor = MemoryDonor(MemorySnapshots("d0", outer), tapped(wires, taps, damage=1))
    run_joiner([donor], wires, destinations, config=SEALED, want_private=False, recorder=recorder).run()
    donor.join()
    (refetched,) = [event for event in recorder.events if isinstance(event, ChunkRefetched)]
    assert (refetched.donor, refetched.blame) == (donor.peer.name, "link")
    assert all(destinations.holds(name, value) for name, value in outer.items())


def test_a_donor_whose_pieces_go_on_being_changed_is_left_for_another() -> None:
    wires, taps, destinations = Wires(), list[Tap](), Destinations()
    outer = outer_state()
    bad = MemoryDonor(MemorySnapshots("d0", outer), tapped(wires, taps, damage=1000))
    good = MemoryDonor(MemorySnapshots("d1", outer), wires.donor_end)
    good.limiter.set_rate(16 * MIB)  # slow enough that the bad one gets work
    result = run_joiner([bad, good], wires, destinations, config=SEALED, want_private=False).run()
    for donor in (bad, good):
        donor.join()
    assert "arrived damaged" in str(result.failures[bad.peer.name])
    assert all(destinations.holds(name, value) for name, value in outer.items())


def test_a_donor_of_a_sealed_run_lends_nothing_unsealed() -> None:
    wires = Wires()
    donor = MemoryDonor(
        MemorySnapshots("d0", outer_state()), wires.donor_end, config=DonorConfig(data_host=HOST, seal=True)
    )
    with pytest.raises(NoDonorLeft, match=r"does not ask for sealed payloads.*seal_payloads"):
        run_joiner([donor], wires, Destinations(), config=JoinerConfig(seal=False)).run()
    donor.join()
    assert donor.snapshots.leases == []


def test_a_joiner_of_a_sealed_run_takes_nothing_unsealed() -> None:
    donor = MemoryDonor(MemorySnapshots("d0", outer_state()), Wires().donor_end)
    machine = JoinerMachine(attempt([donor]), SEALED, b"k" * 32)
    name = donor.peer.name
    machine.start(0.0)
    (say,) = machine.handle(io.Dialled(name, None), 0.0)
    assert isinstance(say, io.Say)
    assert say.letter.open.sealing_key == b"k" * 32
    opened = peer_pb2.Opened(lanes=1, scope="s", manifest_bytes=1, manifest_digest=b"d" * 32)
    actions = machine.handle(io.Heard(name, DonorLetter(opened=opened)), 0.0)
    assert not any(isinstance(action, io.OpenLink) for action in actions)
    assert isinstance(machine.failures[name], DonorRefused)
    assert "does not seal" in str(machine.failures[name])


def test_workers_of_a_secure_run_seal_unless_told_not_to(tmp_path: Path) -> None:
    """Whole processes: TLS turns sealing on at both ends; a worker that was told otherwise is refused by name."""
    authority = Authority(tmp_path, "ca")
    certificate, key = authority.issue("worker")
    files = {
        "certificate_file": certificate,
        "key_file": key,
        "authority_file": str(authority.certificate_file),
    }
    options = [f"--{name.removesuffix('_file')}={path}" for name, path in files.items()]
    with Fleet(tmp_path, *options) as fleet:
        donor = fleet.worker("w0", seed=0, security=files)
        donor.wait_boundary(1)
        joiner = fleet.worker("w1", seed=1, security=files)
        joined = joiner.wait_said("joined")
        reached = joiner.wait_boundary(int(joined["version"].split(".k")[1]) + 1)["version"]
        donor.wait_boundary(int(reached.split(".k")[1]))
        assert joiner.boundaries()[reached]["outer_params"] == donor.boundaries()[reached]["outer_params"]
        plain = fleet.worker("w2", seed=2, security=files, agent={"seal_payloads": False})
        failed = plain.wait_event("DonorFailed")
        assert "does not ask for sealed payloads" in failed["reason"]
