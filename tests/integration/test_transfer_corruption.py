"""Peers that misbehave, each a process of its own: donors train on, joiners heal, nothing wrong is committed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from protos.recovery.v1 import common_pb2, peer_pb2
from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery.control.peer_service import Conversation, dial
from recovery.control.security import SecurityConfig
from recovery.errors import RecoveryError
from recovery.protocol.letters import PROTOCOL
from recovery.protocol.meeting import MeetingPoint
from recovery.transport.process_group import JOINER_RANK, GlooLink, open_gloo_link
from recovery.types import Address, Incarnation, WorkerId, WorkerRef
from tests.support.fleet import Worker
from tests.support.transfer_ends import Ends, attempt, ends, outcome, ready, report, restored

pytestmark = pytest.mark.timeout(300)
"""Several processes each: a machine that is busy with other work starts them slowly."""

NUM_MIB = 32


@pytest.fixture(scope="module")
def both() -> Iterator[Ends]:
    with ends() as made:
        yield made


@pytest.fixture(scope="module")
def good(both: Ends) -> Worker:
    return both.donor("good", NUM_MIB)


def assert_trains(donor: Worker) -> None:
    """The donor's main thread takes steps, and what it lends is what it was."""
    before = report(donor)["steps"]
    after = report(donor)
    assert after["steps"] > before
    assert after["intact"]


@pytest.mark.parametrize("kind", ["short", "other"])
def test_bytes_that_were_not_agreed_are_fetched_again(both: Ends, good: Worker, kind: str) -> None:
    bad = both.donor(f"bad-{kind}", NUM_MIB, fault={"kind": kind, "first": 3, "count": 1})
    done = restored(both.joiner(f"j-{kind}", NUM_MIB), bad)
    assert bad.wait_said("fault")["fault"] == kind
    (refetched,) = done["refetched"]
    assert refetched.endswith(": link")
    assert_trains(bad)
    bad.process.kill()


def test_a_donor_that_always_sends_other_bytes_is_left(both: Ends, good: Worker) -> None:
    bad = both.donor("liar", NUM_MIB, fault={"kind": "other"})
    joiner = both.joiner("j-liar", NUM_MIB)
    failed = outcome(joiner, attempt(joiner, bad))
    assert (failed["say"], failed.get("error")) == ("failed", "NoDonorLeft")
    assert "ChunkDamaged" in failed["message"]
    assert restored(joiner, good)["reused_bytes"] == 0, "nothing of the liar's was kept"
    assert_trains(bad)
    bad.process.kill()


def test_a_message_too_long_costs_the_joiner_a_restart_and_nobody_else_anything(
    both: Ends, good: Worker, tmp_path: Path
) -> None:
    """gloo ends the receiving process: pytorch/gloo#456. The joiner's next process goes on from its spool."""
    bad = both.donor("long", NUM_MIB, fault={"kind": "long", "first": 6})
    spool = str(tmp_path / "spool")
    joiner = both.joiner("j-long", NUM_MIB, spool=spool)
    attempt(joiner, bad)
    assert bad.wait_said("fault")["fault"] == "long"
    assert joiner.end() == -signal.SIGABRT
    assert not any(message["say"] == "done" for message in joiner.heard)
    assert bad.wait_said("served")["failure"]
    assert_trains(bad)
    restored(both.joiner("j-long", NUM_MIB, spool=spool), good)
    bad.process.kill()


def test_a_donor_that_sends_nothing_fails_by_its_progress_deadline(both: Ends, good: Worker) -> None:
    bad = both.donor("silent", NUM_MIB, fault={"kind": "silent", "first": 3})
    joiner = both.joiner("j-silent", NUM_MIB, progress_seconds=1.5)
    failed = outcome(joiner, attempt(joiner, bad))
    assert (failed["say"], failed.get("error")) == ("failed", "NoDonorLeft")
    assert "no progress for" in failed["message"]
    restored(joiner, good)
    assert_trains(bad)
    bad.process.kill()


# Joiners that misbehave: this process is one, by hand.


