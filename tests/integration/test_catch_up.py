"""Joiners whose transfer takes longer than a phase, in real processes over capped links: they catch up."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import WAIT_SECONDS, Fleet, Worker

REPLICATED = ("outer_params", "outer_optimizer", "run_progress")
SLOW: dict[str, Any] = {
    "hidden": 120_000,
    "step_seconds": 0.1,
    "agent": {"inner_steps_per_phase": 30, "recover_timeout_seconds": 80.0},
}
"""22 MB of outer parts, 11 MB an entry, 23 MB of private parts, phases of 3 s."""
PERIOD_SECONDS = 3.0
RATE = 5_900_000
"""Bytes per second with which the outer copy takes 1.25 periods and an entry 0.625, and the private parts 1.3."""

pytestmark = pytest.mark.timeout(240)


def step_of(version: str) -> int:
    return int(version.split(".k")[1])


def newest(worker: Worker) -> int:
    return max(map(step_of, worker.boundaries()), default=0)


def heard(worker: Worker, event: str) -> list[dict[str, Any]]:
    return [m for m in worker.heard if m.get("event") == event]


def slow(**plan: Any) -> dict[str, Any]:
    """Return the plan of a worker whose state outlives a phase; ``agent`` is added to its settings."""
    return {**SLOW, **plan, "agent": {**SLOW["agent"], **plan.get("agent", {})}}


def start(fleet: Fleet, count: int, donors: int, rate: int = RATE, **plan: Any) -> list[Worker]:
    """Start a run whose first ``donors`` workers serve others, together at ``rate``; return when it has a history."""
    workers = [fleet.worker(f"w{i}", seed=i, **slow(**plan)) for i in range(count)]
    for worker in workers:
        worker.wait_said("joined")
    with fleet.operator() as operator:
        for index, worker in enumerate(workers):
            operator.set_rate(worker.name, rate // donors)
            if index >= donors:
                operator.drain(worker.name)
    since = max(map(newest, workers))
    for worker in workers:
        worker.wait_boundary(since + 2)
    return workers


def assert_joined_bit_equal(joiner: Worker, donor: Worker, boundaries: int = 2) -> None:
    """At admission the joiner held what the donor held at that version, and so it does after the next boundaries."""
    joined = joiner.wait_said("joined")
    reached = joiner.wait_boundary(step_of(joined["version"]) + boundaries)
    donor.wait_boundary(step_of(reached["version"]))
    mine, theirs = {joined["version"]: joined["parts"], **joiner.boundaries()}, donor.boundaries()
    common = sorted(mine.keys() & theirs.keys(), key=step_of)
    assert len(common) > boundaries
    for version in common:
        assert [name for name in REPLICATED if mine[version][name] != theirs[version][name]] == [], version


@pytest.mark.chaos
@pytest.mark.parametrize(("codec", "at_most"), [("plain", 3), ("int8", 2)])
def test_first_roster_soon_after_the_base(tmp_path: Path, codec: str, at_most: int) -> None:
    settings = {"gradient_codec": codec}
    with Fleet(tmp_path) as fleet:
        others = start(fleet, count=2, donors=1, report_steps=True, agent=settings)
        joiner = fleet.worker("w2", seed=2, **slow(agent=settings))
        base = joiner.wait_event("BaseRestored")
        at_base = newest(others[1])
        joined = joiner.wait_said("joined")
        assert step_of(joined["version"]) > step_of(base["version"])
        assert step_of(base["version"]) < at_base, "the transfer was not slower than a phase: nothing was caught up"
        first = joiner.wait_said("boundary")
        late = [
            m["fetch_seconds"] for m in heard(joiner, "CommitReplayed") if m["fetch_seconds"] > 0.8 * PERIOD_SECONDS
        ]
        # Where a busy machine, not the cap, made an entry take longer, that entry may have cost a boundary more.
        assert step_of(first["version"]) - at_base <= at_most + len(late)
        replayed = [step_of(m["version"]) for m in heard(joiner, "CommitReplayed")]
        assert replayed[:2] == [step_of(base["version"]) + 1, step_of(base["version"]) + 2][: len(replayed)]
        assert heard(joiner, "CatchUpRebased") == []
        assert_joined_bit_equal(joiner, others[0])
        cut = (joined["version"], joined["inner_step"])
        assert heard(joiner, "ScalarsRefreshed")[0]["cut"] == f"{cut[0]}+{cut[1]}"
        at_boundary = cut[1] == SLOW["agent"]["inner_steps_per_phase"]
        # A cut at a boundary is seen at the next phase's first step: only progress changes there.
        step = (f"L1.k{step_of(cut[0]) + 1}", 0) if at_boundary else cut
        at_cut = others[0].wait(
            lambda m: m["say"] == "step" and (m["version"], m["inner_step"]) == step, f"a step at {step}"
        )
        assert joined["next_rates"] == at_cut["next_rates"]
        assert len(joined["next_rates"]) == 21
        for name in ("scheduler", "buffers") if at_boundary else ("scheduler", "buffers", "local_progress"):
            assert joined["parts"][name] == at_cut["parts"][name]


def test_donor_killed_while_its_joiner_catches_up(tmp_path: Path) -> None:
    """What is complete stays so: the private parts are not fetched again."""
    with Fleet(tmp_path) as fleet:
        others = start(fleet, count=3, donors=2)
        joiner = fleet.worker("w3", seed=3, halt={"event": "BaseRestored"}, **SLOW)
        halted = joiner.wait_said("halted")
        (donor,) = (w for w in others if heard(w, "SnapshotCaptured"))
        donor.signal(signal.SIGKILL)
        donor.end()
        with fleet.operator() as operator:
            operator.set_rate(next(w.name for w in others[:2] if w is not donor), RATE)
        joiner.command(do="go_on")
        survivor = next(w for w in others[:2] if w is not donor)
        assert_joined_bit_equal(joiner, survivor)
        joined = joiner.wait_said("joined")
        assert step_of(joined["version"]) > step_of(halted["version"])
        between = joiner.heard[joiner.heard.index(halted) : joiner.heard.index(joined)]
        moved = [m for m in between if m.get("event") == "TransferEnded" and m["payload_bytes"] > 20_000_000]
        assert [m["cut"] for m in moved if not m["cut"].endswith("+0")] == []


@pytest.mark.chaos
def test_coordinator_killed_while_a_joiner_catches_up(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        others = start(fleet, count=2, donors=1)
        joiner = fleet.worker("w2", seed=2, halt={"event": "BaseRestored"}, **SLOW)
        joiner.wait_said("halted")
        fleet.stop_coordinator()
        joiner.command(do="go_on")
        joiner.wait_event("TransferStarted", since=len(joiner.heard))  # it asks for the journal, and meets nobody
        fleet.start_coordinator()
        assert_joined_bit_equal(joiner, others[0])


@pytest.mark.chaos
def test_boundary_aborted_while_a_joiner_catches_up(tmp_path: Path) -> None:
    """An epoch that fails leaves no entry; the one that commits does, and is what the joiner replays."""
    with Fleet(tmp_path) as fleet:
        others = start(fleet, count=3, donors=1)
        joiner = fleet.worker("w3", seed=3, halt={"event": "BaseRestored"}, **SLOW)
        base = joiner.wait_said("halted")
        victim = others[2]
        victim.command(do="halt", plan={"event": "BoundaryStage", "when": {"stage": "averaging"}})
        at = victim.wait_said("halted")
        assert step_of(at["version"]) >= step_of(base["version"])
        victim.signal(signal.SIGKILL)
        victim.end()
        joiner.command(do="go_on")
        aborted = step_of(at["version"]) + 1
        others[0].wait_boundary(aborted)
        assert_joined_bit_equal(joiner, others[0])
        rosters = [m["epoch"] for m in heard(others[0], "BoundaryStage") if m["version"] == at["version"]]
        assert len(set(rosters)) > 2, "the epoch was not averaged a second time"


@pytest.mark.chaos
def test_overflow_takes_a_new_base(tmp_path: Path) -> None:
    """A joiner that stood still for so long that its entries are gone fetches a newer base, once."""
    with Fleet(tmp_path) as fleet:
        others = start(fleet, count=2, donors=1)
        joiner = fleet.worker("w2", seed=2, halt={"event": "BaseRestored"}, **SLOW)
        base = joiner.wait_said("halted")
        others[0].wait_boundary(max(newest(others[0]), step_of(base["version"])) + 4)
        joiner.command(do="go_on")
        rebased = joiner.wait_event("CatchUpRebased")
        assert "keeps the averages" in rebased["reason"]
        assert_joined_bit_equal(joiner, others[0])
        assert [m["times"] for m in heard(joiner, "CatchUpRebased")] == [1]


def test_a_link_too_slow_is_not_admitted_and_status_says_what_it_needs(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        others = start(fleet, count=2, donors=1, rate=2_000_000)
        joiner = fleet.worker("w2", seed=2, **SLOW)
        deadline, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
        with fleet.operator() as operator:
            says = ""
            while "not admitted" not in says and time.monotonic() < deadline:
                says = next((w.waiting_for for w in operator.list().workers if w.worker.worker_id == "w2"), "")
                pause.wait(0.1)
            assert "not admitted: the link brings" in says
            assert "needs" in says
            assert not any(m["say"] == "joined" for m in joiner.heard)
            operator.set_rate("w0", 20_000_000)
        assert_joined_bit_equal(joiner, others[0])


@pytest.mark.chaos
def test_a_resync_slower_than_a_phase_ends_well(tmp_path: Path) -> None:
    """A live worker goes through the same steps; until its base is whole it keeps the state that it has."""
    with Fleet(tmp_path) as fleet:
        others = start(fleet, count=3, donors=1)
        victim = others[2]
        done: list[object] = []
        with fleet.operator() as operator:
            ordering = threading.Thread(target=lambda: done.append(operator.resync("w2")))
            ordering.start()
            victim.wait_event("CommitReplayed")
            ordering.join(WAIT_SECONDS)
        assert len(done) == 1
        reached = newest(victim) + 2
        victim.wait_boundary(reached)
        others[0].wait_boundary(reached)
        version = next(v for v in victim.boundaries() if step_of(v) >= reached)
        others[0].wait_boundary(step_of(version))
        mine, theirs = victim.boundaries()[version], others[0].boundaries()[version]
        assert [name for name in REPLICATED if mine[name] != theirs[name]] == []
