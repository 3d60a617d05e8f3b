"""What strangers and misbehaving peers can do to the data port: end a joiner at worst, never a donor.

Covers pytorch/gloo#456: a message longer than the posted receive ends the receiving process.
"""

from __future__ import annotations

import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from recovery.errors import DonorLost, PeerUnreachable
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK, GlooLink, open_gloo_link
from tests.support.memory_file_store import FileStore
from tests.support.memory_link_process import EXPECTED_BYTES, SCOPE


class Child:
    """The other end, in a process of its own."""

    def __init__(self, role: str, folder: Path, how: str = "receive", host: str = "127.0.0.1") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.memory_link_process", role, str(folder), how, host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.communicate("\n", timeout=60)
        else:
            self.process.communicate()
        return self.process.returncode


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        if child.process.poll() is None:
            child.process.kill()
        child.process.communicate()


def open_end(folder: Path, rank: int, host: str = "127.0.0.1", store: FileStore | None = None) -> GlooLink:
    return open_gloo_link(store or FileStore(folder), SCOPE, rank=rank, host=host, lanes=1, timeout_seconds=6)


def test_a_message_that_is_too_long_ends_the_joiner_and_not_the_donor(tmp_path: Path, children: list[Child]) -> None:
    child = Child("joiner", tmp_path)
    children.append(child)
    link = open_end(tmp_path, DONOR_RANK)
    assert child.line() == "ready"
    with pytest.raises(DonorLost):
        link.send(0, 0, torch.ones(2 * EXPECTED_BYTES, dtype=torch.uint8)).wait(30)
        # The first send may be with the system before the joiner ends; a second one then meets the broken link.
        link.send(0, 1, torch.ones(1 << 20, dtype=torch.uint8)).wait(30)
    assert child.process.wait(60) == -signal.SIGABRT, "the joiner's process saw the message"
    link.close()


def test_a_joiner_that_is_killed_leaves_the_donor_with_an_error(tmp_path: Path, children: list[Child]) -> None:
    child = Child("joiner", tmp_path)
    children.append(child)
    link = open_end(tmp_path, DONOR_RANK)
    assert child.line() == "ready"
    transfer = link.send(0, 1, torch.ones(1 << 20, dtype=torch.uint8))  # for a receive that is never posted
    child.process.kill()
    with pytest.raises(DonorLost, match=r"link broke|link was shut"):
        transfer.wait(60)
    link.close()


@pytest.mark.parametrize("num_bytes", [1, 8, 64, 4096, 1 << 20])
def test_random_bytes_from_a_stranger_harm_nobody(tmp_path: Path, children: list[Child], num_bytes: int) -> None:
    child = Child("donor", tmp_path)
    children.append(child)
    link = open_end(tmp_path, JOINER_RANK)
    assert child.line() == "ready"
    ports = {local[1] for local, _ in link._handle.sockets.pairs} | {r[1] for _, r in link._handle.sockets.pairs}
    noise = random.Random(num_bytes).randbytes(num_bytes)
    reached = 0
    for port in ports:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
                stranger.sendall(noise)
                reached += 1
        except OSError:
            continue  # an ephemeral port, where nobody listens; or the listener hung up on the noise
    assert reached, "one end's listener was reached"
    into = torch.zeros(EXPECTED_BYTES, dtype=torch.uint8)
    link.receive(0, 0, into).wait(60)
    assert torch.equal(into, torch.ones(EXPECTED_BYTES, dtype=torch.uint8))
    assert child.line() == "survived"
    link.close()
    assert child.end() == 0


def test_a_joiner_that_sends_cannot_end_a_donor(tmp_path: Path, children: list[Child]) -> None:
    child = Child("donor", tmp_path)
    children.append(child)
    link = open_end(tmp_path, JOINER_RANK)
    assert child.line() == "ready"
    # Past our own link, which would not send: an unsolicited megabyte, and one under the tag of the donor's own send.
    group = link._handle.group
    works = [group.send([torch.ones(1 << 20, dtype=torch.uint8)], DONOR_RANK, tag) for tag in (0, 5)]  # type: ignore[attr-defined]
    into = torch.zeros(EXPECTED_BYTES, dtype=torch.uint8)
    link.receive(0, 0, into).wait(60)
    assert child.line() == "survived"
    link.close()
    assert child.end() == 0
    del works


# Strangers who know gloo's own protocol: a pair's id from the rendezvous, then the preamble of a message.

_ADDRESS_OFFSET = 18
"""Of the socket address in what gloo puts into the rendezvous; the pairs' ids, one a rank, stand at its end."""
_PREAMBLE = struct.Struct("<QQQQQQ")
"""Of a message: its bytes in all, operation, slot, offset, length, remote offset."""
_ANNOUNCE = 2
_PAYLOAD = 1


