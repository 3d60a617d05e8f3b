"""Child processes: ended and reaped in every case, and an end that nobody ordered is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from recovery.demo.channel import DEMO_GONE_EXIT_CODE, CommandReader, FlipOrder, ReportWriter
from recovery.demo.children import Child, Children
from recovery.demo.reports import Entry, Record, ScenarioFailed

REPORTS_AND_STAYS = """
import json, sys, threading
print(json.dumps({"type": "hello", "pid": 1}), flush=True)
sys.stdin.readline()
"""


def child(record: Record, folder: Path, code: str) -> Child:
    process = Child(record, "worker-1", 1, [sys.executable, "-c", code], log=folder / "log", reports=True)
    process.start(os.environ)
    return process


def await_kind(record: Record, kind: str) -> Entry:
    return record.wait_for(kind, lambda es: next((e for e in es if e.kind == kind), None), timeout_seconds=60)


def test_a_killed_child_is_reaped_and_recorded(tmp_path: Path) -> None:
    record = Record()
    process = child(record, tmp_path, REPORTS_AND_STAYS)
    await_kind(record, "hello")
    assert process.running
    killed = process.kill()
    assert killed.fields["pid"] == process.pid
    assert not psutil.pid_exists(process.pid)
    process.close()
    process.close()
    assert await_kind(record, "exited").fields["code"] == -9
    assert record.wait_for("anything", lambda entries: entries[0], timeout_seconds=1)


def test_a_child_that_ends_by_itself_fails_the_record_with_its_last_words(tmp_path: Path) -> None:
    record = Record()
    process = child(record, tmp_path, "import sys; sys.exit('the disk is full')")
    with pytest.raises(ScenarioFailed, match=r"(?s)worker-1 .* ended by itself, exit code 1.*the disk is full"):
        record.wait_for("a step", lambda entries: None, timeout_seconds=60)
    process.close()


def test_a_childs_named_error_fails_the_record(tmp_path: Path) -> None:
    record = Record()
    code = 'print(\'{"type": "error", "kind": "RunRefused", "message": "another run"}\', flush=True); input()'
    process = child(record, tmp_path, code)
    with pytest.raises(ScenarioFailed, match="worker-1 ended: RunRefused: another run"):
        record.wait_for("a step", lambda entries: None, timeout_seconds=60)
    process.close()


def test_a_line_that_is_no_report_fails_the_record(tmp_path: Path) -> None:
    record = Record()
    process = child(record, tmp_path, "print('{}', flush=True); input()")
    with pytest.raises(ScenarioFailed, match="no report"):
        record.wait_for("a step", lambda entries: None, timeout_seconds=60)
    process.close()


def test_all_children_end_when_the_block_is_left_by_an_error(tmp_path: Path) -> None:
    record = Record()
    with pytest.raises(KeyboardInterrupt), Children(record, tmp_path / "logs") as children:
        started = [
            children._start(f"worker-{i}", [sys.executable, "-c", REPORTS_AND_STAYS], reports=True) for i in (0, 1)
        ]
        assert children.launches("worker-0") == 1
        assert children.num_started == 2
        raise KeyboardInterrupt
    assert children.running == []
    assert not any(psutil.pid_exists(process.pid) for process in started)


def test_a_guarded_module_ends_with_its_parents_pipe(tmp_path: Path) -> None:
    """However the demo ends, the coordinator that it started does not stay behind."""
    (tmp_path / "sleeper.py").write_text(
        "import sys, threading\nprint(sys.argv[1], flush=True)\nthreading.Event().wait()\n"
    )
    guarded = subprocess.Popen(
        [sys.executable, "-m", "recovery.demo.guarded", "sleeper", "argument"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"},
    )
    with guarded:
        assert guarded.stdin is not None
        assert guarded.stdout is not None
        assert guarded.stdout.readline() == b"argument\n"
        guarded.stdin.close()
        assert guarded.wait(60) == DEMO_GONE_EXIT_CODE


def test_reports_are_whole_lines_from_any_thread() -> None:
    reading, writing = os.pipe()
    writer = ReportWriter(writing)
    text = "x" * 3000

    def write_many() -> None:
        for _ in range(50):
            writer.write({"type": "inner", "text": text})

    threads = [threading.Thread(target=write_many) for _ in range(4)]
    with os.fdopen(reading) as lines:
        for thread in threads:
            thread.start()
        found = [json.loads(lines.readline()) for _ in range(200)]
        for thread in threads:
            thread.join()
    os.close(writing)
    assert all(line == {"type": "inner", "text": text} for line in found)


def test_commands_are_obeyed_once_and_the_end_of_the_channel_is_told() -> None:
    reading, writing = os.pipe()
    ended = threading.Event()
    reader = CommandReader(reading, on_end=ended.set)
    at_first = reader.finish_at
    assert at_first is None
    reader.start()
    assert reader.take_flip() is None
    os.write(writing, b'{"command": "flip", "seed": 4, "num_tensors": 2}\n{"command": "fin')
    os.write(writing, b'ish", "at": 12}\n{"command": "go_on"}\n')
    assert reader.wait_go_on(60)
    assert reader.finish_at == 12
    assert reader.take_flip() == FlipOrder(4, 2)
    assert reader.take_flip() is None
    assert not reader.wait_go_on(0.01), "a new flip waits for a go-on of its own"
    os.write(writing, b'{"command": "hold", "stage": "averaging"}\n{"command": "go_on"}\n')
    assert reader.wait_go_on(60)
    assert not reader.take_hold("voting")
    assert reader.take_hold("averaging")
    assert not reader.take_hold("averaging"), "a hold is obeyed once"
    os.close(writing)
    assert ended.wait(60)
    os.close(reading)
