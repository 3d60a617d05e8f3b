"""One rank of a test of ``send_state_dict``.

``python -m tests.unit.transport.state_dict_process <scenario,...> <rank> <rendezvous file>``: each scenario is a
function of the group and the rank; what it returns is printed as one line of JSON.
"""

from __future__ import annotations

import collections
import json
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from recovery.errors import RecoveryError
from recovery.state.chunks import CHUNK_BYTES
from recovery.state.limits import Limits
from recovery.transport import state_dict as under_test
from recovery.transport.state_dict import post_send, recv_state_dict, send_state_dict, wait_for
from recovery.types import DigestAlgorithm
from tests.unit.state.exact import ARRAY_DTYPES, DTYPES, random_tensor, same

Group = Any
Scenario = Callable[[Group, int], object]
TIMEOUT_SECONDS = 60.0


def refuse_pickle() -> None:
    """Make every way into pickle raise from here on: nothing that moves state may need it."""

    def refuse(*args: object, **kwargs: object) -> object:
        raise AssertionError("pickle was used")

    for owner, name in ((pickle, "loads"), (pickle, "load"), (pickle, "dumps"), (torch, "load"), (torch, "save")):
        setattr(owner, name, refuse)


class CountedSends:
    """Counts the bytes of all messages that this process posts."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._original = under_test.post_send
        under_test.post_send = self

    def __call__(self, pg: Group, data: torch.Tensor, dst: int, tag: int) -> dist.Work:
        self.num_bytes += data.numel()
        return self._original(pg, data, dst, tag)


def trained_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4)).bfloat16()
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters())},
        {"params": list(model[3].parameters()), "lr": 0.2},
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(3):
        model(torch.randn(2, 2, 4, 4).bfloat16()).sum().backward()
        optimizer.step()
    return model, optimizer


def cases() -> dict[str, object]:
    """Trees whose every bit is the same in each process that builds them."""
    torch.manual_seed(1)
    shared = [1, 2]
    weight = nn.Parameter(torch.randn(4, 3))
    flat = torch.randn(1_000_000)
    model, optimizer = trained_model()
    numpy_states = [np.random.RandomState(3).get_state(), np.random.PCG64(3).state, np.float16(0.5)]
    counter, ordered = collections.Counter("abca"), collections.OrderedDict(b=1, a=2)
    return {
        "dtypes": {str(dtype): random_tensor(dtype, (3, 5), 1) for dtype in DTYPES},
        "shapes": {str(dtype): [random_tensor(dtype, s, 2) for s in ((), (0,), (1,), (2, 0, 3))] for dtype in DTYPES},
        "arrays": [np.frombuffer(bytes(range(64)) * 2, dtype)[::-1] for dtype in ARRAY_DTYPES if dtype != "?"],
        "strided": [
            torch.randn(6, 4).t(), torch.randn(9)[::2], torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.ones(1, 3).expand(5, 3), torch.randn(3000, 1000)[:, ::2], torch.randn(2, 2000, 1000).transpose(0, 2),
        ],
        "tied": {"a": weight, "b": [weight], "c": {"d": weight}},
        "views": list(flat.view(1000, 1000)),
        "large": [torch.randn(5_000_000), torch.randn(3), torch.randint(0, 256, (CHUNK_BYTES + 1,), dtype=torch.uint8)],
        "small": [torch.full((3,), float(i)) for i in range(2000)],
        "nothing": {},
        "scalar root": 7,
        "tensor root": torch.arange(3),
        "no bytes": [torch.empty(0), torch.empty(3, 0)],
        "plain": {
            "lr": 0.1, "nan": float("nan"), "zero": -0.0, "big": 1 << 200, "none": None, "flag": True, "text": "é",
            3: b"x", "counter": counter, "ordered": ordered, "tuple": (1, (2,)), "size": torch.Size([1, 2]),
            "dtype": torch.bfloat16, "device": torch.device("cpu"), "shared": [shared, shared], "numpy": numpy_states,
        },
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }  # fmt: skip


def exact(group: Group, rank: int) -> object:
    """Rank 0 sends every case to rank 1, which compares it with its own."""
    refuse_pickle()
    counter = CountedSends()
    result = {}
    for number, (name, value) in enumerate(cases().items()):
        before = counter.num_bytes
        if rank == 0:
            algorithm = list(DigestAlgorithm)[number % 2]
            send_state_dict(group, value, 1, timeout=TIMEOUT_SECONDS, algorithm=algorithm)
            result[name] = counter.num_bytes - before
        else:
            result[name] = same(recv_state_dict(group, 0, timeout=TIMEOUT_SECONDS), value)
    return result


def in_place(group: Group, rank: int) -> object:
    """Rank 1 receives into a live model, a strided tensor and an array; every address and object stays."""
    model, _ = trained_model()
    sent = {
        "model": model.state_dict(), "strided": torch.arange(24.0).view(4, 6), "array": np.arange(5), "lr": 0.25,
        "big": torch.arange(2_000_000.0), "tied": [tied := torch.ones(3), tied],
    }  # fmt: skip
    if rank == 0:
        send_state_dict(group, sent, 1, timeout=TIMEOUT_SECONDS)
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tied = torch.zeros(3)
    own = {
        "model": model.state_dict(), "strided": torch.zeros(6, 8).t()[::2], "array": np.zeros(5, np.int64), "lr": 9.0,
        "big": torch.zeros(2_000_000), "tied": [tied, tied], "extra scalar": 1,
    }  # fmt: skip
    before = {name: value.data_ptr() for name, value in model.named_parameters()}
    received = recv_state_dict(group, 0, into=own, timeout=TIMEOUT_SECONDS)
    assert isinstance(received, dict)
    expected_model, _ = trained_model()
    return {
        "equal": same(received, sent),
        "module": same(dict(model.named_parameters()), dict(expected_model.named_parameters())),
        "addresses": before == {name: value.data_ptr() for name, value in model.named_parameters()},
        "objects": [received[name] is own[name] for name in ("strided", "array", "big")],
        "tied": received["tied"][0] is tied and received["tied"][1] is tied,
        "strides": list(received["strided"].stride()),
    }


def _attempt(call: Callable[[], object]) -> list[object]:
    try:
        return ["done", call()]
    except RecoveryError as error:
        return [error.kind, str(error)]


def mismatched(group: Group, rank: int) -> object:
    """Layouts that differ are refused on both sides, before payload; the group works on."""
    t: dict[str, Any]
    sent = {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(2), "n": np.ones(2)}
    t = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(2), "n": np.zeros(2)}
    wrong: dict[str, Any] = {
        "missing": {"a": t["a"], "b": t["b"], "n": t["n"]},
        "surplus": {**t, "d": torch.zeros(1)},
        "shape": {**t, "a": torch.zeros(3, 2)},
        "dtype": {**t, "b": torch.zeros(4, dtype=torch.int32)},
        "tied": {**t, "c": t["b"][:2], "b": t["b"][:2]},
        "kind": {**t, "n": torch.zeros(2, dtype=torch.float64)},
    }
    found: dict[str, object] = {}
    counter = CountedSends()
    for name, into in wrong.items():
        if rank == 0:
            found[name] = _attempt(lambda: send_state_dict(group, sent, 1, timeout=TIMEOUT_SECONDS))
        else:
            found[name] = _attempt(lambda: recv_state_dict(group, 0, into=into, timeout=TIMEOUT_SECONDS))  # noqa: B023
    untouched = all(float(np.asarray(value).sum()) == 0 for value in t.values())
    if rank == 0:
        send_state_dict(group, sent, 1, timeout=TIMEOUT_SECONDS)
        return {"found": found, "payload": counter.num_bytes}
    return {"found": found, "untouched": untouched, "after": same(recv_state_dict(group, 0), sent)}


def refused(group: Group, rank: int) -> object:
    """A manifest over the receiver's caps, and a value that cannot travel, end before payload; the group works on."""
    sent = {f"tensor {i}": torch.ones(1) for i in range(100)}
    tight = [Limits(manifest_bytes=1000), Limits(tensors=10), Limits(total_bytes=100)]
    found: list[object] = []
    for limits in tight:
        if rank == 0:
            found.append(_attempt(lambda: send_state_dict(group, sent, 1, timeout=TIMEOUT_SECONDS)))
        else:
            call = lambda: recv_state_dict(group, 0, limits=limits, timeout=TIMEOUT_SECONDS)  # noqa: B023, E731
            found.append(_attempt(call))
    if rank == 0:
        found.append(_attempt(lambda: send_state_dict(group, {"f": object()}, 1)))
        send_state_dict(group, sent, 1, timeout=TIMEOUT_SECONDS)
    else:
        found.append(["after", same(recv_state_dict(group, 0), sent)])
    return found


