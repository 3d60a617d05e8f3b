"""The coordinator as a process of its own, and what becomes of streams when either end is killed, frozen or busy."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from protos.recovery.v1 import coordinator_pb2, peer_pb2
from recovery.control.inputs import Attached, Detached, Received
from recovery.control.operator_client import OperatorClient
from recovery.control.peer_client import dial
from recovery.control.peer_probe import probe
from recovery.control.peer_service import DonorConversation, PeerServer
from recovery.errors import CoordinatorUnreachable, DonorLost
from recovery.types import MIB, Address
from tests.support.certificates import Authority
from tests.support.coordinators import PLAIN, RUN, RecordingClient, coordinator
from tests.support.cut_proxy import CutProxy
from tests.support.processes import ChildProcess
from tests.support.scripted_machine import ScriptedMachine

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


# The process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_without_torch_and_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with CoordinatorProcess(tmp_path) as process:
        assert process.announcement == f"coordinator of run {RUN} listens on {process.address}"
        with RecordingClient(process.address) as member:
            member.client.wait_attached(30)
            member.client.key_value().set("scope", "key", b"value")
            with OperatorClient(process.address, PLAIN, run_id=RUN) as operator:
                assert [status.worker.worker_id for status in operator.list().workers] == ["w0"]
            process.signal(number)
            ended = json.loads(process.line("ended").split(" ", 1)[1])
        assert process.wait() == 0
        assert ended == {"code": 0, "heavy": []}
        assert process.errors == ""


def test_json_events_are_one_object_a_line(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path, "--json") as process:
        assert json.loads(process.announcement) == {"listening": str(process.address), "run_id": RUN}
        with RecordingClient(process.address) as member:
            member.client.wait_attached(30)
            event = json.loads(process.line('{"event": "WorkerAttached"'))
        assert event["fields"]["worker_id"] == "w0"
        assert datetime.fromisoformat(event["at"]).tzinfo is not None


def test_each_line_of_the_log_begins_with_its_time(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as process, RecordingClient(process.address) as member:
        member.client.wait_attached(30)
        at, name, fields = process.line("2").split(" ", 2)
    assert datetime.fromisoformat(at).tzinfo is not None
    assert name == "WorkerAttached"
    assert json.loads(fields)["worker_id"] == "w0"


def test_operators_commands_do_not_load_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from recovery.cli.main import run; code = run(sys.argv[1:]);"
        "print('loaded', code, sorted(n for n in ('torch', 'numpy') if n in sys.modules))"
    )
    with (
        CoordinatorProcess(tmp_path) as process,
        ChildProcess(["-c", code, "status", "--coordinator", str(process.address)]) as status,
    ):
        assert status.line("run ") == f"run {RUN}: sealed nothing yet"
        assert status.line("loaded") == "loaded 0 []"


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """As reported in pytorch/pytorch#191560."""
    with CoordinatorProcess(tmp_path) as first:
        state = str(tmp_path / "other")
        arguments = ["--run-id", RUN, "--new-run", "--state-dir", state, "--listen", str(first.address)]
        with command("coordinator", *arguments) as second:
            assert second.wait() == 1
            assert second.errors == (
                f"error: cannot listen on {first.address}: the port is in use by another process: "
                "stop it, or take another port (0: any free)\n"
            )


def test_a_folder_without_history_is_never_made_one_by_accident(tmp_path: Path) -> None:
    state = str(tmp_path / "none")
    with command("coordinator", "--run-id", RUN, "--state-dir", state, "--listen", "127.0.0.1:0") as process:
        assert process.wait() == 1
        assert process.errors.count("\n") == 1
        assert "--new-run" in process.errors


