"""Two processes on loopback for the transfer benchmark: letters over a local socket, a store, a donor to serve.

No coordinator and no gRPC: what is measured is the engine and the wire. The letters' socket is not a TCP one: those of
``multiprocessing`` hold a small letter back until the one before it is acknowledged, 40 ms later; gRPC's do not.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from google.protobuf.message import Message
from torch._C._distributed_c10d import Store

from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery.errors import DonorLost, DonorRefused, PeerUnreachable
from recovery.protocol.session import DonorConfig, DonorSession, RateLimiter
from recovery.state.live_part import LivePart, describe, live_part
from recovery.state.manifest import Manifest, encode
from recovery.transport.process_group import DONOR_RANK, GlooLink, GroupHandle, open_gloo_link, open_group
from recovery.types import (
    MIB,
    Cut,
    Fingerprint,
    Incarnation,
    KeyValue,
    NumericsId,
    PartClass,
    PartName,
    RunId,
    Version,
    WorkerId,
    WorkerRef,
)

HOST = "127.0.0.1"
RUN = RunId("bench")
VERSION = Version(1, 1)
DONOR = WorkerRef(WorkerId("donor"), Incarnation("i1"))
_RAW_IN_FLIGHT = 4

Sent = TypeVar("Sent", bound=Message)
Got = TypeVar("Got", bound=Message)


def diloco_state(num_bytes: int, *, seed: int, fill: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Return outer parameters and momentum of a transformer, of about ``num_bytes`` together, every page touched."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, dict[str, torch.Tensor]] = {"outer_params": {}, "outer_optimizer": {}}
    shapes = [(4096, 1024), (1024, 4096), (3072, 1024), (1024, 1024), (1024,), (1024,), (4096,)]
    total = layer = 0
    while total < num_bytes:
        for index, shape in enumerate(shapes):
            for part in state.values():
                tensor = torch.empty(shape)
                if fill:
                    tensor.uniform_(generator=generator)
                else:
                    tensor.zero_()
                part[f"{layer}.{index}"] = tensor
                total += tensor.numel() * 4
        layer += 1
    return state


class SocketConversation(Generic[Sent, Got]):
    """Letters over one local stream socket; a thread reads."""

    def __init__(self, connection: Connection, got: type[Got]) -> None:
        self.round_trip_seconds: float | None = None
        self._connection = connection
        self._got = got
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._inbox.put(None)

    def send(self, letter: Sent, /) -> None:
        try:
            with self._lock:
                self._connection.send_bytes(letter.SerializeToString() or b"\0")
        except OSError as error:
            raise DonorLost(f"the conversation has ended: {error}") from error

    def receive(self, timeout_seconds: float, /) -> Got | None:
        try:
            data = self._inbox.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if data is None:
            self._inbox.put(None)
            raise DonorLost("the conversation has ended")
        letter = self._got()
        letter.ParseFromString(data)
        return letter

    def close(self, reason: str, /) -> None:
        del reason
        self._inbox.put(None)  # a blocked ``receive`` of this side raises now, not at its timeout
        self._connection.close()


def _tcp_store(port: int, *, server: bool) -> Store:
    return dist.TCPStore(HOST, port, is_master=server, wait_for_workers=False)  # type: ignore[attr-defined]


class TcpKeyValue:
    """A ``KeyValue`` over torch's TCPStore, a client for each thread: a client locks while it waits."""

    def __init__(self, port: int, *, server: bool = False) -> None:
        self._server = _tcp_store(port, server=True) if server else None
        self.port: int = self._server.port if self._server is not None else port  # type: ignore[attr-defined]
        self._clients = threading.local()

    def _client(self) -> Store:
        client: Store | None = getattr(self._clients, "store", None)
        if client is None:
            client = self._clients.store = _tcp_store(self.port, server=False)
        return client

    def set(self, scope: str, key: str, value: bytes) -> None:
        self._client().set(f"{scope}/{key}", value)  # type: ignore[arg-type]

    def get(self, scope: str, keys: list[str], timeout_seconds: float) -> list[bytes]:
        self.wait(scope, keys, timeout_seconds)
        return [self._client().get(f"{scope}/{key}") for key in keys]

    def wait(self, scope: str, keys: list[str], timeout_seconds: float) -> None:
        try:
            self._client().wait([f"{scope}/{key}" for key in keys], timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            raise PeerUnreachable(f"{scope}: no {keys}") from error

    def exists(self, scope: str, keys: list[str]) -> bool:
        return self._client().check([f"{scope}/{key}" for key in keys])

    def add(self, scope: str, key: str, amount: int) -> int:
        return self._client().add(f"{scope}/{key}", amount)

    def compare_set(self, scope: str, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._client().compare_set(f"{scope}/{key}", expected.decode(), desired.decode())

    def delete(self, scope: str, key: str) -> bool:
        return self._client().delete_key(f"{scope}/{key}")


@dataclass(frozen=True)
class _Reading:
    data: torch.Tensor
    live: bool


class _Lease:
    """Lends tensors that nobody changes."""

    until_boundary = False

    def __init__(self, manifest: Manifest, encoded: bytes, parts: list[LivePart]) -> None:
        self.manifest = manifest
        self.manifest_bytes = encoded
        self._parts = parts

    def read(self, part: int, offset: int, num_bytes: int) -> _Reading:
        return _Reading(self._parts[part].bytes.read(offset, num_bytes), live=True)

    def acknowledge(self, part: int, chunk: int) -> None:
        return None

    def recheck(self, part: int, chunk: int) -> bool:
        return True

    def renew(self) -> None:
        return None

    def release(self, reason: str, *, grace: bool = False) -> None:
        return None

    def on_closed(self, callback: object, /) -> None:
        return None


class _Source:
    """A donor's state; the digest pass is done anew for each lease if ``digest_each``."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self._parts = [live_part(PartName(name), PartClass.REPLICATED, value) for name, value in state.items()]
        self.digest_each = False
        self._manifest = self.describe()
        self._encoded = encode(self._manifest)

    @property
    def fingerprint(self) -> bytes:
        return self._manifest.fingerprint

    def describe(self, known: Fingerprint | None = None) -> Manifest:
        return describe(
            self._parts,
            run_id=RUN,
            worker=DONOR,
            cut=Cut(VERSION),
            numerics_id=NumericsId("bench"),
            layout_digest=b"l" * 32,
            agreed_fingerprint=known,
        )

    def lease_outer(self, version: Version, holder: str) -> _Lease:
        del version, holder
        if self.digest_each:
            # The chunk digests alone: a fingerprint is made once a version, by a worker that may train meanwhile.
            manifest = self.describe(self._manifest.fingerprint)
            return _Lease(manifest, encode(manifest), self._parts)
        return _Lease(self._manifest, self._encoded, self._parts)

    def lease_private(self, holder: str, not_before: Version) -> Future[_Lease]:
        del holder, not_before
        future: Future[_Lease] = Future()
        future.set_exception(DonorRefused("the benchmark's donor has no private parts"))
        return future

    def lease_scalars(self, holder: str, not_before: Version) -> Future[_Lease]:
        return self.lease_private(holder, not_before)

    def lease_journal(self, version: Version, holder: str) -> _Lease:
        raise DonorRefused("the benchmark's donor keeps no journal")


def raw_send(handle: GroupHandle, tensors: list[torch.Tensor]) -> None:
    """Send each tensor as one message, a few posted at once."""
    works: list[dist.Work] = []
    for tag, tensor in enumerate(tensors):
        works.append(handle.group.send([tensor], 1, tag))  # type: ignore[attr-defined]
        if len(works) >= _RAW_IN_FLIGHT:
            works.pop(0).wait()
    for work in works:
        work.wait()


def raw_receive(handle: GroupHandle, tensors: list[torch.Tensor]) -> None:
    """Receive each tensor as one message, all posted at once."""
    for work in [handle.group.recv([tensor], 0, tag) for tag, tensor in enumerate(tensors)]:  # type: ignore[attr-defined]
        work.wait()


def serve(state_bytes: int, store_port: int, letters: str) -> None:
    """The donor process: does what the other process orders until it says so."""
    store = TcpKeyValue(store_port)
    state = diloco_state(state_bytes, seed=1, fill=True)
    source = _Source(state)
    tensors = [tensor for part in state.values() for tensor in part.values()]
    raw = open_group(store, "raw", rank=0, size=2, host=HOST, timeout_seconds=60, operation_timeout_seconds=600)
    store.set("bench", "fingerprint", source.fingerprint)
    limiter = RateLimiter()

    def open_link(meeting: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> GlooLink:
        return open_gloo_link(
            meeting, scope, rank=DONOR_RANK, host=host, lanes=lanes, timeout_seconds=30, cancelled=cancelled
        )

    orders = Client(letters)
    number = 0
    while True:
        order = orders.recv_bytes().decode()
        if order == "end":
            break
        cpu = time.process_time()
        if order == "raw":
            raw_send(raw, tensors)
        else:
            source.digest_each = order == "digest"
            number += 1
            conversation: SocketConversation[DonorLetter, JoinerLetter] = SocketConversation(
                Client(letters), JoinerLetter
            )
            result = DonorSession(
                conversation,
                source,
                scope=f"bench/{number}",
                config=DonorConfig(data_host=HOST),
                admit=lambda letter: None,
                open_link=open_link,
                limiter=limiter,
            ).run()
            if result.error is not None:
                raise result.error
        orders.send_bytes(f"{time.process_time() - cpu}".encode())
    raw.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--store-port", type=int, required=True)
    parser.add_argument("--letters", required=True, help="address of a local socket")
    options = parser.parse_args()
    serve(options.megabytes * MIB, options.store_port, options.letters)


__all__ = ["Listener", "SocketConversation", "TcpKeyValue", "diloco_state", "raw_receive"]

if __name__ == "__main__":
    main()
