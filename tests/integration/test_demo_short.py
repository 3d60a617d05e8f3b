"""The demo as a user runs it, in a short form: real processes, real sockets, real kills, and every proof true."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from recovery.demo import plot
from tests.unit.demo.test_proofs import ALL

SHORT = ["--workers", "3", "--outer-steps", "8", "--inner-steps", "10"]
DEMO = [sys.executable, "-m", "recovery.cli.main", "demo", "--json", *SHORT]


@contextlib.contextmanager
def running_demo(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a demo and yield it, with the ids of its processes, once a worker trains. It works inside ``folder``."""
    pids: list[int] = []
    with subprocess.Popen(DEMO, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folder)}) as demo:
        try:
            assert demo.stdout is not None
            for line in demo.stdout:
                entry = json.loads(line)
                if entry["type"] == "started":
                    pids.append(entry["fields"]["pid"])
                if entry["type"] == "inner":
                    break
            assert len(pids) >= 3, "a coordinator and two workers had started"
            yield demo, pids
        finally:
            demo.kill()


def await_gone(pids: list[int]) -> None:
    """Return when none of the processes runs any more; fail if one still does after a minute."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(found, timeout=60)
    assert [process.cmdline() for process in alive] == []


@pytest.mark.timeout(200)
def test_the_demo_proves_everything(tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo = subprocess.run([*DEMO, "--out", str(out)], capture_output=True, text=True, timeout=190)
    lines = [json.loads(line) for line in demo.stdout.splitlines()]
    result = lines[-1]
    assert result["type"] == "result", demo.stderr
    assert [proof for proof in result["proofs"] if not proof["holds"]] == [], result["notes"]
    assert {proof["name"] for proof in result["proofs"]} == ALL
    assert (demo.returncode, result["proved"]) == (0, True)
    assert (out / "record.jsonl").read_text().splitlines() == demo.stdout.splitlines()[:-1]
    assert (out / "loss.png").is_file() == plot.matplotlib_present()
    await_gone([line["fields"]["pid"] for line in lines if line["type"] == "started"])


def test_an_interrupted_demo_ends_all_its_processes_and_leaves_nothing(tmp_path: Path) -> None:
    with running_demo(tmp_path) as (demo, pids):
        demo.send_signal(signal.SIGINT)
        rest, _ = demo.communicate(timeout=60)
        assert demo.returncode == 130
        assert json.loads(rest.splitlines()[-1])["notes"][0] == "Interrupted: all processes were ended."
        await_gone(pids)
        assert list(tmp_path.glob("recovery-demo-*")) == []


def test_a_killed_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    with running_demo(tmp_path) as (demo, pids):
        demo.kill()
        demo.wait()
        await_gone(pids)
