"""Scopes, caps, waits and ends of the rendezvous: the table alone on a manual clock, then over real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.clock import ManualClock, SystemClock
from recovery.control.inputs import Effect, EndScope, Input, Operated
from recovery.control.operator_client import OperatorClient
from recovery.control.rendezvous import RendezvousLimits, RendezvousTable
from recovery.errors import BadConfiguration, DonorBusy, PeerUnreachable, RecoveryError
from recovery.types import KeyValue
from tests.support.coordinators import PLAIN, RecordingClient, coordinator
from tests.support.scripted_machine import ScriptedMachine, welcoming

# The table alone


def table(**limits: int) -> RendezvousTable:
    return RendezvousTable(ManualClock(), RendezvousLimits(**limits))


def now_there(found: RendezvousTable, scope: str, *keys: str) -> tuple[dict[str, bytes], list[str]]:
    return asyncio.run(found.get(scope, keys, 0))


def test_values_are_set_replaced_counted_and_deleted() -> None:
    found = table()
    found.set("s", "a", b"1")
    found.set("s", "a", b"22")
    assert now_there(found, "s", "a", "b") == ({"a": b"22"}, ["b"])
    assert found.total_bytes == 2
    assert found.delete("s", "a")
    assert not found.delete("s", "a")
    assert found.total_bytes == 0


def test_scopes_do_not_share_keys() -> None:
    found = table()
    found.set("s", "a", b"1")
    assert now_there(found, "t", "a") == ({}, ["a"])


def test_add_counts_from_zero_and_refuses_what_is_no_integer() -> None:
    found = table()
    assert found.add("s", "n", 5) == 5
    assert found.add("s", "n", -7) == -2
    assert now_there(found, "s", "n") == ({"n": b"-2"}, [])
    found.set("s", "x", b"text")
    with pytest.raises(BadConfiguration, match="x in scope s"):
        found.add("s", "x", 1)
    with pytest.raises(BadConfiguration, match="64 bits"):
        found.add("s", "n", 2**63 + 2)


def test_compare_set_takes_empty_for_absent() -> None:
    found = table()
    assert found.compare_set("s", "a", b"wrong", b"new") == b""
    assert found.compare_set("s", "a", b"", b"first") == b"first"
    assert found.compare_set("s", "a", b"", b"second") == b"first"
    assert found.compare_set("s", "a", b"first", b"third") == b"third"


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        ({"max_value_bytes": 3}, DonorBusy),
        ({"max_keys": 1}, DonorBusy),
        ({"max_scopes": 1}, DonorBusy),
        ({"max_total_bytes": 4}, DonorBusy),
        ({"max_name_bytes": 3}, BadConfiguration),
    ],
)
def test_every_cap_refuses_and_keeps_what_was_there(limits: dict[str, int], kind: type[RecoveryError]) -> None:
    found = table(**limits)
    found.set("s", "a", b"123")
    with pytest.raises(kind):
        found.set("s" if "max_scopes" not in limits else "t", "long-key", b"4567")
    assert now_there(found, "s", "a") == ({"a": b"123"}, [])
    assert found.total_bytes == 3


@pytest.mark.parametrize(("scope", "key"), [("", "k"), ("s", "")])
def test_nameless_things_are_refused(scope: str, key: str) -> None:
    with pytest.raises(BadConfiguration, match="name"):
        table().set(scope, key, b"")


def test_an_ended_scope_takes_those_below_it_along_and_is_not_begun_again() -> None:
    """As reported in MoonshotAI/checkpoint-engine#106."""
    found = table()
    found.set("transfer/7/1/w2", "a", b"1")
    found.set("transfer/71", "a", b"1")
    found.end("transfer/7")
    assert found.num_scopes == 1
    for scope in ("transfer/7", "transfer/7/1/w2", "transfer/7/2"):
        with pytest.raises(PeerUnreachable, match="has ended"):
            found.set(scope, "a", b"1")
    assert now_there(found, "transfer/71", "a") == ({"a": b"1"}, [])
    assert found.total_bytes == 1


def test_the_memory_of_ends_is_bounded() -> None:
    found = table(remembered_ends=2)
    for number in range(5):
        found.end(f"s{number}")
    found.set("s0", "a", b"")
    with pytest.raises(PeerUnreachable):
        found.set("s4", "a", b"")


def test_idle_scopes_are_forgotten_those_in_use_are_not() -> None:
    clock = ManualClock()
    found = RendezvousTable(clock, RendezvousLimits(idle_seconds=100))
    found.set("old", "a", b"1")
    clock.advance(60)
    found.set("new", "a", b"1")
    clock.advance(60)
    found.expire()
    assert found.num_scopes == 1
    assert now_there(found, "new", "a") == ({"a": b"1"}, [])
    assert found.total_bytes == 1


def test_a_scope_with_a_waiter_is_not_idle_and_its_end_frees_the_waiter() -> None:
    async def play() -> None:
        clock = ManualClock()
        found = RendezvousTable(clock, RendezvousLimits(idle_seconds=1))
        waiter = asyncio.create_task(found.get("s", ["a"], 600))
        await asyncio.sleep(0)
        clock.advance(500)
        found.expire()
        assert found.num_scopes == 1
        found.end("s")
        with pytest.raises(PeerUnreachable, match="has ended"):
            await waiter

    asyncio.run(play())


