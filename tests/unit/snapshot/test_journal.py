"""The journal: kept only while somebody catches up, without copies, within the budget, never what a loop changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from recovery.clock import ManualClock
from recovery.errors import DonorMemoryChanged, DonorRefused
from recovery.snapshot import SnapshotConfig, Snapshots
from recovery.snapshot.journal import JOURNAL_PART, KEPT_ENTRIES
from recovery.state import join
from recovery.types import PartClass, Version
from tests.unit.snapshot.trainee import FIRST, Trainee

GRACE = 5.0


class Run:
    """A worker that commits averages of its own, with a journal."""

    def __init__(self, budget_bytes: int = 1 << 30) -> None:
        self.clock = ManualClock()
        self.trainee = Trainee()
        config = SnapshotConfig(grace_seconds=GRACE, budget_bytes=budget_bytes)
        self.snapshots: Snapshots = self.trainee.snapshots(config, clock=self.clock)
        self.journal = self.snapshots.journal
        self.version = FIRST
        self.snapshots.start()
        self.snapshots.publish(FIRST)

    def averages(self) -> list[Tensor]:
        return [torch.randn(p.shape) for p in self.trainee.outer.values()]

    def commit(self, averaged: list[Tensor] | None = None) -> list[Tensor]:
        averaged = self.averages() if averaged is None else averaged
        self.journal.begin(averaged)
        self.version = self.version.next()
        self.journal.record(self.version, 100 + self.version.outer_step)
        return averaged


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.snapshots.close()
    assert made.snapshots.vault.used_bytes == 0


def test_nothing_is_kept_while_nobody_catches_up(run: Run) -> None:
    assert not run.journal.begin(run.averages())
    run.commit()
    assert run.journal.versions == []
    assert run.snapshots.vault.used_bytes == 0
    with pytest.raises(DonorRefused, match=r"no journal entry leads to L1\.k1 here; there are: none"):
        run.snapshots.lease_journal(run.version, "joiner")


def test_an_entry_is_lent_as_it_was_averaged_and_without_a_copy(run: Run) -> None:
    run.journal.enter()
    averaged = run.averages()
    assert run.journal.begin(averaged)  # the averager has to leave them alone from here on
    run.journal.record(FIRST.next(), 77)
    lease = run.snapshots.lease_journal(FIRST.next(), "joiner")
    assert lease.manifest.cut.version == FIRST.next()
    (spec,) = lease.manifest.parts
    assert (spec.name, spec.part_class) == (JOURNAL_PART, PartClass.REPLICATED)
    value = join(spec.tree, averaged)
    assert isinstance(value, dict)
    assert value["tokens"] == 77
    assert value["encoded"] == []
    assert value["like"] == [(tensor.shape, tensor.dtype) for tensor in averaged]
    assert all(a is b for a, b in zip(value["gradients"], averaged, strict=True))
    at = 0
    for tensor in averaged:
        reading = lease.read(0, at, tensor.nbytes)
        assert not reading.live
        assert torch.equal(reading.data, tensor.reshape(-1).view(torch.uint8))
        assert reading.data.data_ptr() == tensor.data_ptr()
        at += tensor.nbytes
    assert all(lease.recheck(0, chunk) for chunk in range(len(spec.chunks)))
    lease.release("done")


def test_the_last_entries_are_kept_and_those_that_are_read(run: Run) -> None:
    run.journal.enter()
    run.commit()
    lease = run.snapshots.lease_journal(Version(1, 1), "joiner")
    for _ in range(3):
        run.commit()
    assert run.journal.versions == [Version(1, 1), Version(1, 3), Version(1, 4)]
    lease.release("done")
    run.commit()
    assert run.journal.versions == [Version(1, 4), Version(1, 5)]
    assert len(run.journal.versions) == KEPT_ENTRIES


def test_entries_outlive_the_last_conversation_by_a_grace_time(run: Run) -> None:
    run.journal.enter()
    run.commit()
    run.journal.leave()
    run.clock.advance(GRACE - 0.1)
    run.commit()
    assert len(run.journal.versions) == 2
    run.clock.advance(0.2)
    run.snapshots.expire_leases()
    assert run.journal.versions == []
    assert run.snapshots.vault.used_bytes == 0


def test_the_grace_time_is_at_least_one_outer_period(run: Run) -> None:
    run.journal.enter()
    run.commit()
    run.clock.advance(20 * GRACE)
    run.commit()
    run.journal.leave()
    run.clock.advance(19 * GRACE)
    assert run.journal.wanted
    run.clock.advance(2 * GRACE)
    assert not run.journal.wanted


def test_a_loop_that_writes_into_its_averages_is_copied_for(run: Run) -> None:
    """As ``zero_grad(set_to_none=False)`` does, or a foreach step with Nesterov momentum."""
    run.journal.enter()
    averaged = run.averages()
    assert run.journal.begin(averaged)
    averaged[0].zero_()
    run.journal.record(Version(1, 1), 0)
    with pytest.raises(DonorRefused, match="wrote into the averages"):
        run.snapshots.lease_journal(Version(1, 1), "joiner")
    averaged = run.averages()
    first = averaged[0].clone()
    assert not run.journal.begin(averaged)  # they are copies from now on
    averaged[0].zero_()
    run.journal.record(Version(1, 2), 0)
    lease = run.snapshots.lease_journal(Version(1, 2), "joiner")
    assert torch.equal(lease.read(0, 0, first.nbytes).data, first.reshape(-1).view(torch.uint8))
    lease.release("done")


def test_averages_written_after_they_were_applied_are_not_lent(run: Run) -> None:
    run.journal.enter()
    averaged = run.commit()
    averaged[-1].mul_(2)
    with pytest.raises(DonorMemoryChanged, match=r"led to L1\.k1"):
        run.snapshots.lease_journal(Version(1, 1), "joiner")
    assert run.journal.versions == []


def test_an_aborted_boundary_leaves_no_entry(run: Run) -> None:
    run.journal.enter()
    run.journal.begin(run.averages())  # the loop raised before it was through
    charged = run.snapshots.vault.used_bytes
    averaged = run.commit()
    assert run.snapshots.vault.used_bytes == charged == sum(tensor.nbytes for tensor in averaged)
    assert run.journal.versions == [Version(1, 1)]


def test_rounded_averages_are_kept_as_they_travelled_and_more_of_them(run: Run) -> None:
    run.journal.enter()
    averaged = run.averages()
    encoded = [torch.ones(sum(t.nbytes for t in averaged) // 4, dtype=torch.uint8)]
    assert not run.journal.begin(averaged, encoded)  # the averager keeps its buffers
    averaged[0].zero_()
    run.journal.record(Version(1, 1), 0)
    lease = run.snapshots.lease_journal(Version(1, 1), "joiner")
    assert lease.read(0, 0, 8).data.data_ptr() == encoded[0].data_ptr()
    assert lease.manifest.num_bytes == encoded[0].nbytes
    lease.release("done")
    for step in range(2, 12):
        run.journal.begin(averaged, [encoded[0].clone()])
        run.journal.record(Version(1, step), 0)
    assert run.journal.versions == [Version(1, step) for step in range(4, 12)]


def test_what_does_not_fit_the_budget_is_not_kept() -> None:
    run = Run(budget_bytes=1000)
    run.journal.enter()
    run.commit()
    with pytest.raises(DonorRefused, match="do not fit"):
        run.snapshots.lease_journal(Version(1, 1), "joiner")
    run.snapshots.close()
