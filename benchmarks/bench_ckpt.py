"""What saving and loading a checkpoint costs, beside safetensors, torch.save and torch DCP, none of which verifies.

    python -m benchmarks.bench_ckpt [--gib 1] [--rounds 5] [--folder DIR] [--s3-mib 128]

The state is that of a DiLoCo worker: parameters, outer momentum, two inner moments. Every column is measured in the
same run on the same bytes, rounds interleaved, medians reported. "disk" is a folder on the file system of --folder with
fsync of files and folder everywhere; "memory" is /dev/shm without fsync anywhere. "warm": the page cache holds the
files; "cold": they were synced and dropped from it. Loading is into tensors that exist and were touched.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.machine import facts
from ckpt.local import FileSystem, LocalStorage
from ckpt.objects import open_storage
from ckpt.reader import open_checkpoint
from ckpt.saver import Saver, SaverConfig
from ckpt.values import Bytes, ValueSource, source_of
from ckpt.writer import write_checkpoint
from recovery.events import Recorder
from recovery.state.chunks import PartBytes
from recovery.types import GIB, MIB, Cut, Incarnation, PartClass, PartName, RunId, Version, WorkerId, WorkerRef

RESULTS = Path(__file__).parent / "results"
RUN = RunId("bench")
WORKER = WorkerRef(WorkerId("w0"), Incarnation("bench"))
PARTS = ("outer_params", "outer_optimizer", "exp_avg", "exp_avg_sq")


class Unsynced(FileSystem):
    """For /dev/shm, where nobody syncs."""

    def fsync(self, descriptor: int) -> None:
        pass

    def fsync_folder(self, path: str) -> None:
        pass


class Live(ValueSource):
    """The same bytes as a lease lends them while they are live: each is copied before it is written."""

    def read(self, part: int, offset: int, num_bytes: int) -> Bytes:
        return Bytes(super().read(part, offset, num_bytes).data, live=True)


def state_of(num_bytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return parts of matrices of 16 MiB, as many as ``num_bytes`` holds."""
    matrices = max(1, num_bytes // len(PARTS) // (16 * MIB))
    return {part: {f"layers.{i}.weight": torch.randn(2048, 2048) for i in range(matrices)} for part in PARTS}


def source(state: dict[str, dict[str, torch.Tensor]], kind: type[ValueSource], step: int) -> ValueSource:
    values: dict[PartName, tuple[PartClass, object]] = {
        PartName(name): (PartClass.REPLICATED, tensors) for name, tensors in state.items()
    }
    made = source_of(values, run_id=RUN, worker=WORKER, cut=Cut(Version(1, step)))
    return kind(made.manifest, made._parts)


def flat(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{part}.{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


class Column:
    """One way to save and load, in one folder."""

    def __init__(self, save: Callable[[], None], load: Callable[[], None], files: Path) -> None:
        self.save = save
        self.load = load
        self.files = files


def sync(path: Path) -> None:
    """Make a file, or a folder and the files in it, durable."""
    paths = [path] if path.is_file() else [*(p for p in path.rglob("*") if p.is_file()), path]
    for one in [*paths, path.parent]:
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop(path: Path) -> None:
    """Drop a file's, or a folder's files', pages from the page cache."""
    for one in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


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
        "safetensors save_file / load_file": Column(safetensors, load_safetensors, folder / "safetensors"),
        "torch.save / load": Column(pickled, load_pickled, folder / "torch"),
        "DCP": Column(dcp, load_dcp, folder / "dcp"),
    }


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(folder: Path, state: dict[str, dict[str, torch.Tensor]], rounds: int, *, synced: bool) -> dict[str, object]:
    """Return GB/s of every column: save, load warm, load cold."""
    num_bytes = sum(t.numel() * t.itemsize for t in flat(state).values())
    ways = columns(folder, state, synced=synced)
    times: dict[str, dict[str, list[float]]] = {name: {"save": [], "load warm": [], "load cold": []} for name in ways}
    for way in ways.values():  # warm-up: allocations, imports, first touch
        way.save()
        way.load()
    for _ in range(rounds):
        for name, way in ways.items():
            times[name]["save"].append(seconds(way.save))
            times[name]["load warm"].append(seconds(way.load))
            if synced:
                drop(way.files)
                times[name]["load cold"].append(seconds(way.load))
    bar = "safetensors save_file / load_file"
    medians = {name: {k: statistics.median(v) for k, v in found.items() if v} for name, found in times.items()}
    return {
        name: {
            **{f"{k}, GB/s": round(num_bytes / 1e9 / v, 3) for k, v in found.items()},
            **{f"{k}, of safetensors": round(medians[bar][k] / v, 3) for k, v in found.items()},
        }
        for name, found in medians.items()
    }


def blocked(folder: Path, state: dict[str, dict[str, torch.Tensor]], rounds: int) -> dict[str, object]:
    """Return how long the training thread stands still for one save: ours, and DCP's asynchronous one."""
    ours, theirs = [], []
    for n in range(1, rounds + 1):
        of = source(state, Live, n)
        shutil.rmtree(folder / "saver", ignore_errors=True)
        with Saver(
            LocalStorage(folder / "saver"), SaverConfig(), run_id=RUN, worker=WORKER, events=Recorder()
        ) as saver:
            began = time.perf_counter()
            ticket = saver.save([of])
            ours.append(time.perf_counter() - began)
            assert ticket is not None
            ticket.result()
        shutil.rmtree(folder / "async", ignore_errors=True)
        began = time.perf_counter()
        future = async_save(dict(flat(state)), checkpoint_id=folder / "async", no_dist=True)
        theirs.append(time.perf_counter() - began)
        (future if hasattr(future, "result") else future.upload_completion).result()
    return {
        "ours, ms": round(statistics.median(ours) * 1e3, 3),
        "ours, worst ms": round(max(ours) * 1e3, 3),
        "DCP async_save, ms": round(statistics.median(theirs) * 1e3, 1),
    }


def on_s3(num_bytes: int, rounds: int) -> dict[str, object]:
    """Return MB/s against a moto server in this process: its speed is the server's, the ratio is the point."""
    import boto3  # type: ignore[import-untyped]
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="t", aws_secret_access_key="t", region_name="us-east-1"
    )
    client.create_bucket(Bucket="bench")
    options = {"key": "t", "secret": "t", "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"}}
    state = state_of(num_bytes)
    into = {part: [torch.zeros_like(t) for t in tensors.values()] for part, tensors in state.items()}
    of = source(state, ValueSource, 1)

    def save(n: int, path: Path) -> None:
        write_checkpoint(open_storage(f"s3://bench/{n}", options), [of])

    def load(n: int, path: Path) -> None:
        with open_checkpoint(open_storage(f"s3://bench/{n}", options), Version(1, 1)) as checkpoint:
            for part in checkpoint.manifest.parts:
                checkpoint.read_part(part.name, PartBytes(into[part.name], part.tensors))

    def put(n: int, path: Path) -> None:
        save_file(flat(state), path)
        client.upload_file(str(path), "bench", f"{n}/all.safetensors")

    def get(n: int, path: Path) -> None:
        client.download_file("bench", f"{n}/all.safetensors", str(path))
        loaded = load_file(path)
        for part, tensors in into.items():
            for name, tensor in zip(state[part], tensors, strict=True):
                tensor.copy_(loaded[f"{part}.{name}"])

    ways = {"ours, save": save, "ours, verified load": load, "save_file + put": put, "get + load_file": get}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for n in range(1, rounds + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                way(n, Path(folder) / "all.safetensors")
                times[name].append(time.perf_counter() - began)
    client.close()
    server.stop()
    total = sum(t.numel() * t.itemsize for t in flat(state).values())
    return {f"{name}, MB/s": round(total / 1e6 / statistics.median(found), 1) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where 'disk' is; default: the temporary folder")
    parser.add_argument("--s3-mib", type=int, default=128, help="0: not on S3")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # DCP warns at each call that no process group exists
    machine = facts()
    state = state_of(int(arguments.gib * GIB))
    record: dict[str, object] = {"benchmark": "ckpt", **machine, "load_average": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        record["disk, fsync"] = measure(Path(folder), state, arguments.rounds, synced=True)
        record["training thread blocked"] = blocked(Path(folder), state, arguments.rounds)
    if Path("/dev/shm").is_dir():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            record["memory, no fsync"] = measure(Path(folder), state, arguments.rounds, synced=False)
    if arguments.s3_mib:
        record["S3 (moto, loopback)"] = on_s3(arguments.s3_mib * MIB, 3)
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"ckpt-{str(machine['date']).replace(':', '')[:17]}.json"
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))
    print(f"written to {target}")


if __name__ == "__main__":
    main()