def damaged(group: Group, rank: int) -> object:
    """One bit of one message flips on the way; then the group works on."""
    sent = {"first": torch.zeros(10), "second": torch.zeros(3_000_000), "third": torch.zeros(7)}
    sizes = {"manifest": 2, "packed": 3, "large": 5}  # the n-th message that rank 0 posts: header, manifest, chunks
    found: dict[str, object] = {}
    original = under_test.post_send
    flipped = []
    for name, position in sizes.items():
        count = 0

        def flip(pg: Group, data: torch.Tensor, dst: int, tag: int) -> dist.Work:
            nonlocal count
            count += 1
            if count == position:  # noqa: B023
                data = data.clone()
                data[data.numel() // 2] ^= 4
                flipped.append(name)  # noqa: B023
            return original(pg, data, dst, tag)

        if rank == 0:
            under_test.post_send = flip
            found[name] = _attempt(lambda: send_state_dict(group, sent, 1, timeout=TIMEOUT_SECONDS))
            under_test.post_send = original
        else:
            into = {key: torch.ones_like(value) for key, value in sent.items()}
            call = lambda: recv_state_dict(group, 0, into=into, timeout=TIMEOUT_SECONDS)  # noqa: B023, E731
            found[name] = _attempt(call)
    if rank == 0:
        send_state_dict(group, sent, 1, timeout=TIMEOUT_SECONDS)
        return {"found": found, "flipped": flipped}
    return {"found": found, "after": same(recv_state_dict(group, 0, timeout=TIMEOUT_SECONDS), sent)}


def noise(group: Group, rank: int) -> object:
    """A sender of the agreed size that speaks something else."""
    if rank == 0:
        wait_for(post_send(group, torch.full((64,), 7, dtype=torch.uint8), 1, 0), TIMEOUT_SECONDS)
        return None
    return _attempt(lambda: recv_state_dict(group, 0, timeout=TIMEOUT_SECONDS))


def world(group: Group, rank: int) -> object:
    """The default group of a process, with tags and collectives between."""
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}.world", rank=rank, world_size=2)
    whole = dist.group.WORLD
    assert whole is not None
    total = torch.ones(1)
    dist.all_reduce(total)
    value = cases()["plain"], cases()["large"]
    if rank == 0:
        send_state_dict(whole, value, 1, tag=5)
        send_state_dict(whole, [rank], 1, tag=6)
    received = recv_state_dict(whole, 0, tag=5) if rank else value
    first = recv_state_dict(whole, 0, tag=6) if rank else [0]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("worker", "shard"))["shard"]
    sharded = {"w": DTensor.from_local(torch.full((3, 2), 1.0 - rank), mesh, [Shard(0)])}
    if rank == 0:
        without = _attempt(lambda: send_state_dict(whole, sharded, 1, tag=7))
        send_state_dict(whole, sharded, 1, tag=7)
    else:
        without = _attempt(lambda: recv_state_dict(whole, 0, tag=7))
        back = recv_state_dict(whole, 0, tag=7, into=sharded)
        assert isinstance(back, dict)
        assert back["w"] is sharded["w"]
    shard_sum = float(sharded["w"].to_local().sum())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [same(received, value), first, float(total), without, shard_sum]


