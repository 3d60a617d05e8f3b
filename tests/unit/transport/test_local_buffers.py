"""Inside one machine what waits in a link's sockets stays small enough for the processor's cache."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import torch

from recovery.transport import process_group, sockets
from recovery.transport.link import lane_tag
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK, GlooLink, open_gloo_link
from recovery.types import MIB
from tests.support.memory_store import MemoryStore


def link_pair(lanes: int) -> tuple[GlooLink, GlooLink]:
    store, made = MemoryStore(), dict[int, GlooLink]()

    def end(rank: int) -> None:
        made[rank] = open_gloo_link(store, "s", rank=rank, host="127.0.0.1", lanes=lanes, timeout_seconds=30)

    threads = [threading.Thread(target=end, args=(rank,)) for rank in (DONOR_RANK, JOINER_RANK)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[DONOR_RANK], made[JOINER_RANK]


def buffers(link: GlooLink, option: int) -> list[int]:
    """Linux tells twice what was set: half of it is its own book-keeping."""
    return [each.getsockopt(socket.SOL_SOCKET, option) // 2 for each in link._handle.sockets._sockets]


def test_sockets_inside_one_machine_are_bounded_and_carry_what_is_larger() -> None:
    donor, joiner = link_pair(2)
    try:
        if int(sockets._LARGEST_SEND_BUFFER.read_text()) >= process_group._LOCAL_SEND_BYTES:
            assert buffers(donor, socket.SO_SNDBUF) == [process_group._LOCAL_SEND_BYTES] * 2
        if int(sockets._LARGEST_RECEIVE_BUFFER.read_text()) >= process_group._LOCAL_RECEIVE_BYTES:
            assert buffers(joiner, socket.SO_RCVBUF) == [process_group._LOCAL_RECEIVE_BYTES] * 2
        data = torch.arange(16 * MIB, dtype=torch.int64).view(torch.uint8)[: 16 * MIB]
        into = [torch.zeros_like(data) for _ in range(2)]
        waits = [joiner.receive(lane, lane_tag(lane, 2, 1), into[lane]) for lane in range(2)]
        waits += [donor.send(lane, lane_tag(lane, 2, 1), data) for lane in range(2)]
        for wait in waits:
            wait.wait(60)
        assert all(torch.equal(each, data) for each in into)
    finally:
        for link in (donor, joiner):
            link.close()


def test_a_system_that_permits_only_small_buffers_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = tmp_path / "rmem_max"
    small.write_text("212992\n")
    monkeypatch.setattr(sockets, "_LARGEST_RECEIVE_BUFFER", small)
    donor, joiner = link_pair(1)
    try:
        assert buffers(joiner, socket.SO_RCVBUF) != [process_group._LOCAL_RECEIVE_BYTES]
    finally:
        for link in (donor, joiner):
            link.close()


def test_sockets_to_another_machine_are_left_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_is_local", lambda found: False)
    donor, joiner = link_pair(1)
    try:
        assert buffers(joiner, socket.SO_RCVBUF) != [process_group._LOCAL_RECEIVE_BYTES]
    finally:
        for link in (donor, joiner):
            link.close()
