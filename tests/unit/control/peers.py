"""A donor whose conversations a test plays by hand, and the letters that go to and fro."""

from __future__ import annotations

import queue
import socket
import threading

from protos.recovery.v1 import peer_pb2
from recovery.control.peer_service import DonorConversation, PeerServer
from recovery.control.security import SecurityConfig
from recovery.types import Incarnation, WorkerId, WorkerRef

PLAIN = SecurityConfig()
DONOR = WorkerRef(WorkerId("w1"), Incarnation("i1"))
JOINER = WorkerRef(WorkerId("w2"), Incarnation("i2"))


def letter(pull_id: int) -> peer_pb2.JoinerLetter:
    return peer_pb2.JoinerLetter(pull=peer_pb2.PullBatch(pulls=[peer_pb2.Pull(pull_id=pull_id)]))


def answer(lanes: int) -> peer_pb2.DonorLetter:
    return peer_pb2.DonorLetter(opened=peer_pb2.Opened(lanes=lanes))


class Donor:
    """A peer server whose conversations a test takes out and plays by hand."""

    def __init__(self, worker: WorkerRef = DONOR, **options: object) -> None:
        self.conversations: queue.SimpleQueue[DonorConversation] = queue.SimpleQueue()
        self.server = PeerServer("127.0.0.1", 0, self.conversations.put, PLAIN, worker=worker, run_id="run", **options)  # type: ignore[arg-type]

    def next(self) -> DonorConversation:
        return self.conversations.get(timeout=30)


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def peer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("donor-", "peer-server"))]
