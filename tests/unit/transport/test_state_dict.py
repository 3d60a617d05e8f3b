"""``send_state_dict`` and ``recv_state_dict`` between real processes over gloo: exact, verified, never a hang."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recovery.errors import MisuseError
from recovery.transport.state_dict import post_receive, post_send, recv_state_dict, send_state_dict
from tests.support.processes import ChildProcess
from tests.unit.state.exact import same
from tests.unit.transport.state_dict_process import open_group

MODULE = "tests.unit.transport.state_dict_process"


@contextmanager
def ranks(scenario: str, folder: Path, *extra: str) -> Iterator[list[ChildProcess]]:
    """Start the two processes of a scenario; kill what is left of them at the end."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                ChildProcess(
                    ["-m", MODULE, scenario, str(rank), str(folder / "meet"), *extra], {"GLOO_SOCKET_IFNAME": "lo"}
                )
            )
            for rank in range(2)
        ]


def result(child: ChildProcess, scenario: str) -> Any:
    start = f"result {scenario} "
    return json.loads(child.line(start, timeout_seconds=100).removeprefix(start))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """What rank 0 and rank 1 saw in each scenario, all over one group: importing torch takes the longest by far."""
    names = ["exact", "in_place", "mismatched", "refused", "damaged", "noise", "world"]
    with ranks(",".join(names), tmp_path_factory.mktemp("group")) as (sender, receiver):
        return {name: (result(sender, name), result(receiver, name)) for name in names}


Found = dict[str, tuple[Any, Any]]


def test_every_case_arrives_to_the_bit_and_costs_its_logical_bytes(found: Found) -> None:
    """Among them what other transports lose: views cost their bytes only, tied tensors travel once, no pickle runs.

    Reports: learning-at-home/hivemind#155 (a peer's state was unpickled), pytorch/pytorch#131976 and #132366 (0-d and
    one-element tensors), pytorch/gloo#454 (bf16 and complex).
    """
    sent, equal = found["exact"]
    assert [name for name, same in equal.items() if not same] == []
    assert len(equal) == 15
    # Header and manifest come on top: for 1,000 tensors about 100 bytes each.
    assert 4_000_000 < sent["views"] < 4_150_000
    assert 48 < sent["tied"] < 48 + 600
    assert sent["no bytes"] < 600


def test_receiving_in_place_keeps_memory_and_objects(found: Found) -> None:
    _, receiver = found["in_place"]
    assert receiver == {
        "equal": True, "module": True, "addresses": True, "objects": [True] * 3, "tied": True, "strides": [2, 8],
    }  # fmt: skip


def test_layouts_that_differ_are_named_leaf_by_leaf_before_any_payload(found: Found) -> None:
    sent, received = found["mismatched"]
    lines = {
        "missing": "c: sent as float32 [2], not there",
        "surplus": "d: float32 [1] here, not sent",
        "shape": "a: sent as float32 [2, 3], here it is float32 [3, 2]",
        "dtype": "b: sent as float32 [4], here it is int32 [4]",
        "tied": "c: sent as float32 [2], not there (or tied to another) here",
        "kind": "n: sent as float64 array [2], here it is float64 [2]",
    }
    for name, line in lines.items():
        for side in (sent, received):
            kind, message = side["found"][name]
            assert kind == "LayoutMismatch"
            assert line in message
    assert received["untouched"]
    assert received["after"]
    assert sent["payload"] < 7 * 1500


def test_caps_hold_and_the_group_survives_a_refusal(found: Found) -> None:
    sent, received = found["refused"]
    complaints = ["at most 1000 are accepted", "more than 10 tensors", "more than 100 bytes"]
    for side in (sent, received):
        assert [kind for kind, _ in side[:3]] == ["ManifestRejected"] * 3
        assert all(complaint in text for complaint, (_, text) in zip(complaints, side, strict=False))
    assert sent[3][0] == "UnsupportedLeaf"
    assert received[3] == ["after", True]


def test_a_flipped_bit_is_found_and_its_tensors_named(found: Found) -> None:
    sent, received = found["damaged"]
    assert sent["flipped"] == ["manifest", "packed", "large"]
    seen = received["found"]
    assert seen["manifest"][0] == "ManifestRejected"
    assert sent["found"]["manifest"][0] == "ManifestRejected"
    assert seen["packed"][0] == "ChunkDamaged"
    assert "1 of 5 chunks from rank 0" in seen["packed"][1]
    assert seen["packed"][1].endswith("bytes of first")
    assert seen["large"][0] == "ChunkDamaged"
    assert seen["large"][1].endswith("bytes of second")
    assert received["after"]


