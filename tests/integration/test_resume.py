"""Everybody gone: the newest verified checkpoint is resumed at its own step under a new lineage, bit for bit."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from ckpt.catalog import Catalog
from ckpt.local import LocalStorage
from protos.recovery.v1 import coordinator_pb2, manifest_pb2
from recovery.control.inputs import Attached, Effect, Input, Received, Tell
from recovery.control.wire import to_proto
from recovery.events import Recorder
from recovery.state.tree import join
from recovery.types import Version
from recovery.worker import Agent, AgentConfig, chain
from tests.support.boundary_faults import REPLICATED, newest, stopped, wait_commit
from tests.support.coordinators import RUN, coordinator
from tests.support.fleet import Fleet, Worker
from tests.support.scripted_machine import ScriptedMachine, welcoming
from tests.support.toy import Toy

PARTS = ("outer_params", "outer_optimizer", "run_progress", "inner_optimizer", "scheduler", "buffers", "position")


def saved(worker: Worker, version: str, folder: Path) -> None:
    """Wait until ``version`` is on disk: replicated parts and this worker's private ones."""
    lineage, step = version.removeprefix("L").split(".k")
    root = folder / f"step_{lineage}_{step}"
    for url in (root, root / f"worker_{worker.name}"):
        worker.wait_event("CheckpointSaved", url=url)


def end_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.end()


def test_one_worker_resumes_from_disk_under_a_new_lineage(tmp_path: Path) -> None:
    """Field report: nicholicaron/ft-diloco, after a kill a fresh worker's random weights became the run's state."""
    disk = tmp_path / "ckpt"
    agent: dict[str, Any] = {"checkpoint_url": str(disk)}
    with Fleet(tmp_path, "--expected-return", "1") as fleet:
        origin = fleet.worker("w0", seed=0, agent=agent, step_seconds=0.05)
        origin.wait_boundary(2)
        saved(origin, "L1.k2", disk)
        end_all([origin])
        resumed = fleet.worker("w0", seed=7, agent=agent, step_seconds=0.05)
        joined = resumed.wait_said("joined")
        lineage, step = joined["version"].removeprefix("L").split(".k")
        assert lineage == "2"
        assert int(step) >= 2
        at_cut = origin.boundaries()[f"L1.k{step}"]
        assert [name for name in PARTS if joined["parts"][name] != at_cut[name]] == []
        restored = resumed.wait_event("StateRestored")
        assert restored["source"] == "disk"
        with fleet.operator() as operator:
            listed = operator.list()
        assert [(entry.lineage, entry.cause) for entry in listed.lineages] == [(1, "origin"), (2, "resume")]
        # The run goes on under the new lineage, and others join it there.
        other = fleet.worker("w1", seed=1, agent=agent, step_seconds=0.05)
        assert other.wait_said("joined")["version"].startswith("L2.")
        resumed.wait_boundary(int(step) + 2)


def test_a_finished_run_ends_with_its_last_step_on_disk(tmp_path: Path) -> None:
    """The loop is left right after the last boundary, before the run has sealed that step."""
    disk = tmp_path / "ckpt"
    agent: dict[str, Any] = {"checkpoint_url": str(disk)}
    with Fleet(tmp_path, "--expected-workers", "2") as fleet:
        workers = [fleet.worker(f"w{number}", seed=number, agent=agent, outer_steps=3) for number in range(2)]
        assert [worker.end() for worker in workers] == [0, 0]
    newest = Catalog(LocalStorage(disk)).newest()
    assert newest is not None
    assert str(newest.version) == "L1.k3"
    assert newest.workers == ("w0", "w1")


def test_another_worker_never_takes_a_strangers_data_position(tmp_path: Path) -> None:
    """Field report: pytorch/torchft#58, the donor's shard position is copied as one's own."""
    disk = tmp_path / "ckpt"
    agent: dict[str, Any] = {"checkpoint_url": str(disk)}
    with Fleet(tmp_path, "--expected-return", "1") as fleet:
        origin = fleet.worker("w0", seed=0, agent=agent, step_seconds=0.05)
        origin.wait_boundary(1)
        saved(origin, "L1.k1", disk)
        end_all([origin])
        stranger = fleet.worker("w9", seed=9, agent=agent, step_seconds=0.05)
        joined = stranger.wait_said("joined")
        at_cut = origin.boundaries()[joined["version"].replace("L2.", "L1.")]
        assert joined["parts"]["inner_optimizer"] == at_cut["inner_optimizer"]
        assert joined["parts"]["position"] != at_cut["position"]


