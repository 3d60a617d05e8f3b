"""Makes snapshots of one worker: what their manifests say, and how their leases end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from recovery.clock import Clock
from recovery.snapshot.capture_records import Captured
from recovery.snapshot.config import SnapshotConfig
from recovery.snapshot.frozen import freeze
from recovery.snapshot.guard import OuterSnapshot
from recovery.snapshot.lease import Lease, LeaseBook, LeaseRecord
from recovery.snapshot.outline import Outline, held
from recovery.snapshot.private import PrivateSnapshot
from recovery.snapshot.reports import Reports
from recovery.snapshot.vault import Vault
from recovery.state.digest import numerics_id
from recovery.state.live_part import LivePart, describe
from recovery.state.manifest import Manifest
from recovery.state.parts import WorkerState
from recovery.types import Cut, PartName, RunId, Version, WorkerRef


class Maker:
    """Knows what all snapshots of a worker have in common. Any thread, but for ``outer``.

    Args:
        state: What is lent.
        config: Settings.
        run_id: For manifests.
        worker: For manifests.
        vault: Where copies go.
        reports: Who is told of leases.
        clock: Time for deadlines.
    """

    def __init__(
        self,
        state: WorkerState,
        config: SnapshotConfig,
        *,
        run_id: RunId,
        worker: WorkerRef,
        vault: Vault,
        reports: Reports,
        clock: Clock,
    ) -> None:
        self._state = state
        self._config = config
        self._run_id = run_id
        self._worker = worker
        self._vault = vault
        self._reports = reports
        self._clock = clock
        self._layout_digest = b""
        self._outlines: dict[PartName, Outline] = {}
        """Of the outer parts published last, which the shelf keeps alive as long."""

    def outer(self, version: Version) -> OuterSnapshot:
        """Return the replicated parts as they stand now, which is at ``version``. Training thread.

        Raises:
            UnsupportedLeaf, MisuseError: a part cannot be read.
        """
        parts = [self._standing_part(name) for name in self._state.replicated_names]
        self._layout_digest = layout_digest = self._state.layout_digest()
        cut = Cut(version)
        return OuterSnapshot(
            version,
            parts,
            lambda these: self._describe(these, cut, layout_digest),
            self._vault,
            self._clock,
            self.book(cut),
        )

    def private(self, captured: Captured) -> PrivateSnapshot:
        """Return what was captured, described: the digest pass."""
        manifest = self._describe(captured.parts, captured.cut, self._layout_digest)
        return PrivateSnapshot(manifest, captured.data, self.book(captured.cut))

    def entry(self, version: Version, part: LivePart) -> Manifest:
        """Return the manifest of the journal entry that leads to ``version``."""
        return self._describe([part], Cut(version), self._layout_digest)

    def book(self, cut: Cut) -> Callable[[Sequence[int], Callable[[], None]], LeaseBook]:
        """Return what makes the lease book of a snapshot at ``cut``."""

        def ended(record: LeaseRecord, reason: str) -> None:
            self._reports.lease_ended(record.holder, cut.version, reason)

        return lambda counts, on_empty: LeaseBook(
            counts,
            self._clock,
            deadline_seconds=self._config.lease_deadline_seconds,
            grace_seconds=self._config.grace_seconds,
            on_ended=ended,
            on_empty=on_empty,
        )

    def private_lease(self, snapshot: PrivateSnapshot, holder: str) -> Lease:
        """Return a lease on private parts, reported."""
        record = snapshot.book.take(holder, until_boundary=False)
        self._reports.lease_taken(holder, snapshot.manifest.cut.version, until_boundary=False)
        return Lease(snapshot, record, snapshot.manifest, snapshot.manifest_bytes)

    def _standing_part(self, name: PartName) -> LivePart:
        if not self._state.changes_in_forward(name):
            return self._outer_part(name)
        part = self._state.read_part(name)
        # It does not stand still in the inner phase: its value at the boundary is kept by itself. Buffers are small.
        return freeze(
            part, part.bytes.read(0, part.bytes.num_bytes, torch.empty(part.bytes.num_bytes, dtype=torch.uint8))
        )

    def _outer_part(self, name: PartName) -> LivePart:
        """Return the part as it is now; most are what they were at the last boundary, in other bits."""
        part = self._state.part(name)
        value = part.read()
        outline = self._outlines.get(name)
        if outline is None or not outline.is_still(value):
            outline = self._outlines[name] = Outline(part, held(value))
        return outline.part

    def _describe(self, parts: Sequence[LivePart], cut: Cut, layout_digest: bytes) -> Manifest:
        return describe(
            parts,
            run_id=self._run_id,
            worker=self._worker,
            cut=cut,
            numerics_id=numerics_id(),
            layout_digest=layout_digest,
            algorithm=self._config.digest_algorithm,
        )
