"""Runs the demo from the first process to the table: record, children, story, proofs, picture, and the clearing up."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from recovery.demo import plot
from recovery.demo.children import Children
from recovery.demo.display import Display
from recovery.demo.history import Expectation
from recovery.demo.narration import stalls
from recovery.demo.operations import connect
from recovery.demo.proofs import examine
from recovery.demo.reports import DEMO, Entry, Record, ScenarioFailed
from recovery.demo.scenario import Scenario, ScenarioSettings
from recovery.errors import RecoveryError

PROVED = 0
NOT_PROVED = 1
INTERRUPTED = 130


def run_demo(settings: ScenarioSettings, display: Display, *, out: Path | None, keep: bool) -> int:
    """Run the demo once; return 0 if every proof holds, 1 if one does not, 130 after an interruption.

    Args:
        settings: Size of the run.
        display: Shows entries and the table; closed at the end.
        out: Where the picture, the record and the processes' logs are left; None: nowhere.
        keep: Leave the working folder too: checkpoints, the coordinator's state, logs.
    """
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="recovery-demo-"))
    record = Record()
    record.listen(display.entry)
    notes: list[str] = []
    code = PROVED
    try:
        try:
            _run_story(settings, record, folder)
        except (ScenarioFailed, RecoveryError) as error:
            code = NOT_PROVED
            notes.append(f"The demo stopped early: {error}")
        except KeyboardInterrupt:
            code = INTERRUPTED
            notes.append("Interrupted: all processes were ended.")
        expectation = Expectation(workers=settings.workers, outer_steps=settings.outer_steps)
        proofs = examine(record.entries(), expectation, told_in_full=code == PROVED)
        notes.append(stalls(record.entries()))
        notes += _leave(record.entries(), folder, out)
        if keep:
            notes.append(f"Working folder kept: {folder}")
        display.result(proofs, notes, time.monotonic() - began)
    finally:
        display.close()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return code or (PROVED if all(proof.holds for proof in proofs) else NOT_PROVED)


def _run_story(settings: ScenarioSettings, record: Record, folder: Path) -> None:
    """Run the scenario; every child process has ended when this returns or raises."""
    children = Children(record, folder / "logs")
    with _termination_interrupts():
        try:
            with children:
                Scenario(settings, record, children, folder, connect(settings.run_id)).run()
        finally:
            record.add(DEMO, "children_ended", {"running": len(children.running), "started": children.num_started})


def _leave(entries: list[Entry], folder: Path, out: Path | None) -> list[str]:
    """Write what is to stay into ``out``; return a remark for each."""
    if out is None:
        return ["Nothing was saved: give --out DIR for the loss curves, the record and the logs."]
    out.mkdir(parents=True, exist_ok=True)
    record_path = out / "record.jsonl"
    record_path.write_text("".join(entry.to_json() + "\n" for entry in entries))
    shutil.copytree(folder / "logs", out / "logs", dirs_exist_ok=True)
    notes = [f"Record: {record_path}; logs: {out / 'logs'}"]
    if plot.matplotlib_present():
        picture = out / "loss.png"
        plot.draw(entries, picture)
        notes.append(f"Loss curves: {picture}")
    else:
        notes.append("No loss curves: matplotlib is not installed (pip install 'diloco-recovery[plot]').")
    return notes


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Within the block a SIGTERM ends the demo as a Ctrl-C does, so that its processes are ended then too."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it would get the interruption
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
