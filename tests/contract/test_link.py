"""What every link must do. Runs on the memory link and on gloo over loopback, plain and sealed, both ends here.

NCCL's link runs here too where there are two CUDA devices, which NCCL wants for two ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from recovery.errors import ChunkDamaged, DonorLost, MisuseError
from recovery.transport.link import Link, Transfer, lane_tag
from recovery.transport.memory import memory_link_pair
from recovery.transport.nccl import nccl_unavailable, open_nccl_link
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK, open_gloo_link
from recovery.transport.sealed import SealedLink, SealingKeys
from tests.support.memory_store import MemoryStore

LONG_SECONDS = 60.0
Pair = tuple[Link, Link]
MakePair = Callable[[int], contextlib.AbstractContextManager[Pair]]

NO_NCCL = nccl_unavailable(2)
"""Why NCCL's link is not tested here; empty: it is."""

_numbers = itertools.count()


@contextlib.contextmanager
def memory_pair(lanes: int) -> Iterator[Pair]:
    donor, joiner = memory_link_pair(lanes)
    try:
        yield donor, joiner
    finally:
        donor.close()
        joiner.close()


@contextlib.contextmanager
def opened(open_end: Callable[[MemoryStore, str, int], Link]) -> Iterator[Pair]:
    """Both ends at once: each waits for the other."""
    store, scope = MemoryStore(), f"contract/{next(_numbers)}"
    ends: dict[int, Link] = {}

    def open_one(rank: int) -> None:
        ends[rank] = open_end(store, scope, rank)

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in (DONOR_RANK, JOINER_RANK)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        yield ends[DONOR_RANK], ends[JOINER_RANK]
    finally:
        for end in ends.values():
            end.close()


def gloo_pair(lanes: int) -> contextlib.AbstractContextManager[Pair]:
    return opened(
        lambda store, scope, rank: open_gloo_link(
            store, scope, rank=rank, host="127.0.0.1", lanes=lanes, timeout_seconds=20
        )
    )


def nccl_pair(lanes: int) -> contextlib.AbstractContextManager[Pair]:
    return opened(
        lambda store, scope, rank: open_nccl_link(store, scope, rank=rank, device=rank, lanes=lanes, timeout_seconds=60)
    )


@contextlib.contextmanager
def sealed(plain: contextlib.AbstractContextManager[Pair]) -> Iterator[Pair]:
    donor_keys, joiner_keys = SealingKeys(), SealingKeys()
    with plain as (donor, joiner):
        sealed_donor = donor_keys.seal(donor, joiner_keys.public, donor=True, context=[b"contract"], peer="joiner")
        sealed_joiner = joiner_keys.seal(joiner, donor_keys.public, donor=False, context=[b"contract"], peer="donor")
        try:
            yield sealed_donor, sealed_joiner
        finally:
            sealed_donor.close()
            sealed_joiner.close()


def sealed_memory_pair(lanes: int) -> contextlib.AbstractContextManager[Pair]:
    return sealed(memory_pair(lanes))


def sealed_gloo_pair(lanes: int) -> contextlib.AbstractContextManager[Pair]:
    return sealed(gloo_pair(lanes))


@pytest.fixture(
    params=[
        pytest.param(memory_pair, id="memory"),
        pytest.param(gloo_pair, id="gloo"),
        pytest.param(sealed_memory_pair, id="sealed-memory"),
        pytest.param(sealed_gloo_pair, id="sealed-gloo"),
        pytest.param(
            nccl_pair, id="nccl", marks=pytest.mark.skipif(bool(NO_NCCL), reason=f"NCCL cannot be used here: {NO_NCCL}")
        ),
    ],
)
def make_pair(request: pytest.FixtureRequest) -> MakePair:
    made: MakePair = request.param
    return made


def some_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def move(donor: Link, joiner: Link, lane: int, tag: int, data: torch.Tensor, into: torch.Tensor) -> None:
    receiving = joiner.receive(lane, tag, into)
    sending = donor.send(lane, tag, data)
    sending.wait(LONG_SECONDS)
    receiving.wait(LONG_SECONDS)


@pytest.mark.parametrize("num_bytes", [1, 7, 65536, (1 << 22) + 3])
def test_bytes_arrive_unchanged(make_pair: MakePair, num_bytes: int) -> None:
    with make_pair(1) as (donor, joiner):
        data, into = some_bytes(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8)
        move(donor, joiner, 0, 0, data, into)
        assert torch.equal(data, into)


def test_the_tag_chooses_lane_and_receive(make_pair: MakePair) -> None:
    with make_pair(4) as (donor, joiner):
        assert donor.lanes == joiner.lanes == 4
        pieces = [(pull % 4, lane_tag(pull % 4, 4, pull), some_bytes(1000 + pull, pull)) for pull in range(32)]
        into = [torch.zeros_like(data) for _, _, data in pieces]
        receives = [joiner.receive(lane, tag, memory) for (lane, tag, _), memory in zip(pieces, into, strict=True)]
        # Lanes are independent: the last lane's messages may go first.
        order = sorted(pieces, key=lambda piece: (-piece[0], piece[1]))
        sends = [donor.send(*piece) for piece in order]
        for transfer in sends + receives:
            transfer.wait(LONG_SECONDS)
        assert all(torch.equal(data, memory) for (_, _, data), memory in zip(pieces, into, strict=True))