def test_a_stranger_is_refused(found: Found) -> None:
    _, received = found["noise"]
    assert received[0] == "ManifestRejected"
    assert "something else than a state dict" in received[1]


def test_the_default_group_serves_too_and_shards_go_into_shards(found: Found) -> None:
    for equal, other_tag, total, without_into, shard_sum in found["world"]:
        assert (equal, other_tag, total) == (True, [0], 4.0)
        assert without_into[0] == "LayoutMismatch"
        assert "1 tensors are shards of DTensors, 'w' the first: pass into=" in without_into[1]
        assert shard_sum == 6.0


def test_any_ranks_of_a_larger_group_and_both_ways_at_once(tmp_path: Path) -> None:
    """Three ranks pass their states round: each sends to the next while it receives from the one before."""
    states: list[object] = [{"rank": rank, "x": torch.full((2_000_000,), float(rank))} for rank in range(3)]

    def pass_on(rank: int) -> object:
        group: dist.ProcessGroup = open_group(str(tmp_path / "meet"), rank, 3)
        with ThreadPoolExecutor(1, thread_name_prefix=f"send-{rank}") as sender:
            sent = sender.submit(send_state_dict, group, states[rank], (rank + 1) % 3, tag=rank, timeout=60)
            received = recv_state_dict(group, (rank - 1) % 3, tag=(rank - 1) % 3, timeout=60)
            sent.result()
        meeting.wait()  # nobody's group ends before everybody is done
        return received

    meeting = threading.Barrier(3)
    with ThreadPoolExecutor(3, thread_name_prefix="rank") as pool:
        received = list(pool.map(pass_on, range(3)))
    assert same(received, [states[2], states[0], states[1]])


def test_a_sender_that_dies_is_noticed(tmp_path: Path) -> None:
    with ranks("lost", tmp_path, "60") as (sender, receiver):
        sender.line("standing", timeout_seconds=60)
        sender.kill()
        kind, message = result(receiver, "lost")
        assert kind == "DonorLost"
        assert "did not get through" in message


def test_a_sender_that_stands_still_costs_the_timeout_only(tmp_path: Path) -> None:
    with ranks("lost", tmp_path, "1") as (sender, receiver):
        sender.line("standing", timeout_seconds=60)
        assert result(receiver, "lost")[0] == "DonorLost"


def test_a_receiver_that_dies_is_noticed(tmp_path: Path) -> None:
    with ranks("lost_receiver", tmp_path) as (sender, receiver):
        receiver.line("standing", timeout_seconds=60)
        receiver.kill()
        assert result(sender, "lost_receiver")[0] == "DonorLost"


class TestMisuse:
    @pytest.fixture
    def alone(self, tmp_path: Path) -> dist.ProcessGroup:
        group: dist.ProcessGroup = open_group(str(tmp_path / "meet"), 0, 1)
        return group

    @pytest.mark.parametrize("rank", [-1, 0, 1])
    def test_ranks_that_are_not_there(self, alone: dist.ProcessGroup, rank: int) -> None:
        with pytest.raises(MisuseError, match="no other rank"):
            send_state_dict(alone, {}, rank)
        with pytest.raises(MisuseError, match="no other rank"):
            recv_state_dict(alone, rank)

    def test_messages_are_bytes(self, alone: dist.ProcessGroup) -> None:
        for message in (torch.zeros(2), torch.zeros(4, dtype=torch.uint8)[::2], torch.zeros(1, 1, dtype=torch.uint8)):
            with pytest.raises(MisuseError, match="1-d contiguous uint8"):
                post_send(alone, message, 0, 0)
            with pytest.raises(MisuseError, match="1-d contiguous uint8"):
                post_receive(alone, message, 0, 0)

    def test_a_group_without_cpu_tensors(self) -> None:
        class OnlyCuda:
            _device_types = (torch.device("cuda"),)

        with pytest.raises(MisuseError, match="moves cuda tensors only"):
            send_state_dict(OnlyCuda(), {}, 1)  # type: ignore[arg-type]
