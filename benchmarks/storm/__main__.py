"""``python -m benchmarks.storm``: ten minutes of seeded faults, a run of joins and leaves, and a report of both."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import facts
from benchmarks.storm import figures, report
from benchmarks.storm.churn import churn
from benchmarks.storm.faults import Weather
from benchmarks.storm.fleet import Fleet
from benchmarks.storm.network import stage
from benchmarks.storm.plan import draw
from benchmarks.storm.timeline import Timeline
from benchmarks.storm.training import undisturbed

WORKERS = ("w0", "w1", "w2", "w3")
CHURN_ROUNDS = 10
CHURN_SEEDS = 5
"""Undisturbed seeds that its final loss is compared with; the storm's is compared with the first three."""
_CHURN_PHASE_SECONDS = 0.8
_STARTED = time.monotonic()


def say(line: str) -> None:
    """Tell whoever looks on."""
    print(f"{time.monotonic() - _STARTED:7.1f} s  {line}", flush=True)


def storm(folder: Path, options: argparse.Namespace) -> tuple[Timeline, str]:
    """Run the storm; return what was seen, and what its network was."""
    seconds = options.minutes * 60
    strikes = draw(seed=options.seed, seconds=seconds, faults_per_hour=options.faults_per_hour, workers=WORKERS)
    with (
        stage(WORKERS, loopback=options.loopback) as network,
        Fleet(folder, network, WORKERS, seed=options.seed, phase_seconds=options.phase_seconds) as fleet,
    ):
        fleet.begin()
        Weather(fleet, strikes, say).blow(seconds)
        fleet.finish()
        return fleet.timeline, network.described


def quiet(folder: Path, options: argparse.Namespace) -> Timeline:
    """Run as long without faults."""
    with (
        stage(WORKERS, loopback=options.loopback) as network,
        Fleet(folder, network, WORKERS, seed=options.seed, phase_seconds=options.phase_seconds) as fleet,
    ):
        fleet.begin()
        Weather(fleet, []).blow(options.minutes * 60)
        fleet.finish()
        return fleet.timeline


def churned(folder: Path, options: argparse.Namespace, outer_steps: int) -> Timeline:
    """Run with joins and leaves."""
    with (
        stage(WORKERS, loopback=True) as network,
        Fleet(folder, network, WORKERS, seed=options.seed, phase_seconds=_CHURN_PHASE_SECONDS) as fleet,
    ):
        fleet.begin()
        fleet.timeline.began_at = 0.0  # every step counts
        began = time.monotonic()
        churn(fleet, CHURN_ROUNDS, outer_steps, say)
        fleet.finish()
        fleet.timeline.began_at = min(began, fleet.timeline.commits[0].at - 0.001)
        return fleet.timeline


@contextlib.contextmanager
def logs(keep: str) -> Iterator[Path]:
    """Return a folder for state and logs: the named one, or a passing one."""
    if keep:
        yield Path(keep)
        return
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        yield Path(folder)


def measure_storm(record: dict[str, Any], folder: Path, options: argparse.Namespace) -> None:
    """Add the storm, and the run without faults that goes on beside it."""
    say(f"{options.minutes:g} minutes of storm, seed {options.seed}; a run without faults beside it")
    with ThreadPoolExecutor(1) as beside:
        calm = beside.submit(quiet, folder / "quiet", options)
        stormed, network = storm(folder / "storm", options)
        calmed = calm.result()
    record.update(machine=facts(), load=round(os.getloadavg()[2], 1))
    record.update(seed=options.seed, faults_per_hour=options.faults_per_hour, network=network)
    told = report.of_run(calmed)
    del told["counted"], told["rosters"]  # nothing happened there
    record.update(storm=report.of_run(stormed), quiet=told)
    say(f"storm: {len(record['storm']['steps'])} steps; without faults: {len(record['quiet']['steps'])}")


def measure_seeds(record: dict[str, Any], _: Path, options: argparse.Namespace) -> None:
    """Add the losses of undisturbed training, with as many steps as the run beside the storm took."""
    outer_steps, curves = len(record["quiet"]["steps"]), record.setdefault("seeds", {})
    for seed in range(options.seed, options.seed + CHURN_SEEDS):
        if str(seed) in curves:
            continue
        curves[str(seed)] = [round(loss, 5) for loss in undisturbed(seed=seed, outer_steps=outer_steps)]
        say(f"seed {seed} without faults: final loss {figures.closing_loss(curves[str(seed)]):.4f}")
        write(record, options.out)


def measure_churn(record: dict[str, Any], folder: Path, options: argparse.Namespace) -> None:
    """Add the run of joins and leaves, of as many steps."""
    outer_steps = len(record["quiet"]["steps"])
    say(f"{CHURN_ROUNDS} joins and leaves in {outer_steps} steps")
    record["churn"] = report.of_run(churned(folder / "churn", options, outer_steps))


PARTS = {"storm": measure_storm, "seeds": measure_seeds, "churn": measure_churn}


def write(record: dict[str, Any], out: Path) -> None:
    """Write the record as JSON, Markdown, and, if matplotlib is there, pictures."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "storm.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    (out / "storm.md").write_text(report.markdown(record), encoding="utf-8")
    try:
        from benchmarks.storm.picture import draw_churn, draw_storm

        if "storm" in record and "seeds" in record:
            draw_storm(record, out / "storm.png")
        if "churn" in record and "seeds" in record:
            draw_churn(record, out / "churn.png")
    except ModuleNotFoundError as error:
        say(f"no pictures: {error}")


def main() -> int:
    """Return 0 if every asked figure is met, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=2, help="of the faults, the weights and the data")
    parser.add_argument("--faults-per-hour", type=float, default=120.0, help="mean of the Poisson process")
    parser.add_argument("--phase-seconds", type=float, default=2.0, help="least time of an inner phase")
    parser.add_argument("--out", type=Path, default=Path("storm-out"), help="folder of the report")
    parser.add_argument("--logs", default="", help="folder that keeps the processes' logs; empty: they are deleted")
    parser.add_argument("--loopback", action="store_true", help="no network namespaces, though they are permitted")
    parser.add_argument(
        "--parts", nargs="*", choices=sorted(PARTS), default=list(PARTS), help="none: write the report of a record anew"
    )
    parser.add_argument("--note", default="", help="said in the report: what else ran on the machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    kept = options.out / "storm.json"
    record: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"benchmark": "storm", "others": ""}
    if "storm" in options.parts:
        record.pop("seeds", None)  # of another number of steps
        record.pop("churn", None)
    if options.note:
        record["others"] = options.note
    with logs(options.logs) as folder:
        for part in (part for part in PARTS if part in options.parts):
            PARTS[part](record, folder, options)
            write(record, options.out)
    write(record, options.out)
    bounds = [] if "seeds" not in record else figures.storm_bounds(record)
    bounds += figures.churn_bounds(record) if "churn" in record and "seeds" in record else []
    for bound in bounds:
        print(f"{'yes' if bound.holds else 'NO ':3}  {bound.what}: {bound.found} (asked: {bound.asked})")
    print(options.out / "storm.md")
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("storm-")]
    assert not left, left
    return 0 if all(bound.holds for bound in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
