"""What a person sees of the demo: one line an event, a live view in a terminal, and the table of proofs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from recovery.demo.proofs import Proof
from recovery.demo.reports import COORDINATOR, DEMO, Entry

MEGABYTE = 1e6
GIGABYTE = 1e9
NOTEWORTHY_WAIT_SECONDS = 0.1
"""Shorter waits at a boundary are not told: they would drown the rest."""


def narrate(entry: Entry) -> str | None:
    """Return the line that tells ``entry`` to a person; None if it is not worth one."""
    teller = _TELLERS.get(entry.kind)
    if entry.kind in _TOLD_BY_COORDINATOR and entry.source != COORDINATOR:
        return None
    if entry.kind in _TOLD_BY_WORKERS and entry.source == COORDINATOR:
        return None
    told = None if teller is None else teller(entry)
    return None if told is None else f"[{entry.seconds:6.1f}s] {told}"


def rate(num_bytes: float, seconds: float) -> str:
    """Return bytes, seconds and GB/s in words."""
    speed = f"{num_bytes / seconds / GIGABYTE:.3f} GB/s" if seconds > 0 else "at once"
    return f"{num_bytes / MEGABYTE:.2f} MB in {seconds:.3f} s, {speed}"


def megabytes(entry: Entry, field: str) -> str:
    """Return the bytes in ``field`` in words."""
    return f"{entry.number(field) / MEGABYTE:.2f} MB"


def _disk_rate(entry: Entry) -> str:
    return rate(entry.number("num_bytes"), entry.number("took_seconds"))


def _who(entry: Entry) -> str:
    return entry.text("worker_id") or entry.source


def _transfer_ended(entry: Entry) -> str:
    if entry.text("failure"):
        return f"{_who(entry)}: attempt {entry.text('attempt')} of its transfer failed: {entry.text('failure')}"
    reused = entry.number("reused_bytes")
    again = f"; {megabytes(entry, 'reused_bytes')} it already had" if reused else ""
    received = rate(entry.number("payload_bytes"), entry.number("took_seconds"))
    return f"{_who(entry)} received {received}{again}, cut {entry.text('cut')}"


def _roster(entry: Entry) -> str | None:
    missing = entry.texts("missing")
    waited = entry.number("waited_seconds")
    if waited < NOTEWORTHY_WAIT_SECONDS and not missing:
        return None
    for_whom = f"; not there: {', '.join(missing)}" if missing else ""
    return f"boundary {entry.text('version')}: {len(entry.texts('members'))} members waited {waited:.2f} s{for_whom}"


def _epoch(entry: Entry) -> str | None:
    if "aborted" not in entry.text("verdict").lower():
        return None
    return f"epoch {entry.text('epoch')} aborted: {entry.text('reason')}; all average again"


def _guard(entry: Entry) -> str | None:
    if not entry.number("copied_bytes"):
        return None
    return (
        f"{_who(entry)} copied {megabytes(entry, 'copied_bytes')} before its outer step, because a joiner still reads: "
        f"{entry.number('training_thread_seconds') * 1e3:.1f} ms of its training thread"
    )


def _captured(entry: Entry) -> str:
    return (
        f"{_who(entry)} captured {megabytes(entry, 'num_bytes')} at {entry.text('cut')}: "
        f"{entry.number('training_thread_seconds') * 1e3:.1f} ms of its training thread"
    )


def _waited(entry: Entry) -> str | None:
    seconds = entry.number("waited_seconds")
    if seconds < NOTEWORTHY_WAIT_SECONDS:
        return None
    return f"{_who(entry)} waited {seconds:.2f} s for {entry.text('for_whom') or 'nobody'} ({entry.text('what')})"


def _sealed(entry: Entry) -> str:
    reporters = ", ".join(entry.texts("reporters"))
    return f"sealed {entry.text('version')}  {entry.text('fingerprint')[:12]}  by {reporters}"


def _lineage(entry: Entry) -> str:
    lost = entry.number("lost_steps")
    parent = f" of {entry.text('parent')}, {lost:.0f} step(s) lost" if entry.text("cause") != "origin" else ""
    return f"lineage begins at {entry.text('version')}: {entry.text('cause')}{parent}"


def _verified(entry: Entry) -> str:
    different = ", ".join(entry.texts("different")) or "every tensor as sealed"
    return f"verify {entry.text('worker')} by RPC ({entry.text('when')}): {different}"


_TELLERS: dict[str, Callable[[Entry], str | None]] = {
    "act": lambda e: f"== {e.text('what')}",
    "started": lambda e: f"{e.source} started, process {e.text('pid')}",
    "killed": lambda e: f"{e.source} (process {e.text('pid')}) killed",
    "error": lambda e: f"{e.source}: {e.text('kind')}: {e.text('message')}",
    "held": lambda e: f"{e.source} stands in the boundary of {e.text('version')}, {e.text('stage')}",
    "flipped": lambda e: f"{e.source} inverted one bit in each of {', '.join(e.texts('names'))}",
    "verified": _verified,
    "resynced": lambda e: f"resync of {e.text('worker')} done {e.text('detail')}".rstrip(),
    "WorkerLost": lambda e: f"coordinator lost {e.text('worker_id')}: {e.text('reason')}",
    "WorkerLeft": lambda e: f"{e.text('worker_id')} left: {e.text('reason')}",
    "WorkerRejected": lambda e: f"{e.text('worker_id')} refused: {e.text('reason')}",
    "LineageStarted": _lineage,
    "RosterIssued": _roster,
    "EpochEnded": _epoch,
    "VersionSealed": _sealed,
    "FingerprintDiverged": lambda e: f"{_who(e)} diverged at {e.text('version')}",
    "RunPausedEvent": lambda e: f"the run is paused: {e.text('reason')}",
    "TransferStarted": lambda e: (
        f"{_who(e)} gets {e.text('version')} from {', '.join(e.texts('donors'))} ({e.text('reason')})"
    ),
    "TransferEnded": _transfer_ended,
    "ChunkRefetched": lambda e: (
        f"{_who(e)} asks again for chunk {e.text('chunk')} of {e.text('part')}: "
        f"bad from {e.text('donor')} ({e.text('blame')})"
    ),
    "DonorFailed": lambda e: f"{_who(e)}: donor {e.text('donor')} failed: {e.text('reason')}",
    "StateRestored": lambda e: (
        f"{_who(e)} holds {e.text('version')} from {e.text('source')}, {megabytes(e, 'num_bytes')} verified"
    ),
    "SnapshotCaptured": _captured,
    "GuardCopied": _guard,
    "TrainingThreadWaited": _waited,
    "CheckpointSaved": lambda e: f"{_who(e)} saved {e.text('cut')}: {_disk_rate(e)}",
    "CheckpointSaveFailed": lambda e: f"{_who(e)} could not save: {e.text('reason')}",
    "CheckpointLoaded": lambda e: f"{_who(e)} loaded {e.text('cut')}: {_disk_rate(e)}",
    "CheckpointSkipped": lambda e: f"{_who(e)} skipped {e.text('url')}: {e.text('reason')}",
}


# Both ends tell of a transfer: its beginning is told once, by who ordered it, its end by who measured it.
_TOLD_BY_COORDINATOR = frozenset({"TransferStarted"})
_TOLD_BY_WORKERS = frozenset({"TransferEnded", "DonorFailed"})

_STYLES = {"act": "bold cyan", "killed": "red", "flipped": "red", "error": "red"}


class Display(Protocol):
    """Where the demo shows itself. ``entry`` is called on any thread, in order."""

    def entry(self, entry: Entry) -> None:
        """Show one entry of the record."""

    def result(self, proofs: Sequence[Proof], notes: Sequence[str], seconds: float) -> None:
        """Show the table of proofs, and remarks such as where the picture is."""

    def close(self) -> None:
        """Give the terminal back. Twice does no harm."""


class JsonDisplay:
    """One JSON object a line: every entry, then ``{"type": "result", ...}``."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def entry(self, entry: Entry) -> None:
        print(entry.to_json(), file=self._out, flush=True)

    def result(self, proofs: Sequence[Proof], notes: Sequence[str], seconds: float) -> None:
        table = [{"name": proof.name, "holds": proof.holds, "detail": proof.detail} for proof in proofs]
        proved = all(proof.holds for proof in proofs)
        result = {
            "type": "result",
            "proved": proved,
            "seconds": round(seconds, 2),
            "proofs": table,
            "notes": list(notes),
        }
        print(json.dumps(result), file=self._out, flush=True)

    def close(self) -> None:
        """Nothing to give back."""


