"""A whole transfer in one thread: the real machines and the real chunk memory, a simulated network, a chosen schedule.

Every queue between the parties keeps its order; which queue moves next is chosen by the test. Faults are applied to
messages on lanes, and donors can be killed, frozen or pushed over their outer step at any step of the schedule.

The simulation itself checks what must hold at every moment: no two receives are posted into the same destination byte,
and a receive is posted before its bytes are asked for.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery.errors import DonorLost, RecoveryError
from recovery.events import Event
from recovery.protocol import donor_io, joiner_io
from recovery.protocol.chunk_memory import ChunkMemory
from recovery.protocol.donor import DonorConfig, DonorMachine
from recovery.protocol.joiner import JoinerMachine
from recovery.protocol.joiner_config import JoinerConfig
from recovery.protocol.ledger import ChunkLedger
from recovery.protocol.ports import OUTER, PRIVATE, Attempt, DonorPeer, Role
from recovery.protocol.spool import ChunkSpool
from recovery.state.manifest import manifest_digest
from recovery.types import TransferId
from tests.support.memory_donor import HOST, RUN, Destinations, MemoryLease, MemorySnapshots, worker

Fault = Callable[["SimulatedDonor", donor_io.Send, torch.Tensor], torch.Tensor | None]
"""Takes a message's bytes; returns what arrives instead (the same, damaged or shorter), or None to lose it."""

STEP_SECONDS = 0.0001


def no_fault(donor: SimulatedDonor, send: donor_io.Send, data: torch.Tensor) -> torch.Tensor | None:
    del donor, send
    return data


@dataclass
class SimulatedDonor:
    """One donor: its machine, its leases, its queues."""

    snapshots: MemorySnapshots
    machine: DonorMachine
    leases: dict[Role, MemoryLease] = field(default_factory=dict)
    inbox: deque[donor_io.DonorEvent] = field(default_factory=deque)
    to_joiner: deque[DonorLetter] = field(default_factory=deque)
    lanes: list[deque[tuple[donor_io.Send, torch.Tensor, bool]]] = field(default_factory=list)
    link_asked_by: set[str] = field(default_factory=set)
    receives: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    alive: bool = True
    frozen: bool = False
    dropped: bool = False
    finished: donor_io.Finish | None = None
    live: dict[int, Role] = field(default_factory=dict)
    sent_bytes: int = 0

    @property
    def name(self) -> str:
        return str(worker(self.snapshots.name))


