"""What moves between a simulated world's processes beside the coordinator's letters: averages and transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.recovery.v1 import coordinator_pb2
from recovery.control.wire import from_proto
from tests.protocol.sim_oracle import mix
from tests.protocol.sim_worker import AVERAGING, RESTORING, Process

if TYPE_CHECKING:
    from tests.protocol.sim_world import World


class DataPlanes:
    """Collectives and conversations of one world; whoever dies or freezes breaks those that it is part of."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.groups: dict[tuple[int, int], set[str]] = {}
        self.corrupt_next: set[str] = set()
        """Workers whose next average is damaged."""

    def averaging(self, process: Process, roster: coordinator_pb2.Roster) -> None:
        """A member enters the collective; complete once all have."""
        era_epoch = (self.world.oracle.era, roster.epoch)
        entered = self.groups.setdefault(era_epoch, set())
        entered.add(process.ref.incarnation)
        incarnations = [member.worker.incarnation for member in roster.members]
        if not entered.issuperset(incarnations):
            return
        digest = mix(b"average", str(era_epoch).encode(), *(name.encode() for name in incarnations))
        for member in roster.members:
            found = self.world.processes.get(member.worker.worker_id)
            if found is not None and found.ref.incarnation == member.worker.incarnation:
                self._complete_later(found, roster, digest, found.task)

    def _complete_later(self, process: Process, roster: coordinator_pb2.Roster, digest: bytes, task: int) -> None:
        def due() -> None:
            if not process.alive or process.task != task or process.mode != AVERAGING:
                return
            if process.frozen:
                self.world.after(0.5, due)
                return
            broken = any(self._is_gone(member.worker.worker_id, member.worker.incarnation) for member in roster.members)
            if broken and self.world.random.random() < 0.5:
                return  # it was waiting for the dead one's last bytes
            if process.name in self.corrupt_next:
                self.corrupt_next.discard(process.name)
                self.world.struck["corrupt-average"] += 1
                self.world.say(f"corrupt average of {process.name}")
                process.averaged(mix(digest, b"corrupt"))
            else:
                process.averaged(digest)

        self.world.after(self.world.random.uniform(0.01, 0.2), due)

    def _is_gone(self, name: str, incarnation: str) -> bool:
        process = self.world.processes.get(name)
        return process is None or not process.alive or process.frozen or process.ref.incarnation != incarnation

    def others_notice(self, dead: Process) -> None:
        for process in self.world.processes.values():
            if process is None or process.mode != AVERAGING or process.roster is None or not process.alive:
                continue
            if any(member.worker.incarnation == dead.ref.incarnation for member in process.roster.members):
                process.later(process.task, self.world.random.uniform(0.02, 0.5), "_fail_averaging")

    def suspect(self, process: Process) -> str:
        """Return whom a member blames for a collective that does not end."""
        if process.roster is None:
            return ""
        entered = self.groups.get((self.world.oracle.era, process.roster.epoch), set())
        for member in process.roster.members:
            if member.worker.worker_id != process.name and (
                member.worker.incarnation not in entered
                or self._is_gone(member.worker.worker_id, member.worker.incarnation)
            ):
                return member.worker.worker_id
        return ""

    def transfer(self, joiner: Process, ticket: coordinator_pb2.Ticket, task: int) -> None:
        """Move a state, as its donor lends it now; a donor that dies meanwhile fails it."""
        version = from_proto(ticket.version)
        sources: list[tuple[Process, bytes]] = []
        for donor in ticket.donors:
            process = self.world.processes.get(donor.worker.worker_id)
            if process is not None and process.ref.incarnation == donor.worker.incarnation and process.alive:
                value = process.lent.get(version)
                if value is not None and process.mode != RESTORING:
                    sources.append((process, value))

        def due() -> None:
            if not joiner.alive or joiner.task != task:
                return
            if joiner.frozen:
                self.world.after(0.5, due)
                return
            good = [(process, value) for process, value in sources if process.alive and not process.frozen]
            names = [donor.worker.worker_id for donor in ticket.donors]
            right = [process.name for process, value in good if value == ticket.fingerprint]
            joiner.restored(ticket, ticket.fingerprint if right else b"", [name for name in names if name not in right])

        self.world.after(self.world.random.uniform(0.05, 1.5), due)
