"""Forked data loader workers beside a serving worker.

Supported: ``DataLoader(num_workers=n)`` with fork, whether its workers start before or after the snapshots' threads:
the children inherit neither the threads nor the vault's memory, and must not touch the snapshots. Of the kind of
grpc/grpc#18075.
"""

from __future__ import annotations

import gc
import os
import random
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from recovery.control import channel
from recovery.types import PartClass
from tests.unit.snapshot.reader import Reader, Temper, until
from tests.unit.snapshot.trainee import FIRST, Trainee


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # newer Pythons warn of fork beside threads
@pytest.mark.parametrize("loader_first", [True, False])
def test_forked_loader_workers_beside_a_serving_worker(loader_first: bool) -> None:
    trainee = Trainee(width=64)
    snapshots = trainee.snapshots()

    def loader() -> DataLoader[torch.Tensor]:
        return DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")

    early = iter(loader()) if loader_first else None
    snapshots.start()
    version = FIRST
    failures: list[BaseException] = []
    rounds = 8
    for _ in range(rounds):
        expected = trainee.reference(PartClass.REPLICATED)
        snapshots.publish(version)
        lease = snapshots.lease_outer(version, f"joiner {version}")
        reader = Reader(lease, Temper.BRISK, random.Random(1), threading.Event())

        def receive(reader: Reader = reader, expected: object = expected) -> None:
            try:
                reader.receive()
                assert reader.found() == expected
            except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
                failures.append(error)

        thread = threading.Thread(target=receive, name="joiner")
        thread.start()
        batches = early if early is not None else iter(loader())
        early = None
        assert sum(len(batch) for batch in batches) == 8  # forks while a reader reads and digests run
        trainee.inner_step()
        thread.join(60)
        assert not failures, failures
        assert not thread.is_alive()
        trainee.outer_step()
        lease.release("done")
        del lease, reader
        version = version.next()
    assert until(lambda: snapshots.vault.used_bytes == 0)
    snapshots.close()


def test_a_forked_child_collects_nothing_that_its_parent_let_go_of() -> None:
    """gRPC's destructors spin in a child for ever: a loader's worker stood in its first collection."""
    assert channel.MAX_MESSAGE_BYTES  # whoever speaks gRPC imports it
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(gc.get_freeze_count()).encode())
        os._exit(0)
    os.close(write)
    assert int(os.read(read, 32)) > 1000
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert gc.get_freeze_count() < 1000, "the parent goes on collecting"