def lost(group: Group, rank: int) -> object:
    """Rank 0 begins to send and stands still before its second chunk, for ever; the test decides how it ends."""
    value = [torch.zeros(CHUNK_BYTES * 6, dtype=torch.uint8)]
    if rank == 0:
        original, count = under_test.post_send, 0

        def stop(pg: Group, data: torch.Tensor, dst: int, tag: int) -> dist.Work:
            nonlocal count
            count += 1
            if count == 4:
                print("standing", flush=True)
                sys.stdin.readline()
            return original(pg, data, dst, tag)

        under_test.post_send = stop
        send_state_dict(group, value, 1, timeout=TIMEOUT_SECONDS)
        return None
    timeout = float(sys.argv[4])
    return _attempt(lambda: recv_state_dict(group, 0, timeout=timeout))


def lost_receiver(group: Group, rank: int) -> object:
    """Rank 1 stops after the manifest; the sender learns of its end."""
    value = [torch.zeros(CHUNK_BYTES * 6, dtype=torch.uint8)]
    if rank == 0:
        return _attempt(lambda: send_state_dict(group, value, 1, timeout=TIMEOUT_SECONDS))
    original = under_test.post_receive

    def stop(pg: Group, into: torch.Tensor, src: int, tag: int) -> dist.Work:
        if into.numel() == CHUNK_BYTES:
            print("standing", flush=True)
            sys.stdin.readline()
        return original(pg, into, src, tag)

    under_test.post_receive = stop
    return recv_state_dict(group, 0, timeout=TIMEOUT_SECONDS)


SCENARIOS: dict[str, Scenario] = {
    function.__name__: function
    for function in (exact, in_place, mismatched, refused, damaged, noise, world, lost, lost_receiver)
}


def main() -> None:
    names, rank = sys.argv[1].split(","), int(sys.argv[2])
    group = open_group(sys.argv[3], rank, 2)
    for name in names:
        print(f"result {name} " + json.dumps(SCENARIOS[name](group, rank)), flush=True)
    # The other rank's last message may still be on its way out of this process's sockets.
    sys.stdin.readline()


def open_group(meeting: str, rank: int, size: int) -> Group:
    """Return a gloo group on loopback that meets at a file."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
    store = torch._C._distributed_c10d.FileStore(meeting, size)
    return dist.ProcessGroupGloo(store, rank, size, options)


if __name__ == "__main__":
    main()
