"""Runs whose pseudo-gradients travel in fewer bytes: bit-equal workers all the same, and no mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.boundary_faults import INNER_STEPS, REPLICATED, STEP_SECONDS, wait_commit
from tests.support.fleet import Fleet

pytestmark = pytest.mark.timeout(300)
"""Several processes start in each test: a busy machine needs its time."""


@pytest.mark.parametrize(("codec", "other"), [("bf16", "plain"), ("int8", "bf16")])
def test_members_are_bit_equal_and_another_codec_is_refused(tmp_path: Path, codec: str, other: str) -> None:
    agent: dict[str, Any] = {"inner_steps_per_phase": INNER_STEPS}
    with Fleet(tmp_path) as fleet:
        workers = [
            fleet.worker(f"w{i}", seed=i, agent={**agent, "gradient_codec": codec}, step_seconds=STEP_SECONDS)
            for i in range(2)
        ]
        for worker in workers:
            wait_commit(worker, 2)
        stranger = fleet.worker("w2", seed=2, agent={**agent, "gradient_codec": other})
        assert stranger.end() == 1
        error = stranger.wait_said("error")
        assert error["error"] == "LayoutMismatch"
        assert "gradient_codec" in error["message"]
        for worker in workers:
            wait_commit(worker, 4)
        left, right = (worker.boundaries() for worker in workers)
        common = left.keys() & right.keys()
        assert len(common) >= 2
        for version in common:
            assert [part for part in REPLICATED if left[version][part] != right[version][part]] == []
