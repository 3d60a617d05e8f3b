"""One end of real transfers in a process: ``python -m tests.support.transfer_process '<json>'``.

A donor lends real snapshots over gRPC letters and gloo links while its main thread trains; a joiner restores them into
real parameters and an optimizer. No coordinator: the test tells a joiner where its donors are. Says what happens as
JSON lines on standard output and obeys JSON lines on standard input, like ``worker_process``.

The plan: ``role`` ("donor" or "joiner"), ``name``, ``state`` (see ``transfer_state.Outer``), and

- donor: ``version`` (outer step that it stands at), ``rate`` (bytes a second), ``fault`` (see ``transfer_faults``),
  ``snapshots`` (fields of ``SnapshotConfig``);
- joiner: ``spool`` (a path), ``progress_seconds``, ``joiner`` and ``planner`` (fields of ``JoinerConfig`` and
  ``PlannerConfig``).

Commands to a donor: ``{"do": "step"}``: take an outer step and lend the next version, guarding the old one. To a
joiner: ``{"do": "attempt", "donors": [what each donor said when it was ready], "halt_at": share, "times": n}``: at this
share of the bytes verified it says ``halted`` and stands still until ``go_on``; ``times``: so often, forgetting
everything before each. To both: ``report``, ``reset_peak``, ``end``.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from recovery.clock import SystemClock
from recovery.control.peer_service import DonorConversation, PeerServer, dial
from recovery.control.security import SecurityConfig
from recovery.errors import RecoveryError
from recovery.events import ChunkRefetched, Event, GuardCopied
from recovery.protocol.carry_over import carry_over
from recovery.protocol.ports import Attempt, DonorPeer
from recovery.protocol.session import (
    ChunkLedger,
    ChunkSpool,
    DonorConfig,
    DonorSession,
    JoinerConfig,
    JoinerSession,
    PlannerConfig,
    RateLimiter,
    Role,
)
from recovery.snapshot import SnapshotConfig, Snapshots
from recovery.state import Manifest, PartBytes, Restoration, RestoreMode
from recovery.transport.link import Link, Transfer
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK, open_gloo_link
from recovery.types import (
    Address,
    Fingerprint,
    Incarnation,
    KeyValue,
    PartName,
    RunId,
    TransferId,
    Version,
    WorkerId,
    WorkerRef,
)
from tests.support.transfer_faults import faulty
from tests.support.transfer_state import Outer
from tests.support.worker_process import Voice

RUN = RunId("transfer-test")
HOST = "127.0.0.1"
PROGRESS_SECONDS = 20.0


_GRPC_THREADS = {"event_engine", "grpc_global_tim", "lifeguard"}
"""A pool that grows when the machine is busy, and shrinks when it likes."""


def report() -> dict[str, Any]:
    """Return what may pile up in a process: resident bytes, their peak, descriptors, threads but gRPC's pool."""
    tasks = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "rss": int(status["VmRSS"].split()[0]) * 1024,
        "peak": int(status["VmHWM"].split()[0]) * 1024,
        "descriptors": psutil.Process().num_fds(),
        "threads": len([task for task in tasks if task not in _GRPC_THREADS]),
        "names": sorted(thread.name for thread in threading.enumerate()),
    }


def warm() -> int:
    """Return resident bytes after everything was imported that an optimizer imports late."""
    Outer(8)
    return int(report()["rss"])


