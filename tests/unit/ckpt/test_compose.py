"""Loading what does not fit exactly: reported or lenient, and onto another number of local ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckpt.compose import Strictness
from ckpt.local import LocalStorage
from ckpt.source import CheckpointSource
from ckpt.values import live_source
from ckpt.writer import write_checkpoint
from recovery.errors import LayoutMismatch
from recovery.events import Recorder
from recovery.state.parts import WorkerState
from recovery.types import Cut, Incarnation, Version, WorkerId, WorkerRef
from tests.unit.ckpt.power import Quick
from tests.unit.ckpt.states import RUN, W0, storage
from tests.unit.ckpt.workers import Worker, differences


class Longer(Worker):
    """The same worker with one more layer."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        torch.manual_seed(seed)
        self.model.append(nn.Linear(2, 2))
        self.outer = [p.detach().clone().requires_grad_() for p in self.model.parameters()]
        self.outer_optimizer = torch.optim.SGD(self.outer, lr=0.7, momentum=0.9, nesterov=True)
        self.inner_optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.inner_optimizer, lambda n: 1 / (1 + n))
        self.state = WorkerState(
            live=self.model,
            outer_params=self.outer,
            outer_optimizer=self.outer_optimizer,
            inner_optimizer=self.inner_optimizer,
            scheduler=self.scheduler,
        )


def restore(root: LocalStorage, state: WorkerState, strictness: Strictness, worker: WorkerRef = W0):  # type: ignore[no-untyped-def]
    source = CheckpointSource(root, run_id=RUN, worker=worker, events=Recorder())
    return source.restore(state, strictness=strictness)


