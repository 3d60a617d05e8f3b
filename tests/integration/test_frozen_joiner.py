"""A joiner that freezes with sends in flight costs the donor's training thread nothing but its copies."""

from __future__ import annotations

import threading

import pytest

from recovery.events import GuardCopied, Recorder
from recovery.protocol.session import DonorSession
from recovery.snapshot import SnapshotConfig
from recovery.types import PartClass
from tests.support.wire_reader import WireReader
from tests.unit.snapshot.reader import Temper, until
from tests.unit.snapshot.trainee import FIRST, RUN, WORKER, Trainee

WAIT = 60.0


class Frozen:
    """A donor in the middle of a transfer whose joiner stands still; ``overtake`` is the donor's outer step."""

    def __init__(self) -> None:
        self.events = Recorder()
        self.trainee = Trainee(width=1500)
        self.trainee.inner_step()
        self.snapshots = self.trainee.snapshots(SnapshotConfig(copy_ahead=False), events=self.events)
        self.snapshots.start()
        self.expected = self.trainee.reference(PartClass.REPLICATED)
        self.snapshots.publish(FIRST)
        layout = self.trainee.state.layout_digest()
        self.joiner = WireReader(self.snapshots, WORKER, RUN, layout, "joiner", Temper.BRISK)
        self.joiner.thawed.clear()
        self.errors: list[BaseException] = []
        self._receiving = threading.Thread(target=self._receive, name="joiner")
        self._receiving.start()
        assert until(lambda: self.joiner.num_in_flight >= 2)
        self._stepped = threading.Event()
        self._stepping = threading.Thread(target=self._step, name="training")

    def _receive(self) -> None:
        try:
            self.joiner.receive(FIRST, want_private=False)
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            self.errors.append(error)

    def _step(self) -> None:
        self.trainee.outer_step()
        self._stepped.set()

    def overtake(self, seconds: float) -> bool:
        """Begin the outer step; return whether it was over within ``seconds``, the joiner frozen all the time."""
        self._stepping.start()
        return self._stepped.wait(seconds) and not self.joiner.thawed.is_set()

    def thaw(self) -> None:
        self.joiner.thawed.set()
        self._stepping.join(WAIT)
        self._receiving.join(WAIT)
        assert not self._receiving.is_alive()
        self.snapshots.close()


def test_the_outer_step_goes_on_while_the_joiner_is_frozen() -> None:
    frozen = Frozen()
    try:
        assert frozen.overtake(WAIT), "the guard waited for a frozen joiner"
        (guarded,) = frozen.events.of(GuardCopied)
    finally:
        frozen.thaw()
    assert frozen.errors == []
    assert guarded.void_pulls >= 2, "no send was in flight"
    (manifest,) = frozen.joiner.manifests
    assert guarded.copied_bytes == manifest.num_bytes, "nothing was verified: everything had to be saved, and no more"
    assert frozen.joiner.found(manifest) == frozen.expected
    assert set(frozen.joiner.blames) <= {"void"}


def test_a_guard_that_waits_for_sends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = DonorSession._views_closed
    waits = threading.Event()

    def waiting(self: DonorSession, role: int) -> int:
        waits.set()
        while any(self._live._pulls.values()):
            threading.Event().wait(0.01)
        return closed(self, role)  # type: ignore[arg-type]

    monkeypatch.setattr(DonorSession, "_views_closed", waiting)
    frozen = Frozen()
    try:
        assert not frozen.overtake(1.0)
        assert waits.wait(WAIT)
    finally:
        frozen.thaw()
