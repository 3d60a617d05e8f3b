"""One of the zoo's two processes: ``python -m tests.support.zoo_process donor|joiner <rendezvous file> <result file>``.

Case by case, the donor trains and sends its manifest and chunks over gloo with the functions of the live path; the
joiner, whose objects were built from another seed, restores. Then both train on, and the joiner compares. The joiner's
result file has one JSON object a case.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from recovery.errors import RecoveryError
from recovery.state.chunks import PartBytes
from recovery.state.compare import compare
from recovery.state.digest import chunk_digest, numerics_id
from recovery.state.manifest import Manifest, decode, encode
from recovery.state.parts import describe
from recovery.state.restore import Restoration, RestoreMode
from recovery.transport.state_dict import post_receive, post_send, wait_for
from recovery.types import Cut, Incarnation, RunId, Version, WorkerId, WorkerRef
from tests.support.zoo import Case, Worker, next_learning_rates
from tests.support.zoo_cases import all_cases

TIMEOUT_SECONDS = 60.0
PHASES_AFTER = 1


def describe_worker(worker: Worker) -> Manifest:
    """Return the manifest of everything that the worker holds now."""
    state = worker.state
    return describe(
        [state.read_part(name) for name in state.part_names],
        run_id=RunId("zoo"),
        worker=WorkerRef(WorkerId("donor"), Incarnation("1")),
        cut=Cut(Version(1, state.run_progress.outer_step), state.local_progress.inner_step),
        numerics_id=numerics_id(),
        layout_digest=state.layout_digest(),
    )


class Peer:
    """The other process."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._group = group
        self._other = 1 - rank
        self.payload_bytes = 0

    def send(self, data: Tensor) -> None:
        wait_for(post_send(self._group, data, self._other, 0), TIMEOUT_SECONDS)

    def receive(self, into: Tensor) -> None:
        wait_for(post_receive(self._group, into, self._other, 0), TIMEOUT_SECONDS)
        self.payload_bytes += into.numel()

    def send_bytes(self, data: bytes) -> None:
        self.send(torch.tensor([len(data)]).view(torch.uint8))
        self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive_bytes(self) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        self.receive(size.view(torch.uint8))
        data = torch.empty(int(size), dtype=torch.uint8)
        self.receive(data)
        return data.numpy().tobytes()


def give(peer: Peer, case: Case) -> None:
    """The donor's side of one case."""
    worker = Worker(case, seed=0)
    worker.train(case.donor_phases)
    manifest = describe_worker(worker)
    peer.send_bytes(encode(manifest))
    if peer.receive_bytes() == b"go on":
        for part in manifest.parts:
            data = worker.state.read_part(part.name).bytes
            for chunk in part.chunks:
                peer.send(data.read(chunk.offset, chunk.num_bytes))
        worker.train(PHASES_AFTER)
    peer.send_bytes(encode(describe_worker(worker)))
    peer.send_bytes(json.dumps(next_learning_rates(worker)).encode())


def take(peer: Peer, case: Case) -> dict[str, object]:
    """The joiner's side of one case; returns what it found."""
    worker = Worker(case, seed=1)
    worker.train(case.joiner_phases)
    result: dict[str, object] = {"case": case.name}
    try:
        manifest = decode(peer.receive_bytes())
        mode = RestoreMode.STAGED if case.staged else RestoreMode.IN_PLACE
        kept = _identities(worker)
        restoration = Restoration(worker.state, manifest, mode=mode)
        generator = torch.get_rng_state()
        restoration.prepare()
        result["prepare_drew_random_numbers"] = not torch.equal(generator, torch.get_rng_state())
    except RecoveryError as error:
        peer.send_bytes(b"stop")
        peer.receive_bytes()
        peer.receive_bytes()
        return result | {"error": f"{error.kind}: {error}"}
    peer.send_bytes(b"go on")
    peer.payload_bytes = 0
    damaged = 0
    for part in manifest.parts:
        into = restoration.destination(part.name)
        for chunk in part.chunks:
            damaged += not _receive_chunk(peer, into, chunk.offset, chunk.num_bytes, manifest, chunk.digest)
    result |= {"damaged": damaged, "payload_bytes": peer.payload_bytes, "logical_bytes": manifest.num_bytes}
    try:
        report = restoration.commit()
        result |= {"created": report.created, "removed": report.removed, "moved": _moved(kept, worker)}
        worker.train(PHASES_AFTER)
        mine = describe_worker(worker)
    except RecoveryError as error:
        peer.receive_bytes()
        peer.receive_bytes()
        return result | {"error": f"{error.kind}: {error}"}
    theirs = decode(peer.receive_bytes())
    rates = json.loads(peer.receive_bytes())
    return result | {
        "differences": [str(difference) for difference in compare(theirs, mine)],
        "same_rates": rates == next_learning_rates(worker),
    }


def _receive_chunk(peer: Peer, into: PartBytes, offset: int, num_bytes: int, manifest: Manifest, digest: bytes) -> bool:
    place = into.view(offset, num_bytes)
    buffer = torch.empty(num_bytes, dtype=torch.uint8) if place is None else place
    peer.receive(buffer)
    if place is None:
        into.write(offset, buffer)
    return chunk_digest(manifest.digest_algorithm, buffer) == digest


def _identities(worker: Worker) -> dict[str, tuple[int, object]]:
    """Return address and object of every tensor that must stay where it is if the donor has one of its form."""
    found: dict[str, tuple[int, object]] = {}
    for name in worker.state.part_names:
        if worker.state.part(name).loads:
            continue
        part = worker.state.read_part(name)
        for spec, leaf in zip(part.specs, part.leaves, strict=True):
            if isinstance(leaf.value, Tensor) and leaf.value.numel():
                found[f"{name}/{spec.path}:{spec.dtype}{spec.shape}"] = (leaf.value.data_ptr(), leaf.source)
    for parameter_name, parameter in worker.live.named_parameters():
        found[f"live/{parameter_name}"] = (0, parameter)
    return found


def _moved(before: dict[str, tuple[int, object]], worker: Worker) -> list[str]:
    after = _identities(worker)
    return [
        name
        for name, (address, tensor) in before.items()
        if name in after and (after[name][0] != address or after[name][1] is not tensor)
    ]


def main() -> None:
    role, rendezvous, result = sys.argv[1:]
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    # DTensors need a default group: one of this process alone.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    rank = 0 if role == "donor" else 1
    store = dist.FileStore(rendezvous, 2)  # type: ignore[attr-defined]
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=TIMEOUT_SECONDS))
    peer = Peer(group, rank)  # type: ignore[arg-type]  # torch's stub does not tell that it is a ProcessGroup
    with Path(result).open("w") as out:
        for case in all_cases():
            if role == "donor":
                give(peer, case)
            else:
                out.write(json.dumps(take(peer, case)) + "\n")
                out.flush()
            gc.collect(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        raise
