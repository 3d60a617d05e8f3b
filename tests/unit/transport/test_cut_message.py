"""A message that is cut in the middle: gloo does not wake its wait, so its memory must be safe without it."""

from __future__ import annotations

import contextlib
import threading
import weakref

import torch

from recovery.errors import DonorLost
from recovery.transport.link import Transfer, lane_tag
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK, GlooLink, open_gloo_link
from recovery.types import MIB
from tests.support.memory_store import MemoryStore


def link_pair() -> tuple[GlooLink, GlooLink]:
    store = MemoryStore()
    ends: dict[int, GlooLink] = {}

    def open_end(rank: int) -> None:
        ends[rank] = open_gloo_link(store, "scope", rank=rank, host="127.0.0.1", lanes=1, timeout_seconds=30)

    threads = [threading.Thread(target=open_end, args=(rank,)) for rank in (DONOR_RANK, JOINER_RANK)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends[DONOR_RANK], ends[JOINER_RANK]


def test_after_shut_nothing_is_written_and_waits_end() -> None:
    donor, joiner = link_pair()
    into = torch.zeros(512 * MIB, dtype=torch.uint8)
    transfers = [joiner.receive(0, lane_tag(0, 1, pull), part) for pull, part in enumerate(into.tensor_split(2))]
    data = torch.ones(into.numel() // 2, dtype=torch.uint8)
    sends = [donor.send(0, lane_tag(0, 1, pull), data) for pull in range(2)]
    while into[0] == 0:
        pass  # until a part of the first message is there
    joiner.shut("the test says so")
    left = into.clone()
    assert left[-1] == 0, "the second message was cut off"
    for transfer in [*transfers, *sends]:
        try:
            transfer.wait(5)
        except DonorLost as error:
            assert "link" in str(error)
    donor.close()
    joiner.close()
    assert torch.equal(into, left)


def test_a_closed_link_keeps_no_memory_although_a_wait_stays() -> None:
    donor, joiner = link_pair()
    ends = {donor: torch.ones(128 * MIB, dtype=torch.uint8), joiner: torch.zeros(128 * MIB, dtype=torch.uint8)}
    memory = [weakref.ref(data.untyped_storage()) for data in ends.values()]
    tag = lane_tag(0, 1, 0)
    waits_seconds = 4.0

    def wait(transfer: Transfer) -> None:
        with contextlib.suppress(DonorLost):
            transfer.wait(waits_seconds)

    into = ends[joiner]
    transfers = [donor.send(0, tag, ends[donor]), joiner.receive(0, tag, into)]
    threads = [threading.Thread(target=wait, args=(transfer,)) for transfer in transfers]
    for thread in threads:
        thread.start()
    while into[0] == 0:
        pass  # until a part of the message is there
    joiner.shut("the test says so")
    donor.close()
    joiner.close()
    del into
    ends.clear()
    assert any(thread.is_alive() for thread in threads), "no wait stayed: there was nothing to let go of"
    assert [reference() is None for reference in memory] == [True, True]
    for thread in threads:
        thread.join()
