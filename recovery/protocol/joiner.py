"""The joiner's side of a transfer as a machine without IO: events in, actions out.

It opens a conversation with every donor at once, takes the first good outer manifest as the reference, pulls replicated
chunks from all donors that lend the same, then the private parts from one donor. ``recovery.protocol.joiner_session``
carries the actions out.
"""

from __future__ import annotations

from collections.abc import Iterable

from protos.recovery.v1 import peer_pb2
from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery.errors import DonorBusy, DonorLost, DonorRefused, ManifestRejected, NoDonorLeft, RecoveryError
from recovery.protocol.chunk_table import ChunkTable
from recovery.protocol.joiner_config import JoinerConfig
from recovery.protocol.joiner_donors import Donor, Phase, private_donor
from recovery.protocol.joiner_events import donor_failed, progress
from recovery.protocol.joiner_io import (
    Arrived,
    Checked,
    Dial,
    Dialled,
    Drop,
    Ended,
    Fail,
    Finish,
    Heard,
    JoinerAction,
    JoinerEvent,
    LinkOpened,
    OpenLink,
    Prepare,
    Prepared,
    Probed,
    Quiet,
    Say,
    Tick,
    Written,
)
from recovery.protocol.joiner_pulls import Pulls
from recovery.protocol.lent_manifest import check_manifest, same_content
from recovery.protocol.letters import error_of, open_message, version_message
from recovery.protocol.manifest_pieces import ManifestAssembler
from recovery.protocol.planner import choose_lanes
from recovery.protocol.ports import PRIVATE, Attempt
from recovery.protocol.rate import RateMeter
from recovery.state.manifest import Manifest
from recovery.transport.link import MAX_LANES

_ACKNOWLEDGED_TOGETHER = 8


