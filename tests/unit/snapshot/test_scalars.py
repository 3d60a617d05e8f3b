"""Scalars captured between two inner steps, put upon another worker's older moments."""

from __future__ import annotations

import pytest
import torch

from recovery.errors import DonorRefused, LayoutMismatch, ManifestRejected
from recovery.snapshot.lease import Lease
from recovery.state.loose import LooseParts
from recovery.state.scalars import restore_scalars
from recovery.types import MIB, Version
from tests.unit.snapshot.trainee import FIRST, Trainee, reference

MOMENTS = ("inner_optimizer.first", "inner_optimizer.second")


def receive(lease: Lease) -> LooseParts:
    received = LooseParts(lease.manifest, 64 * MIB)
    for index, part in enumerate(lease.manifest.parts):
        if part.num_bytes:
            received.destinations[part.name].write(0, lease.read(index, 0, part.num_bytes).data)
    return received


def scalars_of(trainee: Trainee, steps: int) -> LooseParts:
    """Let the trainee take some steps and return its scalars at the end of them."""
    with trainee.snapshots() as snapshots:
        snapshots.publish(FIRST)
        for _ in range(steps):
            trainee.inner_step()
        future = snapshots.lease_scalars("joiner", FIRST)
        assert not future.done()
        snapshots.inner_boundary()
        lease = future.result(10)
        assert lease.manifest.cut.inner_step == trainee.state.local_progress.inner_step
        received = receive(lease)
        lease.release("done")
    return received


def test_learning_rates_follow_and_moments_stay() -> None:
    """One learning rate is a tensor that its scheduler changes in place: it stays the same object."""
    donor, joiner = Trainee(seed=1), Trainee(seed=2)
    for _ in range(3):
        joiner.inner_step()
    received = scalars_of(donor, 9)
    moments = {
        name: [t.clone() for p in optimizer.state.values() for t in p.values()]
        for name, optimizer in joiner.inner.items()
    }
    rate = joiner.inner["first"].param_groups[0]["lr"]
    restore_scalars(joiner.state, received)
    assert joiner.inner["first"].param_groups[0]["lr"] is rate
    for name, optimizer in joiner.inner.items():
        found = [t for p in optimizer.state.values() for t in p.values()]
        assert found
        assert all(torch.equal(a, b) for a, b in zip(found, moments[name], strict=True))
    for name in joiner.state.private_copied_names:
        if name not in MOMENTS:
            assert reference(joiner.state, name) == reference(donor.state, name), name
    for _ in range(20):
        for a, b in zip(joiner.inner.values(), donor.inner.values(), strict=True):
            assert float(a.param_groups[0]["lr"]) == float(b.param_groups[0]["lr"])
        joiner.inner_step()
        donor.inner_step()


def test_scalars_are_lent_not_before_a_version_and_while_standing() -> None:
    donor = Trainee()
    with donor.snapshots() as snapshots:
        snapshots.publish(FIRST)
        later = snapshots.lease_scalars("late", Version(1, 1))
        snapshots.inner_boundary()
        assert not later.done()
        snapshots.before_outer_update()
        donor.outer_step()
        snapshots.publish(Version(1, 1))
        with snapshots.standing():
            assert later.result(10).manifest.cut.version == Version(1, 1)
            assert snapshots.lease_scalars("other", FIRST).result(10).manifest.cut.version == Version(1, 1)
        forgotten = snapshots.lease_scalars("gone", Version(1, 2))
    with pytest.raises(DonorRefused, match="closing"):
        forgotten.result(10)


def test_scalars_that_do_not_fit_change_nothing() -> None:
    received = scalars_of(Trainee(seed=1, width=32), 2)
    joiner = Trainee(seed=2)
    before = {name: reference(joiner.state, name) for name in joiner.state.private_copied_names}
    with pytest.raises(LayoutMismatch, match="nothing was changed"):
        restore_scalars(joiner.state, received)
    assert {name: reference(joiner.state, name) for name in joiner.state.private_copied_names} == before


def test_more_than_scalars_are_not_received() -> None:
    manifest = scalars_of(Trainee(), 1).manifest
    with pytest.raises(ManifestRejected, match="at most 8 can be meant"):
        LooseParts(manifest, 8)
