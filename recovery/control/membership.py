"""Who is in the run, what each holds, and what follows from it: pure functions of members and history."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.recovery.v1 import coordinator_pb2
from recovery.control.policy import RunPolicy
from recovery.control.record import COMMITTED, HistoryRecord, Voter
from recovery.control.wire import PROTOCOL, from_proto
from recovery.errors import LayoutMismatch, RecoveryError, RunRefused
from recovery.types import NO_VERSION, Version, WorkerRef

MAX_STEP_SECONDS = 86_400.0
"""An inner step that is said to take longer is not believed."""


class Standing(enum.Enum):
    """What a worker's state is to the run."""

    AWAITING = "awaiting the origin"
    """The run has no history yet."""
    ORIGIN = "beginning a lineage"
    """Was told to begin a lineage and has not reported its state."""
    READY = "ready"
    """Holds the newest sealed version; expected at the boundary."""
    APPLIED = "applied"
    """Holds the newest committed version, which is not sealed yet."""
    APPLYING = "applying"
    """Voted for the newest committed version, or holds it, and has not reported its fingerprint yet."""
    QUEUED = "queued"
    """Needs state and has no ticket."""
    JOINING = "joining"
    """Has a ticket."""
    IDLE = "idle"
    """Needs state, and its own next step decides: peers could not help it."""
    FOREIGN = "foreign"
    """Holds a version that this coordinator does not know."""


@dataclass(slots=True)
class Transfer:
    """One joiner's recovery across its attempts."""

    transfer_id: str
    attempt: int
    reason: str
    version: Version = NO_VERSION
    donors: tuple[str, ...] = ()
    """Worker ids of the attempt in flight; empty: none is."""
    since: float = 0.0
    told_turn: int = 0
    """The machine's turn in which the attempt's ticket was told; a stream that ended later may have swallowed it."""
    failures: dict[str, int] = field(default_factory=dict)
    """How often each donor failed it."""
    wanted_donor: str = ""
    cancelled: bool = False


@dataclass(slots=True)
class Member:
    """One worker as the coordinator knows it; survives its process for the sake of its name."""

    ref: WorkerRef
    hello: coordinator_pb2.Hello
    attached_at: float
    attached_turn: int = 0
    alive: bool = True
    last_seen: float = 0.0
    lost_at: float = 0.0
    said_goodbye: bool = False
    held: Version = NO_VERSION
    fingerprint: bytes = b""
    standing: Standing = Standing.QUEUED
    why: str = ""
    """A ticket's reason: fresh, behind, resync, diverged."""
    since: float = 0.0
    """When ``standing`` began."""
    advertisement: coordinator_pb2.Advertisement = field(default_factory=coordinator_pb2.Advertisement)
    advertised_at: float | None = None
    poisoned_in_a_row: int = 0
    """Advertisements since the last that was not poisoned, or since a recovery."""
    progress_at: float = 0.0
    """When ``inner_step`` last changed, or the member became ready."""
    began_late_at: Version = NO_VERSION
    """The version whose phase it started in the middle of."""
    stalled: bool = False
    suspected_at: float | None = None
    """Blamed for a failed epoch, and silent since."""
    transfer: Transfer | None = None
    postponed: coordinator_pb2.RecoveryRequest | None = None
    """Asked while a step that only it may hold was not sealed yet."""
    asked_for_checkpoint_at: float | None = None
    has_no_checkpoint: bool = False
    last_no_donor: coordinator_pb2.NoDonor | None = None
    """What it was told last, so that the same is not told twice."""
    lost_reason: str = ""
    ended_attempts: dict[tuple[str, int], bool] = field(default_factory=dict)
    """Attempts whose report was taken, and whether they succeeded: the same report again is no news."""
    voter: Voter = field(init=False)
    """The process's name in votes and rosters."""

    def __post_init__(self) -> None:
        self.voter = (self.ref.worker_id, self.ref.incarnation)

    @property
    def worker_id(self) -> str:
        return self.ref.worker_id

    @property
    def data_host(self) -> str:
        return self.hello.data_hosts[0] if self.hello.data_hosts else ""

    @property
    def poisoned(self) -> bool:
        """Whether it said so twice running: one advertisement may be older than the report of a recovery."""
        return self.poisoned_in_a_row > 1

    def stand(self, standing: Standing, now: float, why: str = "") -> None:
        """Change what the worker's state is to the run; the same again keeps its time."""
        if self.standing is not standing or self.why != why:
            self.since = now
            if standing in (Standing.READY, Standing.APPLIED):
                self.progress_at = now
                self.stalled = False
        self.standing, self.why = standing, why

    def stall_limit(self, policy: RunPolicy) -> float:
        """Seconds without progress after which the trainer counts as stalled."""
        return max(policy.stall_after_seconds, 10.0 * self.seconds_per_inner_step)

    @property
    def seconds_per_inner_step(self) -> float:
        """As announced; zero: unknown, or nothing that a step can take."""
        told = self.advertisement.seconds_per_inner_step
        return told if 0.0 < told < MAX_STEP_SECONDS else 0.0

    @property
    def phase_seconds(self) -> float:
        """As announced: inner steps of a phase, times what one takes; zero: unknown."""
        return self.advertisement.inner_steps_per_phase * self.seconds_per_inner_step