def test_a_waiter_sees_keys_that_come_one_by_one() -> None:
    async def play() -> None:
        found = RendezvousTable(SystemClock())
        waiter = asyncio.create_task(found.get("s", ["a", "b"], 60))
        for key in ("b", "c", "a"):
            await asyncio.sleep(0)
            assert not waiter.done()
            found.set("s", key, key.encode())
        assert await waiter == ({"a": b"a", "b": b"b"}, [])

    asyncio.run(play())


# Over sockets


@pytest.fixture
def key_value(tmp_path: Path) -> Iterator[KeyValue]:
    with coordinator(tmp_path) as server, RecordingClient(server.address) as worker:
        yield worker.client.key_value()


def test_a_client_sees_what_the_table_does(key_value: KeyValue) -> None:
    key_value.set("s", "a", b"1")
    assert key_value.get("s", ["a"], 1) == [b"1"]
    key_value.wait("s", ["a"], 1)
    assert key_value.exists("s", ["a"])
    assert not key_value.exists("s", ["a", "b"])
    assert key_value.add("s", "n", 2) == 2
    assert key_value.compare_set("s", "a", b"1", b"2") == b"2"
    assert key_value.delete("s", "a")
    assert not key_value.delete("s", "a")


def test_a_wait_that_fails_names_the_missing_keys(key_value: KeyValue) -> None:
    key_value.set("s", "a", b"1")
    with pytest.raises(PeerUnreachable, match=r"nobody set b, c in scope s \(waited 0\.2 s\)"):
        key_value.get("s", ["a", "b", "c"], 0.2)


def test_a_value_over_the_cap_is_refused_by_name(key_value: KeyValue) -> None:
    key_value.set("s", "a", bytes(64 * 1024))
    with pytest.raises(DonorBusy, match="a in scope s has 65537 bytes"):
        key_value.set("s", "a", bytes(64 * 1024 + 1))


def test_values_that_are_too_long_together_are_asked_for_in_parts(key_value: KeyValue) -> None:
    keys = [str(number) for number in range(40)]
    for key in keys:
        key_value.set("s", key, bytes(64 * 1024))
    with pytest.raises(DonorBusy, match="40 keys are too long for one answer"):
        key_value.get("s", keys, 1)
    assert len(key_value.get("s", keys[:20], 1)) == 20


def test_many_groups_meet_at_once_over_one_client(key_value: KeyValue) -> None:
    """64 groups of two, all waiting at the same time: a client whose waits hold a lock would never end."""
    ranks = 128
    everybody = threading.Barrier(ranks)
    met: list[bytes] = []

    def rank(group: int, own: int) -> None:
        everybody.wait()
        scope = f"epoch/{group}"
        if own == 1:
            # The second rank waits before it sets, so that every wait of a second rank is under way together.
            key_value.wait(scope, ["0"], 60)
        key_value.set(scope, str(own), f"{group}.{own}".encode())
        met.extend(key_value.get(scope, [str(1 - own)], 60))

    threads = [threading.Thread(target=rank, args=(number // 2, number % 2)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(met) == sorted(f"{group}.{own}".encode() for group in range(64) for own in range(2))


def test_close_ends_a_wait_at_once(tmp_path: Path) -> None:
    with coordinator(tmp_path) as server:
        worker = RecordingClient(server.address)
        worker.client.start()
        key_value = worker.client.key_value()
        key_value.set("s", "here", b"")
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                key_value.wait("s", ["never"], 600)
            except PeerUnreachable as error:
                ended.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        worker.client.close()
        waiter.join(30)
        assert not waiter.is_alive()
        assert "closed by this process" in str(ended[0])
        with pytest.raises(PeerUnreachable, match="closed by this process"):
            key_value.set("s", "a", b"")


def test_the_machine_ends_scopes(tmp_path: Path) -> None:
    def script(event: Input) -> list[Effect]:
        return [EndScope("transfer/7")] * isinstance(event, Operated) + welcoming(event)

    with (
        coordinator(tmp_path, ScriptedMachine(script)) as server,
        RecordingClient(server.address) as worker,
        OperatorClient(server.address, PLAIN) as operator,
    ):
        key_value = worker.client.key_value()
        key_value.set("transfer/7/1", "a", b"1")
        waited: list[str] = []

        def wait() -> None:
            with pytest.raises(PeerUnreachable) as caught:
                key_value.get("transfer/7/1", ["b"], 600)
            waited.append(str(caught.value))

        waiter = threading.Thread(target=wait)
        waiter.start()
        operator.list()
        waiter.join(30)
        assert "has ended" in waited[0]


def test_a_wait_outlives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    got: list[list[bytes]] = []
    with coordinator(tmp_path) as first:
        address = first.address
        worker = RecordingClient(address)
        worker.client.start()
        worker.client.wait_attached(30)
        key_value = worker.client.key_value()
        key_value.set("s", "lost", b"1")
        waiter = threading.Thread(target=lambda: got.append(key_value.get("s", ["late"], 60)))
        waiter.start()
    with coordinator(tmp_path, listen=address):
        deadline = time.monotonic() + 30
        while not key_value.exists("s", ["late"]) and time.monotonic() < deadline:
            key_value.set("s", "late", b"2")
        assert not key_value.exists("s", ["lost"])
        waiter.join(30)
        assert got == [[b"2"]]
        worker.client.close()
