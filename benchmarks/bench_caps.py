"""How well a donor's cap is held: over every window of two seconds, after a change, and between two joiners.

    python -m benchmarks.bench_caps

Bytes are counted where they arrive, ten times a second, by the system's own counters of the data sockets.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.wan_record import Row, Run, write
from recovery.types import MIB
from tests.support.wan import emulated, why_not_permitted
from tests.support.wan.peers import DonorProcess, JoinerProcess, Site

WINDOW_SECONDS = 2.0
SETTLE_SECONDS = 1.0
"""What opening and a change may take: windows begin later."""
CAPS = (5_000_000, 10_000_000)
SHARED_CAP = 10_000_000


def windows(moved: Sequence[tuple[float, int]], began: float, ended: float) -> list[float]:
    """Return bytes per second over every window between two moments."""
    inside = [(at, count) for at, count in moved if began + SETTLE_SECONDS <= at <= ended]
    rates = []
    for index, (at, count) in enumerate(inside):
        later = next(((then, much) for then, much in inside[index:] if then - at >= WINDOW_SECONDS), None)
        if later is not None:
            rates.append((later[1] - count) / (later[0] - at))
    return rates


def row(name: str, cap: float, rates: Sequence[float]) -> tuple[Row, list[str]]:
    """Return a record and its cells."""
    least, most = min(rates) / cap, max(rates) / cap
    found = Row(
        name=name,
        limit="0.90 to 1.10",
        runs=[Run(seconds=WINDOW_SECONDS, late_microseconds=0.0, note=f"{least:.3f} to {most:.3f} of the cap")],
    )
    return found, [name, f"{cap / 1e6:g}", str(len(rates)), f"{least:.3f}", f"{most:.3f}", found.limit]


def changing(donor: DonorProcess, joiner: JoinerProcess) -> list[tuple[Row, list[str]]]:
    """One joiner; the cap is raised in mid-transfer."""
    slow, fast = CAPS
    donor.set_rate(slow)
    began = time.monotonic()
    joiner.begin([donor], marks=(0.4,))
    joiner.reached(0.4)
    donor.set_rate(fast)
    changed = time.monotonic()
    result = joiner.result()
    if result.error:
        raise RuntimeError(result.error)
    end = result.moved[-1][0] - 0.2  # what is left for the last moment is less than a cap
    return [
        row("one joiner", slow, windows(result.moved, began, changed)),
        row("after the cap was raised", fast, windows(result.moved, changed, end)),
    ]


def shared(donor: DonorProcess, joiners: Sequence[JoinerProcess]) -> list[tuple[Row, list[str]]]:
    """Two joiners, one with many lanes and one with one."""
    donor.set_rate(SHARED_CAP)
    began = time.monotonic()
    for joiner, lanes in zip(joiners, (8, 1), strict=True):
        joiner.begin([donor], lanes=lanes)
    results = [joiner.result() for joiner in joiners]
    for result in results:
        if result.error:
            raise RuntimeError(result.error)
    end = min(result.moved[-1][0] for result in results) - 0.2
    return [
        row(f"{name} of two joiners", SHARED_CAP / 2, windows(result.moved, began, end))
        for name, result in zip(("eight lanes", "one lane"), results, strict=True)
    ]


HEADER = ("what", "cap, MB/s", "windows", "least of the cap", "most of the cap", "must be")
METHOD = (
    "Bytes that arrive at the joiner over every window of 2 s, against the cap that the donor was given; another cap "
    "is given in mid-transfer. Two joiners: against half of the cap of both. No emulated limit on the way."
)


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=96, help="the state, in MiB")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    if reason := why_not_permitted():
        print(f"skipped: {reason}")
        return 0
    with emulated(["d", "j0", "j1"], every={"rtt": "5ms"}) as wan, Site(wan) as site:
        donor = site.donor("d", options.megabytes * MIB)
        joiners = [site.joiner(host) for host in ("j0", "j1")]
        donor.ready()
        for joiner in joiners:
            joiner.ready()
        found = changing(donor, joiners[0]) + shared(donor, joiners)
    cells = [line for _, line in found]
    for line in cells:
        print(" | ".join(line))
    if not options.no_record:
        rows = [each for each, _ in found]
        print(f"recorded in {write('caps', 'A donor held to its cap', METHOD, HEADER, cells, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
