"""Joiners of one worker's snapshots over real gloo sends: donor's sessions on one side, joiner's on the other.

Both ends are in this process, on threads of their own; only the letters do not travel over a network.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import cast

import blake3
import torch

from recovery.errors import DonorLost, RecoveryError
from recovery.events import ChunkRefetched, Recorder
from recovery.protocol.ports import DonorPeer, JoinerConversation, Role, SnapshotSource
from recovery.protocol.session import (
    OUTER,
    Attempt,
    ChunkLedger,
    DonorConfig,
    DonorSession,
    JoinerConfig,
    JoinerSession,
    PlannerConfig,
    RateLimiter,
)
from recovery.snapshot import Snapshots
from recovery.state.chunks import PartBytes
from recovery.state.manifest import Manifest
from recovery.transport.link import Link, Transfer
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK, open_gloo_link
from recovery.types import KIB, Incarnation, KeyValue, PartName, RunId, TransferId, Version, WorkerId, WorkerRef
from tests.support.memory_conversation import conversation_pair
from tests.support.memory_donor import HOST
from tests.unit.snapshot.reader import Temper

_PATIENT_SECONDS = 60.0


class SlowTransfer:
    """A receive that is posted when somebody waits for it, after a pause: until then the donor's send is under way."""

    def __init__(self, post: Callable[[], Transfer], pause: Callable[[], None]) -> None:
        self._post = post
        self._pause = pause

    def wait(self, timeout_seconds: float) -> None:
        self._pause()
        self._post().wait(timeout_seconds)


class SlowLink:
    """A joiner's end that takes nothing off the wire before its reader is ready for it."""

    def __init__(self, link: Link, pause: Callable[[threading.Event], None]) -> None:
        self._link = link
        self._pause = pause
        self._shut = threading.Event()
        self.lanes = link.lanes
        self.endpoints = link.endpoints
        self.bytes_moved = link.bytes_moved
        self.round_trip_seconds = link.round_trip_seconds
        self.send = link.send

    def receive(self, lane: int, tag: int, into: torch.Tensor) -> Transfer:
        if self._shut.is_set():
            raise DonorLost("the link was shut")
        return SlowTransfer(lambda: self._link.receive(lane, tag, into), lambda: self._pause(self._shut))

    def shut(self, reason: str) -> None:
        self._shut.set()
        self._link.shut(reason)

    def close(self) -> None:
        self._shut.set()
        self._link.close()


class CountingDonor(DonorSession):
    """Knows how many of its posted sends the guard found under way."""

    void_sends = 0

    def _views_closed(self, role: Role) -> int:
        found = super()._views_closed(role)
        self.void_sends += found
        return found