class Introduction:
    """What gloo wrote into the rendezvous for the other rank."""

    def __init__(self, value: bytes, for_rank: int) -> None:
        (family,) = struct.unpack_from("<H", value, _ADDRESS_OFFSET)
        port, host = struct.unpack_from(">H4s", value, _ADDRESS_OFFSET + 2)
        assert family == socket.AF_INET
        self.address = (socket.inet_ntoa(host), port)
        self.pair_id = value[len(value) - 16 + 8 * for_rank :][:8]

    def dial(self, num_bytes: int) -> socket.socket:
        """Connect as the other rank would, and announce a message of so many bytes for the first receive."""
        stranger = socket.create_connection(self.address, timeout=10)
        stranger.sendall(self.pair_id)
        stranger.sendall(_PREAMBLE.pack(_PREAMBLE.size, _ANNOUNCE, 0, 0, num_bytes, 0))
        return stranger


class Overheard(FileStore):
    """The rendezvous as one end sees it, with somebody who acts on what the other end wrote before this end can."""

    def __init__(self, folder: Path, key: str, act: Callable[[bytes], None]) -> None:
        super().__init__(folder)
        self._key = key
        self._act = act
        self.acted = threading.Event()

    def get(self, scope: str, keys: list[str], timeout_seconds: float) -> list[bytes]:
        values = super().get(scope, keys, timeout_seconds)
        for key, value in zip(keys, values, strict=True):
            if key == self._key and not self.acted.is_set():
                self._act(value)
                self.acted.set()
        return values


@pytest.mark.parametrize("victim", ["donor", "joiner"])
def test_a_stranger_who_takes_the_peers_place_is_found_before_anything_is_received(
    tmp_path: Path, children: list[Child], victim: str
) -> None:
    """The lower address listens, so the victim's is the lower: the stranger is there before the peer can dial."""
    rank, mine = (DONOR_RANK, JOINER_RANK) if victim == "donor" else (JOINER_RANK, DONOR_RANK)
    child = Child(victim, tmp_path, host="127.0.0.1")
    children.append(child)
    strangers: list[socket.socket] = []
    store = Overheard(
        tmp_path, f"lane/0/0/{rank}", lambda value: strangers.append(Introduction(value, mine).dial(1 << 20))
    )
    try:
        with pytest.raises(PeerUnreachable):
            open_end(tmp_path, mine, host="127.0.0.2", store=store)
        assert store.acted.is_set(), "the stranger was there"
        assert child.line().startswith("refused: ")
        assert child.line() == "survived"
        assert child.end() == 0
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("victim", ["donor", "joiner"])
def test_a_stranger_who_comes_later_with_a_valid_id_changes_nothing(
    tmp_path: Path, children: list[Child], victim: str
) -> None:
    rank, mine = (DONOR_RANK, JOINER_RANK) if victim == "donor" else (JOINER_RANK, DONOR_RANK)
    child = Child(victim, tmp_path, host="127.0.0.1")
    children.append(child)
    introductions: list[Introduction] = []
    store = Overheard(tmp_path, f"lane/0/0/{rank}", lambda value: introductions.append(Introduction(value, mine)))
    link = open_end(tmp_path, mine, host="127.0.0.2", store=store)
    assert child.line() == "ready"
    (introduction,) = introductions
    with introduction.dial(1 << 20), introduction.dial(EXPECTED_BYTES):
        data = torch.ones(EXPECTED_BYTES, dtype=torch.uint8)
        if victim == "joiner":  # its receive is posted: a longer message on its own pair would end it
            link.send(0, 0, data).wait(60)
        else:
            into = torch.zeros(EXPECTED_BYTES, dtype=torch.uint8)
            link.receive(0, 0, into).wait(60)
            assert torch.equal(into, data)
        assert child.line() == "survived"
    link.close()
    assert child.end() == 0


@pytest.mark.parametrize("victim", ["donor", "joiner"])
def test_a_limit_payload_in_the_peers_place_ends_the_process(
    tmp_path: Path, children: list[Child], victim: str
) -> None:
    """What no code around gloo prevents, kept here so that it is known and so that its end is noticed.

    Who takes the peer's place in the moment in which a link is built *and* sends payload that nobody asked for ends
    the process behind the port, a donor's too. The README says that data ports belong inside a private network.
    """
    rank, mine = (DONOR_RANK, JOINER_RANK) if victim == "donor" else (JOINER_RANK, DONOR_RANK)
    child = Child(victim, tmp_path, host="127.0.0.1")
    children.append(child)
    strangers: list[socket.socket] = []

    def act(value: bytes) -> None:
        strangers.append(Introduction(value, mine).dial(1 << 20))
        strangers[0].sendall(_PREAMBLE.pack(_PREAMBLE.size + (1 << 20), _PAYLOAD, 0, 0, 1 << 20, 0))

    try:
        with pytest.raises(PeerUnreachable):
            open_end(tmp_path, mine, host="127.0.0.2", store=Overheard(tmp_path, f"lane/0/0/{rank}", act))
        assert child.process.wait(60) == -signal.SIGABRT
    finally:
        for stranger in strangers:
            stranger.close()
