"""Verified transfer against raw gloo send/recv of the same tensors, two processes on loopback, in the same run.

    python -m benchmarks.bench_transfer --megabytes 1024 --pairs 9

Each pair is one raw run and one verified transfer (from dialling to the last verified byte), in turn; the medians of
the rates and of the pairs' ratios are reported. Memory is warm on both sides: every page was touched before. The
transfer opens a group of its own each time, the raw runs use one that stays open. Closing takes 10 ms more, in which
gloo's thread looks whether it should end; the ratio with that is reported too, and what else the processors did.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path

import psutil

from benchmarks.loopback import (
    DONOR,
    HOST,
    RUN,
    VERSION,
    SocketConversation,
    TcpKeyValue,
    diloco_state,
    raw_receive,
)
from benchmarks.machine import facts
from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery.events import Recorder
from recovery.protocol.session import Attempt, DonorPeer, JoinerConfig, JoinerSession, PlannerConfig
from recovery.state.chunks import PartBytes
from recovery.state.manifest import Manifest
from recovery.transport.process_group import JOINER_RANK, GlooLink, open_gloo_link, open_group
from recovery.types import MIB, Fingerprint, Incarnation, KeyValue, PartName, TransferId, WorkerId, WorkerRef

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Sample:
    """One run: seconds to the last byte, seconds until all was closed, and CPU seconds of both ends."""

    seconds: float
    closed_seconds: float
    joiner_cpu_seconds: float
    donor_cpu_seconds: float


class Bench:
    """The joiner's process; owns the donor's."""

    def __init__(self, megabytes: int, config: JoinerConfig) -> None:
        self._config = config
        self._store = TcpKeyValue(0, server=True)
        self._listener = Listener(family="AF_UNIX")
        self._child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.loopback",
                f"--megabytes={megabytes}",
                f"--store-port={self._store.port}",
                f"--letters={self._listener.address}",
            ]
        )
        self._state = diloco_state(megabytes * MIB, seed=2, fill=False)
        self._tensors = [tensor for part in self._state.values() for tensor in part.values()]
        self.num_bytes = sum(tensor.numel() * 4 for tensor in self._tensors)
        self._raw = open_group(
            self._store, "raw", rank=1, size=2, host=HOST, timeout_seconds=600, operation_timeout_seconds=600
        )
        self._fingerprint = Fingerprint(self._store.get("bench", ["fingerprint"], 600)[0])
        self._orders = self._listener.accept()

    def close(self) -> None:
        self._orders.send_bytes(b"end")
        self._child.wait()
        self._raw.close()
        self._listener.close()

    def raw(self) -> Sample:
        return self._timed("raw")

    def verified(self, *, digest: bool) -> Sample:
        return self._timed("digest" if digest else "serve")

    def _timed(self, order: str) -> Sample:
        cpu, began = time.process_time(), time.perf_counter()
        self._orders.send_bytes(order.encode())
        closing = 0.0
        if order == "raw":
            raw_receive(self._raw, self._tensors)
        else:
            closing = self._transfer()
        closed = time.perf_counter() - began
        joiner = time.process_time() - cpu
        return Sample(closed - closing, closed, joiner, float(self._orders.recv_bytes().decode()))

    def _transfer(self) -> float:
        """Return how long closing took."""
        for tensor in self._tensors:
            tensor.view(-1)[0] = -1.0  # nothing is left over from the run before

        def dial(peer: DonorPeer) -> SocketConversation[JoinerLetter, DonorLetter]:
            return SocketConversation(self._listener.accept(), DonorLetter)

        def open_link(meeting: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> GlooLink:
            return open_gloo_link(
                meeting, scope, rank=JOINER_RANK, host=host, lanes=lanes, timeout_seconds=30, cancelled=cancelled
            )

        def on_manifest(role: int, manifest: Manifest) -> Mapping[PartName, PartBytes]:
            return {
                part.name: PartBytes(list(self._state[part.name].values()), part.tensors) for part in manifest.parts
            }

        attempt = Attempt(
            run_id=RUN,
            transfer_id=TransferId("bench"),
            number=1,
            version=VERSION,
            fingerprint=self._fingerprint,
            token=b"",
            joiner=WorkerRef(WorkerId("joiner"), Incarnation("i1")),
            layout_digest=b"l" * 32,
            data_host=HOST,
            donors=(DonorPeer(worker=DONOR),),
            want_private=False,
        )
        session = JoinerSession(
            attempt, self._config, dial=dial, open_link=open_link, on_manifest=on_manifest, events=Recorder()
        )
        result = session.run()
        return result.took_seconds - result.verified_seconds


class OtherWork:
    """What share of the machine's processors others have since this was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy = self._busy_seconds()

    def share(self, own_cpu_seconds: float) -> float:
        available = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return max(0.0, (self._busy_seconds() - self._busy - own_cpu_seconds) / available)

    @staticmethod
    def _busy_seconds() -> float:
        times = psutil.cpu_times()
        return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def measure(bench: Bench, pairs: int, *, digest: bool) -> dict[str, float]:
    """Return medians over ``pairs`` interleaved pairs, after one pair of warm-up."""
    raw: list[Sample] = []
    verified: list[Sample] = []
    others = OtherWork()
    for number in range(pairs + 1):
        one, other = bench.raw(), bench.verified(digest=digest)
        if number:
            raw.append(one)
            verified.append(other)
    gigabytes = bench.num_bytes / 1e9
    own = sum(each.joiner_cpu_seconds + each.donor_cpu_seconds for each in raw + verified)
    ratios = [one.seconds / other.seconds for one, other in zip(raw, verified, strict=True)]
    return {
        "raw_gigabytes_per_second": gigabytes / statistics.median(each.seconds for each in raw),
        "verified_gigabytes_per_second": gigabytes / statistics.median(each.seconds for each in verified),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratio_until_closed": statistics.median(
            one.seconds / other.closed_seconds for one, other in zip(raw, verified, strict=True)
        ),
        "fastest_raw_gigabytes_per_second": gigabytes / min(each.seconds for each in raw),
        "fastest_verified_gigabytes_per_second": gigabytes / min(each.seconds for each in verified),
        "other_work_share": others.share(own * (pairs + 1) / pairs),
        "raw_joiner_cpu_seconds_per_gigabyte": statistics.median(e.joiner_cpu_seconds for e in raw) / gigabytes,
        "raw_donor_cpu_seconds_per_gigabyte": statistics.median(e.donor_cpu_seconds for e in raw) / gigabytes,
        "joiner_cpu_seconds_per_gigabyte": statistics.median(e.joiner_cpu_seconds for e in verified) / gigabytes,
        "donor_cpu_seconds_per_gigabyte": statistics.median(e.donor_cpu_seconds for e in verified) / gigabytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1024], help="sizes of the state, in MiB")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--lanes", type=int, default=0, help="sockets; 0: automatic")
    parser.add_argument("--piece-mib", type=float, default=0, help="largest message; 0: the default")
    parser.add_argument("--window-mib", type=float, default=0, help="least bytes in flight; 0: the default")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    sizes = {}
    if options.piece_mib:
        sizes["max_piece_bytes"] = int(options.piece_mib * MIB)
    if options.window_mib:
        sizes["min_window_bytes"] = int(options.window_mib * MIB)
    config = JoinerConfig(lanes=options.lanes, planner=PlannerConfig(**sizes))
    records = []
    for megabytes in options.megabytes:
        bench = Bench(megabytes, config)
        try:
            for digest in (False, True):
                record = {
                    "state_bytes": bench.num_bytes,
                    "digest_pass_inside": digest,
                    "pairs": options.pairs,
                    **measure(bench, options.pairs, digest=digest),
                }
                records.append(record)
                print(
                    f"{bench.num_bytes / 1e9:.2f} GB, digest pass {'inside' if digest else 'done before'}: "
                    f"raw {record['raw_gigabytes_per_second']:.2f} GB/s, "
                    f"verified {record['verified_gigabytes_per_second']:.2f} GB/s, ratio {record['ratio']:.2f} "
                    f"({record['ratio_min']:.2f} to {record['ratio_max']:.2f}), CPU s/GB joiner "
                    f"{record['joiner_cpu_seconds_per_gigabyte']:.2f} (raw "
                    f"{record['raw_joiner_cpu_seconds_per_gigabyte']:.2f}), donor "
                    f"{record['donor_cpu_seconds_per_gigabyte']:.2f} (raw "
                    f"{record['raw_donor_cpu_seconds_per_gigabyte']:.2f})",
                    flush=True,
                )
        finally:
            bench.close()
    if not options.no_record:
        machine = facts()
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"transfer-{str(machine['date'])[:16].replace(':', '')}.json"
        text = json.dumps({"benchmark": "transfer", "machine": machine, "records": records}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(markdown(records, machine), encoding="utf-8")
        print(f"recorded in {path}")


def markdown(records: Sequence[Mapping[str, float]], machine: Mapping[str, object]) -> str:
    """Return the records as a table."""
    lines = [
        "# A verified transfer beside raw gloo, on loopback",
        "",
        "Outer parameters and momentum of a transformer, warm, two processes; the joiner hashes every chunk. From "
        "dialling to the last verified byte, and in brackets the least and the greatest ratio of a pair.",
        "",
        "| GB | donor's digest pass | pairs | raw GB/s | verified GB/s | ratio | until all is closed | joiner CPU s/GB "
        "(raw) | donor CPU s/GB (raw) | processors that others had |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in records:
        cells = [
            f"{each['state_bytes'] / 1e9:.2f}",
            "inside" if each["digest_pass_inside"] else "done before",
            f"{each['pairs']}",
            f"{each['raw_gigabytes_per_second']:.2f}",
            f"{each['verified_gigabytes_per_second']:.2f}",
            f"{each['ratio']:.2f} ({each['ratio_min']:.2f} to {each['ratio_max']:.2f})",
            f"{each['ratio_until_closed']:.2f}",
            f"{each['joiner_cpu_seconds_per_gigabyte']:.2f} ({each['raw_joiner_cpu_seconds_per_gigabyte']:.2f})",
            f"{each['donor_cpu_seconds_per_gigabyte']:.2f} ({each['raw_donor_cpu_seconds_per_gigabyte']:.2f})",
            f"{each['other_work_share']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
