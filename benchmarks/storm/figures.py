"""What follows from a storm's timeline: the figures that are asked for, each with the bound that it must keep."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.storm.timeline import Fault, Footprint, Timeline

SETTLED_SECONDS = 45.0
"""Memory is judged from so long after a process's start: by then it has imported, joined, and served once."""
LEAST_WATCHED_SECONDS = 60.0
GROWTH_BYTES_PER_HOUR = 64 * 2**20
GROWTH_FLOOR_BYTES = 8 * 2**20
"""Less than this is the allocator's play, whatever the time."""
STORM_SEEDS = 3
"""Seeds without faults whose final losses a storm's is compared with."""
STEADY_COUNT = 12
"""Threads and descriptors that a process may have more at its end than at its settled beginning: transfers at work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """One asked figure: what it is, what was found, and whether that is enough."""

    what: str
    found: str
    asked: str
    holds: bool


def quantiles(values: Iterable[float]) -> dict[str, float | int]:
    """Return number, median, 90th percentile and worst."""
    ordered = sorted(values)
    if not ordered:
        return {"number": 0}
    return {
        "number": len(ordered),
        "median": round(statistics.median(ordered), 2),
        "p90": round(ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], 2),
        "worst": round(ordered[-1], 2),
    }


def participation(timeline: Timeline) -> float:
    """Return the share of live and ready workers that took part, over all committed boundaries."""
    committed = {epoch for _, epoch, verdict, _ in timeline.epochs if verdict == "committed"}
    shares = [
        len(roster.members) / len({*roster.members, *roster.missing})
        for roster in timeline.rosters
        if roster.epoch in committed and timeline.began_at < roster.at <= timeline.ended_at
    ]
    return statistics.fmean(shares) if shares else 0.0


def mean_counts(timeline: Timeline) -> dict[str, float]:
    """Return the three numbers' means over time, as status told them, and that of running processes."""
    counted = [c for c in timeline.counted if timeline.began_at < c.at <= timeline.ended_at]
    return {
        name: round(statistics.fmean(getattr(c, name) for c in counted), 3) if counted else 0.0
        for name in ("running", "alive", "ready", "participating")
    }


def times(faults: Sequence[Fault]) -> dict[str, Any]:
    """Return detection, resumption and return of a set of faults, in seconds."""
    return {
        "faults": len(faults),
        "felt": sum(fault.felt for fault in faults),
        "back": sum(fault.back_at is not None for fault in faults),
        "detect": quantiles(f.detected_at - f.struck_at for f in faults if f.detected_at is not None),
        "resume": quantiles(f.resumed_at - f.struck_at for f in faults if f.resumed_at is not None),
        "back_after_end": quantiles(
            f.back_at - f.healed_at for f in faults if f.back_at is not None and f.healed_at is not None
        ),
        "back_after_strike": quantiles(f.back_at - f.struck_at for f in faults if f.back_at is not None),
    }


def by_kind(timeline: Timeline) -> dict[str, dict[str, Any]]:
    """Return ``times`` of each kind of fault, and of all."""
    kinds = sorted({fault.kind for fault in timeline.faults})
    found = {kind: times([fault for fault in timeline.faults if fault.kind == kind]) for kind in kinds}
    return {**found, "all": times(timeline.faults)}


def closing_loss(curve: Sequence[float]) -> float:
    """Return the mean of the last five steps' losses: one step's is noisier than what is compared."""
    return statistics.fmean(curve[-5:]) if curve else float("nan")