class LeavingLedger(ChunkLedger):
    """Calls back when it has so many chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.leave_at: int | None = None
        self.leave: Callable[[], None] = lambda: None

    def add(self, name: object) -> None:
        super().add(name)  # type: ignore[arg-type]
        if self.leave_at is not None and len(self) >= self.leave_at:
            self.leave_at = None
            self.leave()


class WireReader:
    """One joiner of ``snapshots``; ``receive`` runs one conversation to its end.

    Attributes:
        manifests: What was received whole, outer parts first.
        failures: Why the donor was left in the last conversation.
        had_manifest: Whether it had lent something by then.
        thawed: Cleared, this joiner takes nothing off the wire: what the donor has posted stays under way.
    """

    _scopes = itertools.count()

    def __init__(
        self, snapshots: Snapshots, donor: WorkerRef, run_id: RunId, layout_digest: bytes, holder: str, temper: Temper
    ) -> None:
        self._snapshots = snapshots
        self._donor = donor
        self._run_id = run_id
        self._layout_digest = layout_digest
        self._holder = holder
        self._temper = temper
        self._rng = random.Random(holder)
        self._ledger = LeavingLedger()
        self._memory: dict[str, torch.Tensor] = {}
        self._attempts = 0
        self._version: Version | None = None
        self._frozen = 0
        self._events = Recorder()
        self.manifests: list[Manifest] = []
        self.failures: dict[str, RecoveryError] = {}
        self.had_manifest = False
        self.thawed = threading.Event()
        self.thawed.set()
        self._donors: list[CountingDonor] = []

    def receive(self, version: Version, *, want_private: bool, leave_at: int | None = None) -> None:
        """Receive and verify everything; raises what a joiner's session raises.

        Args:
            version: Of the outer parts.
            want_private: And the private parts after them.
            leave_at: Break off once so many chunks are verified; what is verified is kept for the next call.
        """
        self._version = version
        self._attempts += 1
        peer = DonorPeer(worker=self._donor)
        serving: list[threading.Thread] = []

        def dial(asked: DonorPeer) -> JoinerConversation:
            mine, theirs = conversation_pair()
            donor = CountingDonor(
                theirs,
                cast(SnapshotSource, self._snapshots),
                scope=f"wire/{next(self._scopes)}",
                config=DonorConfig(data_host=HOST),
                admit=lambda letter: None,
                open_link=lambda *where: _link(DONOR_RANK, *where),
                limiter=RateLimiter(),
            )
            self._donors.append(donor)
            serving.append(threading.Thread(target=donor.run, name=f"donor of {self._holder}"))
            serving[-1].start()
            return mine

        session = JoinerSession(
            Attempt(
                run_id=self._run_id,
                transfer_id=TransferId(f"of-{self._holder}"),
                number=self._attempts,
                version=version,
                fingerprint=self._snapshots.manifest(version, _PATIENT_SECONDS).fingerprint,
                token=b"token",
                joiner=WorkerRef(WorkerId(self._holder), Incarnation("1")),
                layout_digest=self._layout_digest,
                data_host=HOST,
                donors=(peer,),
                want_private=want_private,
            ),
            # Pieces small enough that a chunk has several in flight; nobody is overtaken or given up for being slow.
            JoinerConfig(
                lanes=2,
                progress_seconds=_PATIENT_SECONDS,
                planner=PlannerConfig(overtake_seconds=_PATIENT_SECONDS, max_piece_bytes=512 * KIB),
            ),
            dial=dial,
            open_link=lambda *where: SlowLink(_link(JOINER_RANK, *where), self._pause),
            on_manifest=self._destination,
            events=self._events,
            ledger=self._ledger,
        )
        self._ledger.leave_at = leave_at
        self._ledger.leave = lambda: session.cancel("left")
        try:
            result = session.run()
        finally:
            self.failures = dict(session.machine.failures)
            self.had_manifest = session.machine.first is not None
            for thread in serving:
                thread.join()
        self.manifests = [result.first, *([] if result.private is None else [result.private])]

    @property
    def num_in_flight(self) -> int:
        """Sends of lent memory that the donor has under way in this conversation."""
        return sum(len(donor._live._pulls[OUTER]) for donor in self._donors)

    @property
    def void_sends(self) -> int:
        """Sends that were under way when the guard closed their version."""
        return sum(donor.void_sends for donor in self._donors)

    @property
    def blames(self) -> Counter[str]:
        """How often a chunk had to be fetched again, by what the donor said of it."""
        return Counter(event.blame for event in self._events.of(ChunkRefetched))

    def found(self, manifest: Manifest) -> dict[str, tuple[bytes, bytes]]:
        """Return what was received, in the form of ``trainee.reference``."""
        found = {}
        for part in manifest.parts:
            digest = blake3.blake3(self._memory[part.name].numpy().tobytes()).digest()
            found[str(part.name)] = (part.tree.SerializeToString(deterministic=True), digest)
        return found

    def _destination(self, role: int, manifest: Manifest) -> dict[PartName, PartBytes]:
        for part in manifest.parts:
            self._memory.setdefault(part.name, torch.zeros(part.num_bytes, dtype=torch.uint8))
        return {part.name: PartBytes([self._memory[part.name]]) for part in manifest.parts}

    def _pause(self, shut: threading.Event) -> None:
        """What this joiner does before it takes a piece off the wire."""
        while not self.thawed.wait(0.05) and not shut.is_set():
            pass
        if self._temper is Temper.SLOW:
            shut.wait(self._rng.random() * 0.003)
        elif self._temper is Temper.FREEZES and self._frozen < 2:  # once on each lane
            self._frozen += 1
            for _ in range(400):
                if self._snapshots.version != self._version or shut.wait(0.005):
                    break
            shut.wait(0.02)  # long enough for the outer step to overwrite what is being sent


def _link(rank: int, meeting: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> Link:
    return open_gloo_link(meeting, scope, rank=rank, host=host, lanes=lanes, timeout_seconds=30, cancelled=cancelled)
