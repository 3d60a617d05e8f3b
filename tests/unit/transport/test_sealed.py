"""Sealed links: what is on the wire, what is refused, and that no nonce comes twice."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from recovery.errors import ChunkDamaged, DonorLost, DonorRefused
from recovery.transport.link import lane_tag
from recovery.transport.memory import Delivery, Faults, MemoryLink, Message, memory_link_pair
from recovery.transport.sealed import OVERHEAD_BYTES, SealedLink, SealingKeys

SECONDS = 20.0
CONTEXT = (b"run", b"transfer", b"1", b"scope")


def pair(
    faults: Faults | None = None, *, lanes: int = 1, donor_context: Sequence[bytes] = CONTEXT
) -> tuple[SealedLink, SealedLink]:
    donor, joiner = memory_link_pair(lanes, faults) if faults is not None else memory_link_pair(lanes)
    mine, theirs = SealingKeys(), SealingKeys()
    return (
        mine.seal(donor, theirs.public, donor=True, context=donor_context, peer="the joiner"),
        theirs.seal(joiner, mine.public, donor=False, context=CONTEXT, peer="donor d0"),
    )


def some(num_bytes: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def move(donor: SealedLink, joiner: SealedLink, tag: int, data: torch.Tensor, lane: int = 0) -> torch.Tensor:
    into = torch.zeros_like(data)
    receiving = joiner.receive(lane, tag, into)
    donor.send(lane, tag, data)
    receiving.wait(SECONDS)
    return into


class Recorder:
    """Delivers unchanged and keeps what was on the wire."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def __call__(self, message: Message) -> Sequence[Delivery]:
        self.messages.append(bytes(message.data.tolist()))
        return [Delivery(data=message.data)]


def test_the_wire_never_sees_the_payload_nor_a_nonce_twice() -> None:
    wire = Recorder()
    donor, joiner = pair(wire, lanes=3)
    data = torch.zeros(4096, dtype=torch.uint8)
    for pull in range(60):
        lane = pull % 3
        assert torch.equal(move(donor, joiner, lane_tag(lane, 3, pull), data, lane), data)
    assert all(len(message) == 4096 + OVERHEAD_BYTES for message in wire.messages)
    assert not any(bytes(16) in message for message in wire.messages), "equal plain bytes would show"
    assert len({message[:4096] for message in wire.messages}) == 60
    assert len({message[-12:] for message in wire.messages}) == 60
    assert {struct.unpack("<I", message[-12:-8])[0] for message in wire.messages} == {0, 1, 2}


def test_two_conversations_never_share_a_key() -> None:
    wires = [Recorder(), Recorder()]
    for wire in wires:
        donor, joiner = pair(wire)
        move(donor, joiner, 0, torch.zeros(64, dtype=torch.uint8))
    assert wires[0].messages[0][-12:] == wires[1].messages[0][-12:], "the same nonce, hence another key is needed"
    assert wires[0].messages != wires[1].messages


def changed(at: int) -> Callable[[Message], Sequence[Delivery]]:
    def fault(message: Message) -> Sequence[Delivery]:
        data = message.data.clone()
        data[at] ^= 1
        return [Delivery(data=data)]

    return fault


@pytest.mark.parametrize("at", [0, 99, 100, 115, 116, 127], ids=["first", "last", "tag", "tag end", "lane", "number"])
def test_one_changed_bit_anywhere_is_refused_by_the_peers_name(at: int) -> None:
    donor, joiner = pair(changed(at))
    with pytest.raises(ChunkDamaged, match="donor d0: 100 bytes on lane 0 are not what it sealed"):
        move(donor, joiner, 0, some(100))


def test_a_damaged_message_does_not_end_the_link() -> None:
    def first_damaged(message: Message) -> Sequence[Delivery]:
        return changed(3)(message) if message.number == 0 else [Delivery(data=message.data)]

    donor, joiner = pair(first_damaged)
    with pytest.raises(ChunkDamaged):
        move(donor, joiner, 0, some(100))
    assert torch.equal(move(donor, joiner, 1, some(100)), some(100))


def test_a_message_of_another_pull_is_refused() -> None:
    """Two messages of equal length that change places are each valid, but not where they arrive."""
    kept: list[torch.Tensor] = []

    def swapped(message: Message) -> Sequence[Delivery]:
        kept.append(message.data.clone())
        return [Delivery(data=kept[0])]

    donor, joiner = pair(swapped)
    assert torch.equal(move(donor, joiner, 0, some(100, 1)), some(100, 1))
    with pytest.raises(ChunkDamaged):
        move(donor, joiner, 1, some(100, 2))


@pytest.mark.parametrize("index", range(4))
def test_what_the_ends_did_not_agree_on_does_not_open(index: int) -> None:
    other = tuple(b"x" if at == index else word for at, word in enumerate(CONTEXT))
    donor, joiner = pair(donor_context=other)
    with pytest.raises(ChunkDamaged):
        move(donor, joiner, 0, some(100))


def test_words_of_the_context_do_not_run_into_each_other() -> None:
    donor, joiner = pair(donor_context=(b"ru", b"ntransfer", b"1", b"scope"))
    with pytest.raises(ChunkDamaged):
        move(donor, joiner, 0, some(100))


def test_the_bytes_are_read_when_they_are_posted() -> None:
    """The guard may let training overwrite them afterwards."""
    donor, joiner = pair()
    data = some(1000)
    donor.send(0, 0, data)
    data.zero_()
    into = torch.zeros(1000, dtype=torch.uint8)
    joiner.receive(0, 0, into).wait(SECONDS)
    assert torch.equal(into, some(1000))


def test_what_was_sealed_is_not_opened_into_memory_after_shut() -> None:
    """The memory is somebody else's again once ``shut`` has returned."""
    donor, joiner = pair()
    into = torch.zeros(1000, dtype=torch.uint8)
    receiving = joiner.receive(0, 0, into)
    donor.send(0, 0, some(1000))
    joiner.shut("the test says so")
    with pytest.raises(DonorLost, match="the test says so"):
        receiving.wait(SECONDS)
    assert not into.any()


def test_shut_waits_for_a_message_that_is_being_opened() -> None:
    donor, joiner = pair()
    lane = joiner._lanes[0]
    lane.working.acquire()  # a thread is opening a message
    done = threading.Event()

    def shut() -> None:
        joiner.shut("over")
        done.set()

    thread = threading.Thread(target=shut)
    thread.start()
    assert not done.wait(0.1)
    lane.working.release()
    assert done.wait(SECONDS)
    thread.join()
    donor.close()


@pytest.mark.parametrize("far_key", [b"", b"short", bytes(32)], ids=["none", "short", "of low order"])
def test_an_unusable_key_is_refused_and_the_link_closed(far_key: bytes) -> None:
    donor, joiner = memory_link_pair(1)
    with pytest.raises(DonorRefused, match="donor d0 sent a sealing key that cannot be used"):
        SealingKeys().seal(joiner, far_key, donor=False, context=CONTEXT, peer="donor d0")
    assert_shut(donor)


def assert_shut(link: MemoryLink) -> None:
    with pytest.raises(DonorLost):
        link.send(0, 0, some(10))


def test_buffers_are_used_again() -> None:
    donor, joiner = pair()
    for pull in range(20):
        data = some(50_000)
        into = torch.zeros_like(data)
        receiving = joiner.receive(0, pull, into)
        sending = donor.send(0, pull, data)
        sending.wait(SECONDS)
        receiving.wait(SECONDS)
    assert len(donor._buffers._free) == 1
    assert len(joiner._buffers._free) == 1
