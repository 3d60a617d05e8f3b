"""SIGKILL at 50 random calls of a save: a resume finds the newest whole step, never a torn one; the next save works."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.catalog import Catalog
from ckpt.local import FileSystem, LocalStorage
from ckpt.reader import open_checkpoint
from ckpt.source import CheckpointSource
from ckpt.writer import write_checkpoint
from recovery.events import Recorder
from recovery.types import Version
from tests.unit.ckpt.states import RUN, W0, source
from tests.unit.ckpt.workers import Worker, differences

SEED = 20260107
POINTS = 50


class Killing(FileSystem):
    """Ends its process at call number ``at``, in the middle of it where a call has a middle."""

    def __init__(self, at: int | None) -> None:
        self._at = at
        self.calls = 0

    def _count(self) -> bool:
        self.calls += 1
        return self._at is not None and self.calls > self._at

    def create(self, path: str) -> int:
        descriptor = super().create(path)
        if self._count():
            die()
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        if self._count():
            super().write(descriptor, data[: len(data) // 2])
            die()
        return super().write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        if self._count():
            die()

    def replace(self, source: str, target: str) -> None:
        if self._count():
            die()
        super().replace(source, target)

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        if self._count():
            die()

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        if self._count():
            die()

    def fsync_folder(self, path: str) -> None:
        if self._count():
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def serve() -> None:
    """Fork a saving child for each line of input, so that torch is imported once and not 50 times."""
    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            files = Killing(order["at"])
            storage = LocalStorage(order["root"], files)
            with open_checkpoint(LocalStorage(order["root"]), Version(1, 1)) as previous:
                write_checkpoint(storage, [source(2, large=True)], previous=[previous])
            os.write(write, str(files.calls).encode())
            os._exit(0)
        os.close(write)
        _, status = os.waitpid(child, 0)
        calls = os.read(read, 20).decode()
        os.close(read)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        code = None if killed else os.waitstatus_to_exitcode(status)
        sys.stdout.write(json.dumps({"killed": killed, "code": code, "calls": calls}) + "\n")
        sys.stdout.flush()


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.integration.test_ckpt_kill import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()


def save_in_child(server: subprocess.Popen[str], root: Path, at: int | None) -> dict[str, Any]:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps({"root": str(root), "at": at}) + "\n")
    server.stdin.flush()
    result: dict[str, Any] = json.loads(server.stdout.readline())
    return result


@pytest.mark.timeout(400)
def test_sigkill_at_50_random_points_of_a_save(tmp_path: Path, server: subprocess.Popen[str]) -> None:
    """Automodel#3261, metaseq#53, prime-rl#1593: an interrupted save left a folder that later resumes chose."""
    whole = tmp_path / "whole"
    write_checkpoint(LocalStorage(whole), [source(1)])
    undisturbed = save_in_child(server, whole, None)
    assert undisturbed["code"] == 0, undisturbed
    total = int(undisturbed["calls"])
    assert total > POINTS
    seeded = random.Random(SEED)
    newest_seen = set()
    for n, at in enumerate(seeded.sample(range(total), POINTS)):
        root = tmp_path / f"{n}"
        storage = LocalStorage(root)
        write_checkpoint(storage, [source(1)])
        assert save_in_child(server, root, at)["killed"], f"seed {SEED}: the fault at call {at} did not happen"
        newest = Catalog(storage, RUN).newest()
        assert newest is not None
        newest_seen.add(newest.version)
        for worker_id in (None, *newest.workers):
            with open_checkpoint(storage, newest.version, run_id=RUN, worker_id=worker_id) as checkpoint:
                checkpoint.verify()
        write_checkpoint(storage, [source(2, large=True)])
        with open_checkpoint(storage, Version(1, 2), run_id=RUN) as checkpoint:
            checkpoint.verify()
        step = Catalog(storage, RUN).get(Version(1, 2))
        # Killed while the hint or a folder was settled, the step was whole already: what lies beside it is swept by
        # the next save of that folder.
        named = {root / path for path in step.files}
        left = [p for p in (root / "step_1_2").rglob("*") if p.is_file() and p not in named and p.name != f"run_{RUN}"]
        assert left == [], f"seed {SEED}, call {at}"
    assert newest_seen == {Version(1, 1), Version(1, 2)}


def test_a_worker_that_was_killed_while_saving_resumes_from_the_step_before(
    tmp_path: Path, server: subprocess.Popen[str]
) -> None:
    root = tmp_path / "root"
    storage = LocalStorage(root)
    worker = Worker(1).train()
    worker.save(storage)
    assert save_in_child(server, root, 20)["killed"]
    fresh = Worker(2)
    restored = CheckpointSource(storage, run_id=RUN, worker=W0, events=Recorder()).restore(fresh.state)
    assert restored.version == Version(1, 1)
    assert differences(worker, fresh) == []
    assert differences(worker.train(), fresh.train()) == []
