"""A record of what was seen, as JSON, and the same for people as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.storm import figures
from benchmarks.storm.figures import Bound
from benchmarks.storm.timeline import Timeline


def of_run(timeline: Timeline) -> dict[str, Any]:
    """Return a run as plain values, its times in seconds from its beginning."""
    began = timeline.began_at

    def since(at: float | None) -> float | None:
        return None if at is None else round(at - began, 3)

    faults = []
    for fault in timeline.faults:
        plain = dataclasses.asdict(fault)
        plain.update({name: since(plain[name]) for name in plain if name.endswith("_at")})
        faults.append(plain)
    epochs = [
        {"at": since(at), "epoch": epoch, "verdict": verdict, "reason": reason}
        for at, epoch, verdict, reason in timeline.epochs
        if verdict != "committed"
    ]
    return {
        "seconds": round(timeline.ended_at - began, 1),
        "steps": [
            {"at": since(at), "version": v, "held_out": round(loss, 5)} for at, v, loss in timeline.steps_within()
        ],
        "faults": faults,
        "times": figures.by_kind(timeline),
        "participation": round(figures.participation(timeline), 4),
        "counts": figures.mean_counts(timeline),
        "aborted_epochs": epochs,
        "rosters": [{**dataclasses.asdict(r), "at": since(r.at)} for r in timeline.rosters],
        "counted": [
            {**dataclasses.asdict(c), "at": since(c.at)} for c in timeline.counted if began < c.at <= timeline.ended_at
        ],
        "restored": [
            {"at": since(at), "worker": worker, "version": version, "source": source}
            for at, worker, version, source in timeline.restored
        ],
        "footprints": figures.footprints(timeline),
        "worker_cores": figures.cpu_share(timeline),
        "joins": [{"at": since(at), "worker": worker, "what": what} for at, worker, what in timeline.joins],
        "unexplained": timeline.unexplained,
    }


def markdown(record: dict[str, Any]) -> str:
    """Return the record for people."""
    lines = ["# Storm", ""]
    machine = record["machine"]
    lines += [
        f"{machine['date']}, {machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}. Load average over "
        f"the quarter of an hour before the storm's end: {record['load']}. {record['others']}".rstrip(),
        "",
    ]
    if "storm" in record and "seeds" in record:
        lines += _storm(record)
    if "churn" in record and "seeds" in record:
        lines += _churn(record)
    return "\n".join(lines) + "\n"


def _storm(record: dict[str, Any]) -> list[str]:
    storm, quiet = record["storm"], record["quiet"]
    lines = [
        f"Seed {record['seed']}: {len(storm['faults'])} faults in {storm['seconds']:.0f} s over four workers and a "
        f"coordinator; {record['network']}. The run without faults went on beside it for {quiet['seconds']:.0f} s and "
        f"committed {len(quiet['steps'])} steps. A worker used {storm['worker_cores']} of a core (median). The seeds "
        "without faults are the same training in one process, without this service.",
        "",
        *_bounds(figures.storm_bounds(record)),
        "## Faults",
        "",
        "Seconds: median / 90th percentile / worst. Resume: from the strike to the run's next commit; a whole period "
        f"is {quiet['seconds'] / max(1, len(quiet['steps'])):.2f} s without faults. Back: from the fault's end (for a "
        "kill: the new process's start) to the victim's next commit.",
        "",
        "| kind | faults | felt | recovered | detected | resume | back after its end | back after the strike |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, found in storm["times"].items():
        spans = [_span(found[name]) for name in ("detect", "resume", "back_after_end", "back_after_strike")]
        lines.append(f"| {kind} | {found['faults']} | {found['felt']} | {found['back']} | {' | '.join(spans)} |")
    counts, usual = storm["counts"], quiet["counts"]
    lines += [
        "",
        "## The three numbers",
        "",
        "Means over time of what `recovery status` told each half second; running: processes that were not killed or "
        "frozen. Who is applying a commit is not ready for that moment.",
        "",
        "| | running | alive | ready | participating |",
        "|---|---|---|---|---|",
        *[
            f"| {name} | "
            + " | ".join(f"{each[key]:.2f}" for key in ("running", "alive", "ready", "participating"))
            + " |"
            for name, each in (("storm", counts), ("no faults", usual))
        ],
        "",
        f"Epochs that were aborted and averaged again: {len(storm['aborted_epochs'])}.",
        "",
        *[f"- {each['at']:.1f} s, epoch {each['epoch']}: {each['reason']}" for each in storm["aborted_epochs"]],
        "",
        "## Memory",
        "",
        "Processes watched for a minute and more after their first 45 s: resident MiB at the end and growth between "
        "the first and the last third; threads and descriptors likewise.",
        "",
        *_footprints(storm),
        "",
        "![storm](storm.png)",
        "",
    ]
    return lines


def _churn(record: dict[str, Any]) -> list[str]:
    churn = record["churn"]
    return [
        "## Joins and leaves",
        "",
        f"{len(churn['steps'])} steps in {churn['seconds']:.0f} s; every few steps a worker leaves, and another one, "
        "with a name that the run has not seen, joins.",
        "",
        *_bounds(figures.churn_bounds(record)),
        "![joins and leaves](churn.png)",
        "",
    ]


def _bounds(bounds: Sequence[Bound]) -> list[str]:
    rows = [f"| {b.what} | {b.found} | {b.asked} | {'yes' if b.holds else '**no**'} |" for b in bounds]
    return ["| figure | found | asked | holds |", "|---|---|---|---|", *rows, ""]


def _span(found: dict[str, float | int]) -> str:
    if not found["number"]:
        return "-"
    return f"{found['median']} / {found['p90']} / {found['worst']}"


def _footprints(run: dict[str, Any]) -> list[str]:
    rows = [
        f"| {label} | {f['watched_seconds']} | {f['rss_mib']} | {f['grown_mib']:+} | {f['mib_per_hour']:+} | "
        f"{f['threads_grown']:+} | {f['descriptors_grown']:+} |"
        for label, f in run["footprints"].items()
    ]
    head = "| process | watched, s | MiB | grown | MiB an hour | threads | descriptors |"
    return [head, "|---|---|---|---|---|---|---|", *rows]
