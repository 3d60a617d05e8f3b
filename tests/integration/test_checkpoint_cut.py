"""A checkpoint shows one instant, also of a worker whose private state is too large to be captured in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt.record import decode_record
from recovery.types import MIB, Cut, Version
from tests.support.fleet import Fleet

HIDDEN = 60_000
"""Adam's moments are above the 8 MiB up to which memory is measured and written at one boundary."""
PRIVATE = ("inner_optimizer", "scheduler", "local_progress", "buffers", "position")


def test_private_parts_of_a_checkpoint_are_of_its_boundary(tmp_path: Path) -> None:
    disk = tmp_path / "ckpt"
    agent: dict[str, Any] = {"checkpoint_url": str(disk), "inner_steps_per_phase": 4}
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker("w0", seed=0, hidden=HIDDEN, agent=agent, step_seconds=0.02)
        for step in (1, 2, 3):
            worker.wait_event("CheckpointSaved", url=disk / f"step_1_{step}" / "worker_w0")
        boundaries = worker.boundaries()
    for step in (2, 3):
        file = disk / f"step_1_{step}" / "worker_w0" / "manifest.pb"
        manifest = decode_record(file.read_bytes(), str(file)).manifest
        assert manifest.cut == Cut(Version(1, step))
        assert manifest.num_bytes > 8 * MIB
        found: dict[str, str] = {
            str(part.name): "/".join(
                [part.tree.SerializeToString(deterministic=True).hex(), *(chunk.digest.hex() for chunk in part.chunks)]
            )
            for part in manifest.parts
        }
        assert set(found) == set(PRIVATE)
        assert [name for name in PRIVATE if found[name] != boundaries[f"L1.k{step}"][name]] == []
