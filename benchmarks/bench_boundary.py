"""What a committed boundary costs beside its bare average, and how soon a run commits again after a fault.

    python -m benchmarks.bench_boundary --boundaries 30 --quiet

On loopback, and (as root) with round trips of 80 ms between the workers and to the coordinator. The average is timed by
itself within the same boundaries: same processes, same group, same tensors. Digests and the seal of a step fall into
the following phase, as in training; what of them is left at the next boundary is counted under ``check`` and
``roster``. Faults: see ``boundary_faults``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.boundary_faults import measure
from benchmarks.machine import facts
from recovery.types import MIB
from tests.support.processes import ChildProcess
from tests.support.wan import emulated, why_not_permitted

RESULTS = Path(__file__).parent / "results"
PARTS = ("total", "average", "check", "roster", "prepare", "vote", "apply", "publish")
WARM_UP = 3
_START_SECONDS = 60.0
_LONGEST_SECONDS = 120.0

Prefix = Callable[[str], list[str]]


def boundaries(
    folder: Path, hosts: dict[str, str], prefix: Prefix, num_bytes: int, count: int
) -> list[dict[str, float]]:
    """Run a coordinator and two workers; return the first worker's boundaries, without those of the warm-up."""
    with ExitStack() as stack:
        port_file = folder / "port"
        coordinator = ChildProcess(
            [
                *("-m", "recovery.cli.main", "coordinator", "--run-id", "bench", "--new-run", "--insecure"),
                *("--listen", f"{hosts['hub']}:0", "--port-file", str(port_file), "--state-dir", str(folder / "state")),
                *("--expected-workers", "2", "--min-participants", "2"),
            ],
            prefix=prefix("hub"),
        )
        stack.enter_context(coordinator)
        coordinator.line("coordinator of run", _START_SECONDS)
        workers = []
        for name in ("a", "b"):
            plan: dict[str, Any] = {
                "num_bytes": num_bytes,
                "outer_steps": count + WARM_UP,
                "phase_seconds": max(0.5, num_bytes / (64 * MIB)),
                "agent": {
                    "coordinator": port_file.read_text().strip(),
                    "run_id": "bench",
                    "worker_id": name,
                    "data_host": hosts[name],
                },
            }
            arguments = ["-m", "benchmarks.boundary_worker", json.dumps(plan)]
            workers.append(stack.enter_context(ChildProcess(arguments, prefix=prefix(name))))
        for worker in workers:
            worker.line('{"joined"', _START_SECONDS)
        found: list[dict[str, float]] = []
        while not found or found[-1]["outer_step"] < count + WARM_UP:
            found.append(json.loads(workers[0].line('{"outer_step"', _LONGEST_SECONDS)))
        return [each for each in found if each["outer_step"] > WARM_UP]


def row(where: str, num_bytes: int, found: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians in milliseconds, and the overhead: all but the average and the user's own outer step."""
    medians = {part: statistics.median(each[part] for each in found) * 1000 for part in PARTS}
    overheads = [each["total"] - each["average"] - each["apply"] for each in found]
    overhead = statistics.median(overheads) * 1000
    told = {
        "where": where,
        "num_bytes": num_bytes,
        "boundaries": len(found),
        "overhead_ms": round(overhead, 2),
        "overhead_over_average": round(overhead / medians["average"], 3),
        "overhead_p90_ms": round(sorted(overheads)[int(0.9 * (len(overheads) - 1))] * 1000, 2),
        "medians_ms": {part: round(value, 2) for part, value in medians.items()},
    }
    print(json.dumps(told), flush=True)
    return told


def loopback(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure on loopback, for each size."""
    rows = []
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            hosts = dict.fromkeys(("hub", "a", "b"), "127.0.0.1")
            found = boundaries(Path(folder), hosts, lambda _: [], megabytes * MIB, options.boundaries)
            rows.append(row("loopback", megabytes * MIB, found))
    return rows


def far_apart(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure with round trips of 80 ms, half on each side; the rate is unlimited: what is looked at is latency."""
    with (
        emulated({"hub": {}, "a": {}, "b": {}}, every={"rtt": "80ms"}) as wan,
        tempfile.TemporaryDirectory() as folder,
    ):
        hosts = {name: wan.address(name) for name in ("hub", "a", "b")}
        num_bytes = options.megabytes[0] * MIB
        found = boundaries(Path(folder), hosts, lambda n: list(wan.prefix(n)), num_bytes, options.boundaries)
        return [row("80 ms round trips", num_bytes, found)]


def write(record: dict[str, Any]) -> Path:
    """Write the record as JSON and as Markdown; return the latter's path."""
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"boundary-{str(record['machine']['date'])[:16].replace(':', '')}"
    stem.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    lines = ["# What a boundary costs beside its bare average", "", *table(record["rows"])]
    if record["skipped"]:
        lines += ["", f"80 ms round trips: skipped: {record['skipped']}"]
    lines += ["", "# How soon a run commits again after a fault", "", *table(record["faults"])]
    lines += [
        "",
        "Seconds by which the next commit was later than due, from the moment at which the failure was known.",
    ]
    facts_line = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    lines += ["", f"Machine: {facts_line}. {record['quiet']}"]
    path = stem.with_suffix(".md")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return rows as a Markdown table; the medians of the parts are columns of their own."""
    flat = [{**{k: v for k, v in row.items() if k != "medians_ms"}, **row.get("medians_ms", {})} for row in rows]
    if not flat:
        return ["Not measured in this run."]
    header = list(flat[0])
    body = ["| " + " | ".join(str(row[name]) for name in header) + " |" for row in flat]
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *body]


def main() -> int:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boundaries", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3, help="of each fault")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--only", choices=("loopback", "wan", "faults"), action="append", help="leave the others out")
    parser.add_argument("--quiet", action="store_true", help="note in the record that nothing else ran")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    wanted = options.only or ["loopback", "wan", "faults"]
    skipped = why_not_permitted()
    record: dict[str, Any] = {
        "benchmark": "boundary",
        "machine": facts(),
        "quiet": "Nothing else ran." if options.quiet else "The machine may have had other work.",
        "skipped": skipped,
        "rows": [],
        "faults": [],
    }
    for part in wanted:
        if part == "loopback":
            record["rows"] += loopback(options)
        elif part == "wan" and skipped:
            print(f"80 ms: skipped: {skipped}")
        elif part == "wan":
            record["rows"] += far_apart(options)
        else:
            record["faults"] = measure(options.repeats)
        if not options.no_record:
            print(write(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
