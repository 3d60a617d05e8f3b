"""Settings of a worker's agent. Every other timeout is derived from the few that stand here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from recovery.control.security import SecurityConfig
from recovery.errors import BadConfiguration
from recovery.snapshot import SnapshotConfig
from recovery.types import MIB, Address, checked_id
from recovery.worker.gradient_codec import codec_named


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """What an agent needs to know. ``recovery.config.from_environment(AgentConfig)`` reads ``RECOVERY_<FIELD>``."""

    coordinator: str
    """Where the coordinator listens, ``host:port``."""
    run_id: str
    """The run to take part in; a coordinator of another run refuses the worker."""
    worker_id: str
    """Stable name of this worker: a restarted process takes the same."""
    inner_steps_per_phase: int
    """H: inner optimizer steps between two boundaries; the same on every worker of the run."""

    data_host: str = ""
    """Interface address that this worker binds and advertises, for letters and payload. Empty: the one that routes
    to the coordinator."""
    peer_port: int = 0
    """TCP port of this worker's peer service. 0: any free one."""
    region: str = ""
    """Donors of the same region are preferred."""
    donor_slots: int = 2
    """Joiners served at once."""
    donor_bytes_per_second: int = 0
    """Cap of all transfers that this worker serves together; 0: none. Changed live by ``recovery rate``."""
    lanes: int = 0
    """Sockets of one transfer; 0: the engine decides."""

    attach_timeout_seconds: float = 30.0
    """How long ``start()`` looks for the coordinator before it gives up."""
    recover_timeout_seconds: float = 1800.0
    """How long a worker without state looks for a source before it gives up. A transfer that makes progress is never
    cut short by it."""
    progress_timeout_seconds: float = 15.0
    """A peer that brings nothing for so long is given up."""
    boundary_timeout_seconds: float = 1800.0
    """How long a worker stands at a boundary without a roster or outcome before it raises."""

    verify_before_average: bool = True
    """Hash the outer state again at each boundary, so that a bit flipped in memory is found before it reaches the
    other workers' average. Costs one pass over the outer parts (about 0.1 s a GB)."""
    snapshot_budget_bytes: int = 0
    """Memory that snapshots may take; 0: the snapshots' own default."""
    bucket_bytes: int = 8 * MIB
    """Bytes averaged in one go; bounds the averaging's extra memory. The same on every worker of the run."""
    gradient_codec: str = "plain"
    """How pseudo-gradients travel: ``plain`` (exact), ``bf16`` (half the bytes) or ``int8`` (a quarter); see
    ``gradient_codec`` for the rounding rules. The same on every worker of the run."""

    checkpoint_url: str = ""
    """Folder or fsspec URL for checkpoints; empty: none are written, and none can be restored."""
    checkpoint_every: int = 1
    """Outer steps between two checkpoints."""
    checkpoint_keep: int = 3
    """Verified checkpoints kept; older ones are deleted."""
    metrics_port: int = 0
    """TCP port on which this worker serves ``/metrics`` in Prometheus' format; 0: none."""
    metrics_host: str = "127.0.0.1"
    """Interface on which it does: metrics are neither secret nor protected."""
    spool_path: str = ""
    """File that keeps verified chunks over a restart of a joiner; empty: none."""

    seal_payloads: bool = True
    """In runs whose channels are TLS, payloads of transfers are encrypted too (AES-GCM). False: on a network that all
    members trust. The same on every worker of the run; plaintext runs never seal."""
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @property
    def seals(self) -> bool:
        """Whether payloads are encrypted: the keys are as good as the channels that they are agreed on over."""
        return self.seal_payloads and self.security.uses_tls

    def snapshots(self) -> SnapshotConfig:
        """Return the settings of the snapshot storey."""
        if not self.snapshot_budget_bytes:
            return SnapshotConfig()
        return SnapshotConfig(budget_bytes=self.snapshot_budget_bytes)

    def __post_init__(self) -> None:
        Address.parse(self.coordinator)
        codec_named(self.gradient_codec)
        checked_id("run id", self.run_id)
        checked_id("worker id", self.worker_id)
        for name in ("inner_steps_per_phase", "donor_slots", "checkpoint_every", "checkpoint_keep", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise BadConfiguration(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("donor_bytes_per_second", "lanes", "snapshot_budget_bytes", "peer_port", "metrics_port"):
            if getattr(self, name) < 0:
                raise BadConfiguration(f"{name}={getattr(self, name)} must not be negative")
        for name in (
            "attach_timeout_seconds",
            "recover_timeout_seconds",
            "progress_timeout_seconds",
            "boundary_timeout_seconds",
        ):
            if getattr(self, name) <= 0:
                raise BadConfiguration(f"{name}={getattr(self, name)} must be more than 0")
        if self.progress_timeout_seconds > self.recover_timeout_seconds:
            raise BadConfiguration(
                f"progress_timeout_seconds={self.progress_timeout_seconds} is more than "
                f"recover_timeout_seconds={self.recover_timeout_seconds}: no second donor could ever be tried"
            )
        if self.spool_path and not Path(self.spool_path).parent.is_dir():
            raise BadConfiguration(f"spool_path={self.spool_path!r}: its folder does not exist")
