"""Others' ways to move a state, run in two hosts of an emulated network: raw gloo, torchft's two transports.

    python -m benchmarks.wan_baseline METHOD send|receive --store HOST:PORT --bytes N

The receiver prints its seconds as JSON, from the moment both ends are connected until it holds the state; connecting
is not counted, which favours these.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tests.support.wan.transfer_state import outer_state

TIMEOUT = timedelta(seconds=600)
METHODS = ("gloo", "torchft-pg", "torchft-http")
_HTTP_CHUNKS = 4
_IN_FLIGHT = 4


def main() -> None:
    """Move a state from the sender to the receiver."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("side", choices=("send", "receive"))
    parser.add_argument("--store", required=True, help="where the sender's store listens")
    parser.add_argument("--bytes", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "wan0"
    sends = options.side == "send"
    host, _, port = options.store.rpartition(":")
    store = TCPStore(host, int(port), is_master=sends, wait_for_workers=False, timeout=TIMEOUT)
    state = outer_state(options.bytes, seed=1 if sends else 2)
    move = {"gloo": _gloo, "torchft-pg": _torchft_pg, "torchft-http": _torchft_http}[options.method]
    move(store, options.store, state, sends)
    if sends:
        store.get("received")  # the store is this process's: it stays until the other one is done
    else:
        store.set("received", "")


def _timed(store: Store, receive: Callable[[], object]) -> None:
    """Receive once the sender is ready, and print how long it took."""
    store.get("ready")
    began = time.monotonic()
    receive()
    print(json.dumps({"seconds": time.monotonic() - began}), flush=True)


def _gloo(store: Store, address: str, state: dict[str, dict[str, torch.Tensor]], sends: bool) -> None:
    """Each tensor as one message over one group."""
    del address
    group: Any = dist.ProcessGroupGloo(PrefixStore("group", store), 0 if sends else 1, 2, TIMEOUT)
    tensors = [tensor for part in state.values() for tensor in part.values()]
    if not sends:

        def receive() -> None:
            for work in [group.recv([tensor], 0, tag) for tag, tensor in enumerate(tensors)]:
                work.wait()

        return _timed(store, receive)
    store.set("ready", "")
    works = []
    for tag, tensor in enumerate(tensors):
        works.append(group.send([tensor], 1, tag))
        if len(works) >= _IN_FLIGHT:
            works.pop(0).wait()
    for work in works:
        work.wait()
    return None


def _torchft_pg(store: Store, address: str, state: dict[str, dict[str, torch.Tensor]], sends: bool) -> None:
    """torchft's ``PGTransport``, receiving in place."""
    from torchft.checkpointing.pg_transport import PGTransport
    from torchft.process_group import ProcessGroupGloo

    del address
    group = ProcessGroupGloo(timeout=TIMEOUT)
    # Its own rendezvous advertises the machine's name, which the other host cannot resolve.
    group._pg = group._create_pg(PrefixStore("torchft", store), 0 if sends else 1, 2)
    transport = PGTransport(group, TIMEOUT, torch.device("cpu"), state_dict=lambda: state)
    if sends:
        store.set("ready", "")
        transport.send_checkpoint([1], step=1, state_dict=state, timeout=TIMEOUT)
    else:
        _timed(store, lambda: transport.recv_checkpoint(0, transport.metadata(), step=1, timeout=TIMEOUT))


def _torchft_http(store: Store, address: str, state: dict[str, dict[str, torch.Tensor]], sends: bool) -> None:
    """torchft's ``HTTPTransport`` with parallel chunks."""
    from torchft.checkpointing.http_transport import HTTPTransport

    transport: Any = HTTPTransport(timeout=TIMEOUT, num_chunks=_HTTP_CHUNKS)
    if sends:
        transport.send_checkpoint([1], step=1, state_dict=state, timeout=TIMEOUT)
        # It advertises the machine's name, which the other host cannot resolve.
        host = address.rpartition(":")[0]
        store.set("url", re.sub(r"//[^:/]+:", f"//{host}:", transport.metadata()))
        store.set("ready", "")
        store.get("received")
    else:
        url = store.get("url").decode()
        _timed(store, lambda: transport.recv_checkpoint(0, url, step=1, timeout=TIMEOUT))
        store.set("received", "")
    transport.shutdown(wait=False)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torchft's servers keep threads that end with nobody
