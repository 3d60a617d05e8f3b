"""A worker's metrics, as a scraper sees them over loopback."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from recovery.clock import ManualClock
from recovery.errors import BadConfiguration
from recovery.events import (
    BoundaryStage,
    CheckpointSaved,
    CheckpointSaveFailed,
    ChunkRefetched,
    Event,
    StateRestored,
    TransferEnded,
    TransferProgress,
)
from recovery.snapshot.stall import StallAccount, StallCause
from recovery.types import NO_VERSION, Cut, Version
from recovery.worker.config import AgentConfig
from recovery.worker.metrics import WorkerMetrics
from recovery.worker.standing import Standing
from tests.support.scraping import free_port, scrape


class Rig:
    """Metrics that are served, over a standing and a stall account that a test sets."""

    def __init__(self, port: int) -> None:
        self.clock = ManualClock()
        self.standing = Standing(self.clock)
        self.stall = StallAccount()
        self.sealed = NO_VERSION
        self.metrics = WorkerMetrics(
            AgentConfig(
                coordinator="127.0.0.1:1", run_id="r", worker_id="w", inner_steps_per_phase=1, metrics_port=port
            ),
            self.clock,
        )
        rig = self
        context: Any = SimpleNamespace(
            standing=self.standing,
            snapshots=SimpleNamespace(stall=self.stall),
            inbox=type("Inbox", (), {"sealed": property(lambda _: rig.sealed)})(),
        )
        self.metrics.start(context)


def test_what_happened_is_counted_and_what_is_now_is_read() -> None:
    port = free_port()
    rig = Rig(port)
    try:
        assert scrape(port)["recovery_worker_info,run_id=r,worker_id=w"] == 1
        assert "recovery_version_outer_step" not in scrape(port)
        version = Version(2, 7)
        rig.standing.update(version=version, ready=True, free_slots=2)
        rig.sealed = Version(2, 9)
        rig.stall.bind()
        with rig.stall.measure(StallCause.GUARD_COPY) as span:
            span.num_bytes = 5
        events: list[Event] = [
            TransferProgress(transfer_id="t", verified_bytes=10, total_bytes=40, bytes_per_second=1.0),
            TransferProgress(transfer_id="t", verified_bytes=30, total_bytes=40, bytes_per_second=1.0),
            ChunkRefetched(transfer_id="t", part="p", chunk=0, donor="d", blame="link"),
            TransferEnded(
                transfer_id="t",
                attempt=1,
                cut=Cut(version),
                payload_bytes=40,
                reused_bytes=2,
                took_seconds=1.5,
                failure="DonorLost: gone",
            ),
            StateRestored(version=version, source="peers", num_tensors=1, num_bytes=40),
            *(BoundaryStage(stage=stage, version=version) for stage in ("arriving", "rostered", "arriving")),
            *(BoundaryStage(stage=stage, version=version) for stage in ("rostered", "decided", "applied", "arriving")),
            CheckpointSaved(url="u", cut=Cut(version), num_bytes=100, took_seconds=2.0),
            CheckpointSaveFailed(url="u", reason="full"),
        ]
        for event in events:
            rig.metrics(event)
        rig.clock.advance(3.0)
        found = scrape(port)
        for name, value in {
            "recovery_transfer_verified_bytes_total": 30,
            "recovery_transfer_payload_bytes_total": 40,
            "recovery_transfer_reused_bytes_total": 2,
            "recovery_transfer_seconds_total": 1.5,
            "recovery_transfer_bad_chunks_total": 1,
            "recovery_transfers_total,result=failed": 1,
            "recovery_transfers_total,result=ok": 0,
            "recovery_states_restored_total,source=peers": 1,
            "recovery_boundaries_total,outcome=committed": 1,
            "recovery_boundaries_total,outcome=aborted": 1,
            "recovery_checkpoints_total,result=saved": 1,
            "recovery_checkpoints_total,result=failed": 1,
            "recovery_checkpoint_saved_bytes_total": 100,
            "recovery_checkpoint_age_seconds": 3.0,
            "recovery_version_lineage": 2,
            "recovery_version_outer_step": 7,
            "recovery_catch_up_lag_steps": 2,
            "recovery_ready": 1,
            "recovery_free_slots": 2,
            "recovery_training_thread_copied_bytes_total,cause=guard-copy": 5,
        }.items():
            assert found[name] == value, name
        assert found["recovery_training_thread_stall_seconds_total,cause=guard-copy"] > 0
    finally:
        rig.metrics.close()


def test_a_taken_port_is_one_line_and_a_closed_one_is_free_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadConfiguration, match=f"127.0.0.1:{port}: Address already in use") as refused:
            Rig(port)
        assert "\n" not in str(refused.value)
    rig = Rig(port)
    rig.metrics.close()
    rig.metrics.close()
    rig = Rig(port)
    rig.metrics.close()


def test_a_port_that_cannot_be_one_is_said_in_words() -> None:
    with pytest.raises(BadConfiguration, match=r"127\.0\.0\.1:99999: a port is at most 65535; take another"):
        Rig(99_999)


def test_other_paths_and_clients_that_break_off_do_no_harm() -> None:
    port = free_port()
    rig = Rig(port)
    try:
        with pytest.raises(urllib.error.HTTPError) as missing:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30)
        missing.value.close()
        assert missing.value.code == 404
        hanging = socket.create_connection(("127.0.0.1", port))
        hanging.sendall(b"GET /met")
        garbage = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        garbage.request("BREW", "/metrics")
        assert garbage.getresponse().status == 501
        garbage.close()
        assert scrape(port)["recovery_ready"] == 0
        hanging.close()
    finally:
        rig.metrics.close()