def test_a_send_may_be_posted_before_its_receive(make_pair: MakePair) -> None:
    with make_pair(1) as (donor, joiner):
        data, into = some_bytes(3000), torch.zeros(3000, dtype=torch.uint8)
        sending = donor.send(0, 5, data)
        receiving = joiner.receive(0, 5, into)
        receiving.wait(LONG_SECONDS)
        sending.wait(LONG_SECONDS)
        assert torch.equal(data, into)


def test_a_shorter_message_leaves_the_tail(make_pair: MakePair) -> None:
    with make_pair(1) as (donor, joiner):
        into = torch.full((100,), 9, dtype=torch.uint8)
        if isinstance(joiner, SealedLink):
            with pytest.raises(ChunkDamaged, match="donor"):
                move(donor, joiner, 0, 0, some_bytes(40), into)
            return
        move(donor, joiner, 0, 0, some_bytes(40), into)
        assert torch.equal(into[:40], some_bytes(40))
        assert torch.equal(into[40:], torch.full((60,), 9, dtype=torch.uint8))


@pytest.mark.parametrize("which", ["donor", "joiner"])
def test_shut_on_either_end_ends_every_wait_on_both(make_pair: MakePair, which: str) -> None:
    with make_pair(3) as (donor, joiner):
        blocked: list[Transfer] = [joiner.receive(lane, lane, torch.zeros(10, dtype=torch.uint8)) for lane in range(3)]
        blocked.append(donor.send(1, 4, some_bytes(1 << 20)))
        raised: list[BaseException] = []
        waiting = threading.Barrier(len(blocked) + 1)

        def wait(transfer: Transfer) -> None:
            waiting.wait()
            try:
                transfer.wait(LONG_SECONDS)
            except DonorLost as error:
                raised.append(error)

        threads = [threading.Thread(target=wait, args=(transfer,)) for transfer in blocked]
        for thread in threads:
            thread.start()
        waiting.wait()
        (donor if which == "donor" else joiner).shut("the test says so")
        for thread in threads:
            thread.join(LONG_SECONDS)
        assert len(raised) == len(blocked)
        assert any("the test says so" in str(error) for error in raised)


def test_a_shut_link_refuses_posts(make_pair: MakePair) -> None:
    with make_pair(1) as (donor, joiner):
        donor.shut("first")
        donor.shut("second")
        with pytest.raises(DonorLost, match="first"):
            donor.send(0, 0, some_bytes(1))
        joiner.shut("over")
        with pytest.raises(DonorLost):
            joiner.receive(0, 0, torch.zeros(1, dtype=torch.uint8))


def test_an_expired_wait_breaks_the_link(make_pair: MakePair) -> None:
    with make_pair(1) as (donor, joiner):
        receiving = joiner.receive(0, 0, torch.zeros(10, dtype=torch.uint8))
        with pytest.raises(DonorLost):
            receiving.wait(0.05)
        with pytest.raises(DonorLost):
            joiner.receive(0, 1, torch.zeros(10, dtype=torch.uint8))
        donor.shut("done")


def test_each_transfer_is_waited_for_once(make_pair: MakePair) -> None:
    """As reported in pytorch/gloo#308."""
    with make_pair(1) as (donor, joiner):
        receiving = joiner.receive(0, 0, torch.zeros(10, dtype=torch.uint8))
        sending = donor.send(0, 0, some_bytes(10))
        sending.wait(LONG_SECONDS)
        receiving.wait(LONG_SECONDS)
        for transfer in (sending, receiving):
            with pytest.raises(MisuseError):
                transfer.wait(LONG_SECONDS)


def test_each_end_has_its_direction(make_pair: MakePair) -> None:
    with make_pair(1) as (donor, joiner):
        with pytest.raises(MisuseError):
            donor.receive(0, 0, torch.zeros(10, dtype=torch.uint8))
        with pytest.raises(MisuseError):
            joiner.send(0, 0, some_bytes(10))


@pytest.mark.parametrize(
    ("lane", "tag", "data"),
    [
        (2, 2, torch.zeros(1, dtype=torch.uint8)),
        (0, 1, torch.zeros(1, dtype=torch.uint8)),
        (0, -2, torch.zeros(1, dtype=torch.uint8)),
        (0, 0, torch.zeros(1)),
        (0, 0, torch.zeros(0, dtype=torch.uint8)),
        (0, 0, torch.zeros(2, 2, dtype=torch.uint8)),
        (0, 0, torch.zeros(4, dtype=torch.uint8)[::2]),
    ],
    ids=["lane", "tag", "negative", "dtype", "empty", "2-d", "strided"],
)
def test_malformed_posts_are_refused(make_pair: MakePair, lane: int, tag: int, data: torch.Tensor) -> None:
    with make_pair(2) as (donor, joiner):
        with pytest.raises(MisuseError):
            donor.send(lane, tag, data)
        with pytest.raises(MisuseError):
            joiner.receive(lane, tag, data)


def test_progress_is_seen_at_both_ends(make_pair: MakePair) -> None:
    with make_pair(2) as (donor, joiner):
        before = donor.bytes_moved(), joiner.bytes_moved()
        into = torch.zeros(1 << 20, dtype=torch.uint8)
        move(donor, joiner, 1, 1, some_bytes(1 << 20), into)
        # The far end's acknowledgement may still be under way, but most of it was needed to get the last bytes across.
        assert joiner.bytes_moved() - before[1] >= 1 << 20
        assert donor.bytes_moved() > before[0]


def test_closing_twice_is_harmless(make_pair: MakePair) -> None:
    with make_pair(2) as (donor, joiner):
        for end in (donor, joiner, donor, joiner):
            end.close()
