"""The demo's child processes: started with pipes, watched, and ended by their own process id in every case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from recovery.demo.reports import COORDINATOR, Entry, Record

TERMINATE_SECONDS = 5.0
"""How long a process that was asked to end may take before it is killed."""


class Child:
    """One child process. ``source`` and ``launch`` are its names in the record.

    What it writes to standard output is read on a thread of its own: reports if ``reports``, else log lines that go to
    the log with the rest. An end that nobody ordered fails the record, which wakes whoever waits.
    """

    def __init__(
        self, record: Record, source: str, launch: int, command: Sequence[str], *, log: Path, reports: bool
    ) -> None:
        self._record = record
        self.source = source
        self.launch = launch
        self._command = list(command)
        self._log_path = log
        self._reports = reports
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the process, in a session of its own: a Ctrl-C reaches the demo alone, which then ends it."""
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._reports else log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )
        self._record.add(self.source, "started", {"pid": self._process.pid}, launch=self.launch)
        self._reader = threading.Thread(target=self._watch, name=f"demo-{self.source}-{self.launch}")
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id.

        Raises:
            RuntimeError: the process was not started.
        """
        return self._started().pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process is not None and self._process.poll() is None

    def expect_end(self) -> None:
        """Declare that the process will end by itself, and rightly."""
        self._ending.set()

    def command(self, message: Mapping[str, object]) -> None:
        """Write one command to the process's standard input.

        Raises:
            BrokenPipeError: the process has ended.
        """
        stdin = self._started().stdin
        assert stdin is not None  # Popen was given a pipe
        stdin.write((json.dumps(message) + "\n").encode())
        stdin.flush()

    def kill(self) -> Entry:
        """End the process by SIGKILL and reap it; return the entry that says so."""
        self._ending.set()
        process = self._started()
        process.kill()
        process.wait()
        return self._record.add(self.source, "killed", {"pid": process.pid}, launch=self.launch)

    def wait(self, timeout_seconds: float) -> int:
        """Return the exit code of a process that ends by itself.

        Raises:
            subprocess.TimeoutExpired: it did not within ``timeout_seconds``.
        """
        self._ending.set()
        return self._started().wait(timeout_seconds)

    def close(self) -> None:
        """End the process if it still runs, first politely, and join its reader. Twice does no harm."""
        self._ending.set()
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(TERMINATE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._reader is not None:
            self._reader.join()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # the unflushed rest of a command to a process that has ended concerns nobody

    def log_tail(self, num_lines: int = 12) -> str:
        """Return the last lines of what the process wrote to standard error."""
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.source} was not started")
        return self._process

    def _watch(self) -> None:
        process = self._started()
        if process.stdout is not None:
            for line in process.stdout:
                try:
                    entry = self._record.add_line(self.source, line.decode(errors="replace"), launch=self.launch)
                except ValueError as error:
                    # The last line of a killed process may be half a line; anywhere else it is a fault of the demo.
                    if not self._ending.is_set():
                        self._record.fail(str(error))
                    continue
                if entry.kind == "error":
                    self._record.fail(f"{self.source} ended: {entry.text('kind')}: {entry.text('message')}")
        code = process.wait()
        self._record.add(self.source, "exited", {"pid": process.pid, "code": code}, launch=self.launch)
        if not self._ending.is_set():
            self._record.fail(
                f"{self.source} (process {process.pid}) ended by itself, exit code {code}\n{self.log_tail()}"
            )


class Children:
    """All child processes of one demo. As a context manager it ends every one of them, whatever happened inside."""

    def __init__(self, record: Record, folder: Path) -> None:
        self._record = record
        self._folder = folder
        self._children: list[Child] = []
        self._launches: dict[str, int] = {}
        # One thread a process: the demo's workers share two cores.
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> Children:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def running(self) -> list[Child]:
        """Those that have not ended."""
        return [child for child in self._children if child.running]

    @property
    def num_started(self) -> int:
        """Processes started so far."""
        return len(self._children)

    def start_worker(self, worker_id: str, settings: Mapping[str, object]) -> Child:
        """Start a worker process with ``settings`` and return it."""
        command = [sys.executable, "-m", "recovery.demo.training", json.dumps(settings)]
        return self._start(worker_id, command, reports=True)

    def start_coordinator(self, arguments: Sequence[str]) -> Child:
        """Start ``recovery coordinator`` with ``arguments`` and return it."""
        module = ["recovery.cli.main", "coordinator", *arguments]
        return self._start(COORDINATOR, [sys.executable, "-m", "recovery.demo.guarded", *module], reports=False)

    def launches(self, source: str) -> int:
        """Return how many processes were started as ``source``."""
        return self._launches.get(source, 0)

    def _start(self, source: str, command: Sequence[str], *, reports: bool) -> Child:
        launch = self._launches.get(source, 0) + 1
        self._launches[source] = launch
        log = self._folder / f"{source}.{launch}.log"
        child = Child(self._record, source, launch, command, log=log, reports=reports)
        self._children.append(child)
        child.start(self._environment)
        return child

    def close(self) -> None:
        """End all of them, youngest first, and so the coordinator last."""
        for child in reversed(self._children):
            child.close()
