"""Records of wide-area benchmarks: JSON and Markdown with machine facts, beside each figure the emulator's lateness."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.machine import facts
from tests.support.wan import PUNCTUAL_MICROSECONDS

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measurement. It counts only if the emulator handed packets over in time.

    ``connected_seconds``: from the moment on when the two ends were connected.
    """

    seconds: float
    late_microseconds: float
    connected_seconds: float = 0.0
    note: str = ""

    @property
    def counts(self) -> bool:
        return 0 < self.late_microseconds < PUNCTUAL_MICROSECONDS


@dataclass(frozen=True, kw_only=True)
class Row:
    """Several runs of one case.

    Attributes:
        name: What was measured.
        num_bytes: Payload of each run.
        limit: The least or greatest that the project promises for ``figure``, as text; empty: nothing is promised.
        runs: All of them, also those that do not count.
        skipped: Why there are none.
    """

    name: str
    num_bytes: int = 0
    limit: str = ""
    runs: Sequence[Run] = field(default_factory=tuple)
    skipped: str = ""

    @property
    def counted(self) -> list[Run]:
        return [run for run in self.runs if run.counts]

    @property
    def seconds(self) -> float | None:
        """The median of the runs that count."""
        return statistics.median(run.seconds for run in self.counted) if self.counted else None

    @property
    def connected_seconds(self) -> float | None:
        return statistics.median(run.connected_seconds for run in self.counted) if self.counted else None

    def megabits_per_second(self, *, connected: bool = False) -> float | None:
        seconds = self.connected_seconds if connected else self.seconds
        return self.num_bytes * 8 / seconds / 1e6 if seconds else None


def write(
    name: str, title: str, method: str, header: Sequence[str], table: Sequence[Sequence[str]], rows: Sequence[Row]
) -> Path:
    """Write ``<name>-<date>.json`` and ``.md`` below the results; return the latter's path."""
    machine = facts()
    stem = f"{name}-{str(machine['date'])[:16].replace(':', '')}"
    RESULTS.mkdir(exist_ok=True)
    records = [{**asdict(row), "seconds": row.seconds, "runs_that_count": len(row.counted)} for row in rows]
    record = {"benchmark": name, "machine": machine, "method": method, "rows": records}
    (RESULTS / f"{stem}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    lines = [
        *(f"# {title}", "", method, ""),
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(cells) + " |" for cells in table),
        *("", "Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + "."),
    ]
    path = RESULTS / f"{stem}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def spread(row: Row) -> str:
    """Return the runs' seconds, those that do not count in brackets."""
    return ", ".join(f"{run.seconds:.1f}" if run.counts else f"({run.seconds:.1f})" for run in row.runs)


def lateness(row: Row) -> str:
    """Return the emulator's mean lateness in each run."""
    return ", ".join(f"{run.late_microseconds:.0f}" for run in row.runs)
