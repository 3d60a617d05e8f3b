"""Child processes for tests: started with a line protocol, stopped and killed by their own pid, never left behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[2]


class ChildProcess:
    """A Python child whose standard output is read line by line; ended by ``close`` whatever happened.

    Args:
        arguments: After the interpreter: ``["-m", "module", ...]`` or ``["-c", code]``.
        environment: Added to this process's environment.
        prefix: Before the interpreter: a command that becomes the one after it, such as ``ip netns exec NAME``.
        interpreter: Another one than this process's.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        prefix: Sequence[str] = (),
        interpreter: str = sys.executable,
    ) -> None:
        self._process = subprocess.Popen(
            [*prefix, interpreter, "-X", "faulthandler", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_lines, name=f"child-{self.pid}-stdout", daemon=True),
            threading.Thread(target=self._read_errors, name=f"child-{self.pid}-stderr", daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def errors(self) -> str:
        """What it has written to standard error so far; all of it after ``wait``."""
        return "".join(self._errors)

    def line(self, start: str = "", timeout_seconds: float = 30.0) -> str:
        """Return the next line that begins with ``start``; fails the test if the child ends or none comes in time."""
        while True:
            try:
                line = self._lines.get(timeout=timeout_seconds)
            except queue.Empty:
                raise AssertionError(f"child {self.pid} wrote no line {start!r}; stderr: {self.errors}") from None
            assert line is not None, f"child {self.pid} ended before a line {start!r}; stderr: {self.errors}"
            if line.startswith(start):
                return line

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        """Stop it; returns once the kernel shows it stopped, so that the fault has reached its victim."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once and wait until it is gone."""
        self._process.kill()
        self._process.wait(30)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_seconds: float = 30.0) -> int:
        """Return its exit code; fails the test if it does not end."""
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"child {self.pid} did not end in {timeout_seconds} s: {self.errors}") from None
        for reader in self._readers:
            reader.join()
        return code

    def close(self) -> None:
        """End it, read the rest and close the pipes; twice without harm."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(30)
        for reader in self._readers:
            reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line)
