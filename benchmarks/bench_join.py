"""How long a worker takes from the start of its process to its first useful step, and what that costs the others.

    python -m benchmarks.bench_join --part links        # state sizes and link rates on loopback
    python -m benchmarks.bench_join --part survivors    # the others' boundaries while somebody catches up, against idle
    python -m benchmarks.bench_join --part wan          # 200 Mbit/s with 80 ms (as root)

Real worker processes whose inner steps are paced: a phase takes ``--period`` seconds. Rates are a cap. Each part
writes a record of its own. ``join_model`` holds the formula whose predictions stand beside the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.join_model import PHASES, Constants, Join, predict
from benchmarks.join_run import MEGABYTE, Run
from benchmarks.machine import facts
from tests.support.wan import emulated, why_not_permitted

RESULTS = Path(__file__).parent / "results"
QUIET_PERCENT = 10.0


@dataclasses.dataclass(frozen=True)
class Case:
    """Joins of one size over one link."""

    params: int
    link: str
    rate: float
    """Bytes per second of a capped or emulated link; 0: as fast as loopback is."""
    period: float
    joins: list[Join]


def constants_of(cases: list[Case]) -> Constants:
    """Return what is not bytes: start-up of all joins, the rest of the smallest state's, whose bytes cost nothing."""
    smallest = min(cases, key=lambda case: (case.params, case.rate > 0)).joins

    def median(joins: list[Join], *phases: str) -> float:
        return statistics.median(sum(join.seconds[phase] for phase in phases) for join in joins)

    return Constants(
        start_up=median([join for case in cases for join in case.joins], "start-up"),
        attach=median(smallest, "attach"),
        conversation=median(smallest, "private", "base"),
        admission=median(smallest, "admission"),
    )


def rows_of(cases: list[Case]) -> dict[str, Any]:
    """Return the table: medians beside predictions."""
    constants = constants_of(cases)
    free = [case for case in cases if not case.rate and case.params > min(c.params for c in cases)]
    # What loopback brings is not predicted but fitted: every other figure is.
    loopback = statistics.median(
        4 * case.params / max(1e-3, join.seconds["private"] + join.seconds["base"] - constants.conversation)
        for case in free or cases
        for join in case.joins
    )
    return {
        "constants": dataclasses.asdict(constants),
        "loopback_bytes_per_second": None if not any(not case.rate for case in cases) else round(loopback),
        "rows": [row_of(case, constants, case.rate or loopback) for case in cases],
    }


def row_of(case: Case, constants: Constants, rate: float) -> dict[str, Any]:
    params = case.params
    for join in case.joins:
        join.predicted = predict(
            join, constants, outer=2 * params, private=2 * params, entry=params, rate=rate, period=case.period
        )
    joins = case.joins
    return {
        "outer_bytes": 2 * params,
        "private_bytes": 2 * params,
        "entry_bytes": params,
        "link": case.link,
        "rate": case.rate,
        "period_seconds": round(case.period, 3),
        "seconds": {phase: round(statistics.median(j.seconds[phase] for j in joins), 3) for phase in PHASES},
        "predicted": {phase: round(statistics.median(j.predicted[phase] for j in joins), 3) for phase in PHASES},
        "total": round(statistics.median(j.total for j in joins), 3),
        "predicted_total": round(statistics.median(j.predicted_total for j in joins), 3),
        "joins": [dataclasses.asdict(join) for join in joins],
    }


def measured(run: Run, link: str, rate: float, count: int) -> Case:
    """Join so often; say each time how long it took."""
    joins = []
    for _ in range(count):
        joins.append(run.join())
        print(f"{run.param_bytes / MEGABYTE:.0f} MB, {link}: {joins[-1].total:.2f} s {joins[-1].seconds}", flush=True)
    return Case(run.param_bytes, link, rate, run.period, joins)


