"""Outer parts: lent, guarded, closed. The races are driven step by step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import blake3
import pytest
import torch

from recovery.clock import ManualClock
from recovery.errors import DonorBusy, DonorMemoryChanged, DonorRefused, MisuseError, RecoveryError
from recovery.events import GuardCopied, LeaseEnded, LeaseTaken, Recorder
from recovery.snapshot import Lease, SnapshotConfig, Snapshots, StallCause, frozen, guard, making, outline
from recovery.state.chunks import PartBytes
from recovery.state.live_part import LivePart, describe
from recovery.state.manifest import Manifest, decode
from recovery.state.part import Part
from recovery.types import MIB, PartClass, Version
from tests.unit.snapshot.reader import until
from tests.unit.snapshot.trainee import FIRST, Trainee

WIDTH = 1200  # the model is 5.8 MB: its largest tensor has two chunks


class Donor:
    """A worker without copy-ahead, published at the first version."""

    def __init__(self, config: SnapshotConfig | None = None, width: int = WIDTH) -> None:
        self.events = Recorder()
        self.clock = ManualClock()
        self.trainee = Trainee(width=width)
        self.snapshots = self.trainee.snapshots(
            config or SnapshotConfig(copy_ahead=False), events=self.events, clock=self.clock
        )
        self.snapshots.start()
        self.trainee.inner_step()
        self.expected = self.publish(FIRST)
        self.snapshots.manifest(FIRST, 20)

    def publish(self, version: Version) -> dict[str, tuple[bytes, bytes]]:
        expected = self.trainee.reference(PartClass.REPLICATED)
        self.snapshots.publish(version)
        return expected

    def outer_step(self) -> None:
        self.trainee.inner_step()
        self.trainee.outer_step()


@pytest.fixture
def donor() -> Iterator[Donor]:
    donor = Donor()
    yield donor
    donor.snapshots.close()


def whole(lease: Lease) -> list[torch.Tensor]:
    """Return copies of all parts, as read now."""
    return [
        lease.read(p, 0, part.num_bytes).data.clone() if part.num_bytes else torch.empty(0, dtype=torch.uint8)
        for p, part in enumerate(lease.manifest.parts)
    ]


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_views_are_lent_without_a_copy_and_saved_when_the_outer_step_comes(donor: Donor) -> None:
    lease = donor.snapshots.lease_outer(FIRST, "joiner")
    assert not lease.until_boundary
    weight = donor.trainee.outer["second.weight"]
    spec = next(s for s in lease.manifest.parts[0].tensors if s.path.endswith("second.weight"))
    reading = lease.read(0, spec.offset, 1000)
    assert reading.live
    assert reading.data.data_ptr() == weight.data_ptr()
    before = whole(lease)
    closed: list[bool] = []
    lease.on_closed(lambda: closed.append(donor.snapshots.version is None))
    donor.outer_step()
    assert closed == [True]
    assert not torch.equal(reading.data, before[0][spec.offset : spec.offset + 1000]), "the view was overwritten"
    assert same(whole(lease), before)
    assert not lease.read(0, spec.offset, 1000).live
    assert [event.copied_bytes for event in donor.events.of(GuardCopied)] == [lease.manifest.num_bytes]
    assert donor.snapshots.stall.of(StallCause.GUARD_COPY).num_bytes == lease.manifest.num_bytes


def test_the_manifest_tells_what_was_published(donor: Donor) -> None:
    lease = donor.snapshots.lease_outer(FIRST, "joiner")
    manifest = donor.snapshots.manifest(FIRST, 10)
    assert manifest == lease.manifest == decode(lease.manifest_bytes)
    assert len(manifest.fingerprint) == 32
    assert {part.name: part.tree.SerializeToString(deterministic=True) for part in manifest.parts} == {
        name: tree for name, (tree, _) in donor.expected.items()
    }
    assert manifest.cut.version == FIRST
    assert manifest.layout_digest == donor.trainee.state.layout_digest()


def test_parts_that_changed_in_bits_only_are_not_taken_apart_again(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    take_apart = outline.take_apart

    def noted(part: Part, value: object, *, turns: bool = False) -> LivePart:
        taken.append(part.name)
        return take_apart(part, value, turns=turns)

    monkeypatch.setattr(outline, "take_apart", noted)
    version = FIRST
    for rate, expected in ((0.7, ["outer_optimizer", "run_progress"]), (0.7, ["run_progress"]), (0.3, None)):
        donor.trainee.outer_optimizer.param_groups[0]["lr"] = rate
        donor.trainee.outer_step()
        version = version.next()
        taken.clear()
        reference = donor.trainee.reference(PartClass.REPLICATED)
        donor.snapshots.publish(version)
        assert taken == (expected or ["outer_optimizer", "run_progress"])
        manifest = donor.snapshots.manifest(version, 20)
        assert {str(part.name): part.tree.SerializeToString(deterministic=True) for part in manifest.parts} == {
            name: tree for name, (tree, _) in reference.items()
        }


def test_acknowledged_chunks_are_not_saved(donor: Donor) -> None:
    lease = donor.snapshots.lease_outer(FIRST, "joiner")
    assert len(lease.manifest.parts[0].chunks) >= 3
    lease.acknowledge(0, 0)
    lease.acknowledge(0, 1)
    before = whole(lease)
    donor.outer_step()
    skipped = sum(chunk.num_bytes for chunk in lease.manifest.parts[0].chunks[:2])
    assert donor.events.of(GuardCopied)[0].copied_bytes == lease.manifest.num_bytes - skipped
    third = lease.manifest.parts[0].chunks[2]
    kept = lease.read(0, third.offset, third.num_bytes).data
    assert torch.equal(kept, before[0][third.offset : third.offset + third.num_bytes])
    with pytest.raises(DonorRefused, match="joiner acknowledged chunks 1 to 2 of part 0"):
        lease.read(0, third.offset - 1, 2)


def test_a_chunk_is_saved_while_one_holder_still_needs_it(donor: Donor) -> None:
    leases = [donor.snapshots.lease_outer(FIRST, name) for name in ("first", "second")]
    before = whole(leases[1])
    for p, part in enumerate(leases[0].manifest.parts):
        for c in range(len(part.chunks)):
            leases[0].acknowledge(p, c)
    donor.outer_step()
    assert same(whole(leases[1]), before)
    assert donor.snapshots.vault.used_bytes < 2 * leases[0].manifest.num_bytes, "one reservation for both"


def test_a_version_that_nobody_leases_costs_nothing(donor: Donor) -> None:
    donor.outer_step()
    assert donor.snapshots.vault.peak_bytes == 0
    assert donor.events.of(GuardCopied) == []
    assert donor.snapshots.stall.of(StallCause.GUARD_COPY).times == 0
    assert donor.snapshots.stall.serving_seconds == 0


def test_the_guard_works_once_a_version(donor: Donor) -> None:
    lease = donor.snapshots.lease_outer(FIRST, "joiner")
    before = whole(lease)
    donor.snapshots.before_outer_update()
    donor.outer_step()  # its hook is the guard's second call: the memory is new by then
    donor.snapshots.before_outer_update()
    assert same(whole(lease), before)
    assert len(donor.events.of(GuardCopied)) == 1


def test_without_budget_a_version_is_lent_until_the_boundary() -> None:
    donor = Donor(SnapshotConfig(budget_bytes=0))
    with donor.snapshots:
        lease = donor.snapshots.lease_outer(FIRST, "joiner")
        assert lease.until_boundary
        assert lease.read(0, 0, 4 * MIB).data.numel() == 4 * MIB
        closed = threading.Event()
        lease.on_closed(closed.set)
        donor.outer_step()
        assert closed.is_set()
        with pytest.raises(DonorBusy, match="lent until the boundary"):
            lease.read(0, 0, 1)
        assert donor.snapshots.vault.peak_bytes == 0
        assert donor.events.of(LeaseTaken)[0].until_boundary


def test_who_comes_after_the_guard_is_sent_to_the_newer_version(donor: Donor) -> None:
    donor.snapshots.lease_outer(FIRST, "early")
    donor.outer_step()
    with pytest.raises(DonorBusy, match="is over"):
        donor.snapshots.lease_outer(FIRST, "late")
    donor.publish(FIRST.next())
    with pytest.raises(DonorBusy, match="is over"):
        donor.snapshots.lease_outer(FIRST, "late")
    donor.snapshots.lease_outer(FIRST.next(), "late").release("done")
    with pytest.raises(DonorRefused, match=r"L1\.k7 is not held; the newest is L1\.k1"):
        donor.snapshots.lease_outer(Version(1, 7), "late")


def test_a_lost_holder_comes_back_after_the_outer_step(donor: Donor) -> None:
    lease = donor.snapshots.lease_outer(FIRST, "joiner")
    before = whole(lease)
    lease.release("stream lost", grace=True)
    donor.outer_step()
    donor.publish(FIRST.next())
    again = donor.snapshots.lease_outer(FIRST, "joiner")
    assert same(whole(again), before)
    assert all(again.recheck(p, c) for p, part in enumerate(again.manifest.parts) for c in range(len(part.chunks)))
    with pytest.raises(DonorRefused, match="took its lease up again"):
        lease.read(0, 0, 1)


def test_memory_goes_back_with_the_last_lease(donor: Donor) -> None:
    one = donor.snapshots.lease_outer(FIRST, "one")
    two = donor.snapshots.lease_outer(FIRST, "two")
    donor.outer_step()
    donor.publish(FIRST.next())
    one.release("done")
    assert donor.snapshots.vault.used_bytes > 0
    two.release("done")
    assert until(lambda: donor.snapshots.vault.used_bytes == 0)
    assert [event.reason for event in donor.events.of(LeaseEnded)] == ["done", "done"]
    with pytest.raises(DonorRefused, match="is not held"):
        donor.snapshots.expire_leases()
        donor.snapshots.lease_outer(FIRST, "three")


def test_a_reader_that_never_reads_loses_its_lease_by_the_deadline(donor: Donor) -> None:
    """As reported in learning-at-home/hivemind#401."""
    lease = donor.snapshots.lease_outer(FIRST, "asleep")
    donor.clock.advance(SnapshotConfig().lease_deadline_seconds)
    assert until(lambda: donor.snapshots.num_leases == 0), "the keeper ends it by itself"
    with pytest.raises(DonorRefused, match="asleep ended"):
        lease.read(0, 0, 1)
    with pytest.raises(DonorRefused, match="asleep ended"):
        lease.renew()
    assert "nothing for 60 s" in lease.ended


