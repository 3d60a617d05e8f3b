"""A joiner's process: each line of its standard input orders an attempt, whose result is printed as JSON.

What was verified stays in memory from attempt to attempt, unless an order says ``fresh``. ``mark <fraction>`` is
printed when so large a part of the bytes is verified.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from recovery.control.peer_service import Conversation, dial_at_once, probe_any
from recovery.control.security import SecurityConfig
from recovery.errors import RecoveryError
from recovery.events import Event, LogSink
from recovery.protocol.ledger import ChunkName
from recovery.protocol.session import (
    Attempt,
    ChunkLedger,
    ChunkSpool,
    DonorPeer,
    JoinerConfig,
    JoinerSession,
    PlannerConfig,
)
from recovery.state.chunks import PartBytes
from recovery.state.manifest import Manifest
from recovery.transport.process_group import JOINER_RANK, GlooLink, open_gloo_link
from recovery.types import Address, Fingerprint, KeyValue, PartName, TransferId
from tests.support.memory_donor import RUN, VERSION, worker
from tests.support.wan.transfer_state import outer_state

SECURITY = SecurityConfig(insecure=True)
_LOOK_SECONDS = 0.1


class MarkingLedger(ChunkLedger):
    """Says when a part of the bytes is verified, and waits for leave to go on if it ``stands``."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self._total_bytes = total_bytes
        self._seen_bytes = 0
        self.marks: list[float] = []
        self.stands = False

    def add(self, name: ChunkName) -> None:
        if name not in self:
            self._seen_bytes += name.num_bytes
        super().add(name)
        while self.marks and self._seen_bytes >= self.marks[0] * self._total_bytes:
            print(f"mark {self.marks.pop(0)}", flush=True)
            if self.stands:
                assert sys.stdin.readline() == "go on\n"


class Watch:
    """Notes ten times a second how much has come over links."""

    def __init__(self, links: list[GlooLink]) -> None:
        self._links = links
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch")
        self.moved: list[tuple[float, int]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self.moved.append((time.monotonic(), sum(link.bytes_moved() for link in self._links)))


class Joiner:
    """Keeps memory and ledger; runs attempts."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        self._state_bytes = 0
        self._state: dict[str, dict[str, torch.Tensor]] = {}
        self._ledger = MarkingLedger(0)
        self._spool = ChunkSpool(Path(plan["spool"])) if plan.get("spool") else None
        if self._spool is not None:
            self._spool.start()
        self._links: list[GlooLink] = []
        self._connected_at = 0.0
        self._me = worker(plan["name"])

    def attempt(self, order: Mapping[str, Any]) -> dict[str, object]:
        """Run one attempt and return its result."""
        if order["fresh"] or not self._state:
            self._state_bytes = order["state_bytes"]
            self._state = outer_state(self._state_bytes, self._plan.get("seed", 1), fill=False)
            self._ledger = MarkingLedger(self._state_bytes)
        self._ledger.marks = list(order["marks"])
        self._ledger.stands = order["stands"]
        self._links.clear()
        self._connected_at = 0.0
        config = dict(order["config"])
        planner = PlannerConfig(**config.pop("planner", {}))
        session = JoinerSession(
            self._attempt(order),
            JoinerConfig(**config, planner=planner),
            dial=self._dial,
            probe=self._round_trip,
            open_link=self._open_link,
            on_manifest=self._destinations,
            events=_say if self._plan.get("verbose") else LogSink(),
            ledger=self._ledger,
            spool=self._spool,
        )
        error = ""
        began = time.monotonic()
        with Watch(self._links) as watch:
            try:
                ended = began + session.run().verified_seconds
            except RecoveryError as failure:
                error = f"{type(failure).__name__}: {failure}"
                ended = time.monotonic()
        if not error and not self._is_equal():
            error = "the bytes are not the donors'"
        machine = session.machine
        names = {str(worker(each["name"])): each["name"] for each in order["donors"]}
        return {
            "error": error,
            "seconds": ended - began,
            "connected_seconds": ended - (self._connected_at or began),
            "payload_bytes": machine.payload_bytes,
            "reused_bytes": machine.reused_bytes,
            "verified_bytes": machine.verified_bytes,
            "total_bytes": machine.total_bytes,
            "arrived": {names[name]: count for name, count in machine.arrived_bytes().items()},
            "failures": {names[name]: f"{type(each).__name__}: {each}" for name, each in machine.failures.items()},
            "rates": {names[name]: rate for name, rate in machine.rates(time.monotonic()).items()},
            "moved": watch.moved,
            "lanes": max((link.lanes for link in self._links), default=0),
            "congestion_control": self._plan.get("congestion_control") or "system",
        }

    def _attempt(self, order: Mapping[str, Any]) -> Attempt:
        return Attempt(
            run_id=RUN,
            transfer_id=TransferId("wan"),
            number=order["number"],
            version=VERSION,
            fingerprint=Fingerprint(bytes.fromhex(order["fingerprint"])),
            token=b"token",
            joiner=self._me,
            layout_digest=b"l" * 32,
            data_host=self._plan["host"],
            donors=tuple(
                DonorPeer(worker=worker(donor["name"]), addresses=(donor["address"],)) for donor in order["donors"]
            ),
            want_private=False,
        )

    def _destinations(self, role: int, manifest: Manifest) -> dict[PartName, PartBytes]:
        return {part.name: PartBytes(list(self._state[part.name].values()), part.tensors) for part in manifest.parts}

    def _dial(self, peer: DonorPeer) -> Conversation:
        return dial_at_once(
            [Address.parse(each) for each in peer.addresses],
            SECURITY,
            run_id=RUN,
            sender=self._me,
            expected=peer.worker,
        )

    def _round_trip(self, peer: DonorPeer) -> float:
        addresses = [Address.parse(each) for each in peer.addresses]
        return probe_any(addresses, SECURITY, run_id=RUN, sender=self._me, expected=peer.worker).round_trip_seconds

    def _open_link(self, store: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> GlooLink:
        link = open_gloo_link(
            store,
            scope,
            rank=JOINER_RANK,
            host=host,
            lanes=lanes,
            timeout_seconds=20,
            congestion_control=self._plan.get("congestion_control"),
            cancelled=cancelled,
        )
        self._connected_at = self._connected_at or time.monotonic()
        self._links.append(link)
        return link

    def _is_equal(self) -> bool:
        wanted = outer_state(self._state_bytes, self._plan.get("seed", 1))
        return all(
            torch.equal(found, wanted[part][name])
            for part, tensors in self._state.items()
            for name, found in tensors.items()
        )


def _say(event: Event, /) -> None:
    print(f"event {time.monotonic():.3f} {event}", file=sys.stderr, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    joiner = Joiner(json.loads(sys.argv[1]))
    print("ready", flush=True)
    while line := sys.stdin.readline():
        print(json.dumps(joiner.attempt(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