class JoinerMachine:
    """Decides what the joiner says, posts and checks. Not thread-safe; time comes as an argument.

    Args:
        attempt: What the ticket orders.
        config: How to go about it.
        sealing_key: This end's public key, if donors must seal what they send; empty: they need not.

    Attributes:
        failures: Donors that were dropped, with the reason.
        first: The manifest of what is lent first, that everything was pulled by, once there is one.
        private: The private manifest that was asked for after it, once there is one.
    """

    def __init__(self, attempt: Attempt, config: JoinerConfig, sealing_key: bytes = b"") -> None:
        self._attempt = attempt
        self._config = config
        self._sealing_key = sealing_key
        self._donors = {peer.name: Donor(peer, meter=RateMeter(peer.measured_rate)) for peer in attempt.donors}
        self._pulls = Pulls(attempt, self._donors, config.planner, copied=bool(sealing_key))
        self._private_donor: str | None = None
        self._over = False
        self._reported_at: float | None = None
        self.failures: dict[str, RecoveryError] = {}
        self.first: Manifest | None = None
        self.private: Manifest | None = None

    # What others want to know

    @property
    def payload_bytes(self) -> int:
        """Bytes that arrived over links, whatever became of them."""
        return self._pulls.payload_bytes

    @property
    def reused_bytes(self) -> int:
        """Bytes that were in place before this attempt."""
        return sum(table.reused_bytes for table in self._pulls.tables.values())

    @property
    def verified_bytes(self) -> int:
        return sum(table.done_bytes for table in self._pulls.tables.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of the manifests seen so far."""
        return sum(table.total_bytes for table in self._pulls.tables.values())

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
                return self._pulls.arrived(self._donors[name], pull_id, now)
            case Checked(number, good, written):
                return self._pulls.checked(number, good=good, written=written)
            case Written(number):
                return self._pulls.written(number)
            case Prepared(role, viewable, candidates):
                return self._pulls.prepared(role, viewable, candidates)
            case Probed(key, present):
                self._pulls.probed(key, present=present)
                return []
            case Tick(moved):
                return self._tick(dict(moved), now)

    def _dialled(self, donor: Donor, round_trip: float | None, now: float) -> list[JoinerAction]:
        if donor.phase is not Phase.DIALLING:
            return []
        donor.phase = Phase.OPENING
        donor.progress_at = now
        measured = round_trip if round_trip is not None else donor.peer.round_trip_seconds
        donor.round_trip_seconds = measured or 0.0
        lanes = self._config.lanes or choose_lanes(measured, bbr=self._config.bbr)
        letter = open_message(self._attempt, donor.peer.worker, lanes, self._sealing_key)
        return [Say(donor.name, JoinerLetter(open=letter))]

    def _heard(self, donor: Donor, letter: DonorLetter, now: float) -> list[JoinerAction]:
        if not donor.alive:
            return []
        donor.progress_at = now
        try:
            match letter.WhichOneof("kind"):
                case "opened":
                    return self._opened(donor, letter.opened)
                case "refused":
                    retry = letter.refused.retry_after.ToTimedelta().total_seconds()
                    return self._lose(donor, error_of(donor.name, letter.refused.failure, retry))
                case "manifest":
                    return self._manifest_piece(donor, letter.manifest)
                case "closed":
                    self._pulls.declared_void(donor.name, letter.closed.void_pull_ids)
                    return []
                case "answer":
                    actions, error = self._pulls.answered(donor, letter.answer)
                    return actions if error is None else actions + self._lose(donor, error)
                case "pull_refused":
                    return self._lose(donor, error_of(donor.name, letter.pull_refused.failure))
                case "goodbye":
                    return self._lose(donor, error_of(donor.name, letter.goodbye.failure))
                case other:
                    return self._lose(donor, DonorRefused(f"{donor.name} sent an unexpected letter ({other})"))
        except ManifestRejected as error:
            return self._lose(donor, error)

    def _opened(self, donor: Donor, opened: peer_pb2.Opened) -> list[JoinerAction]:
        if donor.phase is not Phase.OPENING or not 1 <= opened.lanes <= MAX_LANES:
            raise ManifestRejected(f"{donor.name} answered out of order, or with {opened.lanes} lanes")
        if self._sealing_key and not opened.sealing_key:
            error = DonorRefused(f"{donor.name} does not seal its payload, and this worker asks it to")
            return self._lose(donor, error)
        donor.phase = Phase.MANIFEST
        donor.assembler = ManifestAssembler(
            self._attempt.first, num_bytes=opened.manifest_bytes, digest=opened.manifest_digest
        )
        donor.lane_bytes = [0] * opened.lanes
        far_key = opened.sealing_key if self._sealing_key else b""
        return [OpenLink(donor.name, opened.scope, opened.lanes, far_key)]

    def _manifest_piece(self, donor: Donor, piece: peer_pb2.ManifestPiece) -> list[JoinerAction]:
        first = piece.role == self._attempt.first
        assembler = donor.assembler if first else donor.private_assembler
        if assembler is None:
            raise ManifestRejected(f"{donor.name} sent a manifest that was not asked for")
        whole = assembler.add(piece)
        if whole is None:
            return []
        _, manifest = whole
        check_manifest(self._attempt, donor.name, piece.role, manifest)
        if not first:
            donor.private_assembler = None
            self.private = manifest
            self._pulls.tables[PRIVATE] = ChunkTable(PRIVATE, manifest)
            return [Prepare(PRIVATE, manifest)]
        donor.assembler = None
        donor.phase = Phase.READY
        if self.first is None:
            return self._take_as_reference(manifest)
        if same_content(manifest, self.first):
            return []
        # One of the two is wrong, and only the bytes will show which: this one is kept until the others have failed.
        donor.phase = Phase.DISPUTING
        donor.disputed = manifest
        error = ManifestRejected(
            f"{donor.name} lends {self._attempt.version} with other content than {self.first.worker}, "
            "under the same fingerprint"
        )
        self.failures[donor.name] = error
        return [donor_failed(self._attempt, donor.name, error)]

    def _take_as_reference(self, manifest: Manifest) -> list[JoinerAction]:
        """Pull what is lent first by this manifest from now on."""
        self.first = manifest
        role = self._attempt.first
        self._pulls.tables[role] = ChunkTable(role, manifest)
        return [Prepare(role, manifest)]

    def _linked(
        self, donor: Donor, lanes: int, endpoints: tuple[str, ...], round_trip: float | None, now: float
    ) -> list[JoinerAction]:
        if not donor.alive:
            return []
        donor.link_up(lanes, now)
        if round_trip is not None:
            donor.round_trip_seconds = round_trip
        ready = peer_pb2.LanesReady(local_endpoints=endpoints)
        return [Say(donor.name, JoinerLetter(lanes_ready=ready))]

    # Losing donors

    def _lose(self, donor: Donor, error: RecoveryError | None, reason: str = "") -> list[JoinerAction]:
        """Drop a donor; without an error it did nothing wrong."""
        if not donor.alive:
            return []
        donor.phase = Phase.LOST
        name = donor.name
        actions: list[JoinerAction] = []
        if error is not None:
            self.failures[name] = error
            actions.append(donor_failed(self._attempt, donor.name, error))
        actions += self._pulls.no_answers_of(name)
        return [*actions, Drop(name, reason or str(error))]

    def _quiet(self, donor: Donor) -> list[JoinerAction]:
        donor.phase = Phase.GONE
        if self._private_donor == donor.name:
            self._private_donor = None
        return self._pulls.lost(donor.name)

    def _tick(self, moved: dict[str, int], now: float) -> list[JoinerAction]:
        actions: list[JoinerAction] = []
        for name, count in moved.items():
            donor = self._donors[name]
            if count > donor.moved:
                donor.moved, donor.progress_at = count, now
        for donor in self._donors.values():
            owed, limit = donor.owed(self._config, self._attempt.first, complaint=self._pulls.has_complaint(donor.name))
            if not owed:
                continue
            silent = now - donor.progress_at
            if silent > limit:
                error = DonorLost(f"{donor.name}: no progress for {silent:.1f} s while it owed {owed}")
                actions += self._lose(donor, error)
        actions += self._pulls.acknowledge(self._private_donor)
        if self._reported_at is None or now - self._reported_at >= 1.0:
            self._reported_at = now
            rate = sum(rate for rate, _ in self.rates(now).values())
            actions.append(progress(self._attempt, self.verified_bytes, self.total_bytes, rate))
        return actions

    # Going on

    def _move_on(self, now: float) -> list[JoinerAction]:
        pulls = self._pulls
        enough = len(pulls.unacknowledged) >= _ACKNOWLEDGED_TOGETHER
        actions = pulls.acknowledge(self._private_donor) if enough else []
        first = pulls.tables.get(self._attempt.first)
        if first is not None and not first.complete and first.quiet:
            actions += self._settle_dispute()
            first = pulls.tables[self._attempt.first]
        if first is not None and not first.complete:
            actions += self._ask(first, [donor for donor in self._donors.values() if donor.serving], now)
        if first is not None and first.complete:
            actions += self._private_parts(now) if self._attempt.want_private else self._finish()
        if self._over:
            return actions
        # What is being checked may be the last that was missing.
        if all(donor.phase is Phase.GONE for donor in self._donors.values()) and pulls.quiet:
            return actions + self._fail(self._nobody_left())
        return actions

    def _settle_dispute(self) -> list[JoinerAction]:
        """If every donor of the reference has failed, go on with a donor that lends other content."""
        standing = [donor for donor in self._donors.values() if donor.alive and donor.phase is not Phase.DISPUTING]
        disputing = [
            (donor, donor.disputed) for donor in self._donors.values() if donor.disputed is not None and donor.alive
        ]
        if standing or not disputing:
            return []
        manifest = disputing[0][1]
        for donor, other in disputing:
            if same_content(other, manifest):
                donor.phase, donor.disputed = Phase.READY, None
                self.failures.pop(donor.name, None)
        self._pulls.unacknowledged.clear()
        # What is in place and has the same digest is found again when the destinations are probed.
        return self._pulls.tables[self._attempt.first].abandon() + self._take_as_reference(manifest)

    def _private_parts(self, now: float) -> list[JoinerAction]:
        pulls = self._pulls
        table = pulls.tables.get(PRIVATE)
        if self._private_donor is not None:
            if table is not None and table.complete:
                return self._finish()
            return self._ask(table, [self._donors[self._private_donor]], now) if table is not None else []
        if table is not None and not table.quiet:
            return []  # bytes of the lost donor's cut are still being checked
        # Another cut replaces what the lost donor lent; equal chunks are found again by their digests.
        actions = table.abandon() if table is not None else []
        pulls.tables.pop(PRIVATE, None)
        donor = private_donor(self._donors.values(), now)
        if donor is None:
            return actions
        self._private_donor = donor.name
        # What was verified of a lost donor's cut says nothing to this one.
        pulls.unacknowledged = [key for key in pulls.unacknowledged if key.role != PRIVATE]
        donor.progress_at = now
        donor.private_assembler = ManifestAssembler(PRIVATE)
        want = peer_pb2.WantPrivate(not_before=version_message(self._attempt.version))
        return [*actions, Say(donor.name, JoinerLetter(want_private=want))]

    def _ask(self, table: ChunkTable, donors: list[Donor], now: float) -> list[JoinerAction]:
        if not table.any_wanted and (blockers := table.blockers()):
            actions: list[JoinerAction] = []
            for name in blockers:
                actions += self._lose(self._donors[name], None, "others were faster")
            return actions
        return self._pulls.ask(table, donors, now)

    def _finish(self) -> list[JoinerAction]:
        self._over = True
        goodbye = JoinerLetter(goodbye=peer_pb2.JoinerGoodbye(done=True, reason="everything is verified"))
        told = [name for name, donor in self._donors.items() if donor.alive and donor.phase is not Phase.DIALLING]
        return [*(Say(name, goodbye) for name in told), Finish()]

    def _fail(self, error: RecoveryError) -> list[JoinerAction]:
        self._over = True
        return [Fail(error)]

    def _nobody_left(self) -> RecoveryError:
        attempt = self._attempt
        lines = "; ".join(f"{name}: {error.kind}: {error}" for name, error in self.failures.items())
        busy = [error.retry_after_seconds for error in self.failures.values() if isinstance(error, DonorBusy)]
        if busy and len(busy) == len(self.failures):
            return DonorBusy(f"transfer {attempt.transfer_id}: every donor is busy: {lines}", min(busy))
        return NoDonorLeft(
            f"transfer {attempt.transfer_id}: no donor of {attempt.version} is left "
            f"({self.verified_bytes} of {self.total_bytes or 'unknown'} bytes are verified and kept): {lines}"
        )
