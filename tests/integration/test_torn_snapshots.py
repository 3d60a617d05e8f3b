"""The torn-snapshot hunt: a worker trains at full speed while joiners lease, read slowly, freeze, leave and return.

Every snapshot that was received whole has to equal a reference copy that the training thread took at the same cut.
Some readers take pieces straight from leases, in random order and sizes; the others are whole joiners, whose donor's
sessions post real gloo sends of lent memory. The hunt is worth something only because it finds what it looks for: with
the guard, the void message, the wait for the capture, or one of the capture's rules disabled, it must fail
(``test_hunt_notices``).

Of the kind of Lightning-AI/pytorch-lightning#20953, pytorch/pytorch#144657 and pytorch/torchtitan#4598.
"""

from __future__ import annotations

import gc
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest
import torch

from recovery.errors import DonorBusy, DonorRefused, NoDonorLeft, RecoveryError, TransferCancelled
from recovery.events import Recorder, SnapshotCaptured
from recovery.snapshot import SnapshotConfig, Snapshots, capture, frozen
from recovery.snapshot.capture import PrivateCapture
from recovery.snapshot.guard import OuterSnapshot
from recovery.snapshot.rhythm import Rhythm, rhythm
from recovery.state.live_part import LivePart
from recovery.types import MIB, Cut, PartClass, PartName, Version
from tests.support.wire_reader import WireReader
from tests.unit.snapshot.reader import Reader, Temper, until
from tests.unit.snapshot.trainee import FIRST, RUN, WORKER, Trainee

BUDGET_BYTES = 400 * MIB
GRACE_SECONDS = 20.0
_COPY_SECONDS = 0.004
RETRY = (DonorBusy, DonorRefused, NoDonorLeft)
Reference = dict[str, tuple[bytes, bytes]]