class PlainDisplay:
    """One line an event, for pipes and logs."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def entry(self, entry: Entry) -> None:
        line = narrate(entry)
        if line is not None:
            print(line, file=self._out, flush=True)

    def result(self, proofs: Sequence[Proof], notes: Sequence[str], seconds: float) -> None:
        width = max((len(proof.name) for proof in proofs), default=0)
        print(f"\nWhat was proved, in {seconds:.0f} s:", file=self._out)
        for proof in proofs:
            print(f"  {'yes' if proof.holds else 'NO '}  {proof.name:<{width}}  {proof.detail}", file=self._out)
        for note in notes:
            print(note, file=self._out)
        self._out.flush()

    def close(self) -> None:
        """Nothing to give back."""


class LiveDisplay:
    """Lines scroll by above a table of the workers and a bar of the outer steps."""

    def __init__(self, console: Console, *, inner_steps: int, outer_steps: int) -> None:
        self._console = console
        self._inner_steps = inner_steps
        self._outer_steps = outer_steps
        self._lock = threading.Lock()
        self._workers: dict[str, dict[str, str]] = {}
        self._progress: dict[str, int] = {}
        self._newest = 0
        self._lineage = 1
        self._live = Live(console=console, get_renderable=self._view, refresh_per_second=8, transient=True)
        self._live.start()

    def entry(self, entry: Entry) -> None:
        self._follow(entry)
        line = narrate(entry)
        if line is not None:
            style = _STYLES.get(entry.kind, "")
            self._console.print(Text(line, style=style))

    def _follow(self, entry: Entry) -> None:
        with self._lock:
            if entry.kind == "VersionSealed":
                self._newest, self._lineage = entry.version.outer_step, entry.version.lineage
            if entry.launch == 0 or entry.source in (DEMO, COORDINATOR):
                return
            row = self._workers.setdefault(entry.source, {"state": "", "version": "", "loss": ""})
            match entry.kind:
                case "started":
                    row["state"] = "starts"
                case "killed" | "exited":
                    row["state"] = "gone"
                case "TransferStarted":
                    row["state"] = f"recovers from {', '.join(entry.texts('donors'))}"
                case "state" | "applied":
                    row.update(state="trains", version=entry.text("version"))
                    self._progress[entry.source] = 0
                case "inner":
                    row.update(state="trains", version=entry.text("version"), loss=f"{entry.number('loss'):.3f}")
                    self._progress[entry.source] = int(entry.number("inner_step")) + 1
                case "flipped":
                    row["state"] = "damaged"

    def _view(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for column in ("worker", "state", "version", "phase", "loss"):
            table.add_column(column)
        with self._lock:
            for worker_id, row in sorted(self._workers.items()):
                bar = ProgressBar(total=self._inner_steps, completed=self._progress.get(worker_id, 0), width=16)
                table.add_row(worker_id, row["state"], row["version"], bar, row["loss"])
            run = Text(f"lineage {self._lineage}, outer step {self._newest} of {self._outer_steps}")
        return Group(Text(""), table, run)

    def result(self, proofs: Sequence[Proof], notes: Sequence[str], seconds: float) -> None:
        self.close()
        table = Table(title=f"What was proved, in {seconds:.0f} s", title_justify="left")
        for column in ("", "claim", "what was compared"):
            table.add_column(column, overflow="fold")
        for proof in proofs:
            verdict = Text("yes", style="bold green") if proof.holds else Text("NO", style="bold red")
            table.add_row(verdict, Text(proof.name), Text(proof.detail))
        self._console.print(table)
        for note in notes:
            self._console.print(Text(note))

    def close(self) -> None:
        self._live.stop()


def choose(out: TextIO, *, as_json: bool, inner_steps: int, outer_steps: int) -> Display:
    """Return the display that fits: JSON if asked for, live in a terminal, plain lines otherwise."""
    if as_json:
        return JsonDisplay(out)
    if out.isatty():
        return LiveDisplay(Console(file=out), inner_steps=inner_steps, outer_steps=outer_steps)
    return PlainDisplay(out)