def test_a_token_guards_the_process(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("the-token-of-this-run\n")
    with CoordinatorProcess(tmp_path, "--token-file", str(token_file)) as process:
        status = ["status", "--coordinator", str(process.address)]
        with command(*status) as refused:
            assert refused.wait() == 1
            assert refused.errors.startswith("error: the token is missing or wrong")
            assert refused.errors.count("\n") == 1
        with command(*status, "--token-file", str(token_file)) as admitted:
            assert admitted.wait() == 0
        with ChildProcess(
            ["-m", "recovery.cli.main", *status], {"RECOVERY_TOKEN": "the-token-of-this-run"}
        ) as admitted:
            assert admitted.wait() == 0


def test_mutual_tls_by_the_command_lines_options(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    (certificate, key), (own_certificate, own_key) = authority.issue("coordinator"), authority.issue("operator")
    trust = ["--authority", str(authority.certificate_file)]
    with CoordinatorProcess(tmp_path, "--certificate", certificate, "--key", key, *trust) as process:
        status = ["status", "--coordinator", str(process.address), *trust]
        with command(*status, "--certificate", own_certificate, "--key", own_key) as admitted:
            assert admitted.wait() == 0
        with command(*status, "--timeout", "5") as refused:
            assert refused.wait() == 1
            assert refused.errors.count("\n") == 1


def test_watch_ends_on_ctrl_c_without_a_traceback(tmp_path: Path) -> None:
    with (
        CoordinatorProcess(tmp_path) as process,
        command("watch", "--coordinator", str(process.address), "--json") as watch,
    ):
        assert json.loads(_seen_by(watch, process.address))["fields"]["worker_id"]
        watch.signal(signal.SIGINT)
        assert watch.wait() == 130
        assert watch.errors == ""


def test_watch_goes_on_when_the_coordinator_comes_back(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as first:
        address = first.address
        watch = command("watch", "--coordinator", str(address), "--json")
        try:
            _seen_by(watch, address)
            first.kill()
            said = json.loads(watch.line('{"at"'))
            while said["event"] != "WatchInterrupted":
                said = json.loads(watch.line('{"at"'))
            assert "waiting for it" in said["fields"]["reason"]
            with CoordinatorProcess(tmp_path, listen=str(address), new_run=False):
                assert json.loads(watch.line('{"at"'))["event"] == "WatchResumed"
                _seen_by(watch, address)
                watch.signal(signal.SIGINT)
                assert watch.wait() == 130
            assert watch.errors == ""
        finally:
            watch.close()


def _seen_by(watch: ChildProcess, address: Address) -> str:
    """Return the first event of workers that come and go until the watch shows one: it begins when it likes."""
    for attempt in range(100):
        with RecordingClient(address, worker_id=f"w{attempt}") as member:
            member.client.wait_attached(30)
        with contextlib.suppress(AssertionError):
            return watch.line('{"at"', timeout_seconds=0.2)
    raise AssertionError(f"the watch shows nothing: {watch.errors}")


# Killed and restarted


def test_a_killed_coordinator_comes_back_with_its_history_and_its_workers(tmp_path: Path) -> None:
    """ray-project/ray#60820: when the one process that knows everybody dies, nobody may be lost for good."""
    with CoordinatorProcess(tmp_path) as first:
        address = first.address
        member = RecordingClient(address)
        member.client.start()
        member.client.wait_attached(30)
        with OperatorClient(address, PLAIN) as operator:
            operator.drain("w0")
        first.kill()
        member.wait_detached()
        with pytest.raises(CoordinatorUnreachable):
            member.client.wait_attached(0.1)
    with CoordinatorProcess(tmp_path, listen=str(address), new_run=False) as second:
        member.client.wait_attached(30)
        member.wait_message("welcome", count=2)
        with OperatorClient(address, PLAIN) as operator:
            (status,) = operator.list().workers
            assert status.alive
            assert status.drained
        member.client.close("finished")
        second.signal(signal.SIGTERM)
        assert second.wait() == 0


def test_a_frozen_coordinator_is_noticed_and_found_again_when_it_thaws(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as process, RecordingClient(process.address) as member:
        member.client.wait_attached(30)
        process.freeze()
        assert "stopped answering" in member.wait_detached()
        process.thaw()
        member.wait_message("welcome", count=2)


# A worker's lease


def test_a_killed_worker_is_lost_at_once(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server, worker(server.address) as process:
        process.line("told welcome")
        process.kill()
        assert (
            "lost" in machine.detached("w0", FOUND_SECONDS).reason
            or "without a goodbye" in machine.detached("w0").reason
        )


def test_a_frozen_worker_is_lost_in_lease_time_and_may_come_back(tmp_path: Path) -> None:
    """torchft#35: the survivors must not wait for a process group's timeout to learn what the keepalive knows."""
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server, worker(server.address) as process:
        process.line("told welcome")
        process.freeze()
        machine.detached("w0", FOUND_SECONDS)
        process.thaw()
        process.line("detached")
        process.line("told welcome")
        process.tell("vote 5")
        machine.wait_for(lambda event: isinstance(event, Received) and event.message.vote.epoch == 5)


def test_a_worker_that_holds_the_interpreters_lock_keeps_its_lease(tmp_path: Path) -> None:
    """FlagOpen/FlagScale#1267: a process marked dead while it was only busy writing a checkpoint."""
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server, worker(server.address) as process:
        process.line("told welcome")
        process.tell("hold 9")
        process.line("holding")
        # More than twice what a frozen process gets; the child proves that its other threads really stood still.
        assert float(process.line("held").split()[1]) > 8.5
        process.tell("vote 7")
        machine.wait_for(lambda event: isinstance(event, Received) and event.message.vote.epoch == 7)
        assert not any(isinstance(event, Detached) for event in machine.inputs)
        assert sum(isinstance(event, Attached) for event in machine.inputs) == 1


def test_a_cut_path_is_noticed_by_both_ends_and_mended(tmp_path: Path) -> None:
    """The connections stay open and bytes vanish: nothing but an unanswered ping tells."""
    machine = ScriptedMachine()
    with (
        coordinator(tmp_path, machine) as server,
        CutProxy(server.address) as proxy,
        RecordingClient(proxy.address) as member,
    ):
        member.client.wait_attached(30)
        proxy.cut()
        machine.detached("w0", FOUND_SECONDS)
        assert "stopped answering" in member.wait_detached()
        assert proxy.swallowed > 0
        proxy.mend()
        member.wait_message("welcome", count=2)
        assert machine.attached("w0", nth=2).incarnation == "i1"


def test_a_restarted_worker_is_told_from_its_former_process(tmp_path: Path) -> None:
    """torchft#63: a dead member kept for ever; here the next process of the same name does not wait for anything."""
    with CoordinatorProcess(tmp_path) as process:
        with worker(process.address, incarnation="i1") as first:
            first.line("told welcome")
            first.kill()
        with worker(process.address, incarnation="i2") as second:
            second.line("told welcome")
            with OperatorClient(process.address, PLAIN) as operator:
                (status,) = operator.list().workers
                assert (status.worker.incarnation, status.alive) == ("i2", True)


BUSY_FORKS = """
import multiprocessing, sys
from recovery.control.client import CoordinatorClient
from recovery.control.peer_probe import probe
from recovery.control.peer_service import PeerServer
from recovery.control.security import SecurityConfig
from tests.support.scripted_machine import hello

context = multiprocessing.get_context("fork")
client = CoordinatorClient(
    sys.argv[1], SecurityConfig(), hello,
    lambda message: None, lambda reason: print("detached", reason, flush=True),
)
with client, PeerServer("127.0.0.1", 0, lambda side: None, SecurityConfig()) as server:
    client.wait_attached(30)
    for number in range(50):
        children = [context.Process(target=sum, args=((1, 2),)) for _ in range(2)]
        for child in children:
            child.start()
        probe(server.address, SecurityConfig())
        for child in children:
            child.join(20)
            assert child.exitcode == 0, (number, child.exitcode)
    client.key_value().set("scope", "key", b"value")
    print("forked", client.attached, flush=True)
"""


def test_children_forked_beside_live_streams_end_and_harm_nothing(tmp_path: Path) -> None:
    """grpc/grpc#32992, dlrover#405: data loader workers forked from a process that uses gRPC crash or never end."""
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server, ChildProcess(["-c", BUSY_FORKS, str(server.address)]) as process:
        assert process.line("forked", 100) == "forked True"
        assert process.wait() == 0
    assert sum(isinstance(event, Attached) for event in machine.inputs) == 1


# Strangers


def test_strangers_bytes_neither_end_a_server_nor_fill_its_memory(tmp_path: Path) -> None:
    """aws-do-eks and others: a port that believes announced sizes. Random bytes, HTTP, HTTP/2 with huge lengths.

    Reported in InternLM/lmdeploy#4804.
    """
    seed = 20260101
    chaos = random.Random(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    attacks = [
        *(chaos.randbytes(chaos.randint(1, 4096)) for _ in range(100)),
        *(preface + chaos.randbytes(chaos.randint(1, 4096)) for _ in range(100)),
        # A frame that announces 16 MiB, a DATA frame for a stream that does not exist, a gRPC length of 4 GiB.
        preface + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(1024),
        preface + b"\x00\x00\x05\x00\x00\x00\x00\x00\x01\x00\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
    ]
    with CoordinatorProcess(tmp_path) as process, RecordingClient(process.address) as member:
        member.client.wait_attached(30)
        before = psutil.Process(process.pid).memory_info().rss
        for attack in attacks:
            # The server may hang up in the middle, which is its right.
            with (
                socket.create_connection((process.address.host, process.address.port)) as stranger,
                contextlib.suppress(OSError),
            ):
                stranger.sendall(attack)
        with OperatorClient(process.address, PLAIN) as operator:
            assert operator.list().alive == 1, f"seed {seed}"
        assert member.detachments == []
        assert psutil.Process(process.pid).memory_info().rss - before < 64 * MIB


# Peers


@pytest.fixture
def donor() -> Iterator[tuple[ChildProcess, Address]]:
    with ChildProcess(["-c", DONOR]) as process:
        yield process, Address.parse(process.line("listening").split()[1])


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_lost_donor_ends_the_joiners_conversation(donor: tuple[ChildProcess, Address], fault: str) -> None:
    process, address = donor
    joiner = dial([address], PLAIN)
    joiner.send(pull(3))
    answer = joiner.receive(30)
    assert answer is not None
    assert answer.opened.lanes == 3
    getattr(process, fault)()
    with pytest.raises(DonorLost, match="donor at"):
        # A frozen process answers neither this letter nor the keepalive's pings.
        joiner.send(pull(4))
        assert joiner.receive(FOUND_SECONDS) is not None, "the loss was not noticed"
    joiner.close("it is gone")


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_lost_joiner_ends_the_donors_conversation(fault: str) -> None:
    conversations: queue.SimpleQueue[DonorConversation] = queue.SimpleQueue()
    with (
        PeerServer("127.0.0.1", 0, conversations.put, PLAIN) as server,
        ChildProcess(["-c", JOINER, str(server.address)]) as process,
    ):
        process.line("sent")
        side = conversations.get(timeout=30)
        assert side.receive(30) is not None
        getattr(process, fault)()
        with pytest.raises(DonorLost, match="joiner at"):
            assert side.receive(FOUND_SECONDS) is not None, "the loss was not noticed"


def test_a_cut_path_ends_a_conversation_on_both_sides() -> None:
    conversations: queue.SimpleQueue[DonorConversation] = queue.SimpleQueue()
    with PeerServer("127.0.0.1", 0, conversations.put, PLAIN) as server, CutProxy(server.address) as proxy:
        joiner = dial([proxy.address], PLAIN)
        joiner.send(pull(1))
        side = conversations.get(timeout=30)
        assert side.receive(30) == pull(1)
        proxy.cut()
        with pytest.raises(DonorLost, match=r"donor at .* is lost"):
            assert joiner.receive(FOUND_SECONDS) is not None, "the loss was not noticed"
        with pytest.raises(DonorLost, match="joiner at"):
            assert side.receive(FOUND_SECONDS) is not None, "the loss was not noticed"
        assert proxy.swallowed > 0
        joiner.close("")


def test_one_lost_conversation_does_not_touch_another(donor: tuple[ChildProcess, Address]) -> None:
    process, address = donor
    with PeerServer("127.0.0.1", 0, lambda side: side.send(peer_pb2.DonorLetter()), PLAIN) as healthy:
        first, second = dial([address], PLAIN), dial([healthy.address], PLAIN)
        process.kill()
        with pytest.raises(DonorLost):
            assert first.receive(FOUND_SECONDS) is not None
        assert second.receive(30) is not None
        assert second.ended is None
        first.close("")
        second.close("")


def test_the_advertised_address_is_the_one_that_is_bound() -> None:
    """aws-do-eks#50: a listener on whatever the host name resolves to. Only the interface that was named may answer.

    Reported in meta-pytorch/torchft#329.
    """
    with PeerServer("127.0.0.2", 0, lambda side: None, PLAIN) as server:
        assert server.address.host == "127.0.0.2"
        assert probe(server.address, PLAIN).address == server.address
        listening = {
            found.laddr.ip.removeprefix("::ffff:")
            for found in psutil.Process().net_connections("tcp")
            if found.status == psutil.CONN_LISTEN and found.laddr.port == server.address.port
        }
        assert listening == {"127.0.0.2"}


def test_no_descriptor_and_no_thread_stays_behind(tmp_path: Path) -> None:
    own = psutil.Process(os.getpid())

    def once(number: int) -> None:
        with coordinator(tmp_path / str(number)) as server, RecordingClient(server.address) as member:
            member.client.wait_attached(30)
            member.client.key_value().set("s", "k", b"")
            member.client.send(coordinator_pb2.WorkerMessage(vote=coordinator_pb2.Vote(epoch=1)))
        with PeerServer("127.0.0.1", 0, lambda side: side.send(peer_pb2.DonorLetter()), PLAIN) as peer:
            conversation = dial([peer.address], PLAIN)
            conversation.receive(30)
            conversation.close("")

    for number in range(3):
        once(number)
    descriptors, threads = own.num_fds(), threading.active_count()
    for number in range(3, 13):
        once(number)
    assert own.num_fds() <= descriptors + 2
    assert becomes_true(lambda: threading.active_count() <= threads), threading.enumerate()
