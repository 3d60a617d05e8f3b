"""One donor against three, each behind an uplink of 100 Mbit/s, and three whose rates change in mid-transfer.

    python -m benchmarks.bench_donors --megabytes 128 --runs 3

Rates are found by the engine, not given. With changing rates the ideal is the moment by which the three uplinks
together could have carried the state, from the first byte that was possible on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence

from benchmarks.wan_record import Row, Run, lateness, spread, write
from recovery.types import MIB
from tests.support.wan import Wan, emulated, why_not_permitted
from tests.support.wan.peers import DonorProcess, JoinerProcess, Site

DONORS = ("d0", "d1", "d2")
UPLINK_BITS_PER_SECOND = 100_000_000
SLOW_BITS_PER_SECOND = 10_000_000
PAYLOAD_SHARE = 0.965
"""What TCP can carry of a rate that counts headers, at an MTU of 1500."""
_LONGEST_SECONDS = 600.0


class Uplinks:
    """Changes the donors' rates on a schedule, and knows afterwards what they could have carried by when."""

    def __init__(self, wan: Wan, period_seconds: float) -> None:
        self._wan = wan
        self._period_seconds = period_seconds
        self._over = threading.Event()
        self._changes: list[tuple[float, dict[str, int]]] = []
        self._thread = threading.Thread(target=self._change, name="uplinks")

    def __enter__(self) -> Uplinks:
        self._set(dict.fromkeys(DONORS, UPLINK_BITS_PER_SECOND))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._set(dict.fromkeys(DONORS, UPLINK_BITS_PER_SECOND))

    def ideal_seconds(self, began: float, num_bytes: int) -> float:
        """Return how long the uplinks together need for so much payload from ``began`` on."""
        left = num_bytes * 8 / PAYLOAD_SHARE
        times = [at for at, _ in self._changes[1:]] + [float("inf")]
        for (at, rates), until in zip(self._changes, times, strict=True):
            start = max(at, began)
            carried = sum(rates.values()) * max(0.0, until - start)
            if carried >= left:
                return start + left / sum(rates.values()) - began
            left -= carried
        raise AssertionError("the last rates hold for ever")

    def _change(self) -> None:
        # One donor after the other is slow for a period: 10 to 100 Mbit/s and back.
        number = 0
        while not self._over.wait(self._period_seconds):
            rates = dict.fromkeys(DONORS, UPLINK_BITS_PER_SECOND)
            rates[DONORS[number % len(DONORS)]] = SLOW_BITS_PER_SECOND
            self._set(rates)
            number += 1

    def _set(self, rates: dict[str, int]) -> None:
        for host, rate in rates.items():
            self._wan.set(host, up=f"{rate // 1000}kbit")
        self._changes.append((time.monotonic(), rates))


def once(wan: Wan, joiner: JoinerProcess, donors: Sequence[DonorProcess]) -> Run:
    """Move the state once."""
    wan.stats(reset=True)
    joiner.begin(list(donors))
    result = joiner.result(_LONGEST_SECONDS)
    if result.error:
        raise RuntimeError(result.error)
    late = wan.stats().late.mean_microseconds
    parts = ", ".join(f"{host} {count / result.total_bytes:.2f}" for host, count in result.arrived.items())
    print(f"    {result.seconds:.1f} s ({parts}), emulator {late:.0f} us late", flush=True)
    return Run(seconds=result.seconds, late_microseconds=late, note=parts)


def measure(wan: Wan, site: Site, options: argparse.Namespace) -> tuple[list[Row], list[float]]:
    """Return the rows and, for the runs with changing rates that count, their times over the ideal."""
    num_bytes = options.megabytes * MIB
    donors = [site.donor(host, num_bytes, congestion_control="bbr") for host in DONORS]
    joiner = site.joiner("joiner", congestion_control="bbr")
    for donor in donors:
        donor.ready()
    joiner.ready()
    one: list[Run] = []
    three: list[Run] = []
    changing: list[Run] = []
    over_ideal = []
    for _ in range(options.runs):  # in turn, so that the machine's other work meets all alike
        print("  one donor, three donors, three with changing rates", flush=True)
        one.append(once(wan, joiner, donors[:1]))
        three.append(once(wan, joiner, donors))
        with Uplinks(wan, options.period_seconds) as uplinks:
            began = time.monotonic()
            changing.append(once(wan, joiner, donors))
            ideal = uplinks.ideal_seconds(began, num_bytes)
        print(f"    ideal {ideal:.1f} s", flush=True)
        if changing[-1].counts:
            over_ideal.append(changing[-1].seconds / ideal)
    rows = [
        Row(name="one donor", num_bytes=num_bytes, runs=one),
        Row(name="three donors", num_bytes=num_bytes, limit="0.40 of one", runs=three),
        Row(name="three donors, rates changing", num_bytes=num_bytes, limit="1.20 of ideal", runs=changing),
    ]
    return rows, over_ideal


HEADER = ("what", "MiB", "seconds (median)", "ratio", "must be at most", "seconds of each run", "late, us")
METHOD = (
    "Uplinks of 100 Mbit/s, joiner 1 Gbit/s, round trip {rtt}, no loss, BBR. From dialling to the last verified byte, "
    "opening the links included. Changing rates: every {period} s another of the "
    "three donors has 10 Mbit/s and the others 100; ideal is what the three could have carried from the start on. "
    "Median of the runs in which the emulator was less than 300 us late on average; others stand in brackets. The "
    "machine is shared."
)


def table(rows: Sequence[Row], over_ideal: Sequence[float]) -> list[list[str]]:
    """Return the rows' cells."""
    base = rows[0].seconds
    ratios = [
        "",
        f"{rows[1].seconds / base:.3f} of one" if base and rows[1].seconds else "none counts",
        f"{statistics.median(over_ideal):.3f} of ideal" if over_ideal else "none counts",
    ]
    return [
        [
            row.name,
            str(row.num_bytes // MIB),
            f"{row.seconds:.1f}" if row.seconds else "none counts",
            ratio,
            row.limit,
            spread(row),
            lateness(row),
        ]
        for row, ratio in zip(rows, ratios, strict=True)
    ]


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128, help="the state, in MiB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rtt", default="40ms")
    parser.add_argument("--period-seconds", type=float, default=1.5)
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    if reason := why_not_permitted():
        print(f"skipped: {reason}")
        return 0
    uplink = {"up": f"{UPLINK_BITS_PER_SECOND // 10**6}mbit"}
    hosts = {"joiner": {"rate": "1gbit"}, **dict.fromkeys(DONORS, uplink)}
    no_memory = {"net.ipv4.tcp_no_metrics_save": "1"}
    with (
        emulated(hosts, every={"rtt": options.rtt}, congestion_control="cubic", sysctls=no_memory) as wan,
        Site(wan) as site,
    ):
        rows, over_ideal = measure(wan, site, options)
    cells = table(rows, over_ideal)
    for line in cells:
        print(" | ".join(line))
    if not options.no_record:
        method = METHOD.format(rtt=options.rtt, period=options.period_seconds)
        print(f"recorded in {write('donors', 'One donor and three', method, HEADER, cells, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
