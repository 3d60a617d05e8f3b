"""The loops of ``docs/loops``: how little differs between plain and recoverable, and that both run."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fleet import ROOT, RUN_ID, WAIT_SECONDS, Fleet

pytestmark = pytest.mark.timeout(300)
"""Several processes start in each test: a busy machine needs its time."""

LOOPS = ROOT / "docs" / "loops"
STYLES = ("offloaded", "live", "fragments")
CHANGED_LINES = 15
_AFTER = "import runpy, signal, sys\n{}\nsys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Runs a loop after one line of the user's."""
_SAID = re.compile(r"outer step (\d+) ([0-9a-f]{64})")


class Loop:
    """One process that runs a loop, and the digests that it printed by outer step."""

    def __init__(self, name: str, outer_steps: int, environment: dict[str, str], *, first: str = "") -> None:
        self.digests: dict[int, str] = {}
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _AFTER.format(first), str(LOOPS / f"{name}.py"), str(outer_steps)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        self._readers = [threading.Thread(target=run, daemon=True) for run in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := _SAID.search(line):
                with self._changed:
                    self.digests[int(found[1])] = found[2]
                    self._changed.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def wait_steps(self, count: int) -> None:
        """Return once ``count`` outer steps were printed."""
        deadline = time.monotonic() + WAIT_SECONDS
        with self._changed:
            while len(self.digests) < count:
                assert self.process.poll() is None, "".join(self.errors)
                assert time.monotonic() < deadline, f"{self.digests}\n{''.join(self.errors)}"
                self._changed.wait(0.1)

    def end(self) -> int:
        code = self.process.wait(WAIT_SECONDS)
        self.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for reader in self._readers:
            reader.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def running(name: str, outer_steps: int, *, first: str = "", **environment: str) -> Iterator[Loop]:
    loop = Loop(name, outer_steps, environment, first=first)
    try:
        yield loop
    finally:
        loop.close()


def of_the_run(fleet: Fleet) -> dict[str, str]:
    return {"RECOVERY_COORDINATOR": fleet.address, "RECOVERY_RUN_ID": RUN_ID, "RECOVERY_DATA_HOST": "127.0.0.1"}


@pytest.mark.parametrize("style", STYLES)
def test_few_lines_make_a_loop_recoverable(style: str) -> None:
    plain, recoverable = (
        [line for line in (LOOPS / f"{name}.py").read_text().splitlines() if line.strip()]
        for name in (style, f"{style}_recoverable")
    )
    steps = difflib.SequenceMatcher(None, plain, recoverable, autojunk=False).get_opcodes()
    changed = sum(max(a_stop - a, b_stop - b) for kind, a, a_stop, b, b_stop in steps if kind != "equal")
    assert 0 < changed <= CHANGED_LINES


@pytest.mark.parametrize("style", STYLES)
def test_plain_loop_runs(style: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with running(style, 2, **environment) as loop:
        assert loop.end() == 0, "".join(loop.errors)
        assert sorted(loop.digests) == [1, 2]


@pytest.mark.parametrize("style", STYLES)
def test_recoverable_loop_takes_in_a_second_worker_and_lets_it_go(tmp_path: Path, style: str) -> None:
    """The second is told to end by SIGTERM, and leaves as the loops' README says."""
    (on_sigterm,) = re.findall(r"^signal\.signal\(.*$", (LOOPS / "README.md").read_text(), re.MULTILINE)
    with Fleet(tmp_path) as fleet:
        shared = of_the_run(fleet)
        name = f"{style}_recoverable"
        with running(name, 10_000, RANK="0", RECOVERY_WORKER_ID="w0", **shared) as first:
            first.wait_steps(2)
            with running(name, 10_000, first=on_sigterm, RANK="1", RECOVERY_WORKER_ID="w1", **shared) as second:
                second.wait_steps(4)
                joined = min(second.digests)
                assert joined > 2
                newest = max(second.digests)
                first.wait_steps(newest)
                with fleet.operator() as operator:
                    members = max(len(epoch) for epoch in [operator.list().workers])
                assert members == 2
                common = [step for step in second.digests if step in first.digests]
                assert len(common) >= 4
                assert {step: first.digests[step] for step in common} == {step: second.digests[step] for step in common}
                assert len(set(first.digests.values())) == len(first.digests)
                second.process.terminate()
                assert second.end() == 143, "".join(second.errors)
            first.wait_steps(len(first.digests) + 1)
        log = (tmp_path / "coordinator.log").read_text()
    assert re.search(r"WorkerLeft .*w1", log), log
    assert not re.search(r"WorkerLost .*w1", log), log