def growth(prints: Sequence[Footprint]) -> dict[str, float | int] | None:
    """Return how a process grew between its settled beginning and its end; None: it did not live long enough."""
    settled = [p for p in prints if p.at >= prints[0].at + SETTLED_SECONDS]
    if not settled or settled[-1].at - settled[0].at < LEAST_WATCHED_SECONDS:
        return None
    third = max(1, len(settled) // 3)
    first, last = settled[:third], settled[-third:]
    watched = statistics.fmean(p.at for p in last) - statistics.fmean(p.at for p in first)
    grown = statistics.median(p.rss_bytes for p in last) - statistics.median(p.rss_bytes for p in first)
    return {
        "watched_seconds": round(settled[-1].at - settled[0].at),
        "rss_mib": round(statistics.median(p.rss_bytes for p in last) / 2**20, 1),
        "grown_mib": round(grown / 2**20, 2),
        "mib_per_hour": round(grown / 2**20 / watched * 3600, 1),
        "threads_grown": min(p.threads for p in last) - min(p.threads for p in first),
        "descriptors_grown": min(p.descriptors for p in last) - min(p.descriptors for p in first),
    }


def grows(found: dict[str, float | int], watched_share: float = 2 / 3) -> bool:
    """Return whether a process's growth is more than an allocator's play."""
    allowed = max(GROWTH_FLOOR_BYTES, GROWTH_BYTES_PER_HOUR * found["watched_seconds"] * watched_share / 3600) / 2**20
    return (
        found["grown_mib"] > allowed
        or found["threads_grown"] > STEADY_COUNT
        or found["descriptors_grown"] > STEADY_COUNT
    )


def footprints(timeline: Timeline) -> dict[str, dict[str, float | int]]:
    """Return the growth of every process that lived long enough."""
    found = {label: growth(prints) for label, prints in sorted(timeline.footprints.items())}
    return {label: grown for label, grown in found.items() if grown is not None}


def cpu_share(timeline: Timeline) -> float:
    """Return the median over workers of cores used, while nothing but training was due."""
    shares = []
    for label, prints in timeline.footprints.items():
        settled = [p for p in prints if p.at >= prints[0].at + SETTLED_SECONDS]
        if label.startswith("coordinator") or len(settled) < 2:
            continue
        shares += [(b.cpu_seconds - a.cpu_seconds) / (b.at - a.at) for a, b in itertools.pairwise(settled)]
    return round(statistics.median(shares), 3) if shares else 0.0


def storm_bounds(record: dict[str, Any]) -> list[Bound]:
    """Return the asked figures of a record's storm."""
    storm, quiet, rate = record["storm"], record["quiet"], record["faults_per_hour"]
    faults, number = storm["faults"], len(storm["faults"])
    felt = sum(fault["felt"] for fault in faults)
    back = sum(fault["back_at"] is not None for fault in faults)
    steps, quiet_steps = len(storm["steps"]), len(quiet["steps"])
    ratio, share = steps / quiet_steps, storm["participation"]
    finals = [closing_loss(curve) for curve in list(record["seeds"].values())[:STORM_SEEDS]]
    low, high = min(finals) * 0.99, max(finals) * 1.01
    loss = closing_loss([step["held_out"] for step in storm["steps"]])
    grown = {label: found for label, found in storm["footprints"].items() if grows(found)}
    return [
        Bound(
            what="faults an hour (mean of the Poisson process)",
            found=f"{rate:g}; {number} in {storm['seconds']:.0f} s",
            asked="at least 120",
            holds=rate >= 120,
        ),
        Bound(what="faults that reached their victim", found=f"{felt} of {number}", asked="all", holds=felt == number),
        Bound(what="faults recovered", found=f"{back} of {number}", asked="all", holds=back == number),
        Bound(
            what="committed steps of the run without faults",
            found=f"{ratio:.3f} ({steps} of {quiet_steps})",
            asked="at least 0.95",
            holds=ratio >= 0.95,
        ),
        Bound(what="participants of alive and ready", found=f"{share:.3f}", asked="at least 0.9", holds=share >= 0.9),
        Bound(
            what="final loss",
            found=f"{loss:.4f}",
            asked=f"{low:.4f} to {high:.4f}: {len(finals)} seeds without faults, widened by 1 %",
            holds=low <= loss <= high,
        ),
        Bound(
            what="processes whose memory, threads or descriptors grow",
            found=", ".join(grown) or f"none of {len(storm['footprints'])}",
            asked="none",
            holds=not grown,
        ),
        _nothing_unexplained(storm),
    ]


def churn_bounds(record: dict[str, Any]) -> list[Bound]:
    """Return the asked figures of a record's run with joins and leaves."""
    churn = record["churn"]
    loss = closing_loss([step["held_out"] for step in churn["steps"]])
    finals = [closing_loss(curve[: len(churn["steps"])]) for curve in record["seeds"].values()]
    mean, deviation = statistics.fmean(finals), statistics.stdev(finals)
    low, high = mean - 2 * deviation, mean + 2 * deviation
    joined = sum(join["what"] == "joined" for join in churn["joins"])
    left = sum(join["what"] == "left" for join in churn["joins"])
    return [
        Bound(what="joins", found=str(joined), asked="10", holds=joined >= 10),
        Bound(what="leaves", found=str(left), asked="10", holds=left >= 10),
        Bound(
            what="final loss",
            found=f"{loss:.4f}",
            asked=f"{low:.4f} to {high:.4f}: mean and 2 standard deviations of {len(finals)} undisturbed seeds",
            holds=low <= loss <= high,
        ),
        _nothing_unexplained(churn),
    ]


def _nothing_unexplained(run: dict[str, Any]) -> Bound:
    return Bound(
        what="ends that nobody caused, pauses, new lineages",
        found="; ".join(run["unexplained"]) or "none",
        asked="none",
        holds=not run["unexplained"],
    )
