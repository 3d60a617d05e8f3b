"""The group of an epoch: who is behind a broken path is found by the ends of connections that the members published."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from protos.recovery.v1 import common_pb2
from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.errors import PeerUnreachable
from recovery.worker.averaging import Averager
from recovery.worker.groups import EpochGroups
from tests.support import deaf_sockets
from tests.support.memory_store import MemoryStore

PATIENCE = 3.0


def roster_of(size: int, epoch: int = 1) -> pb.Roster:
    members = [pb.RosterMember(worker=common_pb2.WorkerRef(worker_id=f"w{rank}")) for rank in range(size)]
    return pb.Roster(epoch=epoch, group_id=epoch, members=members)


@contextmanager
def members(store: MemoryStore, size: int) -> Iterator[list[EpochGroups]]:
    """Members of one roster, each with its group open."""
    groups = [EpochGroups(lambda: store, "127.0.0.1", PATIENCE) for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda rank: groups[rank].open(roster_of(size), rank), range(size)))
    try:
        yield groups
    finally:
        for each in groups:
            each.close("over")


def sockets_of(groups: EpochGroups) -> list[socket.socket]:
    handle = groups._handle
    assert handle is not None
    return [each.dup() for each in handle.sockets._sockets]


def average(groups: EpochGroups, rank: int, size: int) -> str:
    """Average once; return whom the member suspects if that fails, "fine" if it does not."""
    group = groups.open(roster_of(size), rank)
    try:
        Averager(1 << 20).average([torch.ones(1000)], [1.0] * size, rank, group, 60.0)
    except RuntimeError:
        suspect = groups.suspect(roster_of(size))
        groups.drop("it failed")
        return suspect
    return "fine"


# Both members live in this process here, and each would find the other's sockets too: who is named among several is
# seen in ``tests/integration/test_boundary_places.py``, between processes.


@pytest.mark.parametrize(
    ("stored", "suspect"), [("theirs", "w1"), ("nothing", ""), (b"not json", ""), (json.dumps([["x"]]).encode(), "")]
)
def test_who_does_not_answer_is_named_and_nobody_is_on_a_strangers_word(stored: str | bytes, suspect: str) -> None:
    store = MemoryStore()
    with members(store, 2) as groups, ThreadPoolExecutor(2) as pool:
        if stored == "nothing":
            store.delete("epoch/1", "pairs/1")
        elif isinstance(stored, bytes):
            store.set("epoch/1", "pairs/1", stored)
        cut = sockets_of(groups[1])
        deaf_sockets.cut(cut)
        said = list(pool.map(lambda rank: average(groups[rank], rank, 2), range(2)))
        assert deaf_sockets.dropped(cut) > 0
        for each in cut:
            each.close()
    assert said[0] == suspect


def test_an_aborted_epoch_frees_a_member_that_waits_for_one_that_does_not_come() -> None:
    store = MemoryStore()
    groups = EpochGroups(lambda: store, "127.0.0.1", 60.0)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(groups.open, roster_of(2), 0)
        while not store.exists("epoch/1", ["listener/0"]):
            threading.Event().wait(0.01)
        groups.abort(1, "lost: w1")
        with pytest.raises(PeerUnreachable, match="lost: w1"):
            opening.result(30.0)
    with pytest.raises(PeerUnreachable, match="aborted"):
        groups.open(roster_of(2), 0)
    groups.close("over")
