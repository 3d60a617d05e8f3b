"""The donor's side of a conversation as a machine without IO: it lends, answers and judges; it believes nothing.

::

    AWAITING_OPEN -> ADMITTING -> SERVING -> OVER
"""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from protos.recovery.v1 import peer_pb2
from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery.errors import (
    BadConfiguration,
    DonorBusy,
    DonorLost,
    DonorMemoryChanged,
    DonorRefused,
    RecoveryError,
    RunRefused,
)
from recovery.protocol.donor_io import (
    Acknowledge,
    Admit,
    CancelSends,
    Capture,
    DonorAction,
    DonorEvent,
    Ended,
    Finish,
    Heard,
    Lent,
    LinkOpened,
    NotLent,
    OpenLink,
    Recheck,
    Rechecked,
    Say,
    Send,
    Sent,
    Skipped,
    Stopped,
    Tick,
    Unreadable,
    ViewsClosed,
)
from recovery.protocol.letters import PROTOCOL, chunk_message, failure_message
from recovery.protocol.manifest_pieces import cut_manifest
from recovery.protocol.planner import ChunkKey, choose_lanes
from recovery.protocol.ports import JOURNAL, OUTER, PRIVATE, SCALARS, Role
from recovery.state.manifest import Manifest
from recovery.transport.link import MAX_LANES, lane_tag
from recovery.types import Version


@dataclass(frozen=True, kw_only=True, slots=True)
class DonorConfig:
    """How a donor behaves towards one joiner.

    Attributes:
        data_host: Interface address that its groups bind and advertise.
        max_lanes: Most sockets for one joiner.
        max_pulls: Most pulls that one joiner may have open.
        max_pulled_bytes: Most bytes that one joiner may have asked for and not got.
        progress_seconds: A joiner that takes nothing of what it asked for for this long is given up.
        open_seconds: A stream without ``Open`` ends after this.
        grace_seconds: How long a lost joiner's lease is kept; told to the joiner.
        seal: Refuse joiners that do not ask for sealed payloads. Those that ask get them either way.
    """

    data_host: str
    max_lanes: int = MAX_LANES
    max_pulls: int = 8192
    max_pulled_bytes: int = 1 << 30
    progress_seconds: float = 10.0
    open_seconds: float = 10.0
    grace_seconds: float = 60.0
    seal: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_lanes <= MAX_LANES:
            raise BadConfiguration(f"{self.max_lanes} lanes are not possible: 1 to {MAX_LANES}")
        if min(self.progress_seconds, self.open_seconds) <= 0 or self.grace_seconds < 0:
            raise BadConfiguration("the donor's deadlines must be positive and its grace time not negative")


class _Phase(enum.Enum):
    AWAITING_OPEN = "awaiting open"
    ADMITTING = "admitting"
    SERVING = "serving"
    OVER = "over"


