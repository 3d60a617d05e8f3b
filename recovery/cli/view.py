"""How a run looks to its operator: the tables of ``recovery status`` and the lines of ``recovery watch``."""

from __future__ import annotations

import datetime
import json
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from protos.recovery.v1 import operations_pb2
from recovery.control.wire import from_proto, seconds
from recovery.types import NO_VERSION

SHORT_FINGERPRINT = 12


def short(fingerprint: bytes) -> str:
    """Return the first 12 hex digits, enough to tell states of one run apart; "-" for none."""
    return fingerprint.hex()[:SHORT_FINGERPRINT] or "-"


def status(answer: operations_pb2.ListResponse) -> RenderableType:
    """Return the whole picture: the run in three lines, its workers, its lineages."""
    parts: list[RenderableType] = [_summary(answer), _workers(answer)]
    if answer.lineages:
        parts.append(_lineages(answer))
    return Group(*parts)


def event_object(response: operations_pb2.WatchResponse) -> dict[str, Any]:
    """Return one event as JSON has it: ``at`` in ISO 8601, ``event`` its class, ``fields`` by name."""
    return {
        "at": response.at.ToDatetime(datetime.UTC).isoformat(),
        "event": response.event,
        "fields": json.loads(response.fields_json or "{}"),
    }


def event_line(response: operations_pb2.WatchResponse) -> Text:
    """Return one event as one line: time, name, fields that say something."""
    fields = event_object(response)["fields"]
    said = "  ".join(
        f"{name}={round(value, 3) if isinstance(value, float) else value}"
        for name, value in fields.items()
        if value not in ("", (), [], None)
    )
    clock = response.at.ToDatetime().strftime("%H:%M:%S.%f")[:-3]
    return Text(f"{clock}Z  {response.event}  {said}")


def _summary(answer: operations_pb2.ListResponse) -> RenderableType:
    sealed = from_proto(answer.sealed)
    lines = [
        f"run {escape(answer.run_id)}: sealed {'nothing yet' if sealed == NO_VERSION else sealed}"
        + (f", fingerprint {short(answer.sealed_fingerprint)}" if answer.sealed_fingerprint else ""),
        f"workers: {answer.alive} alive, {answer.ready} ready, {answer.participating} participating in epoch "
        f"{answer.epoch}; {answer.committed_epochs} epochs committed, {answer.aborted_epochs} aborted"
        + (f"; {answer.gone} lost long ago are not listed" if answer.gone else ""),
    ]
    if answer.paused:
        lines.append(f"[bold red]PAUSED:[/bold red] {escape(answer.paused)}")
    return Text.from_markup("\n".join(lines))


def _workers(answer: operations_pb2.ListResponse) -> RenderableType:
    if not answer.workers:
        return Text("no worker is attached")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", "alive", "ready", "version", "fingerprint", "slots", "inner step", "state", "waits for"):
        table.add_column(name, overflow="fold")
    for worker in answer.workers:
        version = from_proto(worker.version)
        diverged = bool(
            worker.fingerprint
            and answer.sealed_fingerprint
            and version == from_proto(answer.sealed)
            and worker.fingerprint != answer.sealed_fingerprint
        )
        table.add_row(
            escape(_name(worker)),
            _mark(worker.alive),
            _mark(worker.ready),
            "-" if version == NO_VERSION else str(version),
            f"[red]{short(worker.fingerprint)}[/red]" if diverged else short(worker.fingerprint),
            f"{worker.free_slots}/{worker.donor_slots}",
            f"{worker.inner_step}/{worker.inner_steps_per_phase}" if worker.inner_steps_per_phase else "-",
            escape(_state(worker, diverged)),
            escape(_waits(worker)),
        )
    return table


def _name(worker: operations_pb2.WorkerStatus) -> str:
    ref = worker.worker
    return ref.worker_id if ref.num_local_ranks <= 1 else f"{ref.worker_id}[{ref.local_rank}]"


def _mark(value: bool) -> str:
    return "[green]yes[/green]" if value else "[red]no[/red]"


def _state(worker: operations_pb2.WorkerStatus, diverged: bool) -> str:
    words = [
        word
        for word, holds in (
            ("poisoned", worker.poisoned),
            ("diverged", diverged),
            ("stalled", worker.stalled),
            ("drained", worker.drained),
        )
        if holds
    ]
    return ", ".join(words) or "-"


def _waits(worker: operations_pb2.WorkerStatus) -> str:
    trouble = f" [{worker.trouble}]" if worker.trouble else ""
    if not worker.waiting_for:
        return trouble.strip() or "-"
    waited = seconds(worker.waited)
    return (f"{worker.waiting_for} ({waited:.0f} s)" if waited >= 1 else worker.waiting_for) + trouble


def _lineages(answer: operations_pb2.ListResponse) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("lineage", "cause", "from", "lost steps", "started"):
        table.add_column(name, overflow="fold")
    for lineage in answer.lineages:
        parent = from_proto(lineage.parent)
        table.add_row(
            f"L{lineage.lineage}",
            escape(lineage.cause),
            "-" if parent == NO_VERSION else str(parent),
            str(lineage.lost_steps),
            lineage.started.ToDatetime().strftime("%Y-%m-%d %H:%M:%SZ") if lineage.HasField("started") else "-",
        )
    return table
