"""Settings of the snapshot storey."""

from __future__ import annotations

from dataclasses import dataclass

from recovery.errors import BadConfiguration
from recovery.types import GIB, DigestAlgorithm


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotConfig:
    """How much memory serving may take, and how long a silent reader keeps it.

    Attributes:
        budget_bytes: Most memory that the vault may hold at once for copies. A version whose worst case does not fit
            is lent only until the next outer step; a private snapshot that does not fit is refused.
        grace_seconds: How long a lease outlives a lost joiner, so that it can come back and go on.
        lease_deadline_seconds: A lease that is neither read, acknowledged nor renewed for this long ends.
        digest_timeout_seconds: How long a lease waits for the digest pass of its version.
        prefault: Keep memory for one version and one private snapshot touched at all times, also when nobody joins:
            the first joiner then costs no more than the later ones.
        copy_ahead: Whether chunks that will not be sent before the next outer step are copied beforehand by a
            background thread, so that the guard finds little left.
        copy_ahead_share: Share of its time that the background thread copies; the rest it sleeps. In (0, 1].
        measure_in_step_bytes: Private state up to this size is measured, reserved and captured at one inner-step
            boundary; for larger state memory is touched in the background first, and the capture waits for the next.
        touch_share: Share of its time that the background thread touches memory for a capture; the rest it sleeps. New
            memory comes slowly, and training waits for it too. In (0, 1].
        digest_algorithm: Algorithm of chunk digests.
    """

    budget_bytes: int = 8 * GIB
    grace_seconds: float = 30.0
    lease_deadline_seconds: float = 60.0
    digest_timeout_seconds: float = 120.0
    prefault: bool = False
    copy_ahead: bool = True
    copy_ahead_share: float = 0.2
    measure_in_step_bytes: int = 8 * 1024 * 1024
    touch_share: float = 0.5
    digest_algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128

    def __post_init__(self) -> None:
        if self.budget_bytes < 0:
            raise BadConfiguration(f"budget_bytes={self.budget_bytes} is negative; 0 lends until the boundary only")
        if self.measure_in_step_bytes < 0:
            raise BadConfiguration(f"measure_in_step_bytes={self.measure_in_step_bytes} is negative")
        if self.grace_seconds < 0:
            raise BadConfiguration(f"grace_seconds={self.grace_seconds} is negative")
        for name in ("lease_deadline_seconds", "digest_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise BadConfiguration(f"{name}={getattr(self, name)} has to be positive")
        for name in ("copy_ahead_share", "touch_share"):
            if not 0 < getattr(self, name) <= 1:
                raise BadConfiguration(f"{name}={getattr(self, name)} is not in (0, 1]")
