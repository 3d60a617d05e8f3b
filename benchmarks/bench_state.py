"""What it costs to describe a state: manifest, digests and fingerprint, and taking apart many small tensors.

    python -m benchmarks.bench_state [--gib 1] [--small 10000] [--rounds 7]

All rates are of the same bytes in the same run: one plain XXH3 (and BLAKE3) pass over each tensor's memory and one
memcpy are the bars. Rounds interleave the measurements, so that a noisy neighbour hits all; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import blake3
import torch
import xxhash

from benchmarks.machine import facts
from recovery.state.chunks import PartBytes, chunk_ranges
from recovery.state.digest import digest_part, digest_part_and_blocks, fingerprint, numerics_id
from recovery.state.live_part import LivePart
from recovery.state.manifest import ChunkSpec, Manifest, PartSpec, decode, encode, specs_of
from recovery.state.tree import join, split
from recovery.types import (
    GIB,
    Cut,
    DigestAlgorithm,
    Fingerprint,
    Incarnation,
    PartClass,
    PartName,
    RunId,
    Version,
    WorkerId,
    WorkerRef,
)

RESULTS = Path(__file__).parent / "results"
NAME = PartName("state")


def live(value: object) -> LivePart:
    """Return ``value`` as a replicated part."""
    tree, leaves = split(value)
    specs = specs_of(leaves)
    part_bytes = PartBytes([leaf.value for leaf in leaves], specs)
    return LivePart(NAME, PartClass.REPLICATED, tree, specs, tuple(leaves), part_bytes)


def manifest_of(part: LivePart, algorithm: DigestAlgorithm) -> bytes:
    """Return the encoded manifest of one part: chunk and tensor digests and fingerprint in one pass over memory."""
    (chunks, tensors), blocks = digest_part_and_blocks(part.bytes, algorithm)
    ranges = chunk_ranges(part.bytes.tensor_num_bytes)
    spec = PartSpec(
        name=part.name,
        part_class=part.part_class,
        tree=part.tree,
        tensors=tuple(replace(s, digest=d) if d else s for s, d in zip(part.specs, tensors, strict=True)),
        chunks=tuple(
            ChunkSpec(offset=offset, num_bytes=size, digest=digest)
            for (offset, size), digest in zip(ranges, chunks, strict=True)
        ),
        num_bytes=part.bytes.num_bytes,
    )
    return encode(
        Manifest(
            run_id=RunId("bench"),
            worker=WorkerRef(WorkerId("bench"), Incarnation("1")),
            cut=Cut(Version(1, 1)),
            numerics_id=numerics_id(),
            layout_digest=b"",
            fingerprint=Fingerprint(fingerprint([part], known={NAME: blocks})),
            digest_algorithm=algorithm,
            parts=(spec,),
        )
    )


def medians(measurements: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each measurement over ``rounds`` interleaved rounds, after one of warming up."""
    seconds: dict[str, list[float]] = {name: [] for name in measurements}
    for number in range(rounds + 1):
        for name, measure in measurements.items():
            began = time.perf_counter()
            measure()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def large_state(num_bytes: int, rounds: int) -> dict[str, object]:
    """Measure a state of a few large matrices, one of them not contiguous, as GB/s and as shares of the bars."""
    width = 4096
    rows = num_bytes // 4 // width
    value = {f"layers.{i}.weight": torch.randn(rows // 8, width) for i in range(8)}
    part = live(value)
    strided = live({f"layers.{i}.weight": tensor.t() for i, tensor in enumerate(value.values())})
    targets = [torch.zeros_like(tensor) for tensor in value.values()]  # touched: first touch is not what is measured
    tensors = list(value.values())
    memory = [tensor.view(-1).view(torch.uint8).numpy().data for tensor in tensors]

    def memcpy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    found = medians(
        {
            "memcpy": memcpy,
            "plain xxh3": lambda: [xxhash.xxh3_128_digest(raw) for raw in memory],
            "plain blake3": lambda: [blake3.blake3(raw).digest() for raw in memory],
            "chunk digests xxh3": lambda: digest_part(part.bytes, DigestAlgorithm.XXH3_128),
            "fingerprint": lambda: fingerprint([part]),
            "manifest xxh3": lambda: manifest_of(part, DigestAlgorithm.XXH3_128),
            "manifest blake3": lambda: manifest_of(part, DigestAlgorithm.BLAKE3),
            "manifest xxh3 of transposed tensors": lambda: manifest_of(strided, DigestAlgorithm.XXH3_128),
        },
        rounds,
    )
    size = part.bytes.num_bytes
    return {
        "bytes": size,
        "gb_per_second": {name: round(size / seconds / 1e9, 2) for name, seconds in found.items()},
        "share_of_plain_pass": {
            "chunk digests xxh3": round(found["plain xxh3"] / found["chunk digests xxh3"], 3),
            "manifest xxh3": round(found["plain xxh3"] / found["manifest xxh3"], 3),
            "manifest blake3": round(found["plain blake3"] / found["manifest blake3"], 3),
        },
    }


def small_state(count: int, rounds: int) -> dict[str, object]:
    """Measure a state of ``count`` small tensors, as an optimizer has them, in milliseconds."""
    third = count // 3
    state = {
        f"layers.{i}.weight": {
            "step": torch.tensor(float(i)),
            "exp_avg": torch.randn(20, 10),
            "exp_avg_sq": torch.randn(20, 10),
        }
        for i in range(third)
    }
    value = {"state": state, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(state)}]}
    tree, leaves = split(value)
    specs = specs_of(leaves)
    part = live(value)
    data = manifest_of(part, DigestAlgorithm.XXH3_128)
    found = medians(
        {
            "split": lambda: split(value),
            "specs": lambda: specs_of(leaves),
            "chunk and tensor digests": lambda: digest_part(PartBytes(part.tensors, specs), DigestAlgorithm.XXH3_128),
            "fingerprint": lambda: fingerprint([part]),
            "manifest, memory to bytes": lambda: manifest_of(live(value), DigestAlgorithm.XXH3_128),
            "decode": lambda: decode(data),
            "join": lambda: join(tree, leaves),
        },
        rounds,
    )
    return {
        "tensors": len(leaves),
        "manifest_bytes": len(data),
        "milliseconds": {name: round(seconds * 1e3, 1) for name, seconds in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the large state")
    parser.add_argument("--small", type=int, default=10_000, help="tensors of the small state")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    machine = facts()
    record = {
        "benchmark": "state",
        **machine,
        "large": large_state(int(arguments.gib * GIB), arguments.rounds),
        "small": small_state(arguments.small, arguments.rounds),
    }
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"state-{str(machine['date']).replace(':', '')[:17]}.json"
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))
    print(f"written to {target}")


if __name__ == "__main__":
    main()
