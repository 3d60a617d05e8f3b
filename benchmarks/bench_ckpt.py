"""What saving and loading a checkpoint costs, beside safetensors, torch.save and torch DCP, none of which verifies.

    python -m benchmarks.bench_ckpt [--gib 1] [--rounds 5] [--folder DIR] [--s3-mib 128] [--only PLACE ...]

The state is that of a DiLoCo worker: parameters, outer momentum, two inner moments. Every column is measured in the
same run on the same bytes, rounds interleaved, medians reported. "disk" is a folder on the file system of --folder with
fsync of files and folder everywhere; "memory" is /dev/shm without fsync anywhere. "warm": the page cache holds the
files, all of their bytes as counted after the save; "cold": they were synced and dropped from it, none of their bytes
left as counted before the load. Loading is into tensors that exist and were touched.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.ckpt_blocked import blocked
from benchmarks.ckpt_s3 import on_s3
from benchmarks.ckpt_state import RUN, Live, flat, seconds, source, state_of
from benchmarks.machine import facts
from ckpt.local import FileSystem, LocalStorage
from ckpt.reader import open_checkpoint
from ckpt.values import ValueSource
from ckpt.writer import write_checkpoint
from recovery.state.chunks import PartBytes
from recovery.types import GIB, MIB, Version

RESULTS = Path(__file__).parent / "results"
QUIET_SHARE = 0.05
"""If other processes used more than this share of the cores meanwhile, the machine was busy."""
PLACES = ("disk", "memory", "blocked", "s3")
BAR = "safetensors save_file / load_file"


class Unsynced(FileSystem):
    """For /dev/shm, where nobody syncs."""

    def fsync(self, descriptor: int) -> None:
        pass

    def fsync_folder(self, path: str) -> None:
        pass


class Column:
    """One way to save and load, in one folder."""

    def __init__(self, save: Callable[[], None], load: Callable[[], None], files: Path) -> None:
        self.save = save
        self.load = load
        self.files = files


def files_of(path: Path) -> list[Path]:
    """Return a file, or the files in a folder."""
    return [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]


def sync(path: Path) -> None:
    """Make a file, or a folder and the files in it, durable."""
    for one in [*files_of(path), *([path] if path.is_dir() else []), path.parent]:
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop(path: Path) -> None:
    """Drop a file's, or a folder's files', pages from the page cache."""
    for one in files_of(path):
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cached(path: Path) -> float:
    """Return which share of a folder's pages the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = total = 0
    for one in files_of(path):
        if not one.stat().st_size:
            continue
        with one.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_WRITE) as pages:
            count = -(-len(pages) // mmap.PAGESIZE)
            resident = (ctypes.c_ubyte * count)()
            first = ctypes.c_char.from_buffer(pages)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(pages)), resident)
            del first
            if failed:
                raise OSError(ctypes.get_errno(), f"mincore({one})")
            held += sum(page & 1 for page in resident)
            total += count
    return held / total if total else 0.0


def columns(folder: Path, state: dict[str, dict[str, torch.Tensor]], *, synced: bool) -> dict[str, Column]:
    """Return every way, each with its own sub-folder and its own destination's tensors shared by all."""
    tensors = flat(state)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    nested = {part: {name: into[f"{part}.{name}"] for name in names} for part, names in state.items()}
    storage = LocalStorage(folder / "ours", None if synced else Unsynced())
    still, live = source(state, ValueSource, 1), source(state, Live, 1)

    def fresh(path: Path) -> Path:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def ours(of: ValueSource) -> None:
        fresh(folder / "ours")
        write_checkpoint(storage, [of])

    def load_ours() -> None:
        with open_checkpoint(storage, Version(1, 1), run_id=RUN) as checkpoint:
            for part in checkpoint.manifest.parts:
                checkpoint.read_part(part.name, PartBytes(list(nested[part.name].values()), part.tensors))

    def finish(path: Path) -> None:
        if synced:
            sync(path)

    def safetensors() -> None:
        save_file(tensors, fresh(folder / "safetensors") / "all.safetensors")
        finish(folder / "safetensors")

    def load_safetensors() -> None:
        loaded = load_file(folder / "safetensors" / "all.safetensors")
        for name, tensor in into.items():
            tensor.copy_(loaded[name])

    def pickled() -> None:
        torch.save(tensors, fresh(folder / "torch") / "all.pt")
        finish(folder / "torch")

    def load_pickled() -> None:
        loaded = torch.load(folder / "torch" / "all.pt", weights_only=True)
        for name, tensor in into.items():
            tensor.copy_(loaded[name])

    def dcp() -> None:
        dcp_save(dict(tensors), checkpoint_id=fresh(folder / "dcp"), no_dist=True)
        finish(folder / "dcp")

    def load_dcp() -> None:
        dcp_load(dict(into), checkpoint_id=folder / "dcp", no_dist=True)

    return {
        "ours, standing memory": Column(lambda: ours(still), load_ours, folder / "ours"),
        "ours, live memory": Column(lambda: ours(live), load_ours, folder / "ours"),
        BAR: Column(safetensors, load_safetensors, folder / "safetensors"),
        "torch.save / load": Column(pickled, load_pickled, folder / "torch"),
        "DCP": Column(dcp, load_dcp, folder / "dcp"),
    }