# Digests


def _blocked_describe(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    reading, go_on = threading.Event(), threading.Event()

    def blocked(parts: Sequence[LivePart], **rest: object) -> Manifest:
        if not reading.is_set():
            reading.set()
            assert go_on.wait(20)
        return describe(parts, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(making, "describe", blocked)
    return reading, go_on


def test_a_digest_pass_overtaken_by_training_goes_on_from_the_copies(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = _blocked_describe(monkeypatch)
    second = FIRST.next()
    donor.outer_step()
    expected = donor.publish(second)
    assert reading.wait(10)
    leases: list[Lease] = []
    taker = threading.Thread(target=lambda: leases.append(donor.snapshots.lease_outer(second, "joiner")))
    taker.start()
    assert until(lambda: donor.snapshots.vault.used_bytes > 0)
    donor.outer_step()
    go_on.set()
    taker.join(20)
    (lease,) = leases
    assert donor.events.of(GuardCopied)[0].copied_bytes == lease.manifest.num_bytes, (
        "all of it: nothing is verified yet"
    )
    assert all(lease.recheck(p, c) for p, part in enumerate(lease.manifest.parts) for c in range(len(part.chunks)))
    trees = {part.name: part.tree.SerializeToString(deterministic=True) for part in lease.manifest.parts}
    found = [blake3.blake3(data.numpy().tobytes()).digest() for data in whole(lease)]
    assert list(zip(trees, zip(trees.values(), found, strict=True), strict=True)) == list(expected.items())


def test_a_digest_pass_overtaken_by_training_with_nobody_reading_is_void(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = _blocked_describe(monkeypatch)
    donor.outer_step()
    donor.publish(FIRST.next())
    assert reading.wait(10)
    donor.outer_step()
    go_on.set()
    with pytest.raises(DonorBusy, match="overwritten before its digests were ready"):
        donor.snapshots.manifest(FIRST.next(), 10)


def test_digests_that_take_too_long_are_said_so_and_leave_no_lease(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = _blocked_describe(monkeypatch)
    donor.outer_step()
    donor.publish(FIRST.next())
    assert reading.wait(10)
    with pytest.raises(DonorBusy, match="not ready after 0 s"):
        donor.snapshots.manifest(FIRST.next(), 0)
    go_on.set()


def test_a_failing_digest_pass_is_told_to_who_waits(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(parts: Sequence[LivePart], **rest: object) -> Manifest:
        raise ZeroDivisionError("digest")

    monkeypatch.setattr(making, "describe", broken)
    donor.outer_step()
    donor.publish(FIRST.next())
    with pytest.raises(DonorRefused, match="ZeroDivisionError"):
        donor.snapshots.lease_outer(FIRST.next(), "joiner")
    assert donor.snapshots.num_leases == 0
    donor.outer_step()
    with pytest.raises(ZeroDivisionError):  # a bug reaches the owner at its next call, too
        donor.publish(Version(1, 2))


# Races with the guard


def test_a_gathered_read_that_the_guard_overtakes_is_read_again(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = donor.snapshots.lease_outer(FIRST, "joiner")
    before = whole(lease)
    small = len(lease.manifest.parts[0].tensors)
    assert small > 2
    read = PartBytes.read
    overtaken: list[int] = []

    def overtaking(self: PartBytes, offset: int, num_bytes: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None and not overtaken:
            overtaken.append(offset)
            donor.outer_step()  # between the view that was not possible and the gathered copy
        return read(self, offset, num_bytes, out)

    monkeypatch.setattr(PartBytes, "read", overtaking)
    reading = lease.read(0, 0, lease.manifest.parts[0].num_bytes)
    assert overtaken
    assert not reading.live
    assert torch.equal(reading.data, before[0])


def test_the_guard_does_not_wait_for_a_copy_ahead_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    donor = Donor(SnapshotConfig(copy_ahead_share=1.0))
    hanging, go_on, done = threading.Event(), threading.Event(), threading.Event()
    copy_range = frozen.copy_range

    def hang(part: LivePart, offset: int, out: torch.Tensor) -> None:
        if threading.current_thread().name != "snapshot-keeper":
            copy_range(part, offset, out)
            return
        hanging.set()
        assert go_on.wait(20)
        copy_range(part, offset, out)
        done.set()

    monkeypatch.setattr(guard, "copy_range", hang)
    with donor.snapshots:
        lease = donor.snapshots.lease_outer(FIRST, "joiner")
        assert hanging.wait(10)
        before = whole(lease)
        donor.outer_step()  # would never end if it waited
        go_on.set()  # and now the copy writes what training has made of the memory
        assert done.wait(10)
        assert same(whole(lease), before)
        assert all(lease.recheck(p, c) for p, part in enumerate(lease.manifest.parts) for c in range(len(part.chunks)))
        for p, part in enumerate(lease.manifest.parts):
            for chunk in part.chunks:  # reads within, up to and across the chunk that has its own place
                for start in (chunk.offset, max(0, chunk.offset - 10)):
                    size = min(chunk.num_bytes, part.num_bytes - start)
                    assert torch.equal(lease.read(p, start, size).data, before[p][start : start + size])


def test_what_was_copied_ahead_is_not_copied_by_the_guard() -> None:
    donor = Donor(SnapshotConfig(copy_ahead_share=1.0))
    with donor.snapshots:
        lease = donor.snapshots.lease_outer(FIRST, "joiner")
        before = whole(lease)
        assert until(
            lambda: (
                not any(
                    lease.read(p, 0, part.num_bytes).live
                    for p, part in enumerate(lease.manifest.parts)
                    if part.num_bytes
                )
                and not lease.read(0, 0, 1).live
            )
        )
        assert until(lambda: not _is_anything_live(lease))
        donor.outer_step()
        assert donor.events.of(GuardCopied)[0].copied_bytes == 0
        assert same(whole(lease), before)


def _is_anything_live(lease: Lease) -> bool:
    return any(
        lease.read(p, chunk.offset, 1).live for p, part in enumerate(lease.manifest.parts) for chunk in part.chunks
    )


# Writes round the guard


def test_a_write_round_the_guard_is_found_and_named(donor: Donor) -> None:
    lease = donor.snapshots.lease_outer(FIRST, "joiner")
    assert donor.snapshots.damaged() == []
    with torch.no_grad():
        donor.trainee.outer["second.weight"].view(-1)[-1] += 1
        donor.trainee.outer["head.bias"][0] += 1
    damaged = donor.snapshots.damaged()
    assert {name.rsplit("/", 1)[-1] for name in damaged} == {"second.weight", "head.bias"}
    assert all(name.startswith("outer_params/") for name in damaged)
    part = lease.manifest.parts[0]
    bad = [c for c in range(len(part.chunks)) if not lease.recheck(0, c)]
    assert 0 < len(bad) <= 2 < len(part.chunks)


def test_publishing_over_an_unguarded_version_ends_its_leases(donor: Donor) -> None:
    lease = donor.snapshots.lease_outer(FIRST, "joiner")
    told = threading.Event()
    lease.on_closed(told.set)
    donor.snapshots.publish(FIRST.next())
    assert told.is_set()
    with pytest.raises(DonorRefused, match="the guard had not been called"):
        lease.read(0, 0, 1)
    assert "guard had not been called" in donor.events.of(LeaseEnded)[0].reason
    with pytest.raises((DonorBusy, DonorRefused, DonorMemoryChanged)):
        donor.snapshots.lease_outer(FIRST, "joiner")


def test_damage_cannot_be_told_between_two_versions(donor: Donor) -> None:
    donor.snapshots.before_outer_update()
    with pytest.raises(DonorBusy, match="after the outer step"):
        donor.snapshots.damaged()


# Edges


@pytest.mark.parametrize(
    ("part", "offset", "num_bytes"), [(9, 0, 1), (-1, 0, 1), (0, -1, 2), (0, 0, 0), (0, 1 << 40, 1)]
)
def test_reading_what_is_not_there_is_refused(donor: Donor, part: int, offset: int, num_bytes: int) -> None:
    lease = donor.snapshots.lease_outer(FIRST, "joiner")
    with pytest.raises(MisuseError):
        lease.read(part, offset, num_bytes)
    with pytest.raises(MisuseError):
        lease.recheck(0, 99)


def test_replicated_buffers_are_kept_as_they_were_at_the_boundary() -> None:
    trainee = Trainee(width=8)
    trainee.inner_step()
    state = type(trainee.state)(
        live=trainee.model, outer_params=trainee.outer, outer_optimizer=trainee.outer_optimizer, replicated_buffers=True
    )
    trainee.state = state
    with trainee.snapshots() as donor:
        donor.publish(FIRST)
        lease = donor.lease_outer(FIRST, "joiner")
        trainee.model(torch.randn(8, 16))  # changes running statistics
        assert donor.damaged() == []
        names = [part.name for part in lease.manifest.parts]
        assert "buffers" in names
        assert all(lease.recheck(p, c) for p, part in enumerate(lease.manifest.parts) for c in range(len(part.chunks)))


def test_a_reader_whose_callback_fails_stops_neither_training_nor_the_others(
    donor: Donor, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    def fails() -> None:
        raise ZeroDivisionError

    donor.snapshots.lease_outer(FIRST, "bad").on_closed(fails)
    donor.snapshots.lease_outer(FIRST, "good").on_closed(told.set)
    donor.snapshots.lease_outer(FIRST, "counting").on_closed(lambda: 5)
    donor.outer_step()
    assert told.is_set()
    assert "a reader failed" in caplog.text
    assert donor.events.of(GuardCopied)[0].void_pulls == 5


def test_life() -> None:
    donor = Donor()
    snapshots_ = donor.snapshots
    lease = snapshots_.lease_outer(FIRST, "joiner")
    snapshots_.start()
    threads = {thread.name for thread in threading.enumerate()}
    assert {"snapshot-digest", "snapshot-copy", "snapshot-keeper"} <= threads
    snapshots_.close()
    snapshots_.close()
    assert not any(thread.name.startswith("snapshot-") for thread in threading.enumerate())
    with pytest.raises(DonorRefused, match="is closing"):
        lease.read(0, 0, 1)
    assert snapshots_.vault.used_bytes == 0
    for call in (lambda: snapshots_.publish(FIRST.next()), lambda: snapshots_.lease_outer(FIRST, "late")):
        with pytest.raises(MisuseError, match="closed"):
            call()
    donor.trainee.inner_step()  # its hooks are gone
    donor.trainee.outer_step()
    fresh: Snapshots = Trainee(width=8).snapshots()
    with pytest.raises(MisuseError, match="not started"):
        fresh.publish(FIRST)
    fresh.close()


def test_prefault_keeps_touched_memory_and_gives_it_to_the_first_joiner() -> None:
    """As reported in dlrover/dlrover#1225."""
    donor = Donor(SnapshotConfig(prefault=True, copy_ahead=False))
    with donor.snapshots:
        vault = donor.snapshots.vault
        assert until(lambda: vault.used_bytes >= donor.snapshots.manifest(FIRST, 10).num_bytes)
        assert until(lambda: len(vault._kept) == 2), "one for outer, one for private parts"
        used = vault.used_bytes
        lease = donor.snapshots.lease_outer(FIRST, "joiner")
        assert vault.used_bytes == used
        lease.release("done")
        assert vault.used_bytes == used
    assert vault.used_bytes == 0


def test_a_part_that_cannot_be_read_is_not_published(donor: Donor) -> None:
    donor.trainee.state.add("odd", lambda: {"value": object()}, PartClass.REPLICATED)
    donor.outer_step()
    with pytest.raises(RecoveryError, match="odd"):
        donor.snapshots.publish(FIRST.next())
    assert donor.snapshots.version is None
