"""Saving to and loading from an S3 server, a process of its own on this machine: its speed is the server's, the ratios
are the point."""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.ckpt_state import flat, seconds, source, state_of
from ckpt.objects import open_storage
from ckpt.reader import open_checkpoint
from ckpt.values import ValueSource
from ckpt.writer import write_checkpoint
from recovery.state.chunks import PartBytes
from recovery.types import Version

_KEYS = {"key": "t", "secret": "t"}


@contextmanager
def server() -> Iterator[str]:
    """Yield the endpoint of a moto server in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def on_s3(num_bytes: int, rounds: int) -> dict[str, object]:
    """Return MB/s of every way, medians; whatever is loaded ends in tensors that exist and were touched."""
    with server() as endpoint, tempfile.TemporaryDirectory() as folder:
        client = boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id="t", aws_secret_access_key="t", region_name="us-east-1"
        )
        client.create_bucket(Bucket="bench")
        options: dict[str, Any] = {
            **_KEYS,
            "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
        }
        state = state_of(num_bytes)
        ways = _ways(state, options, client, Path(folder), rounds)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for n in range(rounds + 1):
            for name, way in ways.items():
                took = seconds(lambda way=way, n=n: way(n))  # type: ignore[misc]
                if n:  # the first is for connections and imports
                    times[name].append(took)
        client.close()
    total = sum(t.nbytes for t in flat(state).values())
    return {f"{name}, MB/s": round(total / 1e6 / statistics.median(found), 1) for name, found in times.items()}


def _ways(
    state: dict[str, dict[str, torch.Tensor]], options: dict[str, Any], client: Any, folder: Path, rounds: int
) -> dict[str, Callable[[int], None]]:
    tensors = flat(state)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    sources = [source(state, ValueSource, n) for n in range(rounds + 1)]
    file = folder / "file"
    # Opened once, as a worker does; so are boto's client and, in fsspec's own cache, DCP's file system.
    storage = open_storage("s3://bench/ours", options)

    def save(n: int) -> None:
        write_checkpoint(storage, [sources[n]])

    def load(n: int) -> None:
        with open_checkpoint(storage, Version(1, n)) as checkpoint:
            for part in checkpoint.manifest.parts:
                wanted = [into[f"{part.name}.{name}"] for name in state[part.name]]
                checkpoint.read_part(part.name, PartBytes(wanted, part.tensors))

    def put(n: int) -> None:
        client.upload_file(str(file), "bench", f"file/{n}")

    def get(n: int) -> None:
        client.download_file("bench", f"file/{n}", str(file))

    def fill(loaded: dict[str, torch.Tensor]) -> None:
        for name, tensor in into.items():
            tensor.copy_(loaded[name])

    def save_safetensors(n: int) -> None:
        save_file(tensors, file)
        put(n)

    def load_safetensors(n: int) -> None:
        get(n)
        fill(load_file(file))

    def save_pickled(n: int) -> None:
        torch.save(tensors, file)
        put(n)

    def load_pickled(n: int) -> None:
        get(n)
        fill(torch.load(file, weights_only=True))

    def save_dcp(n: int) -> None:
        writer = FsspecWriter(f"s3://bench/dcp/{n}", **options)
        dcp_save(dict(tensors), storage_writer=writer, no_dist=True)

    def load_dcp(n: int) -> None:
        dcp_load(dict(into), storage_reader=FsspecReader(f"s3://bench/dcp/{n}", **options), no_dist=True)

    shutil.rmtree(file, ignore_errors=True)
    return {
        "ours, save": save,
        "ours, verified load": load,
        "safetensors save_file + put": save_safetensors,
        "get + safetensors load_file": load_safetensors,
        "torch.save + put": save_pickled,
        "get + torch.load": load_pickled,
        "DCP save": save_dcp,
        "DCP load": load_dcp,
    }
