"""The other side of ``bench_stall``: a process that joins one donor again and again, over real links.

Letters go over a local socket, payload over gloo; what arrives is verified and thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import cast

import torch

from benchmarks.loopback import HOST, SocketConversation
from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery.errors import RecoveryError
from recovery.events import Recorder
from recovery.protocol.ports import DonorPeer, JoinerConversation, SnapshotSource
from recovery.protocol.session import (
    OUTER,
    PRIVATE,
    Attempt,
    DonorConfig,
    DonorSession,
    JoinerConfig,
    JoinerSession,
    RateLimiter,
)
from recovery.snapshot import Snapshots
from recovery.state.chunks import PartBytes
from recovery.state.manifest import Manifest
from recovery.transport.link import Link
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK, open_gloo_link
from recovery.types import (
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

DONOR = WorkerRef(WorkerId("bench"), Incarnation("1"))
RUN = RunId("bench")
_MEETING_SECONDS = 30.0


class ServedJoiner:
    """Serves a joiner's process from ``snapshots`` while told to: one conversation after the other, rate capped."""

    def __init__(self, snapshots: Snapshots, layout_digest: bytes, bytes_per_second: float) -> None:
        self._snapshots = snapshots
        self._layout_digest = layout_digest
        self._limiter = RateLimiter(int(bytes_per_second))
        self._folder = tempfile.TemporaryDirectory()
        self._letters = str(Path(self._folder.name) / "letters")
        self._listener = Listener(self._letters)
        self._number = 0
        self._private = False
        self._stop = threading.Event()
        self._session: DonorSession | None = None
        self._thread: threading.Thread | None = None
        self.sent_bytes = 0
        self.whole = 0
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.stall_joiner"),
                *("--letters", self._letters),
            ],
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._orders = self._listener.accept()

    @property
    def pid(self) -> int:
        """The joiner's process."""
        return self._process.pid

    def start(self) -> None:
        """The joiner takes private parts, then outer ones, then private ones again, until told to stop."""
        self._stop.clear()
        self._private = True
        self._thread = threading.Thread(target=self._serve, name="bench-serve")
        self._thread.start()

    def stop(self) -> None:
        """Nobody joins any more; what was under way is cancelled."""
        self._stop.set()
        session = self._session
        if session is not None:
            session.cancel("the phase is over")
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self._orders.close()
        self._process.wait(_MEETING_SECONDS)
        self._listener.close()
        self._folder.cleanup()

    def _serve(self) -> None:
        while not self._stop.is_set():
            version = self._snapshots.version
            if version is None:
                self._stop.wait(0.001)
                continue
            try:
                fingerprint = self._snapshots.manifest(version, _MEETING_SECONDS).fingerprint
            except RecoveryError:
                continue  # overwritten meanwhile
            self._number += 1
            private, self._private = self._private, not self._private
            order = {
                "number": self._number,
                "private": private,
                "lineage": version.lineage,
                "outer_step": version.outer_step,
                "fingerprint": fingerprint.hex(),
                "layout_digest": self._layout_digest.hex(),
            }
            self._orders.send_bytes(json.dumps(order).encode())
            conversation: SocketConversation[DonorLetter, JoinerLetter] = SocketConversation(
                self._listener.accept(), JoinerLetter
            )
            self._session = DonorSession(
                conversation,
                cast(SnapshotSource, self._snapshots),
                scope=f"stall/{self._number}",
                config=DonorConfig(data_host=HOST),
                admit=lambda letter: None,
                open_link=lambda *where: link(DONOR_RANK, *where),
                limiter=self._limiter,
            )
            if self._stop.is_set():
                self._session.cancel("the phase is over")
            result = self._session.run()
            self._session = None
            self.sent_bytes += result.sent_bytes
            self.whole += result.error is None
            self._orders.recv_bytes()  # the joiner is ready for the next order


def link(rank: int, meeting: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> Link:
    """Return one end of the link at ``scope``."""
    return open_gloo_link(
        meeting, scope, rank=rank, host=host, lanes=lanes, timeout_seconds=_MEETING_SECONDS, cancelled=cancelled
    )


def join(letters: str, order: dict[str, object]) -> None:
    """Receive and verify one donor's state, or give up when the donor does."""

    def dial(peer: DonorPeer) -> JoinerConversation:
        conversation: SocketConversation[JoinerLetter, DonorLetter] = SocketConversation(Client(letters), DonorLetter)
        conversation.round_trip_seconds = 1e-4
        return conversation

    def memory(role: int, manifest: Manifest) -> dict[PartName, PartBytes]:
        return {part.name: PartBytes([torch.empty(part.num_bytes, dtype=torch.uint8)]) for part in manifest.parts}

    session = JoinerSession(
        Attempt(
            run_id=RUN,
            transfer_id=TransferId(f"t{order['number']}"),
            number=1,
            version=Version(int(str(order["lineage"])), int(str(order["outer_step"]))),
            fingerprint=Fingerprint(bytes.fromhex(str(order["fingerprint"]))),
            token=b"token",
            joiner=WorkerRef(WorkerId(f"joiner-{order['number']}"), Incarnation("1")),
            layout_digest=bytes.fromhex(str(order["layout_digest"])),
            data_host=HOST,
            donors=(DonorPeer(worker=DONOR),),
            want_private=False,
            first=PRIVATE if order["private"] else OUTER,
        ),
        JoinerConfig(),
        dial=dial,
        open_link=lambda *where: link(JOINER_RANK, *where),
        on_manifest=memory,
        events=Recorder(),
    )
    try:
        session.run()
    except RecoveryError as error:
        print(f"joiner: {error}", file=sys.stderr)  # the phase was over: the next order follows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--letters", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    orders = Client(options.letters)
    while True:
        try:
            order = json.loads(orders.recv_bytes())
        except EOFError:
            return
        join(options.letters, order)
        orders.send_bytes(b"ready")


if __name__ == "__main__":
    main()