class Hunt:
    """One hunt. The caller's thread trains; some threads read leases, others join over gloo links."""

    def __init__(self, seed: int, *, readers: int, joiners: int, width: int = 1200) -> None:
        self.rng = random.Random(seed)
        self.trainee = Trainee(width=width, accumulate=2, seed=seed)
        self.events = Recorder()
        self.snapshots = self.trainee.snapshots(
            SnapshotConfig(budget_bytes=BUDGET_BYTES, grace_seconds=GRACE_SECONDS), events=self.events
        )
        self.outer: dict[Version, Reference] = {}
        self.private: dict[Cut, Reference] = {}
        self._layout_digest = self.trainee.state.layout_digest()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        ways = [self._join] * readers + [self._join_by_wire] * joiners
        self._readers = [
            threading.Thread(target=self._read, args=(n, random.Random(seed * 100 + n), way), name=f"reader-{n}")
            for n, way in enumerate(ways)
        ]

    def run(self, enough: Callable[[Counter[str]], bool], max_seconds: float) -> None:
        """Hunt until there is enough, something failed, or time is up."""
        ends = time.monotonic() + max_seconds
        with self.snapshots:
            for reader in self._readers:
                reader.start()
            version = FIRST
            try:
                while any(reader.is_alive() for reader in self._readers):
                    with self._lock:
                        if enough(self.counts) or self.failures or time.monotonic() > ends:
                            self._stop.set()
                    self._phase(version)
                    version = version.next()
                    self.counts["outer steps"] += 1
            finally:
                self._stop.set()
        for reader in self._readers:
            reader.join()

    def _phase(self, version: Version) -> None:
        self.outer[version] = self.trainee.reference(PartClass.REPLICATED)
        self.snapshots.publish(version)
        says_boundaries = self.rng.random() < 0.5
        self._note(version, says_boundaries)
        for _ in range(self.rng.randint(1, 6)):
            self.trainee.inner_step(overflow=self.counts["inner steps"] > 0 and self.rng.random() < 0.1)
            self.counts["inner steps"] += 1
            self._note(version, says_boundaries)
        self.trainee.outer_step()  # the outer optimizer's pre-hook is the guard

    def _note(self, version: Version, says_boundary: bool) -> None:
        cut = Cut(version, self.trainee.state.local_progress.inner_step)
        self.private[cut] = self.trainee.reference(PartClass.PRIVATE_COPIED)
        if says_boundary:
            self.snapshots.inner_boundary()

    def _read(self, number: int, rng: random.Random, join: Callable[[str, random.Random], None]) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            holder = f"joiner-{number}.{turn}"
            try:
                join(holder, rng)
            except (DonorBusy, CancelledError):
                self._count("asked again")
                self._stop.wait(0.001)
            except Exception as error:  # noqa: BLE001 - a thread's root: shown by the test's own thread
                with self._lock:
                    self.failures.append(f"{holder}: {type(error).__name__}: {error}")

    def _join(self, holder: str, rng: random.Random) -> None:
        version = self.snapshots.version
        if version is None:
            raise DonorBusy("between two versions")
        try:
            lease = self.snapshots.lease_outer(version, holder)
        except DonorRefused as error:  # the next version was published meanwhile
            raise DonorBusy(str(error)) from error
        reader = Reader(lease, rng.choice(list(Temper)), rng, self._stop)
        chance = rng.random()
        if chance < 0.15:
            reader.receive(until=rng.random())
            lease.release("left")
            self._count("left")
            return
        if chance < 0.35:
            reader.receive(until=rng.random())
            lease.release("lost", grace=True)
            reader.take_up(self.snapshots.lease_outer(version, holder))
            self._count("returned")
        self._finish(reader, self.outer[version], "outer")
        if rng.random() < 0.7:
            # Well above any wait of a healthy donor: it bounds the test, it is not measured.
            private = self.snapshots.lease_private(holder, version).result(60)
            assert private.manifest.cut.version >= version
            self._finish(Reader(private, Temper.SLOW, rng, self._stop), self.private[private.manifest.cut], "private")

    def _join_by_wire(self, holder: str, rng: random.Random) -> None:
        version = self.snapshots.version
        if version is None:
            raise DonorBusy("between two versions")
        joiner = WireReader(self.snapshots, WORKER, RUN, self._layout_digest, holder, rng.choice(list(Temper)))
        try:
            if rng.random() < 0.3:
                with suppress(TransferCancelled):
                    joiner.receive(version, want_private=False, leave_at=rng.randint(1, 4))
                self._count("broke off")
            joiner.receive(version, want_private=rng.random() < 0.7)
        except RecoveryError as error:
            # Too late for the version: asked again. Once lent, it must be served to the end.
            if not joiner.had_manifest and all(isinstance(one, RETRY) for one in (error, *joiner.failures.values())):
                raise DonorBusy(str(error)) from error
            raise
        finally:
            self._count("bad chunks", sum(n for blame, n in joiner.blames.items() if blame != "void"))
            self._count("sends in flight", joiner.void_sends)
        assert set(joiner.blames) <= {"void"}, f"chunks of a healthy donor were bad: {joiner.blames}"
        for manifest, what in zip(joiner.manifests, ("outer", "private"), strict=False):
            expected = self.outer[version] if what == "outer" else self.private[manifest.cut]
            assert manifest.cut.version >= version
            found = joiner.found(manifest)
            wrong = [name for name in expected if found.get(name) != expected[name]]
            assert found.keys() == expected.keys() and not wrong, f"{what} at {manifest.cut}: {wrong} differ"
            self._count("snapshots")
            self._count("by wire")
            self._count(what)
        self._count("wire spanning", int(self.snapshots.version != version))

    def _finish(self, reader: Reader, expected: Reference, what: str) -> None:
        reader.receive()
        self._count("bad chunks", reader.bad_chunks)
        assert not reader.bad_chunks, f"{what}: {reader.bad_chunks} bad chunks"
        found = reader.found()
        wrong = [name for name in expected if found.get(name) != expected[name]]
        assert found.keys() == expected.keys() and not wrong, f"{what} at {reader.lease.manifest.cut}: {wrong} differ"
        reader.lease.release("done")
        self._count("snapshots")
        self._count(what)
        self._count("spanning", int(reader.read_after_close))
        self._count("in flight", int(reader.void_sends > 0))

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self.counts[what] += by


