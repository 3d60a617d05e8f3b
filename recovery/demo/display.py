"""What a person sees of the demo: one line an event, a live view in a terminal, and the table of proofs."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from recovery.demo.narration import narrate
from recovery.demo.proofs import Proof
from recovery.demo.reports import COORDINATOR, DEMO, Entry

_STYLES = {"act": "bold cyan", "killed": "red", "flipped": "red", "error": "red"}
_VERDICT_STYLES = {"yes": "bold green", "NO": "bold red", "open": "yellow"}


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
        table = [
            {"name": proof.name, "holds": proof.holds, "verdict": proof.verdict, "detail": proof.detail}
            for proof in proofs
        ]
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
            print(f"  {proof.verdict:<4}  {proof.name:<{width}}  {proof.detail}", file=self._out)
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
            verdict = Text(proof.verdict, style=_VERDICT_STYLES[proof.verdict])
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