def test_policy_refuse_refuses(tmp_path: Path) -> None:
    disk = tmp_path / "ckpt"
    agent: dict[str, Any] = {"checkpoint_url": str(disk), "recover_timeout_seconds": 10.0}
    with Fleet(tmp_path, "--expected-return", "1", "--on-all-gone", "refuse") as fleet:
        origin = fleet.worker("w0", seed=0, agent=agent, step_seconds=0.05)
        origin.wait_boundary(1)
        saved(origin, "L1.k1", disk)
        end_all([origin])
        refused = fleet.worker("w0", seed=7, agent=agent)
        assert refused.end() == 1
        assert "refuse" in refused.wait_said("error")["message"]


def test_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """Field report: pytorch/torchtitan#4011, a flipped bit in a checkpoint is loaded without an error."""
    disk = tmp_path / "ckpt"
    agent: dict[str, Any] = {"checkpoint_url": str(disk)}
    with Fleet(tmp_path, "--expected-return", "1") as fleet:
        origin = fleet.worker("w0", seed=0, agent=agent, step_seconds=0.05)
        origin.wait_boundary(3)
        saved(origin, "L1.k3", disk)
        end_all([origin])
        newest = max(disk.glob("step_1_*"), key=lambda folder: int(folder.name.split("_")[2]))
        damaged = next(newest.rglob("outer_params*.safetensors"))
        content = bytearray(damaged.read_bytes())
        content[-3] ^= 4
        damaged.write_bytes(content)
        resumed = fleet.worker("w0", seed=7, agent=agent, step_seconds=0.05)
        joined = resumed.wait_said("joined")
        skipped = resumed.wait_event("CheckpointSkipped")
        assert newest.name in skipped["url"]
        assert int(joined["version"].split(".k")[1]) < int(newest.name.split("_")[2])


def test_replaced_worker_draws_on_from_its_last_committed_boundary(tmp_path: Path) -> None:
    """Field reports: NousResearch/nousnet#20 (batches of a kicked client are lost), prime-diloco#98 (shards repeat)."""
    with Fleet(tmp_path) as fleet:
        workers = [fleet.worker(f"w{i}", seed=i, step_seconds=0.1) for i in range(2)]
        for worker in workers:
            worker.wait_boundary(2)
        victim = workers[1]
        victim.process.kill()
        victim.end()
        recorded = {version: parts["position"] for version, parts in victim.boundaries().items()}
        newest = max(recorded, key=lambda version: int(version.split(".k")[1]))
        again = fleet.worker("w1", seed=77, step_seconds=0.1)
        joined = again.wait_said("joined")
        assert joined["parts"]["position"] == recorded[newest]
        assert again.wait_event("StateRestored")["source"] == "peers"


def test_frozen_worker_of_the_old_lineage_becomes_a_joiner_when_it_thaws(tmp_path: Path) -> None:
    """Field report: nicholicaron/ft-diloco, what came back late was believed."""
    disk = tmp_path / "ckpt"
    with Fleet(tmp_path, "--expected-return", "1") as fleet:
        keeper = fleet.worker("w0", seed=0, agent={"checkpoint_url": str(disk)}, step_seconds=0.05)
        frozen = fleet.worker("w1", seed=1, step_seconds=0.05)
        for worker in (keeper, frozen):
            wait_commit(worker, 2)
        frozen.signal(signal.SIGSTOP)
        stopped(frozen.process)
        reached = max(newest(keeper), newest(frozen)) + 1
        wait_commit(keeper, reached)  # alone: the other is known to be lost
        saved(keeper, f"L1.k{reached}", disk)
        end_all([keeper])
        again = fleet.worker("w0", seed=7, agent={"checkpoint_url": str(disk)}, step_seconds=0.05)
        assert again.wait_said("joined")["version"].startswith("L2.")
        since = len(frozen.heard)
        frozen.signal(signal.SIGCONT)
        restored = frozen.wait(lambda m: m.get("event") == "StateRestored", "took a state on waking", since=since)
        assert restored["source"] == "peers"
        assert restored["version"].startswith("L2.")
        back = frozen.wait(
            lambda m: m["say"] == "boundary" and m["version"].startswith("L2."), "a boundary", since=since
        )
        same = again.wait(lambda m: m["say"] == "boundary" and m["version"] == back["version"], "the same boundary")
        assert [part for part in REPLICATED if back["parts"][part] != same["parts"][part]] == []