class Simulation:
    """Runs one attempt to its end.

    Args:
        snapshots: What each donor lends, in the ticket's order; the first is asked for private parts.
        config: The joiner's.
        destinations: The joiner's memory, kept across simulations of one transfer.
        ledger: Likewise.
        fault: What becomes of messages.
        choose: Returns a number below its argument: which queue moves next.
        want_private: Whether private parts are asked for.
        rates: Bytes per second that were measured of donors before, by name.
        round_trip_seconds: Of every donor; None: not measured.
    """

    def __init__(
        self,
        snapshots: Sequence[MemorySnapshots],
        *,
        config: JoinerConfig | None = None,
        destinations: Destinations | None = None,
        ledger: ChunkLedger | None = None,
        spool: ChunkSpool | None = None,
        fault: Fault = no_fault,
        choose: Callable[[int], int] = lambda count: 0,
        want_private: bool = True,
        rates: Mapping[str, float] | None = None,
        round_trip_seconds: float | None = None,
    ) -> None:
        self.now = 1000.0
        self.destinations = destinations or Destinations()
        self.ledger = ledger if ledger is not None else ChunkLedger()
        self.memory = ChunkMemory(self.ledger, spool)
        self.fault = fault
        self.events: list[Event] = []
        self.result: RecoveryError | str | None = None
        self.num_steps = 0
        self.at_step: dict[int, Callable[[], None]] = {}
        self._choose = choose
        self._config = config or JoinerConfig()
        self._inbox: deque[joiner_io.JoinerEvent] = deque()
        self._work: deque[joiner_io.JoinerAction] = deque()
        self._posted: dict[tuple[int, int], tuple[str, int]] = {}
        self._bounced: set[int] = set()
        scopes = itertools.count()
        donors = [
            SimulatedDonor(each, DonorMachine(DonorConfig(data_host=HOST), f"sim/{next(scopes)}")) for each in snapshots
        ]
        self.donors = {donor.name: donor for donor in donors}
        first = snapshots[0]
        self.attempt = Attempt(
            run_id=RUN,
            transfer_id=TransferId("t1"),
            number=1,
            version=first.version,
            fingerprint=first.outer_manifest.fingerprint,
            token=b"",
            joiner=worker("joiner"),
            layout_digest=b"l" * 32,
            data_host=HOST,
            donors=tuple(
                DonorPeer(
                    worker=worker(each.name),
                    private_parts=each is first,
                    measured_rate=(rates or {}).get(each.name, 0.0),
                    round_trip_seconds=round_trip_seconds,
                )
                for each in snapshots
            ),
            want_private=want_private,
        )
        self.joiner = JoinerMachine(self.attempt, self._config)

    # Running

    def run(self, max_steps: int = 20_000) -> RecoveryError | str:
        """Run to the end; return "done" or the error. Time stands still only while something can move."""
        self._carry_out(self.joiner.start(self.now))
        for donor in self.donors.values():
            donor.machine.start(self.now)
        while self.result is None:
            self.num_steps += 1
            assert self.num_steps < max_steps, f"no end after {max_steps} steps: {self.joiner.waits_for()}"
            if (act := self.at_step.get(self.num_steps)) is not None:
                act()
            moves = self._moves()
            if moves:
                self.now += STEP_SECONDS
                moves[self._choose(len(moves))]()
            else:
                self.now += 0.5
            if not moves or self.num_steps % 16 == 0:
                self._inbox.append(joiner_io.Tick({}))
                for donor in self.donors.values():
                    if donor.alive and not donor.frozen and donor.finished is None:
                        self._serve(donor, donor.machine.handle(donor_io.Tick(donor.sent_bytes), self.now))
        while self._work:  # the session finishes checks that were asked for, too
            self._check()
        return self.result

    def kill(self, name: str) -> None:
        """End a donor's process: its stream and its sockets break."""
        donor = self.donors[name]
        if donor.alive:
            donor.alive = False
            donor.to_joiner.clear()
            donor.lanes = [deque() for _ in donor.lanes]
            if not donor.dropped:
                self._inbox.append(joiner_io.Ended(name, DonorLost(f"{name} was killed")))

    def freeze(self, name: str) -> None:
        """Stop a donor without breaking anything."""
        self.donors[name].frozen = True

    def land(self, name: str, tag: int, data: torch.Tensor) -> None:
        """Deliver bytes to a receive whose message a fault kept back."""
        donor = self.donors[name]
        into, pull_id = self._end_receive(donor, tag)
        into[: data.numel()].copy_(data)
        self._inbox.append(joiner_io.Arrived(name, pull_id))

    def outer_step(self, name: str, change: Callable[[], None]) -> None:
        """Let a donor's guard close the live views, then change the memory that training overwrites."""
        donor = self.donors[name]
        for role, lease in donor.leases.items():
            lease.close_views()
            void = tuple(sorted(pull for pull, of in donor.live.items() if of == role))
            donor.live = {pull: of for pull, of in donor.live.items() if of != role}
            if void:
                donor.inbox.append(donor_io.ViewsClosed(role, void))
        change()

    def _moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        if self._inbox:
            moves.append(self._hear)
        if self._work:
            moves.append(self._check)
        for donor in self.donors.values():
            if not donor.alive or donor.frozen:
                continue
            if donor.inbox:
                moves.append(lambda donor=donor: self._donor_moves(donor))  # type: ignore[misc]
            if donor.to_joiner and not donor.dropped:
                moves.append(lambda donor=donor: self._letter_arrives(donor))  # type: ignore[misc]
            for lane in range(len(donor.lanes)):
                # A message moves only when the joiner has posted its receive, as over gloo.
                if donor.lanes[lane] and donor.lanes[lane][0][0].tag in donor.receives:
                    moves.append(lambda donor=donor, lane=lane: self._message_moves(donor, lane))  # type: ignore[misc]
        return moves

    # The joiner's side

    def _hear(self) -> None:
        self._carry_out(self.joiner.handle(self._inbox.popleft(), self.now))

    def _carry_out(self, actions: list[joiner_io.JoinerAction]) -> None:
        for action in actions:
            match action:
                case joiner_io.Dial(peer):
                    if self.donors[peer.name].alive:
                        self._inbox.append(joiner_io.Dialled(peer.name))
                    else:
                        self._inbox.append(joiner_io.Ended(peer.name, DonorLost("nobody answers")))
                case joiner_io.Say(name, letter):
                    self._say(self.donors[name], letter)
                case joiner_io.OpenLink(name, _, lanes):
                    self._open_link(self.donors[name], "joiner", lanes)
                case joiner_io.Prepare(role, manifest):
                    destinations = self.destinations(role, manifest)
                    viewable, candidates = self.memory.prepare(role, manifest, destinations, delta=self._config.delta)
                    self._inbox.append(joiner_io.Prepared(role, viewable, candidates))
                case joiner_io.Post():
                    self._post(action)
                case joiner_io.Fork(flight, twin, key, direct):
                    self.memory.fork(flight, twin, key, direct=direct)
                    self._bounced.add(twin)
                case joiner_io.Check() | joiner_io.Write() | joiner_io.Probe():
                    self._work.append(action)
                case joiner_io.Forget(flight):
                    if flight in self._bounced:
                        self._bounced.discard(flight)
                    self.memory.close_flight(flight)
                case joiner_io.Drop(name, reason):
                    self._drop(self.donors[name], reason)
                case joiner_io.Emit(event):
                    self.events.append(event)
                case joiner_io.Finish():
                    self.result = "done"
                case joiner_io.Fail(error):
                    self.result = error

    def _say(self, donor: SimulatedDonor, letter: JoinerLetter) -> None:
        for pull in letter.pull.pulls:
            tag = pull.lane + len(donor.lanes) * pull.pull_id
            assert tag in donor.receives, "bytes were asked for before their receive was posted"
        if donor.alive:
            copy = JoinerLetter()
            copy.ParseFromString(letter.SerializeToString())
            donor.inbox.append(donor_io.Heard(copy))

    def _post(self, post: joiner_io.Post) -> None:
        donor = self.donors[post.donor]
        memory = self.memory.open_flight(post.flight, post.key, direct=post.direct)
        if not post.direct and post.flight not in self._bounced:
            self._bounced.add(post.flight)
            memory.fill_(0xEE)
        for pull in post.pulls:
            into = memory[pull.offset : pull.offset + pull.num_bytes]
            start = into.data_ptr()
            for (begin, end), who in self._posted.items():
                assert end <= start or start + pull.num_bytes <= begin, f"two receives into one byte: {who} and {post}"
            assert pull.tag not in donor.receives, "a tag is in use"
            donor.receives[pull.tag] = (into, pull.pull_id)
            self._posted[start, start + pull.num_bytes] = (donor.name, pull.pull_id)

    def _end_receive(self, donor: SimulatedDonor, tag: int) -> tuple[torch.Tensor, int]:
        into, pull_id = donor.receives.pop(tag)
        del self._posted[into.data_ptr(), into.data_ptr() + into.numel()]
        return into, pull_id

    def _drop(self, donor: SimulatedDonor, reason: str) -> None:
        donor.dropped = True
        for tag in list(donor.receives):
            into, _ = self._end_receive(donor, tag)
            into.fill_(0xDD)  # whatever came of a broken receive
        if donor.alive:
            donor.inbox.append(donor_io.Ended(DonorLost(f"the joiner left: {reason}")))
        self._inbox.append(joiner_io.Quiet(donor.name))

    def _check(self) -> None:
        match self._work.popleft():
            case joiner_io.Check(flight, key, write):
                self._inbox.append(joiner_io.Checked(flight, *self.memory.check(flight, key, write=write)))
            case joiner_io.Write(flight, key):
                self.memory.write(flight, key)
                self._inbox.append(joiner_io.Written(flight))
            case joiner_io.Probe(key):
                self._inbox.append(joiner_io.Probed(key, self.memory.probe(key)))

    # The donors' side

    def _donor_moves(self, donor: SimulatedDonor) -> None:
        self._serve(donor, donor.machine.handle(donor.inbox.popleft(), self.now))

    def _serve(self, donor: SimulatedDonor, actions: list[donor_io.DonorAction]) -> None:
        for action in actions:
            match action:
                case donor_io.Say(letter):
                    donor.to_joiner.append(letter)
                case donor_io.Admit(_, version):
                    try:
                        self._lend(donor, OUTER, donor.snapshots.lease_outer(version, "joiner"))
                    except RecoveryError as error:
                        donor.inbox.append(donor_io.NotLent(OUTER, error))
                case donor_io.Capture(not_before):
                    self._lend(donor, PRIVATE, donor.snapshots.lease_private("joiner", not_before).result())
                case donor_io.OpenLink(_, lanes):
                    self._open_link(donor, "donor", lanes)
                case donor_io.Send():
                    reading = donor.leases[action.role].read(action.part, action.offset, action.num_bytes)
                    if reading.live:
                        donor.live[action.pull_id] = action.role
                    donor.lanes[action.lane].append((action, reading.data, reading.live))
                case donor_io.Acknowledge(key):
                    donor.leases[key.role].acknowledge(key.part, key.chunk)
                case donor_io.Recheck(key):
                    intact = donor.leases[key.role].recheck(key.part, key.chunk)
                    donor.inbox.append(donor_io.Rechecked(key, intact))
                case donor_io.Finish():
                    donor.finished = action
                    if not donor.dropped:
                        donor.to_joiner.append(DonorLetter())  # the stream's end, behind what was said
                case donor_io.CancelSends():
                    pass

    def _lend(self, donor: SimulatedDonor, role: Role, lease: MemoryLease) -> None:
        donor.leases[role] = lease
        encoded = lease.manifest_bytes
        donor.inbox.append(donor_io.Lent(role, lease.manifest, encoded, manifest_digest(encoded), False))

    def _open_link(self, donor: SimulatedDonor, who: str, lanes: int) -> None:
        donor.link_asked_by.add(who)
        if len(donor.link_asked_by) == 2:
            donor.lanes = [deque() for _ in range(lanes)]
            donor.inbox.append(donor_io.LinkOpened())
            self._inbox.append(joiner_io.LinkOpened(donor.name, lanes))

    def _letter_arrives(self, donor: SimulatedDonor) -> None:
        letter = donor.to_joiner.popleft()
        if letter.WhichOneof("kind") is None:
            assert donor.finished is not None
            self._inbox.append(joiner_io.Ended(donor.name, DonorLost("the donor closed the conversation")))
        else:
            self._inbox.append(joiner_io.Heard(donor.name, letter))

    def _message_moves(self, donor: SimulatedDonor, lane: int) -> None:
        send, data, _ = donor.lanes[lane].popleft()
        arrives = self.fault(donor, send, data)
        donor.live.pop(send.pull_id, None)
        donor.sent_bytes += send.num_bytes
        donor.inbox.append(donor_io.Sent(send.pull_id))
        if arrives is None:
            return
        into, pull_id = self._end_receive(donor, send.tag)
        into[: arrives.numel()].copy_(arrives)
        self._inbox.append(joiner_io.Arrived(donor.name, pull_id))