def measure(
    folder: Path, state: dict[str, dict[str, torch.Tensor]], rounds: int, *, synced: bool
) -> dict[str, dict[str, object]]:
    """Return GB/s of every column: save, load warm, load cold."""
    num_bytes = sum(t.nbytes for t in flat(state).values())
    ways = columns(folder, state, synced=synced)
    times: dict[str, dict[str, list[float]]] = {name: {"save": [], "load warm": [], "load cold": []} for name in ways}
    pages: dict[str, dict[str, list[float]]] = {name: {"warm": [], "cold": []} for name in ways}
    for way in ways.values():  # warm-up: allocations, imports, first touch
        way.save()
        way.load()
    for _ in range(rounds):
        for name, way in ways.items():
            times[name]["save"].append(seconds(way.save))
            if synced:
                pages[name]["warm"].append(cached(way.files))
            times[name]["load warm"].append(seconds(way.load))
            if synced:
                drop(way.files)
                pages[name]["cold"].append(cached(way.files))
                times[name]["load cold"].append(seconds(way.load))
    medians = {name: {k: statistics.median(v) for k, v in found.items() if v} for name, found in times.items()}
    return {
        name: {
            **{f"{k}, GB/s": round(num_bytes / 1e9 / v, 3) for k, v in found.items()},
            **{f"{k}, of safetensors": round(medians[BAR][k] / v, 3) for k, v in found.items()},
            **{f"share of pages cached, {k}": round(statistics.median(v), 4) for k, v in pages[name].items() if v},
            "seconds of each run": {k: [round(s, 3) for s in v] for k, v in times[name].items() if v},
        }
        for name, found in medians.items()
    }


def behind(found: dict[str, dict[str, object]]) -> list[str]:
    """Return every column in which torch.save or DCP is faster than ours."""
    lines = []
    for name in ("ours, standing memory", "ours, live memory"):
        for other in ("torch.save / load", "DCP"):
            for what in ("save, GB/s", "load warm, GB/s", "load cold, GB/s"):
                ours, theirs = found[name].get(what), found[other].get(what)
                if isinstance(ours, float) and isinstance(theirs, float) and ours < theirs:
                    lines.append(f"{name} is behind {other}: {what}: {ours} and {theirs}")
    return lines


def behind_on_s3(found: dict[str, object]) -> list[str]:
    """Return every way over the wire in which torch.save or DCP is faster than ours."""
    rivals = {"ours, save": ("torch.save + put", "DCP save"), "ours, verified load": ("get + torch.load", "DCP load")}
    lines = []
    for ours, others in rivals.items():
        for other in others:
            mine, theirs = found[f"{ours}, MB/s"], found[f"{other}, MB/s"]
            if isinstance(mine, float) and isinstance(theirs, float) and mine < theirs:
                lines.append(f"S3: {ours} is behind {other}: {mine} and {theirs} MB/s")
    return lines