def links(options: argparse.Namespace) -> dict[str, Any]:
    """Join runs of several sizes over several rates."""
    hosts = dict.fromkeys(("hub", "donor", "bystander", "joiner"), "127.0.0.1")
    cases = []
    for megabytes in sorted(options.megabytes):
        with contextlib.ExitStack() as stack:
            run = Run(stack, hosts, lambda _: [], megabytes, options.period)
            for rate in options.rates:
                run.cap(rate * MEGABYTE)
                name = f"{rate} MB/s" if rate else "loopback"
                cases.append(measured(run, name, rate * MEGABYTE, options.joins))
    return rows_of(cases)


def wan(options: argparse.Namespace) -> dict[str, Any]:
    """Join over an emulated wide-area link: the smallest size gives the constants, the others are predicted."""
    if reason := why_not_permitted():
        print(f"skipped: {reason}")
        return {"skipped": reason, "rows": []}
    rate = options.megabits * 125_000 * 0.96  # headers
    shape = {"rate": f"{options.megabits}mbit", "rtt": "80ms"}
    cases = []
    for megabytes in sorted(options.megabytes):
        names = ["hub", "donor", "bystander", "joiner"]
        with emulated(names, every=shape) as network, contextlib.ExitStack() as stack:
            hosts = {name: network.address(name) for name in names}
            prefix = {name: list(network.prefix(name)) for name in names}
            run = Run(stack, hosts, prefix.__getitem__, megabytes, options.period)
            cases.append(measured(run, f"{options.megabits} Mbit/s, 80 ms", rate, options.joins))
    return rows_of(cases)