class DonorMachine:
    """Decides what the donor says, sends and lends to one joiner. Not thread-safe; time comes as an argument.

    Args:
        config: Limits.
        scope: Where the two groups meet; unique to this conversation.
        sealing_key: This end's public key, for joiners that ask for sealed payloads.
    """

    def __init__(self, config: DonorConfig, scope: str, sealing_key: bytes = b"") -> None:
        self._config = config
        self._scope = scope
        self._sealing_key = sealing_key
        self._far_key = b""
        self._phase = _Phase.AWAITING_OPEN
        self._version = Version(0, 0)
        self._first = OUTER
        self._lanes = 0
        self._manifests: dict[Role, Manifest] = {}
        self._chunk_ends: dict[tuple[Role, int], list[int]] = {}
        self._capturing = False
        self._last_pull_id = 0
        self._open_pulls: dict[int, int] = {}
        self._open_bytes = 0
        self._linked = False
        self._waiting_for_link: list[Send] = []
        self._void: set[int] = set()
        self._rechecking: set[ChunkKey] = set()
        self._moved = 0
        self._progress_at = 0.0
        self.joiner = ""
        self.sent_bytes = 0

    def start(self, now: float) -> list[DonorAction]:
        """Begin; called once, before any event."""
        self._progress_at = now
        return []

    def handle(self, event: DonorEvent, now: float) -> list[DonorAction]:
        """Take one event and return what to do, in order."""
        if self._phase is _Phase.OVER:
            return []
        match event:
            case Heard(letter):
                try:
                    return self._heard(letter, now)
                except RecoveryError as error:
                    return self._end(error)
            case Lent():
                return self._lent(event)
            case NotLent(role, error):
                if role == self._first:
                    return self._refuse(error)
                return self._end(error)
            case LinkOpened():
                self._linked = True
                self._progress_at = now
                waiting, self._waiting_for_link = self._waiting_for_link, []
                return list(waiting)
            case Sent(pull_id):
                num_bytes = self._open_pulls.pop(pull_id, 0)
                self._open_bytes -= num_bytes
                self.sent_bytes += num_bytes
                self._progress_at = now
                return []
            case Skipped(pull_id):
                self._open_bytes -= self._open_pulls.pop(pull_id, 0)
                return []
            case Stopped(error):
                return self._end(error)
            case Unreadable(pull_id, error):
                self._open_bytes -= self._open_pulls.pop(pull_id, 0)
                refused = peer_pb2.PullRefused(pull_ids=[pull_id], failure=failure_message(error))
                return [Say(DonorLetter(pull_refused=refused)), *self._end(error)]
            case ViewsClosed(role, pull_ids):
                self._void.update(pull_ids)
                version = self._manifests[role].cut.version
                closed = peer_pb2.Closed(void_pull_ids=pull_ids)
                closed.version.lineage, closed.version.outer_step = version.lineage, version.outer_step
                return [Say(DonorLetter(closed=closed))]
            case Rechecked(key, intact):
                return self._rechecked(key, intact)
            case Ended(error):
                self._phase = _Phase.OVER
                return [Finish(error, grace=True)]
            case Tick(moved):
                return self._tick(moved, now)

    def _heard(self, letter: JoinerLetter, now: float) -> list[DonorAction]:
        kind = letter.WhichOneof("kind")
        if self._phase is _Phase.AWAITING_OPEN:
            if kind != "open":
                raise DonorRefused(f"the first letter must be Open, not {kind}")
            return self._open(letter.open)
        match kind:
            case "goodbye":
                self._phase = _Phase.OVER
                if letter.goodbye.done:
                    return [Finish()]
                return [Finish(DonorLost(f"{self.joiner} left: {letter.goodbye.reason}"), grace=True)]
            case "lanes_ready":
                return []
            case "pull" if self._phase is _Phase.SERVING:
                return self._pull(letter.pull, now)
            case "acknowledge" if self._phase is _Phase.SERVING:
                return [Acknowledge(self._known_chunk(chunk)) for chunk in letter.acknowledge.chunks]
            case "complaint" if self._phase is _Phase.SERVING:
                return self._complaint(letter.complaint)
            case "cancel":
                pull_ids = frozenset(letter.cancel.pull_ids)
                return [CancelSends(pull_ids)]
            case "want_private" if self._phase is _Phase.SERVING and self._first == OUTER and not self._capturing:
                self._capturing = True
                wanted = letter.want_private.not_before
                return [Capture(max(self._version, Version(wanted.lineage, wanted.outer_step)))]
            case _:
                raise DonorRefused(f"{self.joiner} sent {kind} while the donor was {self._phase.value}")

    def _open(self, letter: peer_pb2.Open) -> list[DonorAction]:
        if letter.protocol != PROTOCOL:
            raise RunRefused(f"the joiner speaks protocol {letter.protocol}, this donor {PROTOCOL}: use one release")
        self._phase = _Phase.ADMITTING
        self.joiner = letter.joiner.worker_id
        self._version = Version(letter.version.lineage, letter.version.outer_step)
        self._first = letter.lends or OUTER
        if self._first not in (OUTER, PRIVATE, JOURNAL, SCALARS):
            raise DonorRefused(f"{self.joiner} asks for manifest role {self._first}, which this donor does not know")
        if self._config.seal and not letter.sealing_key:
            raise DonorRefused(
                f"{self.joiner} does not ask for sealed payloads, and this run's are: "
                "set seal_payloads, certificate and authority alike on all workers"
            )
        self._far_key = letter.sealing_key
        wished = letter.lanes or choose_lanes(None, bbr=False)
        self._lanes = max(1, min(wished, self._config.max_lanes))
        return [Admit(letter, self._version, self._first)]

    def _lent(self, lent: Lent) -> list[DonorAction]:
        self._manifests[lent.role] = lent.manifest
        for index, part in enumerate(lent.manifest.parts):
            self._chunk_ends[lent.role, index] = [chunk.offset + chunk.num_bytes for chunk in part.chunks]
        actions: list[DonorAction] = []
        if lent.role == self._first:
            self._phase = _Phase.SERVING
            opened = peer_pb2.Opened(
                lanes=self._lanes,
                scope=self._scope,
                data_host=self._config.data_host,
                manifest_digest=lent.digest,
                manifest_bytes=len(lent.encoded),
                grace=_duration(self._config.grace_seconds),
                until_boundary=lent.until_boundary,
                sealing_key=self._sealing_key if self._far_key else b"",
            )
            actions = [Say(DonorLetter(opened=opened)), OpenLink(self._scope, self._lanes, self._far_key)]
        else:
            self._capturing = False
        return actions + [Say(letter) for letter in cut_manifest(lent.role, lent.encoded)]

    def _pull(self, batch: peer_pb2.PullBatch, now: float) -> list[DonorAction]:
        actions: list[DonorAction] = []
        if not self._open_pulls:
            self._progress_at = now
        for pull in batch.pulls:
            manifest = self._manifests.get(pull.role)
            if pull.pull_id <= self._last_pull_id or pull.lane >= self._lanes:
                raise DonorRefused(f"{self.joiner}: pull {pull.pull_id} on lane {pull.lane} is out of order")
            if manifest is None or pull.part >= len(manifest.parts) or pull.num_bytes == 0:
                raise DonorRefused(f"{self.joiner}: pull {pull.pull_id} names part {pull.part}, which is not lent")
            # Inside one chunk: a pull that crosses chunks could not be judged by their digests.
            ends = self._chunk_ends[pull.role, pull.part]
            index = bisect.bisect_right(ends, pull.offset)
            if index >= len(ends) or pull.offset + pull.num_bytes > ends[index]:
                raise DonorRefused(
                    f"{self.joiner}: pull {pull.pull_id} ({pull.num_bytes} bytes at {pull.offset}) leaves a chunk"
                )
            self._last_pull_id = pull.pull_id
            self._open_pulls[pull.pull_id] = pull.num_bytes
            self._open_bytes += pull.num_bytes
            tag = lane_tag(pull.lane, self._lanes, pull.pull_id)
            send = Send(pull.pull_id, pull.role, pull.part, pull.offset, pull.num_bytes, pull.lane, tag)
            (actions if self._linked else self._waiting_for_link).append(send)
        if len(self._open_pulls) > self._config.max_pulls or self._open_bytes > self._config.max_pulled_bytes:
            raise DonorRefused(
                f"{self.joiner} asked for {self._open_bytes} bytes in {len(self._open_pulls)} pulls at once; "
                f"at most {self._config.max_pulled_bytes} in {self._config.max_pulls} are served"
            )
        return actions

    def _known_chunk(self, chunk: peer_pb2.ChunkId) -> ChunkKey:
        if chunk.chunk >= len(self._chunk_ends.get((chunk.role, chunk.part), ())):
            raise DonorRefused(f"{self.joiner} names chunk {chunk.chunk} of part {chunk.part}, which is not lent")
        return ChunkKey(chunk.role, chunk.part, chunk.chunk)

    def _complaint(self, complaint: peer_pb2.Complaint) -> list[DonorAction]:
        key = self._known_chunk(complaint.chunk)
        if self._void.intersection(complaint.pull_ids):
            return [_answer(key, peer_pb2.BLAME_VOID)]
        if key in self._rechecking:
            return []
        self._rechecking.add(key)
        return [Recheck(key)]

    def _rechecked(self, key: ChunkKey, intact: bool) -> list[DonorAction]:
        self._rechecking.discard(key)
        if intact:
            return [_answer(key, peer_pb2.BLAME_LINK)]
        part = self._manifests[key.role].parts[key.part].name
        error = DonorMemoryChanged(
            f"chunk {key.chunk} of {part!r} in this donor's memory differs from its manifest: "
            "something wrote it round the guard"
        )
        return [_answer(key, peer_pb2.BLAME_MEMORY), *self._end(error)]

    def _tick(self, moved: int, now: float) -> list[DonorAction]:
        if moved > self._moved:
            self._moved, self._progress_at = moved, now
        if self._phase is _Phase.AWAITING_OPEN and now - self._progress_at > self._config.open_seconds:
            return self._end(DonorLost("no Open came on the stream"))
        if self._open_pulls and self._linked and now - self._progress_at > self._config.progress_seconds:
            self._phase = _Phase.OVER
            error = DonorLost(
                f"{self.joiner} took nothing for {now - self._progress_at:.1f} s of {self._open_bytes} bytes asked for"
            )
            goodbye = peer_pb2.DonorGoodbye(failure=failure_message(error))
            return [Say(DonorLetter(goodbye=goodbye)), Finish(error, grace=True)]
        return []

    def _refuse(self, error: RecoveryError) -> list[DonorAction]:
        self._phase = _Phase.OVER
        refused = peer_pb2.Refused(failure=failure_message(error))
        if isinstance(error, DonorBusy):
            refused.retry_after.CopyFrom(_duration(error.retry_after_seconds))
        return [Say(DonorLetter(refused=refused)), Finish(error)]

    def _end(self, error: RecoveryError) -> list[DonorAction]:
        if self._phase in (_Phase.AWAITING_OPEN, _Phase.ADMITTING):
            return self._refuse(error)
        self._phase = _Phase.OVER
        goodbye = peer_pb2.DonorGoodbye(failure=failure_message(error))
        return [Say(DonorLetter(goodbye=goodbye)), Finish(error)]


def _answer(key: ChunkKey, blame: peer_pb2.Blame.ValueType) -> Say:
    return Say(DonorLetter(answer=peer_pb2.ComplaintAnswer(chunk=chunk_message(key), blame=blame)))


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(int(seconds * 1_000_000))
    return duration
