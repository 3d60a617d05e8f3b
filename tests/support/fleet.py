"""A whole run of real processes on loopback: one coordinator, any number of workers, all ended by pid."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from recovery.control.operator_client import OperatorClient
from recovery.control.security import SecurityConfig
from recovery.types import Address

ROOT = Path(__file__).parents[2]
RUN_ID = "test-run"
WAIT_SECONDS = 90.0
"""Longest wait for something that a test expects; a machine may be slow, but nothing waits for ever."""


@dataclass
class Worker:
    """One worker process and everything that it said."""

    name: str
    process: subprocess.Popen[bytes]
    heard: list[dict[str, Any]] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    _news: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self._readers = [
            threading.Thread(target=self._read, name=f"read-{self.name}", daemon=True),
            threading.Thread(target=self._read_errors, name=f"errors-{self.name}", daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.heard.append(json.loads(line))
            self._news.put(None)
        self._news.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr.append(line.decode(errors="replace").rstrip())

    def wait(self, predicate: Callable[[dict[str, Any]], bool], what: str, *, since: int = 0) -> dict[str, Any]:
        """Return the first message from number ``since`` on that ``predicate`` accepts."""
        deadline = time.monotonic() + WAIT_SECONDS
        at = since
        while True:
            while at < len(self.heard):
                if predicate(self.heard[at]):
                    return self.heard[at]
                at += 1
            left = deadline - time.monotonic()
            ended = self.process.poll() is not None and not self._readers[0].is_alive()
            if left <= 0 or (ended and at >= len(self.heard)):
                raise AssertionError(self.complaint(what))
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=min(left, 0.2))

    def complaint(self, what: str) -> str:
        said = "\n".join(str(message)[:300] for message in self.heard[-15:])
        errors = "\n".join(self.stderr[-40:])
        return f"{self.name} (exit code {self.process.poll()}) never: {what}\nit said:\n{said}\nstderr:\n{errors}"

    def wait_event(self, event: str, *, since: int = 0, **fields: object) -> dict[str, Any]:
        return self.wait(
            lambda m: m.get("event") == event and all(str(m.get(k)) == str(v) for k, v in fields.items()),
            f"event {event} {fields}",
            since=since,
        )

    def wait_said(self, kind: str, *, since: int = 0) -> dict[str, Any]:
        return self.wait(lambda m: m["say"] == kind, f"said {kind!r}", since=since)

    def wait_boundary(self, outer_step: int, *, since: int = 0) -> dict[str, Any]:
        return self.wait(
            lambda m: m["say"] == "boundary" and int(m["version"].split(".k")[1]) >= outer_step,
            f"boundary {outer_step}",
            since=since,
        )

    def boundaries(self) -> dict[str, dict[str, str]]:
        """Return the parts' digests by version."""
        return {m["version"]: m["parts"] for m in self.heard if m["say"] == "boundary"}

    def command(self, **fields: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(fields) + "\n").encode())
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> int:
        """Wait for the process to end by itself; return its exit code."""
        try:
            code = self.process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.complaint("ended")) from None
        self.close()
        return code

    def close(self) -> None:
        """Wait for the process and close its pipes."""
        self.process.wait(10)
        for reader in self._readers:
            reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Fleet:
    """Starts and ends processes; use it as a context manager."""

    def __init__(self, folder: Path, *coordinator_options: str, new_run: bool = True) -> None:
        self.folder = folder
        self.workers: list[Worker] = []
        self._options = coordinator_options
        self._new_run = new_run
        self._port = 0
        self.coordinator: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start_coordinator()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self.workers:
            worker.close()
        self.stop_coordinator()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start_coordinator(self) -> None:
        """Start the coordinator, again on the same port and state if it ran before."""
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "recovery.cli.main", "coordinator", "--run-id", RUN_ID),
            *("--listen", f"127.0.0.1:{self._port}", "--state-dir", str(self.folder / "coordinator")),
            *("--port-file", str(port_file)),
            *(["--new-run"] if self._new_run else []),
            *self._options,
        ]
        self._new_run = False
        with (self.folder / "coordinator.log").open("ab") as log:
            self.coordinator = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        deadline = time.monotonic() + WAIT_SECONDS
        poll = threading.Event()
        while not (port_file.exists() and port_file.read_text().strip()):
            assert self.coordinator.poll() is None, (self.folder / "coordinator.log").read_text()
            assert time.monotonic() < deadline, "the coordinator wrote no port file"
            poll.wait(0.05)
        self._port = int(port_file.read_text().rsplit(":", 1)[-1])

    def forget_history(self) -> None:
        """Let the next coordinator begin a new run, as an operator does who lost the state directory."""
        self._new_run = True

    def stop_coordinator(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.coordinator is not None and self.coordinator.poll() is None:
            self.coordinator.send_signal(number)
            self.coordinator.wait(10)

    def worker(self, name: str, *, seed: int = 0, **plan: Any) -> Worker:
        """Start a worker; ``plan`` as in ``tests.support.worker_process``, ``agent`` completed here.

        ``environment`` in the plan is added to the process's; ``module`` runs in place of ``worker_process``.
        """
        environment = {**os.environ, **plan.pop("environment", {})}
        module = plan.pop("module", "tests.support.worker_process")
        agent = {
            "coordinator": self.address,
            "run_id": RUN_ID,
            "worker_id": name,
            "inner_steps_per_phase": 10,
            "data_host": "127.0.0.1",
            "attach_timeout_seconds": 20.0,
            "recover_timeout_seconds": 60.0,
            "progress_timeout_seconds": 5.0,
            "boundary_timeout_seconds": 60.0,
            **plan.pop("agent", {}),
        }
        plan = {"hidden": 64, "outer_steps": 1000, "step_seconds": 0.02, **plan, "agent": agent, "seed": seed}
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", module, json.dumps(plan)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        worker = Worker(name, process)
        self.workers.append(worker)
        return worker

    @contextlib.contextmanager
    def operator(self) -> Iterator[OperatorClient]:
        client = OperatorClient(Address.parse(self.address), SecurityConfig(), run_id=RUN_ID)
        try:
            yield client
        finally:
            client.close()
