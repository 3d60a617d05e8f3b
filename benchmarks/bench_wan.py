"""One donor over an emulated wide-area link: this engine against others, at three rates of loss.

    python -m benchmarks.bench_wan --megabytes 256 --runs 3

The link has 200 Mbit/s and a round trip of 80 ms, each direction loses packets. Times run from dialling the donor to
the last verified byte. The fallback takes what an unprivileged process has: cubic. Others that reach a few Mbit/s move
``--slow-megabytes`` instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import torchft_environment
from benchmarks.wan_record import Row, Run, lateness, spread, write
from recovery.types import MIB
from tests.support.processes import ROOT, ChildProcess
from tests.support.wan import Wan, emulated, why_not_permitted
from tests.support.wan.peers import Site

LINK_BITS_PER_SECOND = 200_000_000
LOSSES = ("0%", "0.1%", "1%")
_PORT = 29500
_LONGEST_SECONDS = 900.0


@dataclass(frozen=True)
class Engine:
    """This project's engine. ``targets``: least share of the link at each of ``LOSSES``."""

    name: str
    congestion_control: str | None
    lanes: int = 0
    targets: tuple[float, ...] = ()
    slow: bool = False


ENGINES = (
    Engine("recovery, BBR", "bbr", targets=(0.9, 0.85, 0.75)),
    Engine("recovery, streams only", None, targets=(0.9, 0.75, 0.4)),
    Engine("recovery, one stream", None, lanes=1, slow=True),
)
BASELINES = {"gloo": "raw gloo", "torchft-pg": "torchft PGTransport", "torchft-http": "torchft HTTPTransport"}


def measured(wan: Wan, once: Callable[[], tuple[float, float]], runs: int) -> list[Run]:
    """Return so many runs, each with the emulator's lateness during it; ``once`` gives seconds, and once connected."""
    found = []
    for _ in range(runs):
        wan.stats(reset=True)
        seconds, connected = once()
        late = wan.stats().late.mean_microseconds
        found.append(Run(seconds=seconds, connected_seconds=connected, late_microseconds=late))
        print(f"    {seconds:.1f} s, {connected:.1f} s once connected, emulator {late:.0f} us late", flush=True)
    return found


def engine_rows(wan: Wan, engine: Engine, options: argparse.Namespace) -> list[Row]:
    """Measure the engine at every loss."""
    num_bytes = (options.slow_megabytes if engine.slow else options.megabytes) * MIB
    rows = []
    wan.set("all", loss="0")
    with Site(wan) as site:
        donor = site.donor("donor", num_bytes, congestion_control=engine.congestion_control)
        joiner = site.joiner("joiner", congestion_control=engine.congestion_control)
        donor.ready()
        joiner.ready()

        def once() -> tuple[float, float]:
            joiner.begin([donor], lanes=engine.lanes, bbr=engine.congestion_control is not None)
            result = joiner.result(_LONGEST_SECONDS)
            if result.error:
                raise RuntimeError(result.error)
            return result.seconds, result.connected_seconds

        for number, loss in enumerate(LOSSES):
            wan.set("all", loss=loss)
            print(f"  {engine.name}, {loss} loss", flush=True)
            limit = f"{engine.targets[number]:.2f}" if engine.targets else ""
            runs = measured(wan, once, 1 if engine.slow else options.runs)
            rows.append(Row(name=f"{engine.name}, {loss} loss", num_bytes=num_bytes, limit=limit, runs=runs))
    return rows


def baseline_rows(wan: Wan, method: str, options: argparse.Namespace) -> list[Row]:
    """Measure one of the others at every loss."""
    name = BASELINES[method]
    python = sys.executable
    if method.startswith("torchft"):
        interpreter, reason = torchft_environment.python()
        if interpreter is None:
            return [Row(name=f"{name}, {loss} loss", skipped=reason) for loss in LOSSES]
        python = str(interpreter)
    num_bytes = options.slow_megabytes * MIB
    rows = []
    for loss in LOSSES:
        wan.set("all", loss=loss)
        print(f"  {name}, {loss} loss", flush=True)
        once = partial(baseline, wan, method, num_bytes, python)
        try:
            rows.append(Row(name=f"{name}, {loss} loss", num_bytes=num_bytes, runs=measured(wan, once, 1)))
        except AssertionError as error:  # it ended without a result: the others' figures are recorded all the same
            print(error, file=sys.stderr)
            rows.append(Row(name=f"{name}, {loss} loss", skipped=str(error).splitlines()[-1]))
    return rows


def baseline(wan: Wan, method: str, num_bytes: int, interpreter: str) -> tuple[float, float]:
    """Run one transfer of one of the others and return its seconds, twice: connecting is not counted."""
    words = ["--store", f"{wan.address('donor')}:{_PORT}", "--bytes", str(num_bytes)]

    def start(host: str, side: str) -> ChildProcess:
        arguments = ["-m", "benchmarks.wan_baseline", method, side, *words]
        return ChildProcess(arguments, {"PYTHONPATH": str(ROOT)}, prefix=wan.prefix(host), interpreter=interpreter)

    with start("donor", "send"), start("joiner", "receive") as receiver:
        result: dict[str, Any] = json.loads(receiver.line("{", _LONGEST_SECONDS))
    return float(result["seconds"]), float(result["seconds"])


def share(row: Row, *, connected: bool = False) -> str:
    rate = row.megabits_per_second(connected=connected)
    return f"{rate * 1e6 / LINK_BITS_PER_SECOND:.3f}" if rate is not None else "none counts"


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the rows' cells."""
    cells = []
    for row in rows:
        if row.skipped:
            cells.append([row.name, "skipped: " + row.skipped, *([""] * 6)])
            continue
        rate = row.megabits_per_second()
        shown = f"{rate:.1f}" if rate is not None else "none counts"
        shares = [share(row), share(row, connected=True), row.limit]
        cells.append([row.name, f"{row.num_bytes // MIB}", shown, *shares, spread(row), lateness(row)])
    return cells


HEADER = (
    *("what", "MiB", "Mbit/s", "share of the link", "share once connected", "must be at least"),
    *("seconds of each run", "late, us"),
)
METHOD = (
    "200 Mbit/s, round trip 80 ms, each direction loses packets; payload over the link's rate, which counts headers "
    "too, so that 0.965 is the most possible. From dialling to the last verified byte, opening the link included; for "
    "the others from the moment they are connected, without any verification. Median of the runs in which the emulator "
    "was less than 300 us late on average; others stand in brackets. The machine is shared."
)


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="state moved by the engine, in MiB")
    parser.add_argument("--slow-megabytes", type=int, default=4, help="state moved by those that are slow, in MiB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    if reason := why_not_permitted():
        print(f"skipped: {reason}")
        return 0
    rows: list[Row] = []
    shape = {"rate": f"{LINK_BITS_PER_SECOND // 10**6}mbit", "rtt": "80ms"}
    no_memory = {"net.ipv4.tcp_no_metrics_save": "1"}
    with emulated(["joiner", "donor"], every=shape, congestion_control="cubic", sysctls=no_memory) as wan:
        for engine in ENGINES:
            if options.only in engine.name:
                rows += engine_rows(wan, engine, options)
        for method, name in BASELINES.items():
            if options.only in name:
                rows += baseline_rows(wan, method, options)
    for cells in table(rows):
        print(" | ".join(cells))
    if not options.no_record:
        print(f"recorded in {write('wan', 'One donor over a wide-area link', METHOD, HEADER, table(rows), rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
