"""A run of real worker processes whose inner steps are paced, and what each of them said when."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.join_model import Join, read
from recovery.control.operator_client import OperatorClient
from recovery.control.security import SecurityConfig
from recovery.types import Address
from tests.support.processes import ChildProcess

MEGABYTE = 1_000_000
RUN = "bench"
STEPS = 16
_START_SECONDS = 90.0
_LONGEST_SECONDS = 150.0


Prefix = Callable[[str], list[str]]


class Worker:
    """A worker process, and a thread that keeps what it says."""

    def __init__(self, name: str, plan: dict[str, Any], prefix: list[str]) -> None:
        self.name = name
        self.spawned = time.monotonic()
        self._child = ChildProcess(["-m", "benchmarks.join_worker", json.dumps(plan)], prefix=prefix)
        self.said: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(AssertionError):  # it was ended, or said nothing for very long
            while True:
                line = json.loads(self._child.line("{", _LONGEST_SECONDS))
                with self._changed:
                    self.said.append(line)
                    self._changed.notify_all()

    def wait(self, what: str, count: int = 1, *, after: float = 0.0) -> dict[str, Any]:
        """Return the ``count``-th line of a kind that was said after a moment."""

        def found() -> list[dict[str, Any]]:
            return [m for m in self.said if m["what"] == what and m["at"] > after]

        with self._changed:
            if not self._changed.wait_for(lambda: len(found()) >= count, _LONGEST_SECONDS):
                raise RuntimeError(f"{self.name} never said {what!r} {count} times: {self.said[-5:]}")
            return found()[count - 1]

    def boundaries(self) -> list[dict[str, Any]]:
        return [m for m in self.said if m["what"] == "boundary"]

    def close(self) -> None:
        self._child.close()
        self._reader.join()


class Run:
    """A coordinator and two workers that train: ``w0``, which serves, and ``w1``, which does not."""

    def __init__(
        self, stack: contextlib.ExitStack, hosts: dict[str, str], prefix: Prefix, megabytes: int, period: float
    ) -> None:
        self._hosts, self._prefix, self._period = hosts, prefix, period
        self.param_bytes = megabytes * MEGABYTE
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port_file = folder / "port"
        coordinator = ChildProcess(
            [
                *("-m", "recovery.cli.main", "coordinator", "--run-id", RUN, "--new-run", "--insecure"),
                *("--listen", f"{hosts['hub']}:0", "--port-file", str(port_file), "--state-dir", str(folder / "state")),
                *("--expected-workers", "2"),
            ],
            prefix=prefix("hub"),
        )
        stack.callback(coordinator.close)
        coordinator.line("coordinator of run", _START_SECONDS)
        self.address = port_file.read_text().strip()
        self._number = 0
        self.survivors = [self.start(host) for host in ("donor", "bystander")]
        for survivor in self.survivors:
            stack.callback(survivor.close)
        for survivor in self.survivors:
            survivor.wait("boundary", 2)

    def start(self, host: str) -> Worker:
        """Start a worker in a host."""
        number, self._number = self._number, self._number + 1
        agent = {
            "coordinator": self.address,
            "run_id": RUN,
            "worker_id": f"w{number}",
            "data_host": self._hosts[host],
            "inner_steps_per_phase": STEPS,
            "recover_timeout_seconds": 120.0,
        }
        plan = {
            "num_bytes": self.param_bytes,
            "seed": number,
            "step_seconds": self._period / STEPS,
            "agent": agent,
        }
        return Worker(f"w{number}", plan, self._prefix(host))

    @contextlib.contextmanager
    def operator(self) -> Iterator[OperatorClient]:
        client = OperatorClient(Address.parse(self.address), SecurityConfig(insecure=True), run_id=RUN)
        try:
            yield client
        finally:
            client.close()

    def cap(self, bytes_per_second: int) -> None:
        """Let only ``w0`` serve, at this rate; 0: no cap."""
        with self.operator() as operator:
            operator.set_rate("w0", bytes_per_second)
            operator.drain("w1")

    def join(self) -> Join:
        """Start a worker, wait for its first inner step, end it; return its phases."""
        joiner = self.start("joiner")
        try:
            at = joiner.wait("StateRestored")["at"]
            joiner.wait("step", after=at)
            said = list(joiner.said)
        finally:
            joiner.close()
        return read(joiner.spawned, said, [m["at"] for m in self.survivors[1].boundaries()])

    @property
    def period(self) -> float:
        """The survivors' period, as it is."""
        times = [m["at"] for m in self.survivors[0].boundaries()]
        return float(statistics.median(b - a for a, b in itertools.pairwise(times)))