def refusal(hello: coordinator_pb2.Hello, policy: RunPolicy, record: HistoryRecord) -> RecoveryError | None:
    """Return why a worker may not attach at all, or None."""
    name = hello.worker.worker_id
    if hello.protocol != PROTOCOL:
        return RunRefused(
            f"worker {name} speaks protocol {hello.protocol}, this coordinator {PROTOCOL}: install one release on both"
        )
    if hello.run_id != policy.run_id:
        return RunRefused(
            f"worker {name} belongs to run {hello.run_id!r}, this coordinator serves {policy.run_id!r}: correct the "
            "worker's run id or its coordinator address"
        )
    if hello.worker.local_rank != 0:
        return RunRefused(
            f"local rank {hello.worker.local_rank} of worker {name} attached: only local rank 0 speaks for a worker"
        )
    if policy.strict_numerics and record.numerics_id and hello.numerics_id != record.numerics_id:
        return RunRefused(
            f"worker {name} computes as {hello.numerics_id!r}, the run as {record.numerics_id!r}: their results would "
            f"differ in the last bits and every fingerprint with them. {_numerics_remedy(record.numerics_id)}"
        )
    if record.layout_digest and hello.layout_digest != record.layout_digest:
        return LayoutMismatch(
            f"worker {name} has layout {hello.layout_digest.hex()[:16] or 'none'}, the run has "
            f"{record.layout_digest.hex()[:16]}: start it with the run's model, optimizers, schedulers, parts, "
            "gradient_codec and bucket_bytes"
        )
    return None


def refusal_of_phase(
    hello: coordinator_pb2.Hello, policy: RunPolicy, members: Iterable[Member]
) -> RecoveryError | None:
    """Return why a worker whose phases have another number of inner steps may not attach, or None.

    Its weight in the average says how much of its own phase it did: for another phase that is another unit. The run's
    number is the coordinator's; if that was told none, the live members'. So all may stop, and go on with another.
    """
    mine, name = hello.inner_steps_per_phase, hello.worker.worker_id
    wanted, whose = policy.inner_steps_per_phase, "this run's coordinator was told"
    for member in members:
        if not wanted and member.alive and member.worker_id != name:
            wanted, whose = member.hello.inner_steps_per_phase, f"worker {member.worker_id} takes"
    if not mine or not wanted or mine == wanted:
        return None
    return RunRefused(
        f"worker {name} takes {mine} inner steps in a phase, {whose} {wanted}: start it with "
        f"inner_steps_per_phase={wanted}"
    )


def _numerics_remedy(numerics_id: str) -> str:
    software, _, capability = numerics_id.rpartition("/")
    if not software:
        return "Install the same torch release for the same kind of device"
    return (
        f"Install {software.split('/')[0]}, on the same kind of device, and set "
        f"ATEN_CPU_CAPABILITY={capability.lower()} on workers whose processor can do more"
    )


def is_foreign(record: HistoryRecord, held: Version, voter: Voter) -> bool:
    """Return whether ``held`` is a version that this coordinator's history cannot contain."""
    if held == NO_VERSION:
        return False
    if record.sealed == NO_VERSION:
        # Only who was told to begin a lineage, and whose report was not sealed, can hold anything of it.
        begun = record.begun(held.lineage)
        return begun is None or (begun.worker_id, begun.incarnation) != voter or begun.version != held
    return held.lineage > record.newest_lineage or (
        held.lineage == record.committed.lineage and held > record.committed
    )


def placed(record: HistoryRecord, member: Member, *, beginning: Voter | None) -> tuple[Standing, str]:
    """Return a worker's standing, and the reason of the ticket that it needs, from what it holds alone.

    Neither its arrival time nor how high its step is gives it any authority: only versions that this coordinator
    committed or sealed do, and only with their fingerprint.

    Args:
        record: The history.
        member: The worker.
        beginning: The process that is beginning a lineage; None: nobody is.
    """
    held = member.held
    behind = "fresh" if held == NO_VERSION else "behind"
    if member.voter == beginning:
        return Standing.ORIGIN, ""
    if is_foreign(record, held, member.voter):
        return Standing.FOREIGN, ""
    if beginning is not None:
        return Standing.QUEUED, behind
    if record.sealed == NO_VERSION:
        return Standing.AWAITING, ""
    if member.poisoned:
        # Without a version it never had a state: what it fetches is not whole yet.
        return Standing.QUEUED, "diverged" if held != NO_VERSION else behind
    if held == record.committed:
        if not member.fingerprint:
            return Standing.APPLYING, ""  # its digest pass has not ended
        if record.committed > record.sealed:
            return Standing.APPLIED, ""
        return (
            (Standing.READY, "") if member.fingerprint == record.sealed_fingerprint else (Standing.QUEUED, "diverged")
        )
    if held.next() == record.committed and may_apply(record, member, record.committed_epoch):
        return Standing.APPLYING, ""
    return Standing.QUEUED, behind


def may_apply(record: HistoryRecord, member: Member, epoch: int) -> bool:
    """Return whether this very process voted for what ``epoch`` committed, so that it holds the average."""
    found = record.epochs.get(epoch)
    return found is not None and found.verdict == COMMITTED and member.voter in found.voters


def held_of(hello: coordinator_pb2.Hello) -> Version:
    """Return the version that a hello says the worker holds."""
    return from_proto(hello.held) if hello.HasField("held") else NO_VERSION
