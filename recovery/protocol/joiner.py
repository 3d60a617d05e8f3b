"""The joiner's side of a transfer as a machine without IO: events in, actions out.

It opens a conversation with every donor at once, takes the first good outer manifest as the reference, pulls replicated
chunks from all donors that lend the same, then the private parts from one donor. ``recovery.protocol.joiner_session``
carries the actions out.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.recovery.v1 import peer_pb2
from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery import events
from recovery.errors import (
    BadConfiguration,
    ChunkDamaged,
    DonorBusy,
    DonorLost,
    DonorMemoryChanged,
    DonorRefused,
    ManifestRejected,
    NoDonorLeft,
    RecoveryError,
)
from recovery.protocol.chunk_table import ChunkFlight, ChunkTable
from recovery.protocol.joiner_io import (
    Arrived,
    Checked,
    Dial,
    Dialled,
    Drop,
    Emit,
    Ended,
    Fail,
    Finish,
    Heard,
    JoinerAction,
    JoinerEvent,
    LinkOpened,
    OpenLink,
    Post,
    PostedPull,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Quiet,
    Say,
    Tick,
    Written,
)
from recovery.protocol.letters import PROTOCOL, error_of, version_message, worker_message
from recovery.protocol.manifest_pieces import ManifestAssembler
from recovery.protocol.planner import (
    Asking,
    ChunkKey,
    DonorView,
    Flight,
    PlannerConfig,
    choose_lanes,
    overtake,
    plan,
    window_bytes,
)
from recovery.protocol.ports import AT_A_CUT, JOURNAL, OUTER, PRIVATE, Attempt, DonorPeer, Role
from recovery.protocol.rate import RateMeter
from recovery.state.manifest import Manifest, PartSpec
from recovery.transport.link import MAX_LANES, lane_tag
from recovery.transport.sockets import permits
from recovery.types import PartClass

_DAMAGED_CHUNKS_ALLOWED = 1
_ACKNOWLEDGED_TOGETHER = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinerConfig:
    """How a joiner behaves.

    Attributes:
        progress_seconds: A donor that owes something and moves nothing for this long is dropped.
        private_seconds: How long a donor may take until its next inner-step boundary.
        lanes: Sockets to each donor; 0: by the path's round trip.
        bbr: Whether BBR may be used, as found on this machine if not given; few sockets are enough then.
        delta: Hash what the destination holds first and pull only what differs.
        seal: Take payload only from donors that seal it.
        planner: Sizes of pieces and windows.
    """

    progress_seconds: float = 10.0
    private_seconds: float = 600.0
    lanes: int = 0
    bbr: bool = field(default_factory=lambda: permits("bbr"))
    delta: bool = False
    seal: bool = False
    planner: PlannerConfig = field(default_factory=PlannerConfig)

    def __post_init__(self) -> None:
        if self.progress_seconds <= 0 or self.private_seconds < self.progress_seconds:
            raise BadConfiguration(
                f"deadlines of {self.progress_seconds} s (progress) and {self.private_seconds} s (private parts) "
                "are not possible: the first must be positive, the second not shorter"
            )
        if not 0 <= self.lanes <= MAX_LANES:
            raise BadConfiguration(f"{self.lanes} lanes are not possible: 0 (automatic) to {MAX_LANES}")


class _Phase(enum.Enum):
    DIALLING = "dialling"
    OPENING = "awaiting its answer"
    MANIFEST = "awaiting its manifest"
    READY = "serving"
    DISPUTING = "lending other content"
    LOST = "lost"
    GONE = "gone"


@dataclass(slots=True)
class _Donor:
    peer: DonorPeer
    phase: _Phase = _Phase.DIALLING
    meter: RateMeter = field(default_factory=RateMeter)
    round_trip_seconds: float = 0.0
    lane_bytes: list[int] = field(default_factory=list)
    lane_heard_at: list[float] = field(default_factory=list)
    lane_meters: list[RateMeter] = field(default_factory=list)
    linked: bool = False
    assembler: ManifestAssembler | None = None
    private_assembler: ManifestAssembler | None = None
    next_pull_id: int = 1
    num_damaged: int = 0
    moved: int = 0
    progress_at: float = 0.0
    arrived_bytes: int = 0
    disputed: Manifest | None = None

    @property
    def alive(self) -> bool:
        return self.phase not in (_Phase.LOST, _Phase.GONE)


class JoinerMachine:
    """Decides what the joiner says, posts and checks. Not thread-safe; time comes as an argument.

    Args:
        attempt: What the ticket orders.
        config: How to go about it.
        sealing_key: This end's public key, if donors must seal what they send; empty: they need not.

    Attributes:
        payload_bytes: Bytes that arrived over links, whatever became of them.
        failures: Donors that were dropped, with the reason.
        first: The manifest of what is lent first, that everything was pulled by, once there is one.
        private: The private manifest that was asked for after it, once there is one.
    """

    def __init__(self, attempt: Attempt, config: JoinerConfig, sealing_key: bytes = b"") -> None:
        self._attempt = attempt
        self._config = config
        self._sealing_key = sealing_key
        self._donors = {peer.name: _Donor(peer, meter=RateMeter(peer.measured_rate)) for peer in attempt.donors}
        self._tables: dict[Role, ChunkTable] = {}
        self._next_flight = 1
        self._private_donor: str | None = None
        self._unacknowledged: list[ChunkKey] = []
        self._over = False
        self._reported_at: float | None = None
        self.payload_bytes = 0
        self.failures: dict[str, RecoveryError] = {}
        self.first: Manifest | None = None
        self.private: Manifest | None = None

    # What others want to know

    @property
    def reused_bytes(self) -> int:
        """Bytes that were in place before this attempt."""
        return sum(table.reused_bytes for table in self._tables.values())

    @property
    def verified_bytes(self) -> int:
        return sum(table.done_bytes for table in self._tables.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of the manifests seen so far."""
        return sum(table.total_bytes for table in self._tables.values())

    def rates(self, now: float) -> dict[str, tuple[float, float]]:
        """Return each donor's measured bytes per second and round trip, where known."""
        return {
            name: (rate, donor.round_trip_seconds)
            for name, donor in self._donors.items()
            if (rate := donor.meter.rate(now)) > 0
        }

    def arrived_bytes(self) -> dict[str, int]:
        """Return the payload bytes that came from each donor."""
        return {name: donor.arrived_bytes for name, donor in self._donors.items()}

    def waits_for(self) -> str:
        """Return in words what the transfer waits for now."""
        return "; ".join(f"{name}: {donor.phase.value}" for name, donor in self._donors.items()) or "a donor"

    # Events

    def start(self, now: float) -> list[JoinerAction]:
        """Begin; called once, before any event."""
        for donor in self._donors.values():
            donor.progress_at = now
        if not self._donors:
            return self._fail(NoDonorLeft(f"transfer {self._attempt.transfer_id}: the ticket names no donor"))
        return [Dial(donor.peer) for donor in self._donors.values()]

    def handle(self, event: JoinerEvent, now: float) -> list[JoinerAction]:
        """Take one event and return what to do, in order."""
        return self.handle_all((event,), now)

    def handle_all(self, happened: Iterable[JoinerEvent], now: float) -> list[JoinerAction]:
        """Take events in their order and return what to do, in order; what to ask for is decided after the last."""
        if self._over:
            return []
        actions: list[JoinerAction] = []
        for event in happened:
            actions += self._handle(event, now)
        return actions + self._move_on(now)

    def _handle(self, event: JoinerEvent, now: float) -> list[JoinerAction]:
        match event:
            case Dialled(name, round_trip):
                return self._dialled(self._donors[name], round_trip, now)
            case Heard(name, letter):
                return self._heard(self._donors[name], letter, now)
            case LinkOpened(name, lanes, endpoints, round_trip):
                return self._linked(self._donors[name], lanes, endpoints, round_trip, now)
            case Ended(name, error):
                return self._lose(self._donors[name], error)
            case Quiet(name):
                return self._quiet(self._donors[name])
            case Arrived(name, pull_id):
                return self._arrived(self._donors[name], pull_id, now)
            case Checked(number, good, written):
                return self._checked(number, good, written)
            case Written(number):
                return self._written(number)
            case Prepared(role, viewable, candidates):
                return [Probe(key) for key in self._tables[role].prepare(viewable, candidates)]
            case Probed(key, present):
                table = self._tables[key.role]
                table.probed(key, present)
                self._note_done(table, key)
                return []
            case Tick(moved):
                return self._tick(dict(moved), now)

    def _dialled(self, donor: _Donor, round_trip: float | None, now: float) -> list[JoinerAction]:
        if donor.phase is not _Phase.DIALLING:
            return []
        donor.phase = _Phase.OPENING
        donor.progress_at = now
        measured = round_trip if round_trip is not None else donor.peer.round_trip_seconds
        donor.round_trip_seconds = measured or 0.0
        attempt = self._attempt
        letter = peer_pb2.Open(
            protocol=PROTOCOL,
            run_id=attempt.run_id,
            transfer_id=attempt.transfer_id,
            attempt=attempt.number,
            token=attempt.token,
            joiner=worker_message(attempt.joiner),
            donor=worker_message(donor.peer.worker),
            version=version_message(attempt.version),
            layout_digest=attempt.layout_digest,
            lanes=self._config.lanes or choose_lanes(measured, bbr=self._config.bbr),
            data_host=attempt.data_host,
            lends=attempt.first,
            sealing_key=self._sealing_key,
        )
        return [Say(donor.peer.name, JoinerLetter(open=letter))]

    def _heard(self, donor: _Donor, letter: DonorLetter, now: float) -> list[JoinerAction]:
        if not donor.alive:
            return []
        donor.progress_at = now
        try:
            match letter.WhichOneof("kind"):
                case "opened":
                    return self._opened(donor, letter.opened)
                case "refused":
                    retry = letter.refused.retry_after.ToTimedelta().total_seconds()
                    return self._lose(donor, error_of(donor.peer.name, letter.refused.failure, retry))
                case "manifest":
                    return self._manifest_piece(donor, letter.manifest)
                case "closed":
                    for pull_id in letter.closed.void_pull_ids:
                        for table in self._tables.values():
                            table.declare_void(donor.peer.name, pull_id)
                    return []
                case "answer":
                    return self._answered(donor, letter.answer)
                case "pull_refused":
                    return self._lose(donor, error_of(donor.peer.name, letter.pull_refused.failure))
                case "goodbye":
                    return self._lose(donor, error_of(donor.peer.name, letter.goodbye.failure))
                case other:
                    return self._lose(donor, DonorRefused(f"{donor.peer.name} sent an unexpected letter ({other})"))
        except ManifestRejected as error:
            return self._lose(donor, error)

    def _opened(self, donor: _Donor, opened: peer_pb2.Opened) -> list[JoinerAction]:
        if donor.phase is not _Phase.OPENING or not 1 <= opened.lanes <= MAX_LANES:
            raise ManifestRejected(f"{donor.peer.name} answered out of order, or with {opened.lanes} lanes")
        if self._sealing_key and not opened.sealing_key:
            error = DonorRefused(f"{donor.peer.name} does not seal its payload, and this worker asks it to")
            return self._lose(donor, error)
        donor.phase = _Phase.MANIFEST
        donor.assembler = ManifestAssembler(
            self._attempt.first, num_bytes=opened.manifest_bytes, digest=opened.manifest_digest
        )
        donor.lane_bytes = [0] * opened.lanes
        far_key = opened.sealing_key if self._sealing_key else b""
        return [OpenLink(donor.peer.name, opened.scope, opened.lanes, far_key)]

    def _manifest_piece(self, donor: _Donor, piece: peer_pb2.ManifestPiece) -> list[JoinerAction]:
        first = piece.role == self._attempt.first
        assembler = donor.assembler if first else donor.private_assembler
        if assembler is None:
            raise ManifestRejected(f"{donor.peer.name} sent a manifest that was not asked for")
        whole = assembler.add(piece)
        if whole is None:
            return []
        _, manifest = whole
        self._check_manifest(donor, piece.role, manifest)
        if not first:
            donor.private_assembler = None
            self.private = manifest
            self._tables[PRIVATE] = ChunkTable(PRIVATE, manifest)
            return [Prepare(PRIVATE, manifest)]
        donor.assembler = None
        donor.phase = _Phase.READY
        if self.first is None:
            self.first = manifest
            self._tables[piece.role] = ChunkTable(piece.role, manifest)
            return [Prepare(piece.role, manifest)]
        if [_content(part) for part in manifest.parts] == [_content(part) for part in self.first.parts]:
            return []
        # One of the two is wrong, and only the bytes will show which: this one is kept until the others have failed.
        donor.phase = _Phase.DISPUTING
        donor.disputed = manifest
        error = ManifestRejected(
            f"{donor.peer.name} lends {self._attempt.version} with other content than {self.first.worker}, "
            "under the same fingerprint"
        )
        self.failures[donor.peer.name] = error
        return [self._failed(donor, error)]

    def _failed(self, donor: _Donor, error: RecoveryError) -> Emit:
        return Emit(
            events.DonorFailed(
                worker_id=self._attempt.joiner.worker_id,
                transfer_id=self._attempt.transfer_id,
                donor=donor.peer.name,
                reason=f"{error.kind}: {error}",
            )
        )

    def _check_manifest(self, donor: _Donor, role: Role, manifest: Manifest) -> None:
        attempt = self._attempt
        name = donor.peer.name
        cut = manifest.cut.version
        if manifest.run_id != attempt.run_id:
            raise ManifestRejected(f"{name} lends a state of run {manifest.run_id!r}, not {attempt.run_id!r}")
        wanted_class = PartClass.PRIVATE_COPIED if role in AT_A_CUT else PartClass.REPLICATED
        for part in manifest.parts:
            if part.part_class is not wanted_class:
                raise ManifestRejected(f"{name} lists {part.name!r} ({part.part_class.value}) where it does not belong")
        if role == OUTER and (cut, manifest.fingerprint) != (attempt.version, attempt.fingerprint):
            raise ManifestRejected(
                f"{name} lends {cut} with fingerprint {manifest.fingerprint.hex()[:12]}; "
                f"wanted is {attempt.version} with {attempt.fingerprint.hex()[:12]}"
            )
        if role == JOURNAL and cut != attempt.version:
            raise ManifestRejected(f"{name} lends the journal of {cut}; wanted is {attempt.version}")
        if role in AT_A_CUT and (cut.lineage != attempt.version.lineage or cut < attempt.version):
            raise ManifestRejected(f"{name} lends private parts of {cut}; wanted is {attempt.version} or later")

    def _linked(
        self, donor: _Donor, lanes: int, endpoints: tuple[str, ...], round_trip: float | None, now: float
    ) -> list[JoinerAction]:
        if not donor.alive:
            return []
        donor.linked = True
        donor.progress_at = now
        donor.lane_bytes = [0] * lanes
        donor.lane_heard_at = [now] * lanes
        donor.lane_meters = [RateMeter() for _ in range(lanes)]
        if round_trip is not None:
            donor.round_trip_seconds = round_trip
        ready = peer_pb2.LanesReady(local_endpoints=endpoints)
        return [Say(donor.peer.name, JoinerLetter(lanes_ready=ready))]

    def _arrived(self, donor: _Donor, pull_id: int, now: float) -> list[JoinerAction]:
        for table in self._tables.values():
            landed = table.landed(donor.peer.name, pull_id)
            if landed is None:
                continue
            pull, actions = landed
            donor.progress_at = now
            donor.lane_bytes[pull.lane] -= pull.num_bytes
            donor.lane_heard_at[pull.lane] = now
            donor.lane_meters[pull.lane].add(now, pull.num_bytes)
            if not donor.lane_bytes[pull.lane]:
                donor.lane_meters[pull.lane].end(now)
            donor.arrived_bytes += pull.num_bytes
            donor.meter.add(now, pull.num_bytes)
            if not any(donor.lane_bytes):
                donor.meter.end(now)
            self.payload_bytes += pull.num_bytes
            return actions
        return []

    def _checked(self, number: int, good: bool, written: bool) -> list[JoinerAction]:
        table = self._table_of_flight(number)
        key = table.flight(number).key
        complaint, actions = table.checked(number, good, written)
        self._note_done(table, key)
        if complaint is None:
            return actions
        (name,) = complaint.contributors
        donor = self._donors[name]
        if not donor.alive:
            return actions + table.give_up(complaint)
        letter = peer_pb2.Complaint(chunk=_chunk_id(key), pull_ids=[pull_id for _, pull_id in complaint.pulls])
        return [*actions, Say(donor.peer.name, JoinerLetter(complaint=letter))]

    def _written(self, number: int) -> list[JoinerAction]:
        table = self._table_of_flight(number)
        key = table.flight(number).key
        actions = table.written(number)
        self._note_done(table, key)
        return actions

    def _note_done(self, table: ChunkTable, key: ChunkKey) -> None:
        """If the chunk is in place, the donors' guards need not save it for us: tell them, several at a time."""
        if table.entries[key].done:
            self._unacknowledged.append(key)

    def _acknowledge(self) -> list[JoinerAction]:
        keys, self._unacknowledged = self._unacknowledged, []
        actions: list[JoinerAction] = []
        for name, donor in self._donors.items():
            if donor.phase is not _Phase.READY:
                continue
            known = [_chunk_id(key) for key in keys if key.role == self._attempt.first or name == self._private_donor]
            if known:
                actions.append(Say(name, JoinerLetter(acknowledge=peer_pb2.Acknowledge(chunks=known))))
        return actions

    def _answered(self, donor: _Donor, answer: peer_pb2.ComplaintAnswer) -> list[JoinerAction]:
        key = ChunkKey(answer.chunk.role, answer.chunk.part, answer.chunk.chunk)
        table = self._tables.get(answer.chunk.role)
        flight = table.complaint(donor.peer.name, key) if table is not None else None
        if table is None or flight is None:
            return []
        entry = table.entries[key]
        blame = peer_pb2.Blame.Name(answer.blame).removeprefix("BLAME_").lower()
        actions: list[JoinerAction] = [
            Emit(
                events.ChunkRefetched(
                    worker_id=self._attempt.joiner.worker_id,
                    transfer_id=self._attempt.transfer_id,
                    part=entry.name.part,
                    chunk=key.chunk,
                    donor=donor.peer.name,
                    blame=blame,
                )
            )
        ]
        if answer.blame == peer_pb2.BLAME_VOID:
            return actions + table.give_up(flight)
        entry.bad.add(donor.peer.name)
        actions += table.give_up(flight)
        where = f"{entry.name.part} bytes {entry.name.offset} to {entry.name.offset + entry.name.num_bytes}"
        if answer.blame == peer_pb2.BLAME_MEMORY:
            error: RecoveryError = DonorMemoryChanged(
                f"{donor.peer.name}: {where} in its memory differ from its manifest: written round the guard"
            )
            return actions + self._lose(donor, error)
        donor.num_damaged += 1
        if donor.num_damaged > _DAMAGED_CHUNKS_ALLOWED:
            error = ChunkDamaged(f"{donor.peer.name}: {donor.num_damaged} chunks arrived damaged, the last was {where}")
            return actions + self._lose(donor, error)
        return actions

    # Losing donors

    def _lose(self, donor: _Donor, error: RecoveryError | None, reason: str = "") -> list[JoinerAction]:
        """Drop a donor; without an error it did nothing wrong."""
        if not donor.alive:
            return []
        donor.phase = _Phase.LOST
        name = donor.peer.name
        actions: list[JoinerAction] = []
        if error is not None:
            self.failures[name] = error
            actions.append(self._failed(donor, error))
        for table in self._tables.values():
            # Their receives have ended, so that nothing has to be waited for.
            for flight in table.complaints_to(name):
                actions += table.give_up(flight)
        return [*actions, Drop(name, reason or str(error))]

    def _quiet(self, donor: _Donor) -> list[JoinerAction]:
        donor.phase = _Phase.GONE
        actions: list[JoinerAction] = []
        for table in self._tables.values():
            actions += table.lost(donor.peer.name)
        if self._private_donor == donor.peer.name:
            self._private_donor = None
        return actions

    def _tick(self, moved: dict[str, int], now: float) -> list[JoinerAction]:
        actions: list[JoinerAction] = []
        for name, count in moved.items():
            donor = self._donors[name]
            if count > donor.moved:
                donor.moved, donor.progress_at = count, now
        for donor in self._donors.values():
            owed, limit = self._owed(donor)
            if not owed:
                continue
            silent = now - donor.progress_at
            if silent > limit:
                error = DonorLost(f"{donor.peer.name}: no progress for {silent:.1f} s while it owed {owed}")
                actions += self._lose(donor, error)
        actions += self._acknowledge()
        if self._reported_at is None or now - self._reported_at >= 1.0:
            self._reported_at = now
            actions.append(
                Emit(
                    events.TransferProgress(
                        worker_id=self._attempt.joiner.worker_id,
                        transfer_id=self._attempt.transfer_id,
                        verified_bytes=self.verified_bytes,
                        total_bytes=self.total_bytes,
                        bytes_per_second=sum(rate for rate, _ in self.rates(now).values()),
                    )
                )
            )
        return actions

    @property
    def _progress(self) -> float:
        return self._config.progress_seconds

    def _owed(self, donor: _Donor) -> tuple[str, float]:
        """Return what is awaited of a donor (empty: nothing) and for how long it may stand still."""
        name = donor.peer.name
        if donor.phase in (_Phase.OPENING, _Phase.MANIFEST):
            captured = donor.phase is _Phase.OPENING and self._attempt.first in AT_A_CUT
            limit = self._config.private_seconds if captured else self._progress
            return donor.phase.value.removeprefix("awaiting "), limit
        if donor.phase is not _Phase.READY:
            return "", self._progress  # dialling has its own deadline
        if any(donor.lane_bytes):
            return f"{sum(donor.lane_bytes)} bytes", self._progress
        if any(table.complaints_to(name) for table in self._tables.values()):
            return "an answer to a complaint", self._progress
        if donor.private_assembler is not None:
            return "its private parts", self._config.private_seconds
        return "", self._progress

    # Going on

    def _move_on(self, now: float) -> list[JoinerAction]:
        actions = self._acknowledge() if len(self._unacknowledged) >= _ACKNOWLEDGED_TOGETHER else []
        first = self._tables.get(self._attempt.first)
        if first is not None and not first.complete and first.quiet:
            actions += self._settle_dispute()
            first = self._tables[self._attempt.first]
        if first is not None and not first.complete:
            names = [name for name, donor in self._donors.items() if donor.phase is _Phase.READY and donor.linked]
            actions += self._ask(first, names, now)
        if first is not None and first.complete:
            actions += self._private_parts(now) if self._attempt.want_private else self._finish()
        if self._over:
            return actions
        if all(donor.phase is _Phase.GONE for donor in self._donors.values()) and all(
            table.quiet
            for table in self._tables.values()  # what is being checked may be the last that was missing
        ):
            return actions + self._fail(self._no_donor_left())
        return actions

    def _settle_dispute(self) -> list[JoinerAction]:
        """If every donor of the reference has failed, go on with a donor that lends other content."""
        standing = [donor for donor in self._donors.values() if donor.alive and donor.phase is not _Phase.DISPUTING]
        disputing = [
            (donor, donor.disputed) for donor in self._donors.values() if donor.disputed is not None and donor.alive
        ]
        if standing or not disputing:
            return []
        manifest = self.first = disputing[0][1]
        for donor, other in disputing:
            if [*map(_content, other.parts)] == [*map(_content, manifest.parts)]:
                donor.phase, donor.disputed = _Phase.READY, None
                self.failures.pop(donor.peer.name, None)
        self._unacknowledged.clear()
        # What is in place and has the same digest is found again when the destinations are probed.
        role = self._attempt.first
        actions = self._tables[role].abandon()
        self._tables[role] = ChunkTable(role, manifest)
        return [*actions, Prepare(role, manifest)]

    def _private_parts(self, now: float) -> list[JoinerAction]:
        table = self._tables.get(PRIVATE)
        if self._private_donor is not None:
            if table is not None and table.complete:
                return self._finish()
            return self._ask(table, [self._private_donor], now) if table is not None else []
        if table is not None and not table.quiet:
            return []  # bytes of the lost donor's cut are still being checked
        # Another cut replaces what the lost donor lent; equal chunks are found again by their digests.
        actions = table.abandon() if table is not None else []
        self._tables.pop(PRIVATE, None)
        ready = [donor for donor in self._donors.values() if donor.phase is _Phase.READY and donor.linked]
        opening = [donor for donor in self._donors.values() if donor.alive and donor not in ready]
        if any(donor.peer.private_parts for donor in opening):
            return actions  # the one that is meant to lend them is about to be ready
        if not ready:
            return actions
        donor = max(ready, key=lambda each: (each.peer.private_parts, each.meter.rate(now)))
        self._private_donor = donor.peer.name
        # What was verified of a lost donor's cut says nothing to this one.
        self._unacknowledged = [key for key in self._unacknowledged if key.role != PRIVATE]
        donor.progress_at = now
        donor.private_assembler = ManifestAssembler(PRIVATE)
        want = peer_pb2.WantPrivate(not_before=version_message(self._attempt.version))
        return [*actions, Say(donor.peer.name, JoinerLetter(want_private=want))]

    def _ask(self, table: ChunkTable, names: list[str], now: float) -> list[JoinerAction]:
        if not table.prepared:
            return []
        views = [self._view(self._donors[name], table, now) for name in names]
        if table.any_wanted:
            askings = plan(table.begun(), table.fresh(), table.wanted_bytes, views, self._config.planner)
            return self._send_askings(table, askings, views, now)
        actions: list[JoinerAction] = []
        blockers = table.blockers()
        if blockers:
            for name in blockers:
                actions += self._lose(self._donors[name], None, "others were faster")
            return actions
        expected = [self._expected(table, flight, now) for flight in table.flying()]
        flights = [flight for flight in expected if flight is not None]
        for number, donor in overtake(flights, views, self._config.planner):
            twin, forked = table.fork(table.flight(number), self._next_flight)
            self._next_flight += 1
            needs = [need for need in table.begun() if need.flight == twin.number]
            view = self._view(self._donors[donor], table, now)
            patient = dataclasses.replace(self._config.planner, min_window_bytes=self._config.planner.max_window_bytes)
            askings = plan(needs, (), twin.unasked_bytes, [dataclasses.replace(view, rate=0.0)], patient)
            actions += forked + self._send_askings(table, askings, views, now)
        return actions

    def _expected(self, table: ChunkTable, flight: ChunkFlight, now: float) -> Flight | None:
        entry = table.entries[flight.key]
        if len(entry.flights) > 1 or flight.alone:
            return None  # asked twice already, or not to be asked of two
        remaining = 0.0
        for (name, _), pull in flight.outstanding.items():
            donor = self._donors[name]
            silent = now - donor.lane_heard_at[pull.lane]
            lane_rate = donor.meter.rate(now) / len(donor.lane_bytes)
            # A lane that stands still is expected to go on doing so.
            due = donor.lane_bytes[pull.lane] / lane_rate if lane_rate > 0 else silent
            remaining = max(remaining, due, silent)
        return Flight(
            number=flight.number,
            missing_bytes=flight.missing_bytes,
            donors=flight.owed_by,
            own_lanes_help=not flight.direct,
            remaining_seconds=remaining,
        )

    def _send_askings(
        self, table: ChunkTable, askings: list[Asking], views: list[DonorView], now: float
    ) -> list[JoinerAction]:
        posts: list[Post] = []
        batches: dict[str, peer_pb2.PullBatch] = {}
        begun: dict[ChunkKey, ChunkFlight] = {}
        # What several donors, or several lanes far away, bring at the end comes into memory that nothing has to wait
        # for: whatever is late then is left behind.
        shared = len(views) > 1 or any(not view.near for view in views)
        end_bytes = sum(window_bytes(view, self._config.planner) for view in views) if shared else 0
        for asking in askings:
            donor = self._donors[asking.donor]
            lanes = len(donor.lane_bytes)
            flight = table.flight(asking.flight) if asking.flight else begun.get(asking.key)
            if flight is None:
                bounce = table.wanted_bytes <= end_bytes
                flight = table.take_off(self._next_flight, asking.key, asking.donor, bounce=bounce)
                begun[asking.key] = flight
                self._next_flight += 1
            batch = batches.setdefault(asking.donor, peer_pb2.PullBatch())
            if not any(donor.lane_bytes):
                donor.meter.begin(now)
                donor.progress_at = now
            if not donor.lane_bytes[asking.lane]:
                donor.lane_heard_at[asking.lane] = now
                donor.lane_meters[asking.lane].begin(now)
            pull_id = donor.next_pull_id
            donor.next_pull_id += 1
            donor.lane_bytes[asking.lane] += asking.span.num_bytes
            tag = lane_tag(asking.lane, lanes, pull_id)
            pull = PostedPull(pull_id, asking.span.offset, asking.span.num_bytes, asking.lane, tag)
            table.ask(flight, asking.donor, pull)
            batch.pulls.add(
                pull_id=pull_id,
                role=table.role,
                part=asking.key.part,
                offset=table.entries[asking.key].name.offset + asking.span.offset,
                num_bytes=asking.span.num_bytes,
                lane=asking.lane,
            )
            last = posts[-1] if posts else None
            if last is not None and (last.donor, last.flight) == (asking.donor, flight.number):
                posts[-1] = dataclasses.replace(last, pulls=(*last.pulls, pull))
            else:
                posts.append(Post(asking.donor, flight.number, asking.key, flight.direct, (pull,)))
        return [*posts, *(Say(name, JoinerLetter(pull=batch)) for name, batch in batches.items())]

    def _view(self, donor: _Donor, table: ChunkTable, now: float) -> DonorView:
        return DonorView(
            name=donor.peer.name,
            rate=donor.meter.rate(now),
            round_trip_seconds=donor.round_trip_seconds,
            lane_bytes=tuple(donor.lane_bytes),
            lane_rates=tuple(meter.rate(now) for meter in donor.lane_meters) if len(donor.lane_bytes) > 1 else (),
            lent_bytes=table.total_bytes,
            in_place=table.in_place and not self._sealing_key,
        )

    def _table_of_flight(self, number: int) -> ChunkTable:
        return next(table for table in self._tables.values() if table.has_flight(number))

    def _finish(self) -> list[JoinerAction]:
        self._over = True
        goodbye = JoinerLetter(goodbye=peer_pb2.JoinerGoodbye(done=True, reason="everything is verified"))
        told = [name for name, donor in self._donors.items() if donor.alive and donor.phase is not _Phase.DIALLING]
        return [*(Say(name, goodbye) for name in told), Finish()]

    def _fail(self, error: RecoveryError) -> list[JoinerAction]:
        self._over = True
        return [Fail(error)]

    def _no_donor_left(self) -> RecoveryError:
        lines = "; ".join(f"{name}: {error.kind}: {error}" for name, error in self.failures.items())
        busy = [error for error in self.failures.values() if isinstance(error, DonorBusy)]
        if busy and len(busy) == len(self.failures):
            wait = min(error.retry_after_seconds for error in busy)
            return DonorBusy(f"transfer {self._attempt.transfer_id}: every donor is busy: {lines}", wait)
        return NoDonorLeft(
            f"transfer {self._attempt.transfer_id}: no donor of {self._attempt.version} is left "
            f"({self.verified_bytes} of {self.total_bytes or 'unknown'} bytes are verified and kept): {lines}"
        )


def _content(part: PartSpec) -> tuple[object, ...]:
    """Return what two donors' replicated parts must have in common, byte for byte."""
    return (part.name, part.part_class, part.num_bytes, part.chunks)


def _chunk_id(key: ChunkKey) -> peer_pb2.ChunkId:
    return peer_pb2.ChunkId(role=key.role, part=key.part, chunk=key.chunk)
