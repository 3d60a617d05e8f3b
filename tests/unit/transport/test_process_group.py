"""Groups of any size: they meet, work, and end at once from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from recovery.errors import BadConfiguration, MisuseError, PeerUnreachable
from recovery.transport import process_group
from recovery.transport.process_group import (
    DONOR_RANK,
    JOINER_RANK,
    GroupHandle,
    open_gloo_link,
    open_group,
)
from recovery.transport.rendezvous_store import ControlStore
from recovery.transport.sockets import endpoint_text
from tests.support.memory_store import MemoryStore

HOST = "127.0.0.1"


def in_threads(count: int, act: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            act(index)
        except BaseException as error:  # noqa: BLE001 - reported below, on the test's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def make_group(size: int, scope: str = "g", store: MemoryStore | None = None) -> list[GroupHandle]:
    store = store or MemoryStore()
    handles: dict[int, GroupHandle] = {}

    def open_one(rank: int) -> None:
        handles[rank] = open_group(store, scope, rank=rank, size=size, host=HOST, timeout_seconds=20)

    in_threads(size, open_one)
    return [handles[rank] for rank in range(size)]


def test_who_cancels_does_not_wait_for_connections_to_an_end_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small state is whole before the links to all donors are: gloo went on connecting to the others for 75 s."""
    connecting, let_go = threading.Semaphore(0), threading.Event()

    class Connecting:
        """Does not come back from its constructor before it is told to, as with an end that has gone."""

        _Options = ProcessGroupGloo._Options  # type: ignore[attr-defined]
        create_device = staticmethod(ProcessGroupGloo.create_device)

        def __init__(self, *_: object) -> None:
            connecting.release()
            let_go.wait()

    monkeypatch.setattr(process_group, "ProcessGroupGloo", Connecting)
    store, cancelled = MemoryStore(), threading.Event()
    errors: list[Exception] = []

    def open_one() -> None:
        try:
            open_group(store, "g", rank=0, size=1, host=HOST, timeout_seconds=20, lanes=3, cancelled=cancelled)
        except PeerUnreachable as error:
            errors.append(error)

    opening = threading.Thread(target=open_one)
    opening.start()
    for _ in range(3):
        assert connecting.acquire(timeout=20)
    cancelled.set()
    opening.join(20)
    still_opening = opening.is_alive()
    let_go.set()
    opening.join()
    assert not still_opening
    assert [str(error) for error in errors] == [
        "the ranks of 'g' met, and the wait for their connections was cancelled"
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_group_averages_and_closes(size: int) -> None:
    handles = make_group(size)
    tensors = [torch.full((1000,), float(rank + 1)) for rank in range(size)]

    def reduce(rank: int) -> None:
        handles[rank].group.allreduce([tensors[rank]]).wait()  # type: ignore[attr-defined]

    in_threads(size, reduce)
    for tensor in tensors:
        assert torch.equal(tensor, torch.full((1000,), size * (size + 1) / 2))
    for handle in handles:
        assert len(handle.sockets) >= size - 1
        handle.close()
        handle.close()
        with pytest.raises(MisuseError):
            _ = handle.group


def test_a_blocked_collective_ends_when_one_rank_shuts() -> None:
    """Covers what pytorch's abort and shutdown do not: they return while the collective stays blocked.

    Reported in meta-pytorch/torchft#196.
    """
    handles = make_group(3)
    raised: list[str] = []
    blocked = threading.Barrier(3)

    def reduce(rank: int) -> None:
        work = handles[rank].group.allreduce([torch.ones(10)])  # type: ignore[attr-defined]
        blocked.wait()
        try:
            work.wait(timedelta(seconds=100))
        except RuntimeError as error:
            raised.append(str(error))

    # Rank 2 does not take part: the others would wait for it for ever.
    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    blocked.wait()
    handles[0].shut("the test says so")
    for thread in threads:
        thread.join(60)
    assert len(raised) == 2
    assert handles[0].reason == "the test says so"
    for handle in handles:
        handle.close()


def test_groups_built_at_once_through_one_store_do_not_block_each_other() -> None:
    store = MemoryStore()
    handles: list[GroupHandle] = []
    lock = threading.Lock()

    def open_one(index: int) -> None:
        handle = open_group(
            store, f"scope/{index // 2}", rank=index % 2, size=2, host=HOST, timeout_seconds=60, lanes=2
        )
        with lock:
            handles.append(handle)

    in_threads(16, open_one)
    assert len(handles) == 16
    for handle in handles:
        assert len(handle.sockets) == 2
        handle.close()


def test_nobody_comes() -> None:
    with pytest.raises(PeerUnreachable, match=r"no peer at rendezvous 'alone' within 0\.3 s"):
        open_group(MemoryStore(), "alone", rank=0, size=2, host=HOST, timeout_seconds=0.3)


def test_a_wait_for_the_others_is_cancelled() -> None:
    cancelled = threading.Event()
    raised: list[PeerUnreachable] = []

    def wait() -> None:
        try:
            open_gloo_link(
                MemoryStore(),
                "s",
                rank=JOINER_RANK,
                host=HOST,
                lanes=1,
                timeout_seconds=1000,
                cancelled=cancelled,
            )
        except PeerUnreachable as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    cancelled.set()
    thread.join(60)
    assert "cancelled" in str(raised[0])


@pytest.mark.parametrize(("rank", "size", "lanes"), [(2, 2, 1), (-1, 2, 1), (0, 2, 0), (0, 2, 65)])
def test_impossible_groups_are_refused(rank: int, size: int, lanes: int) -> None:
    with pytest.raises(BadConfiguration):
        open_group(MemoryStore(), "s", rank=rank, size=size, host=HOST, timeout_seconds=1, lanes=lanes)


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(BadConfiguration, match=r"203\.0\.113\.7"):
        open_group(MemoryStore(), "s", rank=0, size=1, host="203.0.113.7", timeout_seconds=1)


def test_sockets_that_are_not_the_other_ends_are_refused() -> None:
    store = MemoryStore()
    errors: list[PeerUnreachable] = []

    class Lying(MemoryStore):
        """One end reads another list of sockets than the other end wrote."""

        def set(self, scope: str, key: str, value: bytes) -> None:
            store.set(scope, key, b'[[["127.0.0.1", 1], ["127.0.0.1", 2]]]' if key == "sockets/0" else value)

        def get(self, scope: str, keys: list[str], timeout_seconds: float) -> list[bytes]:
            return store.get(scope, keys, timeout_seconds)

        def wait(self, scope: str, keys: list[str], timeout_seconds: float) -> None:
            store.wait(scope, keys, timeout_seconds)

    def open_end(rank: int) -> None:
        try:
            open_gloo_link(
                Lying() if rank == DONOR_RANK else store, "s", rank=rank, host=HOST, lanes=1, timeout_seconds=20
            ).close()
        except PeerUnreachable as error:
            errors.append(error)

    in_threads(2, open_end)
    assert len(errors) == 1
    assert "not the other end's" in str(errors[0])


def test_endpoints_name_both_ends() -> None:
    handles = make_group(2)
    (pair,) = handles[0].sockets.pairs
    assert (pair[1], pair[0]) in handles[1].sockets.pairs
    assert endpoint_text(("::1", 5)) == "[::1]:5"
    for handle in handles:
        handle.close()


def test_the_store_keeps_scopes_apart_and_speaks_torch() -> None:
    kept = MemoryStore()
    one, two = ControlStore(kept, "a", 5), ControlStore(kept, "b", 5)
    one.set("k", "text")
    one.set("n", b"\0\xff")
    assert one.get("k") == b"text"
    assert one.get("n") == b"\0\xff"
    assert one.check(["k", "n"])
    assert not two.check(["k"])
    assert one.add("count", 2) == 2
    assert one.add("count", 3) == 5
    assert two.compare_set("c", "", "new") == b"new"
    assert two.compare_set("c", "other", "x") == b"new"
    assert one.delete_key("k")
    assert not one.delete_key("k")
    two.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(PeerUnreachable, match="missing: nothing"):
        two.wait(["nothing"])
    with pytest.raises(PeerUnreachable):
        one.wait(["nothing"], timedelta(seconds=0.05))