class Commands:
    """Lines of standard input, as a queue; the process ends with its test."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.go_on = threading.Event()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def _read(self) -> None:
        pending = b""
        while data := os.read(0, 65536):
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if command["do"] == "go_on":
                    self.go_on.set()
                else:
                    self.queue.put(command)
        os._exit(9)  # the test is gone


def answer_common(command: dict[str, Any], voice: Voice, now: dict[str, int], **fields: object) -> None:
    if command["do"] == "report":
        voice.say("report", **now, **fields)
    elif command["do"] == "reset_peak":
        Path("/proc/self/clear_refs").write_text("5")
        voice.say("reset", **report(), **fields)


def run_donor(plan: dict[str, Any], voice: Voice) -> None:
    commands = Commands()
    worker = WorkerRef(WorkerId(plan["name"]), Incarnation("i1"))
    before_state = warm()
    outer = Outer(**plan["state"])
    version = Version(1, int(plan.get("version", 1)))
    limiter = RateLimiter(plan.get("rate"))
    numbers = itertools.count()

    copied: list[int] = []

    def note(event: Event, /) -> None:
        if isinstance(event, GuardCopied):
            copied.append(event.copied_bytes)

    def open_link(store: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> Link:
        link = open_gloo_link(
            store, scope, rank=DONOR_RANK, host=host, lanes=lanes, timeout_seconds=PROGRESS_SECONDS, cancelled=cancelled
        )
        return faulty(link, plan["fault"], voice.say) if "fault" in plan else link

    def serve(conversation: DonorConversation) -> None:
        session = DonorSession(
            conversation,
            snapshots,
            scope=f"{plan['name']}/{os.getpid()}/{next(numbers)}",
            config=DonorConfig(data_host=HOST, progress_seconds=PROGRESS_SECONDS, grace_seconds=0.0),
            admit=lambda opening: None,
            open_link=open_link,
            limiter=limiter,
        )
        result = session.run()
        failure = "" if result.error is None else f"{result.error.kind}: {result.error}"
        voice.say("served", joiner=result.joiner, sent_bytes=result.sent_bytes, failure=failure)

    snapshots = Snapshots(
        outer.state,
        SnapshotConfig(grace_seconds=0.0, **plan.get("snapshots", {})),
        run_id=RUN,
        worker=worker,
        events=note,
        clock=SystemClock(),
    )
    snapshots.start()
    snapshots.publish(version)
    manifest = snapshots.manifest(version, 300.0)
    server = PeerServer(HOST, 0, serve, SecurityConfig(), run_id=RUN, worker=worker)
    server.start()
    voice.say(
        "ready",
        name=plan["name"],
        address=str(server.address),
        version=[version.lineage, version.outer_step],
        fingerprint=manifest.fingerprint.hex(),
        num_bytes=manifest.num_bytes,
        num_chunks=manifest.num_chunks,
        before_state=before_state,
    )
    # Training: what a donor's main thread does must go on whatever a joiner does.
    steps = 0
    weight = torch.eye(64)
    while True:
        weight = (weight @ weight).clamp(-1, 1)
        steps += 1
        snapshots.inner_boundary()
        try:
            command = commands.queue.get(timeout=0.01)
        except queue.Empty:
            continue
        if command["do"] == "end":
            break
        if command["do"] == "step":
            version = version.next()
            outer.step()
            snapshots.publish(version)
            manifest = snapshots.manifest(version, 300.0)
            named = {"version": [version.lineage, version.outer_step], "fingerprint": manifest.fingerprint.hex()}
            voice.say("stepped", **named, copied_bytes=copied.pop() if copied else 0)
            continue
        # Seen before the answer's own digest pass.
        vault_bytes, now = snapshots.vault.peak_bytes, report()
        answer_common(
            command,
            voice,
            now,
            steps=steps,
            vault_bytes=vault_bytes,
            intact=outer.fingerprint() == manifest.fingerprint.hex(),
        )
    server.close()
    snapshots.close()


class HaltingLedger(ChunkLedger):
    """Stands still at a number of verified bytes, on the thread that verifies."""

    def __init__(self, voice: Voice, commands: Commands) -> None:
        super().__init__()
        self._voice = voice
        self._commands = commands
        self.halt_at: int | None = None
        self.halted = False

    def stand(self) -> None:
        """While this halts, nothing more is asked for."""
        if self.halted:
            self._commands.go_on.wait()

    def add(self, name: Any) -> None:
        super().add(name)
        if self.halt_at is not None and self.num_bytes >= self.halt_at:
            self.halt_at = None
            self._commands.go_on.clear()
            self.halted = True
            self._voice.say("halted", verified_bytes=self.num_bytes)
            self._commands.go_on.wait()
            self.halted = False


class Standing:
    """A joiner's link that posts nothing while the ledger halts."""

    def __init__(self, link: Link, ledger: HaltingLedger) -> None:
        self._link = link
        self._ledger = ledger

    def receive(self, lane: int, tag: int, into: torch.Tensor) -> Transfer:
        self._ledger.stand()
        return self._link.receive(lane, tag, into)

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)


