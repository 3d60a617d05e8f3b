"""Coordinators, workers and donors as processes of their own, for tests of their streams."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from protos.recovery.v1 import peer_pb2
from recovery.types import Address
from tests.support.coordinators import RUN
from tests.support.processes import ChildProcess

# Keepalive finds a frozen process in about 3 s; without it, gRPC would take minutes.
FOUND_SECONDS = 30.0

SERVE = """
import json, sys
from recovery.cli.main import run
code = run(["coordinator", *json.loads(sys.argv[1])])
heavy = sorted(name for name in ("torch", "numpy") if name in sys.modules)
print("ended", json.dumps({"code": code, "heavy": heavy}), flush=True)
"""

WORKER = """
import ctypes, sys, threading, time
from protos.recovery.v1 import coordinator_pb2
from recovery.control.client import CoordinatorClient
from recovery.control.security import SecurityConfig
from tests.support.scripted_machine import hello

client = CoordinatorClient(
    sys.argv[1], SecurityConfig(), lambda: hello(sys.argv[2], incarnation=sys.argv[3]),
    lambda message: print("told", message.WhichOneof("kind"), flush=True),
    lambda reason: print("detached", reason, flush=True),
)
client.start()
client.wait_attached(30)
for line in sys.stdin:
    if line.startswith("hold"):
        gaps, stop = [0.0], threading.Event()

        def tick():
            before = time.monotonic()
            while not stop.wait(0.01):
                now = time.monotonic()
                gaps.append(now - before)
                before = now

        ticker = threading.Thread(target=tick)
        ticker.start()
        print("holding", flush=True)
        # PyDLL keeps the interpreter's lock during the call, which CDLL would give away.
        ctypes.PyDLL(None).sleep(int(line.split()[1]))
        time.sleep(0.1)
        stop.set()
        ticker.join()
        print("held", max(gaps), flush=True)
    if line.startswith("vote"):
        client.send(coordinator_pb2.WorkerMessage(vote=coordinator_pb2.Vote(epoch=int(line.split()[1]))))
client.close("finished")
print("closed", flush=True)
"""

DONOR = """
import sys, threading
from recovery.control.peer_service import PeerServer
from recovery.control.security import SecurityConfig
from protos.recovery.v1 import peer_pb2

def serve(conversation):
    while True:
        letter = conversation.receive(None)
        conversation.send(peer_pb2.DonorLetter(opened=peer_pb2.Opened(lanes=letter.pull.pulls[0].lane)))

with PeerServer("127.0.0.1", 0, serve, SecurityConfig()) as server:
    print("listening", server.address, flush=True)
    sys.stdin.read()
"""

JOINER = """
import sys
from recovery.control.peer_client import dial
from recovery.control.security import SecurityConfig
from recovery.types import Address
from protos.recovery.v1 import peer_pb2

conversation = dial([Address.parse(sys.argv[1])], SecurityConfig())
conversation.send(peer_pb2.JoinerLetter(pull=peer_pb2.PullBatch()))
print("sent", flush=True)
sys.stdin.read()
"""


class CoordinatorProcess(ChildProcess):
    """`recovery coordinator` with its history below ``folder``; the address is read from its port file."""

    def __init__(self, folder: Path, *options: str, listen: str = "127.0.0.1:0", new_run: bool = True) -> None:
        port_file = folder / "port"
        port_file.unlink(missing_ok=True)
        arguments = [
            *("--run-id", RUN, "--state-dir", str(folder / "state"), "--listen", listen),
            *("--port-file", str(port_file)),
            *(["--new-run"] if new_run else []),
            *options,
        ]
        super().__init__(["-c", SERVE, json.dumps(arguments)])
        self.announcement = self.line()
        self.address = Address.parse(port_file.read_text().strip())


def command(*arguments: str) -> ChildProcess:
    return ChildProcess(["-m", "recovery.cli.main", *arguments])


def worker(address: Address, worker_id: str = "w0", incarnation: str = "i1") -> ChildProcess:
    return ChildProcess(["-c", WORKER, str(address), worker_id, incarnation])


def becomes_true(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            return False
        threading.Event().wait(0.02)
    return True


def pull(lane: int) -> peer_pb2.JoinerLetter:
    return peer_pb2.JoinerLetter(pull=peer_pb2.PullBatch(pulls=[peer_pb2.Pull(lane=lane)]))
