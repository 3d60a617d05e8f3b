"""The processes of a storm: started in their place of the network, heard line by line, hit and ended by their pid."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_GONE_SECONDS = 30.0


class Program:
    """One Python process. Each line of its standard output is JSON and goes to ``heard`` with the time it came at.

    Standard error goes to ``complained`` line by line, and to the log file.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        prefix: Sequence[str],
        log: Path,
        heard: Callable[[Program, float, dict[str, Any]], None],
        complained: Callable[[Program, float, str], None],
    ) -> None:
        self.name = name
        self._heard, self._complained, self._log = heard, complained, log
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-X", "faulthandler", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._threads = [
            threading.Thread(target=self._listen, name=f"{name}-stdout", daemon=True),
            threading.Thread(target=self._read_errors, name=f"{name}-stderr", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tell(self, line: str) -> None:
        """Write a line to its standard input; nothing if it is gone."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def kill(self) -> bool:
        """End it at once; return whether it was this that ended it."""
        self.process.kill()
        return self.process.wait(_GONE_SECONDS) == -signal.SIGKILL

    def freeze(self) -> bool:
        """Stop it; return whether the kernel shows it stopped."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT) is not None
        except ChildProcessError:  # it ended just before
            return False

    @property
    def frozen(self) -> bool:
        """Whether the kernel shows it stopped now."""
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state in ("T", "t")
        return False

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> int:
        """End it if it has not ended; return its exit code."""
        if self.alive:
            self.process.kill()
        code = self.process.wait(_GONE_SECONDS)
        for thread in self._threads:
            thread.join(_GONE_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return code

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                told = json.loads(line)
            except ValueError:
                continue  # a line that a SIGKILL cut off
            self._heard(self, time.monotonic(), told)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self._log.open("ab") as log:
            for line in self.process.stderr:
                log.write(line)
                log.flush()
                self._complained(self, time.monotonic(), line.decode(errors="replace").rstrip())