class Joiner:
    """Restores an outer state in place, attempt after attempt, as ``PeerSource`` does."""

    def __init__(self, plan: dict[str, Any], voice: Voice, commands: Commands) -> None:
        self.outer = Outer(**plan["state"])
        self.refetched: list[str] = []
        self._plan = plan
        self._voice = voice
        self._commands = commands
        self._ledger = HaltingLedger(voice, commands)
        self._restoration: Restoration | None = None
        self._halt_at = 0.0
        self._numbers = itertools.count(1)
        self._worker = WorkerRef(WorkerId(plan["name"]), Incarnation(str(os.getpid())))

    def attempt(self, donors: list[dict[str, Any]], halt_at: float = 0.0) -> None:
        """Run one attempt; say ``done`` or ``failed``."""
        self._halt_at = halt_at
        self.refetched = []
        spool = ChunkSpool(Path(self._plan["spool"])) if "spool" in self._plan else None
        if spool is not None:
            spool.start()
        planner = PlannerConfig(**self._plan.get("planner", {}))
        session = JoinerSession(
            self._order(donors),
            JoinerConfig(
                progress_seconds=float(self._plan.get("progress_seconds", PROGRESS_SECONDS)),
                planner=planner,
                **self._plan.get("joiner", {}),
            ),
            dial=lambda peer: dial(
                [Address.parse(address) for address in peer.addresses],
                SecurityConfig(),
                run_id=RUN,
                sender=self._worker,
                expected=peer.worker,
            ),
            open_link=self._open_link,
            on_manifest=self._on_manifest,
            events=self._note,
            ledger=self._ledger,
            spool=spool,
        )
        try:
            result = session.run()
        except RecoveryError as error:
            self._voice.say("failed", error=error.kind, message=str(error), payload_bytes=session.machine.payload_bytes)
            return
        finally:
            if spool is not None:
                spool.close()
        assert self._restoration is not None
        restored = self._restoration.commit()
        self._restoration = None
        self._voice.say(
            "done",
            payload_bytes=result.payload_bytes,
            reused_bytes=result.reused_bytes,
            num_bytes=restored.num_bytes,
            fingerprint=self.outer.fingerprint(),
            failures={name: f"{error.kind}: {error}" for name, error in result.failures.items()},
            refetched=self.refetched,
        )

    def forget(self) -> None:
        """Hold nothing any more, so that everything is fetched again."""
        self._ledger = HaltingLedger(self._voice, self._commands)
        self.outer.clear()

    def _note(self, event: Event, /) -> None:
        if isinstance(event, ChunkRefetched):
            self.refetched.append(f"{event.donor}: {event.blame}")

    def _order(self, donors: list[dict[str, Any]]) -> Attempt:
        number = next(self._numbers)
        return Attempt(
            run_id=RUN,
            transfer_id=TransferId(f"{self._plan['name']}-{os.getpid()}"),
            number=number,
            version=Version(*donors[0]["version"]),
            fingerprint=Fingerprint(bytes.fromhex(donors[0]["fingerprint"])),
            token=b"",
            joiner=self._worker,
            layout_digest=self.outer.state.layout_digest(),
            data_host=HOST,
            donors=tuple(
                DonorPeer(worker=WorkerRef(WorkerId(donor["name"]), Incarnation("i1")), addresses=(donor["address"],))
                for donor in donors
            ),
            want_private=False,
        )

    def _on_manifest(self, role: Role, manifest: Manifest) -> Mapping[PartName, PartBytes]:
        del role
        self._ledger.halt_at = int(manifest.num_bytes * self._halt_at) if self._halt_at else None
        kept = self._restoration
        if kept is not None and kept.manifest.parts == manifest.parts:
            return {name: kept.destination(name) for name in kept.part_names}
        made = self._restoration = Restoration(self.outer.state, manifest, mode=RestoreMode.IN_PLACE)
        made.prepare()
        destinations = {name: made.destination(name) for name in made.part_names}
        if kept is not None:
            carry_over(self._ledger, manifest, {name: kept.destination(name) for name in kept.part_names}, destinations)
        return destinations

    def _open_link(self, store: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> Link:
        link = open_gloo_link(
            store,
            scope,
            rank=JOINER_RANK,
            host=host,
            lanes=lanes,
            timeout_seconds=PROGRESS_SECONDS,
            cancelled=cancelled,
        )
        return cast(Link, Standing(link, self._ledger))


def run_joiner(plan: dict[str, Any], voice: Voice) -> None:
    commands = Commands()
    before_state = warm()
    joiner = Joiner(plan, voice, commands)
    voice.say("ready", name=plan["name"], before_state=before_state)
    while (command := commands.queue.get())["do"] != "end":
        if command["do"] == "attempt":
            for _ in range(command.get("times", 1)):
                if "times" in command:
                    joiner.forget()
                joiner.attempt(command["donors"], command.get("halt_at", 0.0))
        answer_common(command, voice, report())


def main(plan: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    voice = Voice()
    (run_donor if plan["role"] == "donor" else run_joiner)(plan, voice)
    voice.say("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
