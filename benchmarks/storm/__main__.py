"""``python -m benchmarks.storm``: ten minutes of seeded faults, a run of joins and leaves, and a report of both."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import facts
from benchmarks.storm import figures, report
from benchmarks.storm.churn import churn
from benchmarks.storm.faults import Weather
from benchmarks.storm.fleet import Fleet
from benchmarks.storm.network import stage
from benchmarks.storm.plan import draw
from benchmarks.storm.timeline import Timeline

WORKERS = ("w0", "w1", "w2", "w3")
CHURN_ROUNDS = 10
_CHURN_PHASE_SECONDS = 0.5
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


def undisturbed(folder: Path, seed: int, outer_steps: int) -> list[float]:
    """Return the held-out losses of a run without faults or pauses: with a fixed roster they do not depend on time."""
    with (
        stage(WORKERS, loopback=True) as network,
        Fleet(
            folder,
            network,
            WORKERS,
            seed=seed,
            phase_seconds=0.0,
            outer_steps=outer_steps,
            # Without pauses the first one would be through before the others have joined.
            min_participants=len(WORKERS),
        ) as fleet,
    ):
        for name in WORKERS:
            fleet.expect_end(name)
        fleet.until(lambda: all(not fleet.running[name].alive for name in WORKERS), f"seed {seed} ends", 600.0)
        if fleet.timeline.unexplained:
            raise RuntimeError(f"seed {seed}: {fleet.timeline.unexplained}; the logs are in {folder}")
        return [loss for _, _, loss in fleet.timeline.steps()]


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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything; return the record."""
    record: dict[str, Any] = {"benchmark": "storm", "machine": facts(), "seed": options.seed, "others": options.note}
    with logs(options.logs) as folder:
        say(f"{options.minutes:g} minutes of storm, seed {options.seed}; a run without faults beside it")
        with ThreadPoolExecutor(1) as beside:
            calm = beside.submit(quiet, folder / "quiet", options)
            stormed, network = storm(folder / "storm", options)
            calmed = calm.result()
        num_steps = len(calmed.steps_within())
        say(f"storm: {len(stormed.steps_within())} steps; without faults: {num_steps}")
        record.update(network=network, storm=report.of_run(stormed), quiet=report.of_run(calmed))
        curves: dict[str, list[float]] = {}
        for seed in range(options.seed, options.seed + (5 if options.churn else 3)):
            curves[str(seed)] = [round(v, 5) for v in undisturbed(folder / f"seed-{seed}", seed, num_steps)]
            say(f"seed {seed} without faults: final loss {sum(curves[str(seed)][-5:]) / 5:.4f}")
        record["seeds"] = curves
        finals = [sum(curve[-5:]) / len(curve[-5:]) for curve in curves.values()]
        record["storm_bounds"] = report.plain_bounds(
            figures.storm_bounds(stormed, options.faults_per_hour, num_steps, finals[:3])
        )
        if options.churn:
            say(f"{CHURN_ROUNDS} joins and leaves in {num_steps} steps")
            churning = churned(folder / "churn", options, num_steps)
            record["churn"] = report.of_run(churning)
            record["churn_bounds"] = report.plain_bounds(figures.churn_bounds(churning, finals))
    return record


def write(record: dict[str, Any], out: Path) -> None:
    """Write the record as JSON, Markdown, and, if matplotlib is there, pictures."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "storm.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    (out / "storm.md").write_text(report.markdown(record), encoding="utf-8")
    try:
        from benchmarks.storm.picture import draw_churn, draw_storm

        draw_storm(record, out / "storm.png")
        if "churn" in record:
            draw_churn(record, out / "churn.png")
    except ModuleNotFoundError as error:
        say(f"no pictures: {error}")


def main() -> int:
    """Return 0 if every asked figure is met, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1, help="of the faults, the weights and the data")
    parser.add_argument("--faults-per-hour", type=float, default=120.0, help="mean of the Poisson process")
    parser.add_argument("--phase-seconds", type=float, default=2.0, help="least time of an inner phase")
    parser.add_argument("--out", type=Path, default=Path("storm-out"), help="folder of the report")
    parser.add_argument("--logs", default="", help="folder that keeps the processes' logs; empty: they are deleted")
    parser.add_argument("--loopback", action="store_true", help="no network namespaces, though they are permitted")
    parser.add_argument("--no-churn", dest="churn", action="store_false", help="without the run of joins and leaves")
    parser.add_argument("--note", default="", help="said in the report: what else ran on the machine")
    parser.add_argument("--render", type=Path, help="write a report of this storm.json, and run nothing")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    record = json.loads(options.render.read_text()) if options.render else measure(options)
    write(record, options.out)
    bounds = [*record["storm_bounds"], *record.get("churn_bounds", ())]
    for bound in bounds:
        print(f"{'yes' if bound['holds'] else 'NO ':3}  {bound['what']}: {bound['found']} (asked: {bound['asked']})")
    print(options.out / "storm.md")
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("storm-")]
    assert not left, left
    return 0 if all(bound["holds"] for bound in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