def survivors(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the survivors' boundaries while somebody catches up with idle ones of the same run, interleaved."""
    hosts = dict.fromkeys(("hub", "donor", "bystander", "joiner"), "127.0.0.1")
    rounds = []
    with contextlib.ExitStack() as stack:
        run = Run(stack, hosts, lambda _: [], max(options.megabytes), options.period)
        run.survivors[0].wait("boundary", 3)
        rate = int(2 * run.param_bytes / (1.25 * run.period))
        run.cap(rate)
        for _ in range(options.rounds):
            rounds.append(round_of(run, options.idle))
            print(json.dumps(rounds[-1]), flush=True)
    names = [survivor.name for survivor in run.survivors]
    ratios = {
        f"{name} {what}": round(statistics.median(r[name][what]["ratio"] for r in rounds), 4)
        for name in names
        for what in ("period", "boundary")
    }
    print(json.dumps(ratios), flush=True)
    return {
        "outer_bytes": 2 * run.param_bytes,
        "rate": rate,
        "period_seconds": round(run.period, 3),
        "median_ratios": ratios,
        "w0": "the donor",
        "w1": "a bystander",
        "rounds": rounds,
    }


def round_of(run: Run, idle: int) -> dict[str, Any]:
    """Return one round: idle boundaries, then those from a joiner's first transfer on until it is admitted."""
    begun = time.monotonic()
    run.survivors[0].wait("boundary", idle + 1, after=begun)
    joiner = run.start("joiner")
    try:
        serving_since = joiner.wait("TransferStarted")["at"]
        joined_at = joiner.wait("StateRestored")["at"]
    finally:
        joiner.close()
    entries = sum(m["what"] == "CommitReplayed" for m in joiner.said)
    base_at = max(m["at"] for m in joiner.said if m["what"] == "BaseRestored")
    told: dict[str, Any] = {
        "entries": entries,
        "first_roster_after_base": 1 + sum(base_at < m["at"] <= joined_at for m in run.survivors[1].boundaries()),
        "seconds_to_join": round(joined_at - joiner.spawned, 2),
    }
    for survivor in run.survivors:
        found = survivor.boundaries()
        # The first boundary after the last joiner was ended rebuilds a group; it counts for neither.
        quiet = [m for m in found if begun < m["at"] <= joiner.spawned][1:]
        serving = [m for m in found if serving_since <= m["at"] <= joined_at]
        before = {b["at"]: b["at"] - a["at"] for a, b in itertools.pairwise(found)}
        told[survivor.name] = {
            "period": compare([before[m["at"]] for m in quiet], [before[m["at"]] for m in serving]),
            "boundary": compare([m["seconds"] for m in quiet], [m["seconds"] for m in serving]),
        }
    # Its place is empty again before the next round begins.
    run.survivors[0].wait("boundary", 1, after=time.monotonic())
    return told


def compare(idle: list[float], serving: list[float]) -> dict[str, Any]:
    """Return both medians and their ratio."""
    return {
        "idle_seconds": round(statistics.median(idle), 4),
        "serving_seconds": round(statistics.median(serving), 4),
        "ratio": round(statistics.median(serving) / statistics.median(idle), 4),
        "num_idle": len(idle),
        "num_serving": len(serving),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the joins as Markdown: measured / predicted seconds."""
    lines = [
        "| outer / private / entry, MB | link | " + " | ".join(PHASES) + " | total | predicted | replayed |",
        "|" + "---|" * (len(PHASES) + 5),
    ]
    for row in rows:
        sizes = " / ".join(f"{row[key] / MEGABYTE:.0f}" for key in ("outer_bytes", "private_bytes", "entry_bytes"))
        cells = [f"{row['seconds'][phase]:.2f} / {row['predicted'][phase]:.2f}" for phase in PHASES]
        replayed = ", ".join(str(join["entries"]) for join in row["joins"])
        lines.append(
            f"| {sizes} | {row['link']} | {' | '.join(cells)} | {row['total']:.2f} | {row['predicted_total']:.2f} "
            f"| {replayed} |"
        )
    return lines


def markdown(part: str, record: dict[str, Any]) -> str:
    """Return the record as a page."""
    lines = [f"# Joining a run: {part}", ""]
    if part == "survivors":
        lines += [
            f"Two workers train with an outer period of {record['period_seconds']} s while a third catches up behind a "
            f"cap of {record['rate'] / MEGABYTE:.1f} MB/s (outer copy 1.25 periods, a commit 0.625): their boundaries "
            "without it in the roster, against idle ones of the same run; w0 serves, w1 does not.",
            "",
            "| round | replayed | first roster after the base | " + " | ".join(record["median_ratios"]) + " |",
            "|" + "---|" * (3 + len(record["median_ratios"])),
        ]
        for number, found in enumerate(record["rounds"], 1):
            ratios = [f"{found[k.split()[0]][k.split()[1]]['ratio']:.3f}" for k in record["median_ratios"]]
            counts = f"{found['entries']} | {found['first_roster_after_base']}"
            lines.append(f"| {number} | {counts} | {' | '.join(ratios)} |")
        medians = [f"{value:.3f}" for value in record["median_ratios"].values()]
        lines.append(f"| median |  |  | {' | '.join(medians)} |")
    else:
        lines += [
            "Seconds from the start of the process to the first inner step, measured / predicted; medians. The formula "
            "stands in `benchmarks/join_model.py`.",
            "",
            *table(record["rows"]),
        ]
    machine = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    return "\n".join([*lines, "", f"The machine was {record['machine_was']}: {machine}."]) + "\n"


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "links": links,
    "survivors": survivors,
    "wan": wan,
}


def main() -> int:
    """Measure, print and record."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the children, too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="default: all")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 16, 48], help="parameters of one worker, in MB")
    parser.add_argument("--rates", type=int, nargs="+", default=[0, 50, 20], help="donor's cap in MB/s; 0: none")
    parser.add_argument("--megabits", type=int, default=200, help="of the wide-area link")
    parser.add_argument("--joins", type=int, default=2, help="of each case")
    parser.add_argument("--period", type=float, default=4.0, help="seconds of a phase")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=int, default=3, help="idle boundaries of each round")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    for part in options.part or list(PARTS):
        busy = [psutil.cpu_percent(interval=2.0)]
        record = PARTS[part](options)
        busy.append(psutil.cpu_percent(interval=2.0))
        record = {
            "benchmark": "join",
            "part": part,
            "machine": facts(),
            "machine_was": "quiet" if max(busy) < QUIET_PERCENT else "busy",
            "percent_busy_before_and_after": busy,
            **record,
        }
        if not options.no_record and "skipped" not in record:
            stem = f"join-{part}-{str(record['machine']['date'])[:16].replace(':', '')}"
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{stem}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            (RESULTS / f"{stem}.md").write_text(markdown(part, record), encoding="utf-8")
            print(RESULTS / f"{stem}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
