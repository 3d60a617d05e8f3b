"""One process reads for a group; all have the same state afterwards, or none has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt.group import restore_in_group
from ckpt.local import LocalStorage
from recovery.errors import CheckpointRejected, LayoutMismatch
from recovery.types import Version
from tests.unit.ckpt.states import RUN, W0, storage
from tests.unit.ckpt.workers import Worker, differences

WAIT = 60.0


class Threads:
    """A group of threads: every broadcast meets at a barrier."""

    def __init__(self, size: int, spoil: Callable[[int, torch.Tensor], None] | None = None) -> None:
        self._size = size
        self._barrier = threading.Barrier(size)
        self._data = torch.empty(0)
        self._votes: list[bool] = []
        self._lock = threading.Lock()
        self._spoil = spoil
        self.broadcast_bytes = 0

    def member(self, rank: int) -> Member:
        return Member(self, rank)

    def broadcast(self, rank: int, data: torch.Tensor) -> None:
        if rank == 0:
            self._data = data.clone()
            self.broadcast_bytes += data.numel() * data.itemsize
        self._barrier.wait(WAIT)
        data.copy_(self._data)
        if rank and self._spoil is not None:
            self._spoil(rank, data)
        self._barrier.wait(WAIT)

    def agree(self, ok: bool) -> bool:
        with self._lock:
            self._votes.append(ok)
        self._barrier.wait(WAIT)
        verdict = all(self._votes)
        self._barrier.wait(WAIT)
        with self._lock:
            self._votes = []
        self._barrier.wait(WAIT)
        return verdict


class Member:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads = threads
        self._rank = rank

    @property
    def is_leader(self) -> bool:
        return self._rank == 0

    def broadcast(self, data: torch.Tensor) -> None:
        self._threads.broadcast(self._rank, data)

    def agree(self, ok: bool) -> bool:
        return self._threads.agree(ok)


def together(threads: Threads, workers: list[Worker], root: LocalStorage) -> list[Version | Exception]:
    results: list[Version | Exception] = [Version(0, 0)] * len(workers)

    def run(rank: int) -> None:
        try:
            results[rank] = restore_in_group(
                threads.member(rank),
                workers[rank].state,
                storage=root if rank == 0 else None,
                run_id=RUN,
                worker_id=W0.worker_id,
            )
        except (CheckpointRejected, LayoutMismatch) as error:
            results[rank] = error

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(len(workers))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(WAIT)
    return results


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_all_have_what_the_leader_read(tmp_path: Path) -> None:
    root = storage(tmp_path)
    trained = Worker(1).train(2)
    trained.save(root)
    workers = [Worker(seed) for seed in (2, 3, 4)]
    assert together(Threads(3), workers, root) == [Version(1, 2)] * 3
    names = [name for name in trained.state.part_names if name != "data"]
    for worker in workers:
        assert differences(trained, worker, parts=list(names)) == []
        assert worker.data.at == 0


def test_a_damaged_step_is_given_up_by_all(tmp_path: Path) -> None:
    root = storage(tmp_path)
    worker = Worker(1).train()
    worker.save(root)
    worker.train().save(root)
    flip(root.root / "step_1_2" / "replicated" / "outer_optimizer.safetensors")
    assert together(Threads(2), [Worker(2), Worker(3)], root) == [Version(1, 1)] * 2


def test_nothing_to_restore_is_an_error_everywhere(tmp_path: Path) -> None:
    results = together(Threads(2), [Worker(2), Worker(3)], storage(tmp_path))
    assert all(isinstance(result, CheckpointRejected) for result in results)


def test_one_process_of_another_model_stops_all_and_nothing_changes(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    workers, twins = [Worker(2), Worker(3, width=9)], [Worker(2), Worker(3, width=9)]
    results = together(Threads(2), workers, root)
    assert isinstance(results[0], CheckpointRejected)
    assert isinstance(results[1], LayoutMismatch)
    for worker, twin in zip(workers, twins, strict=True):
        assert differences(worker, twin) == []


def test_a_byte_that_is_damaged_on_the_way_is_found_by_its_receiver(tmp_path: Path) -> None:
    root = storage(tmp_path)
    worker = Worker(1).train()
    worker.save(root)
    worker.train().save(root)
    spoiled: list[int] = []

    def spoil(rank: int, data: torch.Tensor) -> None:
        if data.dtype is torch.uint8 and data.numel() == 296 and not spoiled:
            spoiled.append(data.numel())
            data[7] ^= 1

    results = together(Threads(2, spoil), [Worker(2), Worker(3)], root)
    assert spoiled
    assert results == [Version(1, 1)] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_each_byte_is_read_once_for_the_group(tmp_path: Path, size: int) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    threads = Threads(size)
    together(threads, [Worker(seed) for seed in range(size)], root)
    assert 0 < threads.broadcast_bytes < 20_000