def markdown(record: dict[str, object], machine: dict[str, str | int | float]) -> str:
    """Return the record as tables."""
    lines = ["# Saving and loading a checkpoint", "", (__doc__ or "").split("\n\n")[2].replace("\n", " "), ""]
    others = record["share of the cores used by others"]
    lines += [f"The machine was {record['machine was']}: other processes used {others} of the cores meanwhile.", ""]
    for place in ("disk, fsync", "memory, no fsync"):
        found = record.get(place)
        if not isinstance(found, dict):
            continue
        kinds = [k.removesuffix(", GB/s") for k in found[BAR] if k.endswith(", GB/s")]
        lines += [
            f"## {place}",
            "",
            "| GB/s (of safetensors) | " + " | ".join(kinds) + " |",
            "|---" * (len(kinds) + 1) + "|",
        ]
        for name, row in found.items():
            cells = [f"{row[f'{kind}, GB/s']} ({row[f'{kind}, of safetensors']})" for kind in kinds]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        warm, cold = "share of pages cached, warm", "share of pages cached, cold"
        shares = [f"{name} {row[warm]} and {row[cold]}" for name, row in found.items() if warm in row]
        if shares:
            lines += ["", f"Share of pages in the page cache, warm and cold: {'; '.join(shares)}."]
        lines.append("")
    for place in ("training thread blocked", "S3 (moto, loopback)"):
        rows = record.get(place)
        if isinstance(rows, dict):
            lines += [
                f"## {place}",
                "",
                "| what | value |",
                "|---|---|",
                *(f"| {k} | {v} |" for k, v in rows.items()),
                "",
            ]
    late = record.get("behind torch.save or DCP")
    if isinstance(late, list):
        lines += [f"Behind torch.save or DCP: {'; '.join(late) or 'nowhere'}.", ""]
    lines.append("Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + ".")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Used:
    """Processor seconds used so far, by everybody and by this process with its ended children, and the time."""

    everybody: float
    own: float
    at: float

    @staticmethod
    def now() -> Used:
        busy = psutil.cpu_times()
        return Used(busy.user + busy.nice + busy.system, sum(os.times()[:4]), time.monotonic())

    def by_others_since(self, before: Used) -> float:
        """Return which share of the cores others had; the kernel's writing back counts among them."""
        seconds_of_others = (self.everybody - before.everybody) - (self.own - before.own)
        return max(0.0, seconds_of_others / ((self.at - before.at) * (os.cpu_count() or 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where 'disk' is; default: the temporary folder")
    parser.add_argument("--s3-mib", type=int, default=128, help="0: not on S3")
    parser.add_argument(
        "--only", nargs="+", choices=PLACES, default=PLACES, help="where to measure; default: everywhere"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # DCP warns at each call that no process group exists
    machine = facts()
    before = Used.now()
    state = state_of(int(arguments.gib * GIB))
    record: dict[str, object] = {"benchmark": "ckpt", **machine}
    found = []
    if "disk" in arguments.only:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            on_disk = measure(Path(folder), state, arguments.rounds, synced=True)
            record["disk, fsync"] = on_disk
            found += behind(on_disk)
    if "memory" in arguments.only and Path("/dev/shm").is_dir():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            in_memory = measure(Path(folder), state, arguments.rounds, synced=False)
            record["memory, no fsync"] = in_memory
            found += behind(in_memory)
    del state
    if "blocked" in arguments.only:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            record["training thread blocked"] = blocked(Path(folder), int(arguments.gib * GIB), arguments.rounds)
    if "s3" in arguments.only and arguments.s3_mib:
        over_the_wire = on_s3(arguments.s3_mib * MIB, arguments.rounds)
        record["S3 (moto, loopback)"] = over_the_wire
        found += behind_on_s3(over_the_wire)
    record["behind torch.save or DCP"] = found
    others = Used.now().by_others_since(before)
    record |= {
        "machine was": "quiet" if others < QUIET_SHARE else "busy",
        "share of the cores used by others": round(others, 4),
    }
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"ckpt-{str(machine['date']).replace(':', '')[:17]}.json"
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    target.with_suffix(".md").write_text(markdown(record, machine), encoding="utf-8")
    print(json.dumps(record, indent=2))
    print(f"written to {target}")


if __name__ == "__main__":
    main()
