"""What strangers and misbehaving peers can do to the data port: end a joiner at worst, never a donor.

Covers pytorch/gloo#456: a message longer than the posted receive ends the receiving process.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recovery.errors import DonorLost
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK, GlooLink, open_gloo_link
from tests.support.memory_file_store import FileStore
from tests.support.memory_link_process import EXPECTED_BYTES, SCOPE


class Child:
    """The other end, in a process of its own."""

    def __init__(self, role: str, folder: Path, how: str = "receive") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.memory_link_process", role, str(folder), how],
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


def open_end(folder: Path, rank: int) -> GlooLink:
    return open_gloo_link(FileStore(folder), SCOPE, rank=rank, host="127.0.0.1", lanes=1, timeout_seconds=60)


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