def drawn(parts: dict[str, str]) -> int:
    """Return how many samples a worker had drawn, from what it says of its data position."""
    tree = manifest_pb2.Value.FromString(bytes.fromhex(parts["position"].split("/")[0]))
    value = join(tree, [])
    assert isinstance(value, dict)
    return int(value["drawn"])


def test_a_run_that_went_back_draws_the_lost_steps_samples_again(tmp_path: Path) -> None:
    """The ledger of one worker's samples: none twice in the history that counts, none left out of it.

    Field report: NousResearch/nousnet#20 (batches of a kicked client are lost).
    """
    disk = tmp_path / "ckpt"
    pace: dict[str, Any] = {"step_seconds": 0.1}
    with Fleet(tmp_path, "--expected-return", "1") as fleet:
        keeper = fleet.worker("w1", seed=0, agent={"checkpoint_url": str(disk), "checkpoint_keep": 50}, **pace)
        other = fleet.worker("w0", seed=1, **pace)  # has no disk: only the coordinator knows where it stood
        for worker in (keeper, other):
            worker.wait_boundary(4)
        saved(keeper, "L1.k4", disk)
        before = {version: drawn(parts) for version, parts in other.boundaries().items()}
        end_all([keeper, other])
        for folder in disk.glob("step_1_*"):
            if int(folder.name.split("_")[2]) > 2:
                shutil.rmtree(folder)
        keeper = fleet.worker("w1", seed=7, agent={"checkpoint_url": str(disk), "checkpoint_keep": 50}, **pace)
        kept = keeper.wait_said("joined")["version"].replace("L2.", "L1.")
        assert kept in ("L1.k1", "L1.k2")
        again = fleet.worker("w0", seed=8, **pace)
        joined = again.wait_said("joined")
        assert drawn(joined["parts"]) == before[kept] < before["L1.k4"]
        # The same for a live worker: it goes back to what it had drawn when the run was there.
        again.wait_boundary(5)
        reached = {version: drawn(parts) for version, parts in again.boundaries().items()}
        with fleet.operator() as operator:
            operator.rollback(Version(2, int(kept[4:]) + 1), timeout_seconds=60.0)
        back = again.wait(
            lambda m: m["say"] == "boundary" and m["version"].startswith("L3."), "a boundary of the third lineage"
        )
        start = reached.get(f"L2.k{int(kept[4:]) + 1}", before[kept])
        assert start < drawn(back["parts"]) <= start + 8 * 10 * (int(back["version"][4:]) - int(kept[4:]) - 1)


def test_checkpoint_offer_that_nobody_wants_any_more_is_not_waited_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked on one stream, answered on the next, where the coordinator takes the worker for ready: it asks again."""
    monkeypatch.setattr(chain, "_ASK_AGAIN_SECONDS", 0.3)

    def script(event: Input) -> list[Effect]:
        message = coordinator_pb2.CoordinatorMessage()
        match event:
            case Attached(worker=worker):
                message.no_donor.CopyFrom(coordinator_pb2.NoDonor(expected=True, resume_from_disk=True))
                return [*welcoming(event), Tell(worker, message)]
            case Received(worker=worker, message=said) if said.HasField("recovery_request"):
                message.become_origin.version.CopyFrom(to_proto(Version(2, 0)))
                return [Tell(worker, message)]
            case _:
                return []

    with coordinator(tmp_path, ScriptedMachine(script)) as server:
        config = AgentConfig(
            coordinator=f"127.0.0.1:{server.port}",
            run_id=RUN,
            worker_id="w0",
            inner_steps_per_phase=1,
            data_host="127.0.0.1",
            recover_timeout_seconds=60.0,
        )
        with Agent(Toy(8, 0).state, config, events=Recorder()) as agent:
            assert agent.version == Version(2, 0)
