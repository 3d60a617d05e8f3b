"""The other end of a gloo link, in a process: ``python -m tests.support.memory_link_process ROLE FOLDER HOW HOST``.

It says "ready" on its standard output before it does what may end it, and "survived" if it is still there afterwards.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from recovery.errors import DonorLost, PeerUnreachable
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK, open_gloo_link
from tests.support.memory_file_store import FileStore

EXPECTED_BYTES = 64
SCOPE = "two processes"


def main(role: str, folder: str, how: str, host: str = "127.0.0.1") -> None:
    rank = DONOR_RANK if role == "donor" else JOINER_RANK
    try:
        link = open_gloo_link(FileStore(Path(folder)), SCOPE, rank=rank, host=host, lanes=1, timeout_seconds=6)
    except PeerUnreachable as error:
        print(f"refused: {error}", flush=True)
        print("survived", flush=True)
        sys.stdin.readline()
        return
    if role == "joiner":
        transfer = link.receive(0, 0, torch.zeros(EXPECTED_BYTES, dtype=torch.uint8))
        print("ready", flush=True)
        if how == "receive":
            try:
                transfer.wait(60)
            except DonorLost:
                print("link broke", flush=True)
    else:
        print("ready", flush=True)
        try:
            # Waits until the joiner takes it, or misbehaves.
            link.send(0, 0, torch.ones(EXPECTED_BYTES, dtype=torch.uint8)).wait(60)
        except DonorLost:
            print("link broke", flush=True)
    print("survived", flush=True)
    sys.stdin.readline()
    link.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
