"""Every wait and copy on the training thread is counted under its cause, and told."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from recovery.events import Recorder, TrainingThreadStalled
from recovery.snapshot import SnapshotConfig, StallAccount, StallCause, capture, frozen, guard
from recovery.snapshot.copy_jobs import CopyJobs
from recovery.snapshot.guard import OuterSnapshot
from recovery.snapshot.service import ServiceThread
from recovery.snapshot.vault import Arena
from recovery.state.chunks import PartBytes
from tests.unit.snapshot.reader import until
from tests.unit.snapshot.trainee import FIRST, Trainee


class Watch:
    """Notes what may take long and runs on this thread outside of any span of the account."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uncounted: list[str] = []
        self.seen: set[str] = set()
        self._depth = 0
        self._thread = threading.get_ident()
        self._patch = monkeypatch
        measure = StallAccount.measure

        @contextmanager
        def deeper(account: StallAccount, cause: StallCause) -> Iterator[object]:
            with measure(account, cause) as span:
                mine = threading.get_ident() == self._thread
                self._depth += mine
                try:
                    yield span
                finally:
                    self._depth -= mine

        monkeypatch.setattr(StallAccount, "measure", deeper)
        for owner, name in (
            (capture, "copy_range"),
            (guard, "copy_range"),
            (CopyJobs, "wait"),
            (PartBytes, "read"),
            (OuterSnapshot, "manifest"),
            (OuterSnapshot, "damaged"),
            (Arena, "touch"),
        ):
            self._watch(owner, name)

    def _watch(self, owner: object, name: str) -> None:
        called: Callable[..., object] = getattr(frozen if name == "copy_range" else owner, name)

        def watched(*args: object, **kwargs: object) -> object:
            if threading.get_ident() == self._thread:
                self.seen.add(name)
                if not self._depth:
                    self.uncounted.append(name)
            return called(*args, **kwargs)

        self._patch.setattr(owner, name, watched)


def test_all_that_may_take_long_is_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    events = Recorder()
    trainee = Trainee(width=32)
    with trainee.snapshots(SnapshotConfig(copy_ahead=False), events=events) as snapshots:
        version = FIRST
        for _ in range(3):
            snapshots.publish(version)
            joiner = ServiceThread("joiner")  # leases are taken on threads that may wait
            joiner.start()
            joiner.submit(functools.partial(snapshots.lease_outer, version, f"joiner {version}"))
            joiner.close()
            snapshots.manifest(version, 20)
            assert snapshots.damaged() == []
            future = snapshots.lease_private(f"joiner {version}", version)
            busy = threading.Event()
            snapshots._copier.submit(functools.partial(busy.wait, 20))  # so that copies are left for this thread
            for _ in range(2):
                trainee.inner_step()
            busy.set()
            with snapshots.standing():
                assert until(future.done)
            future.result(0).release("done")
            trainee.outer_step()
            version = version.next()
        snapshots.publish(version)
        told = events.of(TrainingThreadStalled)
        by_cause = snapshots.stall.by_cause()
    assert watch.uncounted == []
    assert watch.seen == {"copy_range", "wait", "read", "manifest", "damaged", "touch"}, "the test looks past something"
    assert [event.version for event in told] == [FIRST, FIRST.next(), FIRST.next().next(), version]
    for cause in ("publish", "guard-copy", "capture-measure", "capture-copy", "capture-wait", "digest-wait"):
        of_cause = [
            (seconds, copied)
            for event in told
            for named, seconds, copied in zip(event.causes, event.seconds, event.copied_bytes, strict=True)
            if named == cause
        ]
        assert of_cause, cause
        assert sum(seconds for seconds, _ in of_cause) == pytest.approx(by_cause[cause].seconds), cause
        assert sum(copied for _, copied in of_cause) == by_cause[cause].num_bytes, cause
    outer_bytes = sum(tensor.nbytes for tensor in trainee.outer.values())
    assert by_cause["guard-copy"].num_bytes >= 3 * outer_bytes


def test_a_copy_outside_of_a_span_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    trainee = Trainee(width=8)
    part = trainee.state.read_part(trainee.state.replicated_names[0])
    part.bytes.read(0, 8, torch.empty(8, dtype=torch.uint8))
    assert watch.uncounted == ["read"]
