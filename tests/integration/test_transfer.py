"""Both sessions against each other over real gloo links, in this process."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from recovery.errors import DonorRefused, LayoutMismatch, MisuseError, NoDonorLeft, TransferCancelled
from recovery.events import Recorder
from recovery.protocol.ports import DonorPeer, JoinerConversation
from recovery.protocol.session import ChunkLedger, ChunkSpool, JoinerConfig, JoinerSession, PlannerConfig
from recovery.state.chunks import PartBytes
from recovery.state.manifest import Manifest
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK, GlooLink, open_gloo_link
from recovery.types import KIB, MIB, KeyValue, PartName
from tests.support.memory_donor import Destinations, MemoryDonor, MemorySnapshots, attempt


class Wires:
    """Opens both ends of gloo links, which meet through their conversation, in so many seconds at most."""

    def __init__(self, timeout_seconds: float = 20.0) -> None:
        self._timeout_seconds = timeout_seconds

    def donor_end(self, store: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> GlooLink:
        return self._open(DONOR_RANK, store, scope, host, lanes, cancelled)

    def joiner_end(self, store: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> GlooLink:
        return self._open(JOINER_RANK, store, scope, host, lanes, cancelled)

    def _open(
        self, rank: int, store: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event
    ) -> GlooLink:
        return open_gloo_link(
            store,
            scope,
            rank=rank,
            host=host,
            lanes=lanes,
            timeout_seconds=self._timeout_seconds,
            cancelled=cancelled,
        )


def big(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.rand(num_bytes // 4, generator=torch.Generator().manual_seed(seed))


def outer_state() -> dict[str, object]:
    return {
        "outer_params": {
            "large": big(18 * MIB + 4, 1),
            "small": big(12, 2),
            "strided": big(64 * KIB, 3).reshape(128, 128).t(),
            "scalar": torch.tensor(7, dtype=torch.int64),
            "large2": big(9 * MIB, 4),
        },
        "run_progress": {"outer_step": 3, "tokens": 10**12},
    }


def private_state() -> dict[str, object]:
    return {"inner_optimizer": {"state": {"w": {"exp_avg": big(6 * MIB, 5), "step": torch.tensor(3.0)}}, "lr": 0.25}}


def run_joiner(
    donors: list[MemoryDonor],
    wires: Wires,
    destinations: Destinations,
    *,
    config: JoinerConfig | None = None,
    ledger: ChunkLedger | None = None,
    spool: ChunkSpool | None = None,
    want_private: bool = True,
    number: int = 1,
    recorder: Recorder | None = None,
) -> JoinerSession:
    by_name = {donor.peer.name: donor for donor in donors}

    def dial(peer: DonorPeer) -> JoinerConversation:
        return by_name[peer.name].dial()

    return JoinerSession(
        attempt(donors, number=number, want_private=want_private),
        config or JoinerConfig(),
        dial=dial,
        open_link=wires.joiner_end,
        on_manifest=destinations,
        events=recorder or Recorder(),
        ledger=ledger,
        spool=spool,
    )


@pytest.mark.parametrize("num_donors", [1, 3])
@pytest.mark.parametrize("lanes", [1, 4])
def test_every_byte_of_every_part_arrives(num_donors: int, lanes: int) -> None:
    wires = Wires()
    outer, private = outer_state(), private_state()
    donors = [
        MemoryDonor(MemorySnapshots(f"d{index}", outer, private), wires.donor_end, private_parts=index == 0)
        for index in range(num_donors)
    ]
    destinations = Destinations()
    patient = PlannerConfig(overtake_seconds=60)  # on a busy machine a chunk may be late; it is not to be asked twice
    result = run_joiner(donors, wires, destinations, config=JoinerConfig(lanes=lanes, planner=patient)).run()
    for donor in donors:
        assert [each.error for each in donor.join()] == [None]
    for name, value in {**outer, **private}.items():
        assert destinations.holds(name, value), name
    assert result.private is not None
    assert result.payload_bytes == result.first.num_bytes + result.private.num_bytes
    assert result.reused_bytes == 0
    assert result.failures == {}
    assert donors[0].snapshots.leases[-1].released == [("the joiner has everything", False)]


def test_nothing_stays_behind() -> None:
    before = set(threading.enumerate())
    wires = Wires()
    donor = MemoryDonor(MemorySnapshots("d0", outer_state(), private_state()), wires.donor_end)
    run_joiner([donor], wires, Destinations()).run()
    donor.join()
    assert set(threading.enumerate()) == before


def test_all_donors_gone_keeps_what_was_verified() -> None:
    wires = Wires()
    outer = outer_state()
    recorder = Recorder()
    ledger = ChunkLedger()
    destinations = Destinations()
    donor = MemoryDonor(MemorySnapshots("d0", outer), wires.donor_end)
    donor.limiter.set_rate(16 * MIB)  # slower than the check: the donor dies with chunks under way
    small = JoinerConfig(planner=PlannerConfig(min_window_bytes=1 * MIB, max_window_bytes=4 * MIB))

    class Killer(ChunkLedger):
        def add(self, name: object) -> None:
            ledger.add(name)  # type: ignore[arg-type]
            if len(ledger) == 4:
                donor.die()

    with pytest.raises(
        NoDonorLeft, match=r"no donor of L1.k3 is left \(\d+ of \d+ bytes are verified and kept\): d0: DonorLost"
    ):
        run_joiner([donor], wires, destinations, config=small, ledger=Killer(), recorder=recorder).run()
    donor.join()
    assert 4 <= len(ledger) < donor.snapshots.outer_manifest.num_chunks
    kept = ledger.num_bytes

    again = MemoryDonor(MemorySnapshots("d1", outer), wires.donor_end)
    result = run_joiner([again], wires, destinations, ledger=ledger, want_private=False, number=2).run()
    again.join()
    assert result.reused_bytes == kept
    assert result.payload_bytes == result.first.num_bytes - kept
    assert all(destinations.holds(name, value) for name, value in outer.items())


def test_delta_moves_only_what_differs() -> None:
    wires = Wires()
    outer = outer_state()
    destinations = Destinations()
    first = MemoryDonor(MemorySnapshots("d0", outer), wires.donor_end)
    run_joiner([first], wires, destinations, want_private=False).run()
    first.join()
    large: torch.Tensor = outer["outer_params"]["large2"]  # type: ignore[index]
    large[5] += 1
    changed = MemoryDonor(MemorySnapshots("d1", outer), wires.donor_end)
    result = run_joiner([changed], wires, destinations, want_private=False, config=JoinerConfig(delta=True)).run()
    changed.join()
    assert result.payload_bytes == 4 * MIB
    assert all(destinations.holds(name, value) for name, value in outer.items())


def test_a_restarted_joiner_takes_what_it_has_from_its_spool(tmp_path: Path) -> None:
    """As reported in gensyn-ai/rl-swarm#377."""
    wires = Wires()
    outer = outer_state()
    for kept_fraction in (0.0, 1.0):
        spool = ChunkSpool(tmp_path / "spool")
        spool.start()
        donor = MemoryDonor(MemorySnapshots("d0", outer), wires.donor_end)
        destinations = Destinations()  # a new process has fresh memory and no ledger
        result = run_joiner([donor], wires, destinations, spool=spool, want_private=False).run()
        donor.join()
        spool.close()
        assert result.reused_bytes == kept_fraction * result.first.num_bytes
        assert result.payload_bytes == (1 - kept_fraction) * result.first.num_bytes
        assert all(destinations.holds(name, value) for name, value in outer.items())


