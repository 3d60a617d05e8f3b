"""Consistent snapshots of a worker's state while it trains: lent views, a guard, captures, leases."""

from recovery.snapshot.config import SnapshotConfig
from recovery.snapshot.lease import Lease, Reading
from recovery.snapshot.snapshots import Snapshots
from recovery.snapshot.stall import Stall, StallAccount, StallCause

__all__ = ["Lease", "Reading", "SnapshotConfig", "Snapshots", "Stall", "StallAccount", "StallCause"]
