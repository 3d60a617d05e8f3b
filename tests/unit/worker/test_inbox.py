"""What the inbox knows of seals: the newest, their fingerprints, the run's period."""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.clock import ManualClock
from recovery.control.wire import to_proto
from recovery.types import NO_VERSION, Fingerprint, Version
from recovery.worker.inbox import Inbox


def fingerprint(step: int) -> Fingerprint:
    return Fingerprint(bytes([step]) * 32)


def test_seals_are_remembered_with_their_fingerprints_for_a_while() -> None:
    inbox = Inbox(ManualClock())
    assert inbox.sealed == NO_VERSION
    for step in range(1, 40):
        inbox.put_sealed(Version(1, step), fingerprint(step))
    assert inbox.sealed == Version(1, 39)
    assert inbox.fingerprint_of(Version(1, 30)) == fingerprint(30)
    assert inbox.fingerprint_of(Version(1, 1)) == b""
    inbox.put_sealed(Version(2, 3), fingerprint(99))
    assert inbox.sealed == Version(2, 3)


def test_the_period_is_known_from_two_seals_heard_as_they_happened() -> None:
    clock = ManualClock()
    inbox = Inbox(clock)
    inbox.put_welcome(pb.Welcome(sealed=to_proto(Version(1, 4)), sealed_fingerprint=fingerprint(4)))
    assert inbox.sealed == Version(1, 4)
    clock.advance(1.0)  # a welcome comes at any time of the phase
    inbox.put_sealed(Version(1, 5), fingerprint(5))
    assert inbox.outer_period_seconds == 0.0
    clock.advance(7.0)
    inbox.put_sealed(Version(1, 6), fingerprint(6))
    assert inbox.outer_period_seconds == 7.0
    clock.advance(3.0)
    inbox.put_sealed(Version(1, 8), fingerprint(8))  # one was missed
    assert inbox.outer_period_seconds == 0.0
    clock.advance(2.0)
    inbox.put_sealed(Version(1, 9), fingerprint(9))
    assert inbox.outer_periods == [7.0, 2.0]


def test_how_long_a_phase_lasts_already_is_known_from_a_seal_heard_as_it_happened() -> None:
    clock = ManualClock()
    inbox = Inbox(clock)
    assert inbox.seconds_since_seal is None
    inbox.put_welcome(pb.Welcome(sealed=to_proto(Version(1, 4)), sealed_fingerprint=fingerprint(4)))
    assert inbox.seconds_since_seal is None
    clock.advance(1.0)
    inbox.put_sealed(Version(1, 5), fingerprint(5))
    clock.advance(2.5)
    assert inbox.seconds_since_seal == 2.5
