"""Forked data loader workers beside a serving agent: no deadlock, crash or leak.

Supported: ``DataLoader(num_workers=n)`` with fork, whether its workers start before or after the agent. The children
inherit neither the agent's threads nor the snapshots' memory, and must not use the agent. Of the kind of
grpc/grpc#18075.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import Fleet

HIDDEN = 20_000
RATE = 20_000_000
"""Bytes per second: a join of some megabytes takes several rounds, and still keeps up with them."""


@pytest.mark.parametrize(("rounds", "joins"), [(12, 2), pytest.param(50, 3, marks=pytest.mark.chaos)])
def test_forked_loaders_beside_a_serving_agent(tmp_path: Path, rounds: int, joins: int) -> None:
    agent: dict[str, Any] = {"inner_steps_per_phase": 4, "donor_bytes_per_second": RATE}
    with Fleet(tmp_path) as fleet:
        trains = fleet.worker("w0", seed=0, hidden=HIDDEN, agent=agent, module="tests.support.loader_process")
        trains.wait_said("joined")
        served: list[int] = []
        for number in range(joins):
            joiner = fleet.worker(f"j{number}", seed=9, hidden=HIDDEN, agent=agent, outer_steps=0)
            joiner.wait_said("joined")
            assert joiner.end() == 0
            served.append(len(trains.heard))
        reached = [m["number"] for m in trains.heard if m["say"] == "round"][-1] + 5
        enough = max(rounds, reached)
        trains.wait(lambda m: m["say"] == "round" and m["number"] >= enough, f"{enough} rounds")
        trains.command(do="finish")
        trains.wait_said("ended")
        assert trains.end() == 0
    assert sum(m["served"] for m in trains.heard if m["say"] == "round") >= joins, (
        "hardly a round had somebody to serve"
    )
    after_first = [m for m in trains.heard[served[0] : served[1]] if m["say"] == "round"]
    after_last = [m for m in trains.heard[served[-1] :] if m["say"] == "round"]
    for what, slack in (("threads", 2), ("children", 0), ("descriptors", 4)):
        before, now = (min(m[what] for m in some) for some in (after_first, after_last))
        assert now <= before + slack, f"{what}: {before} after the first join, {now} after the last"
