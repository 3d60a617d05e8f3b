"""One donor as the joiner's session sees it: what arrives is hashed first, told together, and never kept back."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery.errors import DonorLost
from recovery.protocol import joiner_line
from recovery.protocol.joiner_io import Arrived, Dialled, Ended, JoinerEvent, LinkOpened, PostedPull, Quiet
from recovery.protocol.joiner_line import DonorLine
from recovery.protocol.ports import DonorPeer
from recovery.transport.link import lane_tag
from recovery.transport.memory import memory_link_pair
from recovery.types import Incarnation, WorkerId, WorkerRef

PEER = DonorPeer(worker=WorkerRef(WorkerId("donor"), Incarnation("i1")))
PATIENCE = 60.0
LANES = 2


class Silence:
    """A conversation in which nobody speaks."""

    round_trip_seconds: float | None = 0.0

    def __init__(self) -> None:
        self._closed = threading.Event()

    def send(self, letter: JoinerLetter, /) -> None:
        del letter

    def receive(self, timeout_seconds: float, /) -> DonorLetter | None:
        if self._closed.wait(timeout_seconds):
            raise DonorLost("closed")
        return None

    def close(self, reason: str, /) -> None:
        del reason
        self._closed.set()


class NotWoken:
    """A receive of which a part has come: gloo does not wake who waits for it when the link is shut."""

    def __init__(self, let_go: threading.Event) -> None:
        self._let_go = let_go

    def wait(self, timeout_seconds: float) -> None:
        self._let_go.wait(timeout_seconds)
        raise DonorLost("shut long ago")


class Rig:
    """A line over a link in memory, and what it has reported."""

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[JoinerEvent] = queue.SimpleQueue()
        self.donor, self.joiner = memory_link_pair(LANES)
        self.line = DonorLine(
            PEER,
            self.reports.put,
            dial=lambda peer: Silence(),
            probe=None,
            open_link=lambda *where: self.joiner,
            seal=lambda link, key, scope, donor: link,
            data_host="here",
        )
        self.line.start()
        assert isinstance(self.next(), Dialled)
        self.line.open_link("scope", LANES)
        assert isinstance(self.next(), LinkOpened)

    def next(self) -> JoinerEvent:
        return self.reports.get(timeout=PATIENCE)

    def told(self, num_events: int) -> list[JoinerEvent]:
        """Return so many events, telling what is held back, as the session does at each tick."""
        found: list[JoinerEvent] = []
        deadline = time.monotonic() + PATIENCE
        while len(found) < num_events and time.monotonic() < deadline:
            self.line.tell()
            with contextlib.suppress(queue.Empty):
                found.append(self.reports.get(timeout=0.01))
        return found

    def post(self, memory: torch.Tensor, pulls: dict[int, int], when_whole: Callable[[], None]) -> None:
        """Post receives of equal size: lane by pull id."""
        size = memory.numel() // len(pulls)
        posted = tuple(
            PostedPull(pull_id, index * size, size, lane, lane_tag(lane, LANES, pull_id))
            for index, (pull_id, lane) in enumerate(pulls.items())
        )
        assert self.line.post(memory, posted, when_whole)

    def send(self, pull_id: int, lane: int, num_bytes: int) -> None:
        data = torch.full((num_bytes,), pull_id, dtype=torch.uint8)
        self.donor.send(lane, lane_tag(lane, LANES, pull_id), data).wait(PATIENCE)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.line.drop("the test is over")
    made.line.join()


def never() -> None:
    raise AssertionError("this flight is not whole")


def test_a_flight_is_whole_once_and_before_its_last_receive_is_told(rig: Rig) -> None:
    memory = torch.zeros(400, dtype=torch.uint8)
    whole: list[list[int]] = []
    rig.post(memory, {1: 0, 2: 1, 3: 0, 4: 1}, lambda: whole.append(memory[::100].tolist()))
    for pull_id, lane in ((1, 0), (2, 1), (3, 0)):
        rig.send(pull_id, lane, 100)
    told = rig.told(3)
    assert not whole
    rig.send(4, 1, 100)
    told.append(rig.next())
    assert whole == [[1, 2, 3, 4]]
    assert sorted(event.pull_id for event in told if isinstance(event, Arrived)) == [1, 2, 3, 4]


def test_a_flight_of_which_a_receive_failed_is_not_whole(rig: Rig) -> None:
    rig.post(torch.zeros(200, dtype=torch.uint8), {1: 0, 2: 0}, never)
    rig.send(1, 0, 100)
    assert rig.told(1) == [Arrived(PEER.name, 1)]
    rig.donor.shut("the donor is gone")
    assert isinstance(rig.next(), Ended)


def test_what_was_held_back_for_company_is_told_when_asked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner_line, "_TOLD_SECONDS", 1e9)
    whole = threading.Event()
    rig.post(torch.zeros(300, dtype=torch.uint8), {1: 0, 2: 0, 3: 0}, whole.set)
    rig.send(1, 0, 100)
    assert rig.told(1) == [Arrived(PEER.name, 1)]
    rig.send(2, 0, 100)
    rig.send(3, 0, 100)  # the last of the lane is never held back, nor is what waited for it
    assert [rig.next(), rig.next()] == [Arrived(PEER.name, 2), Arrived(PEER.name, 3)]
    assert whole.is_set()


def test_what_goes_wrong_with_a_whole_flight_ends_the_donor_by_name(rig: Rig) -> None:
    rig.post(torch.zeros(100, dtype=torch.uint8), {1: 0}, never)
    rig.send(1, 0, 100)
    ended = rig.next()
    assert isinstance(ended, Ended) and "this flight is not whole" in str(ended.error)


def test_what_was_held_back_is_told_before_the_line_is_quiet(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner_line, "_TOLD_SECONDS", 1e9)
    landed, let_go = threading.Event(), threading.Event()
    rig.post(torch.zeros(100, dtype=torch.uint8), {1: 0}, landed.set)
    with monkeypatch.context() as patched:
        patched.setattr(rig.joiner, "receive", lambda lane, tag, into: NotWoken(let_go))
        rig.post(torch.zeros(100, dtype=torch.uint8), {2: 0}, never)
    rig.send(1, 0, 100)
    assert landed.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while not rig.line._untold and time.monotonic() < deadline:
        time.sleep(0.001)  # between the two the thread has nothing to be seen by
    rig.line.drop("the test has seen enough")
    told = [rig.next()]
    while not isinstance(told[-1], Quiet):
        told.append(rig.next())
    let_go.set()
    assert Arrived(PEER.name, 1) in told[:-1]
