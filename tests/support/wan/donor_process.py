"""A donor's process: serves joiners from a state made from a seed, until its standard input ends.

Prints address and fingerprint as JSON once it can be dialled. Orders on standard input: ``rate <bytes per second>``,
``results``.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch

from recovery.control.peer_service import DonorConversation, PeerServer
from recovery.control.security import SecurityConfig
from recovery.protocol.session import DonorConfig, DonorResult, DonorSession, RateLimiter
from recovery.transport.process_group import DONOR_RANK, GlooLink, open_gloo_link
from recovery.types import KeyValue
from tests.support.memory_donor import RUN, MemorySnapshots, worker
from tests.support.wan.transfer_state import outer_state

SECURITY = SecurityConfig(insecure=True)


def serve(plan: dict[str, Any]) -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    snapshots = MemorySnapshots(plan["name"], outer_state(plan["state_bytes"], plan.get("seed", 1)))
    limiter = RateLimiter(plan.get("bytes_per_second", 0))
    config = DonorConfig(data_host=plan["host"], progress_seconds=plan.get("progress_seconds", 10.0))
    begun = 0
    counting = threading.Lock()
    results: list[DonorResult] = []

    def open_link(store: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> GlooLink:
        return open_gloo_link(
            store,
            scope,
            rank=DONOR_RANK,
            host=host,
            lanes=lanes,
            timeout_seconds=20,
            congestion_control=plan.get("congestion_control"),
            cancelled=cancelled,
        )

    def on_conversation(conversation: DonorConversation) -> None:
        nonlocal begun
        with counting:
            begun += 1
            number = begun
        session = DonorSession(
            conversation,
            snapshots,
            scope=f"conversation/{plan['name']}/{number}",
            config=config,
            admit=lambda letter: None,
            open_link=open_link,
            limiter=limiter,
        )
        results.append(session.run())

    with PeerServer(plan["host"], 0, on_conversation, SECURITY, run_id=RUN, worker=worker(plan["name"])) as server:
        fingerprint = snapshots.outer_manifest.fingerprint.hex()
        print(json.dumps({"address": str(server.address), "fingerprint": fingerprint}), flush=True)
        for line in sys.stdin:
            match line.split():
                case ["rate", number]:
                    limiter.set_rate(int(number))
                    print("rate", flush=True)
                case ["results"]:
                    ended = [{"sent": each.sent_bytes, "error": str(each.error or "")} for each in results]
                    print(json.dumps(ended), flush=True)
                case ["busy"]:
                    print(f"busy {begun - len(results)}", flush=True)
                case other:
                    raise ValueError(f"an order {other}")


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