@pytest.fixture
def slow_copier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service thread takes its time, so that a capture is never over before the next step wants to begin."""
    copy_range = frozen.copy_range

    def slowly(live: LivePart, offset: int, out: torch.Tensor) -> None:
        if threading.current_thread().name == "snapshot-copy":
            threading.Event().wait(_COPY_SECONDS)
        copy_range(live, offset, out)

    monkeypatch.setattr(capture, "copy_range", slowly)


def hunted(hunt: Hunt, *, snapshots: int, by_wire: int, in_flight: int, max_seconds: float) -> None:
    """Hunt until so much was seen, nothing torn, and no memory left in use."""
    wanted = {
        "snapshots": snapshots,
        "by wire": by_wire,
        "sends in flight": in_flight,
        "spanning": 50,
        "in flight": 50,
        "private": 50,
    }
    hunt.run(lambda counts: all(counts[what] >= number for what, number in wanted.items()), max_seconds)
    assert not hunt.failures, hunt.failures
    counts = hunt.counts
    assert {what: counts[what] for what, number in wanted.items() if counts[what] < number} == {}, counts
    assert counts["broke off"] > 0, counts
    assert counts["bad chunks"] == 0, counts
    assert hunt.trainee.num_skipped > 0
    assert 0 < hunt.snapshots.vault.peak_bytes <= BUDGET_BYTES

    def given_back() -> bool:
        gc.collect()  # the joiners of this process refer to themselves, and to what they read
        return hunt.snapshots.vault.used_bytes == 0

    assert until(given_back), "memory of ended leases was not given back"
    cuts = {event.cut.inner_step for event in hunt.events.of(SnapshotCaptured)}
    assert len(cuts) > 3, "captures at few places only"


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("slow_copier")
def test_every_received_snapshot_equals_the_copy_taken_at_its_cut() -> None:
    hunted(Hunt(seed=1, readers=3, joiners=3), snapshots=500, by_wire=60, in_flight=50, max_seconds=90)


@pytest.mark.chaos
@pytest.mark.usefixtures("slow_copier")
@pytest.mark.parametrize("seed", range(10, 14))
def test_every_snapshot_received_over_links_equals_the_copy_taken_at_its_cut(seed: int) -> None:
    hunted(Hunt(seed, readers=1, joiners=5), snapshots=800, by_wire=500, in_flight=300, max_seconds=480)


def _guard_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "before_outer_update", lambda self: None)


def _guard_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OuterSnapshot, "_needed", lambda self: [])


def _no_void_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "_call", lambda self, callbacks: 0)


def _no_wait_for_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivateCapture, "_finish", PrivateCapture._read_scalars)
    # Nobody waits for the copies now: they take several steps on the slowest machine too.
    monkeypatch.setattr(sys.modules[__name__], "_COPY_SECONDS", 0.05)


def _forward_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(state: object, name: PartName) -> Rhythm:
        found = rhythm(state, name)  # type: ignore[arg-type]
        return Rhythm.CHANGES_BETWEEN if found is Rhythm.CHANGES_IN_FORWARD else found

    monkeypatch.setattr(capture, "rhythm", careless)


def _scalars_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = PrivateCapture._begin

    def hasty(self: PrivateCapture, version: Version) -> None:
        begin(self, version)
        self._read_scalars(version)

    monkeypatch.setattr(PrivateCapture, "_begin", hasty)


BY_WIRE = {"readers": 0, "joiners": 4}
BY_LEASE = {"readers": 4, "joiners": 0}


@pytest.mark.usefixtures("slow_copier")
@pytest.mark.parametrize(
    ("disable", "who", "seen"),
    [
        (_guard_not_called, BY_LEASE, "bad chunks|had not been called"),
        (_guard_not_called, BY_WIRE, "written round the guard|had not been called"),
        (_guard_saves_nothing, BY_LEASE, "no longer has them"),
        (_guard_saves_nothing, BY_WIRE, "no longer has them"),
        (_no_void_message, BY_LEASE, "bad chunks"),
        (_no_void_message, BY_WIRE, "of a healthy donor were bad: .*'link'"),
        (_no_wait_for_the_capture, BY_LEASE, "private at .* differ"),
        (_no_wait_for_the_capture, BY_WIRE, "private at .* differ"),
        (_forward_is_forgotten, BY_LEASE, "private at .* differ"),
        (_scalars_too_early, BY_LEASE, "private at .* differ"),
    ],
)
def test_hunt_notices(
    disable: Callable[[pytest.MonkeyPatch], None], who: dict[str, int], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disable(monkeypatch)
    hunt = Hunt(seed=2, **who)
    hunt.run(lambda n: n["snapshots"] >= 2000, max_seconds=60)  # it ends with the first failure
    assert hunt.failures, f"the hunt passed with a protection disabled: {hunt.counts}"
    assert any(re.search(seen, failure) for failure in hunt.failures), hunt.failures