class Rogue:
    """A joiner that says and does what it likes to one donor."""

    def __init__(self, donor: Worker) -> None:
        named = ready(donor)
        self.version = named["version"]
        self.num_bytes = int(named["num_bytes"])
        self._me = WorkerRef(WorkerId("rogue"), Incarnation("r1"))
        self._donor = WorkerRef(WorkerId(named["name"]), Incarnation("i1"))
        self.conversation: Conversation = dial(
            [Address.parse(named["address"])],
            SecurityConfig(),
            run_id="transfer-test",
            sender=self._me,
            expected=self._donor,
        )
        self._meeting = MeetingPoint(lambda letter: self.say(meeting=letter))

    def say(self, **letter: object) -> None:
        with contextlib.suppress(RecoveryError):  # the donor may have hung up already: that is what is tested
            self.conversation.send(JoinerLetter(**letter))  # type: ignore[arg-type]

    def open(self, *, lanes: int = 1) -> str:
        """Begin as an honest joiner would; return the rendezvous."""
        lineage, outer_step = self.version
        letter = peer_pb2.Open(
            protocol=PROTOCOL,
            run_id="transfer-test",
            transfer_id="rogue",
            attempt=1,
            joiner=common_pb2.WorkerRef(worker_id="rogue", incarnation="r1"),
            donor=common_pb2.WorkerRef(worker_id=self._donor.worker_id, incarnation="i1"),
            version=common_pb2.Version(lineage=lineage, outer_step=outer_step),
            lanes=lanes,
            data_host="127.0.0.1",
        )
        self.say(open=letter)
        return self.hear("opened").opened.scope

    def link(self, scope: str) -> GlooLink:
        opened: list[GlooLink] = []

        def build() -> None:
            opened.append(
                open_gloo_link(self._meeting, scope, rank=JOINER_RANK, host="127.0.0.1", lanes=1, timeout_seconds=30)
            )

        thread = threading.Thread(target=build)
        thread.start()
        while thread.is_alive():
            letter = self.conversation.receive(0.05)
            if letter is not None and letter.WhichOneof("kind") == "meeting":
                self._meeting.heard(letter.meeting)
        return opened[0]

    def hear(self, kind: str) -> DonorLetter:
        while True:
            letter = self.conversation.receive(30.0)
            assert letter is not None, f"no {kind} came"
            if letter.WhichOneof("kind") == "meeting":
                self._meeting.heard(letter.meeting)
            if letter.WhichOneof("kind") == kind:
                return letter

    def pull(self, number: int, num_bytes: int, offset: int = 0, lane: int = 0, part: int = 0) -> peer_pb2.Pull:
        return peer_pb2.Pull(
            pull_id=number, role=peer_pb2.MANIFEST_ROLE_OUTER, part=part, offset=offset, num_bytes=num_bytes, lane=lane
        )


def never_opens(rogue: Rogue) -> None:
    rogue.say(pull=peer_pb2.PullBatch(pulls=[rogue.pull(1, 10)]))


def asks_beyond_the_end(rogue: Rogue) -> None:
    rogue.open()
    rogue.say(pull=peer_pb2.PullBatch(pulls=[rogue.pull(1, 1 << 20, offset=rogue.num_bytes)]))


def asks_for_everything_at_once(rogue: Rogue) -> None:
    rogue.open()
    rogue.say(pull=peer_pb2.PullBatch(pulls=[rogue.pull(number, 4 << 20) for number in range(1, 9000)]))


def asks_twice_under_one_number(rogue: Rogue) -> None:
    rogue.open()
    rogue.say(pull=peer_pb2.PullBatch(pulls=[rogue.pull(1, 10), rogue.pull(1, 10)]))


def never_comes_to_the_rendezvous(rogue: Rogue) -> None:
    rogue.open(lanes=8)
    rogue.say(pull=peer_pb2.PullBatch(pulls=[rogue.pull(1, 1 << 20)]))


def takes_nothing_and_hangs_up(rogue: Rogue) -> None:
    link = rogue.link(rogue.open())
    rogue.say(pull=peer_pb2.PullBatch(pulls=[rogue.pull(n, 1 << 20) for n in range(1, 5)]))
    link.shut("hung up")
    link.close()


def sends_to_the_donor(rogue: Rogue) -> None:
    link = rogue.link(rogue.open())
    rogue.say(pull=peer_pb2.PullBatch(pulls=[rogue.pull(n, 1 << 20) for n in range(1, 5)]))
    group = link._handle.group
    works = [group.send([torch.ones(2 << 20, dtype=torch.uint8)], 0, tag) for tag in range(5)]  # type: ignore[attr-defined]
    link.shut("hung up")
    link.close()
    del works


def complains_about_everything(rogue: Rogue) -> None:
    rogue.open()
    chunk = peer_pb2.ChunkId(role=peer_pb2.MANIFEST_ROLE_OUTER, part=0, chunk=0)
    for _ in range(50):
        rogue.say(complaint=peer_pb2.Complaint(chunk=chunk, pull_ids=[1]))
    assert rogue.hear("answer").answer.blame == peer_pb2.BLAME_LINK
    rogue.say(acknowledge=peer_pb2.Acknowledge(chunks=[peer_pb2.ChunkId(role=chunk.role, part=99, chunk=99)]))


ROGUES: list[Callable[[Rogue], None]] = [
    never_opens,
    asks_beyond_the_end,
    asks_for_everything_at_once,
    asks_twice_under_one_number,
    never_comes_to_the_rendezvous,
    takes_nothing_and_hangs_up,
    sends_to_the_donor,
    complains_about_everything,
]


@pytest.mark.parametrize("behave", ROGUES, ids=lambda behave: behave.__name__)
def test_a_joiner_that_misbehaves_ends_its_own_conversation_only(
    both: Ends, good: Worker, behave: Callable[[Rogue], None]
) -> None:
    rogue = Rogue(good)
    since = len(good.heard)
    behave(rogue)
    rogue.conversation.close("the rogue has gone")
    served = good.wait_said("served", since=since)
    assert served["failure"], "it never got what a joiner gets"
    assert_trains(good)


def test_after_all_of_them_the_donor_serves_as_before(both: Ends, good: Worker) -> None:
    assert restored(both.joiner("j-last", NUM_MIB), good)["failures"] == {}