def test_neither_descriptors_nor_threads_pile_up() -> None:
    wires = Wires()
    outer: dict[str, object] = {"outer_params": {"w": big(1 * MIB, 1)}}

    def counts() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    seen = []
    for _ in range(8):
        donor = MemoryDonor(MemorySnapshots("d0", outer), wires.donor_end)
        run_joiner([donor], wires, Destinations(), want_private=False, config=JoinerConfig(lanes=8)).run()
        donor.join()
        seen.append(counts())
    # gloo's own thread closes what it was told to close a little later: what was piled up would stay.
    deadline = time.monotonic() + 20.0
    while grown := [now for now, then in zip(counts(), seen[1], strict=True) if now > then]:
        assert time.monotonic() < deadline, (seen, grown)
        threading.Event().wait(0.05)


@pytest.mark.parametrize("moment", ["before", "dialling", "manifest"])
def test_cancel_is_possible_at_any_moment(moment: str) -> None:
    wires = Wires(timeout_seconds=10.0)
    donor = MemoryDonor(MemorySnapshots("d0", outer_state(), private_state()), wires.donor_end)
    before = set(threading.enumerate())
    sessions: list[JoinerSession] = []

    class Cancelling(Destinations):
        def __call__(self, role: int, manifest: Manifest) -> dict[PartName, PartBytes]:
            if moment == "manifest":
                sessions[0].cancel(moment)
            return super().__call__(role, manifest)

    def dial(peer: DonorPeer) -> JoinerConversation:
        if moment == "dialling":
            sessions[0].cancel(moment)
        return donor.dial()

    session = JoinerSession(
        attempt([donor]),
        JoinerConfig(),
        dial=dial,
        open_link=wires.joiner_end,
        on_manifest=Cancelling(),
        events=Recorder(),
    )
    sessions.append(session)
    if moment == "before":
        session.cancel(moment)
    with pytest.raises(TransferCancelled, match=moment):
        session.run()
    donor.join()
    for thread in set(threading.enumerate()) - before:
        # Nothing interrupts gloo while it connects; to an end that has gone it tries for five times its timeout.
        assert thread.name.startswith("recovery-lane-")
        thread.join(80.0)
    assert set(threading.enumerate()) == before
    with pytest.raises(MisuseError):
        session.run()