def test_strict_names_every_difference_and_changes_nothing(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    longer = Longer(2)
    before = [p.clone() for p in longer.model.parameters()]
    with pytest.raises(LayoutMismatch, match=r"3\.weight"):
        restore(root, longer.state, Strictness.STRICT)
    assert all(a.equal(b) for a, b in zip(before, longer.model.parameters(), strict=True))


def test_report_lists_and_changes_nothing(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    longer = Longer(2)
    before = [p.clone() for p in longer.model.parameters()]
    restored = restore(root, longer.state, Strictness.REPORT)
    assert any("outer_params/3.weight: missing" in line for line in restored.differences)
    assert restored.num_tensors == 0
    assert all(a.equal(b) for a, b in zip(before, longer.model.parameters(), strict=True))


def test_lenient_loads_what_fits_and_lists_the_rest(tmp_path: Path) -> None:
    root = storage(tmp_path)
    trained = Worker(1).train(2)
    trained.save(root)
    longer = Longer(2)
    kept = longer.model.get_parameter("3.weight").detach().clone()
    restored = restore(root, longer.state, Strictness.LENIENT)
    assert {line.split(":")[0] for line in restored.differences} >= {
        "outer_params/3.weight",
        "outer_params/3.bias",
    }
    for name, tensor in trained.model.named_parameters():
        assert longer.model.get_parameter(name).equal(tensor)
    assert longer.model.get_parameter("3.weight").equal(kept)
    state = longer.inner_optimizer.state_dict()["state"]
    assert len(state) == 6  # the new layer's moments are made when it is first stepped
    assert state[0]["exp_avg"].equal(trained.inner_optimizer.state_dict()["state"][0]["exp_avg"])
    assert longer.scheduler.last_epoch == trained.scheduler.last_epoch
    longer.train()


def test_lenient_keeps_its_own_where_a_shape_differs(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    wider = Worker(2, width=9)
    before = wider.model.get_parameter("0.weight").detach().clone()
    restored = restore(root, wider.state, Strictness.LENIENT)
    assert any(
        line.startswith("outer_params/0.weight: float32 [8, 4] in the checkpoint, float32 [9, 4]")
        for line in restored.differences
    )
    assert wider.model.get_parameter("0.weight").equal(before)
    assert wider.model.get_parameter("2.bias").equal(wider.outer[5])


def test_lenient_without_differences_is_exact(tmp_path: Path) -> None:
    root = storage(tmp_path)
    trained = Worker(1).train(2)
    trained.save(root)
    fresh = Worker(2)
    restored = restore(root, fresh.state, Strictness.LENIENT)
    assert restored.differences == ()
    assert differences(trained, fresh) == []
    assert differences(trained.train(), fresh.train()) == []


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Be one rank of a group that never communicates, so that one process can hold each rank's shards in turn."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(full: dict[str, torch.Tensor], size: int) -> tuple[WorkerState, torch.optim.Optimizer]:
    """Return this rank's state: parameters sharded along their first dimension, moments too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    # Named after the rank: torch keeps specs of equal meshes, and would give this rank another one's coordinate.
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(f"rank{dist.get_rank()}",))
    outer = {}
    for name, tensor in full.items():
        pieces = list(torch.chunk(tensor, size))
        local = pieces[dist.get_rank()].clone()
        made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())
        outer[name] = nn.Parameter(made)
    optimizer = torch.optim.AdamW(outer.values(), lr=0.1)
    return WorkerState(outer_params=outer, inner_optimizer=optimizer), optimizer


def fill_moments(state: WorkerState, optimizer: torch.optim.Optimizer, full: dict[str, torch.Tensor]) -> None:
    for (name, parameter), seed in zip(state.read_outer_params().items(), range(9), strict=False):
        from torch.distributed.tensor import DTensor

        assert isinstance(parameter, DTensor)
        moments = {}
        for offset, key in enumerate(("exp_avg", "exp_avg_sq")):
            whole = moment(full[name], seed * 10 + offset)
            local = list(torch.chunk(whole, dist.get_world_size()))[dist.get_rank()]
            moments[key] = DTensor.from_local(
                local.clone(),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        optimizer.state[optimizer.param_groups[0]["params"][seed]] = {"step": torch.tensor(4.0), **moments}


def moment(like: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("saved_by", "restored_by"), [(2, 2), (2, 4), (4, 2), (2, 1), (1, 2)])
def test_another_number_of_local_ranks_takes_its_share(tmp_path: Path, saved_by: int, restored_by: int) -> None:
    """By the manifest's global offsets: parameters, moments, and moments that the new worker does not have yet."""
    root = LocalStorage(tmp_path / "root", Quick())
    full = {"weight": moment(torch.empty(8, 3), 77), "bias": moment(torch.empty(8), 78)}
    for rank in range(saved_by):
        ref = WorkerRef(WorkerId("w0"), Incarnation("i"), rank, saved_by)
        with as_rank(rank, saved_by):
            state, optimizer = sharded(full, saved_by)
            fill_moments(state, optimizer, full)
            state.run_progress.outer_step = 5
            parts = [state.read_part(name) for name in state.part_names]
            write_checkpoint(root, [live_source(parts, run_id=RUN, worker=ref, cut=Cut(Version(1, 5)))])
    for rank in range(restored_by):
        ref = WorkerRef(WorkerId("w0"), Incarnation("j"), rank, restored_by)
        with as_rank(rank, restored_by):
            fresh, optimizer = sharded({name: torch.zeros_like(t) for name, t in full.items()}, restored_by)
            restored = restore(root, fresh, Strictness.STRICT, ref)
            assert restored.version == Version(1, 5)
            assert fresh.run_progress.outer_step == 5
            for index, (name, parameter) in enumerate(fresh.read_outer_params().items()):
                local = parameter._local_tensor  # type: ignore[attr-defined]
                assert local.equal(list(torch.chunk(full[name], restored_by))[rank])
                moments = optimizer.state[optimizer.param_groups[0]["params"][index]]
                for offset, key in enumerate(("exp_avg", "exp_avg_sq")):
                    whole = moment(full[name], index * 10 + offset)
                    expected = list(torch.chunk(whole, restored_by))[rank]
                    assert moments[key]._local_tensor.equal(expected)
                assert moments["step"].item() == 4.0