def test_an_error_of_the_callback_ends_the_transfer_with_it() -> None:
    wires = Wires()
    donor = MemoryDonor(MemorySnapshots("d0", outer_state()), wires.donor_end)

    class Refusing(Destinations):
        def __call__(self, role: int, manifest: Manifest) -> dict[PartName, PartBytes]:
            raise LayoutMismatch("two models")

    with pytest.raises(LayoutMismatch, match="two models"):
        run_joiner([donor], wires, Refusing()).run()
    (result,) = donor.join()
    assert "two models" in str(result.error)


def test_a_donor_that_drains_says_so() -> None:
    wires = Wires()
    donor = MemoryDonor(MemorySnapshots("d0", outer_state()), wires.donor_end)
    donor.limiter.set_rate(64 * KIB)

    class Watching(Destinations):
        def __call__(self, role: int, manifest: Manifest) -> dict[PartName, PartBytes]:
            donor.sessions[0].cancel("this donor drains")
            return super().__call__(role, manifest)

    with pytest.raises(NoDonorLeft, match="this donor drains"):
        run_joiner([donor], wires, Watching()).run()
    (result,) = donor.join()
    assert isinstance(result.error, DonorRefused)


def test_cancel_ends_both_sides() -> None:
    wires = Wires()
    donor = MemoryDonor(MemorySnapshots("d0", outer_state(), private_state()), wires.donor_end)
    donor.limiter.set_rate(1 * MIB)  # slow enough that the transfer is under way when it is cancelled
    destinations = Destinations()
    session: JoinerSession | None = None

    class Canceller(ChunkLedger):
        def add(self, name: object) -> None:
            assert session is not None
            session.cancel("the test says so")

    session = run_joiner([donor], wires, destinations, ledger=Canceller())
    with pytest.raises(TransferCancelled, match="the test says so"):
        session.run()
    results = donor.join()
    assert results[0].error is not None
    assert donor.snapshots.leases[0].released[0][1], "the lease is kept for a grace time"
