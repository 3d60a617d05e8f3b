"""Both ancestors' layouts and torch DCP, written by torch's own code from their descriptions, come back exactly."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt.compose import Strictness, apply_values
from ckpt.interop.cosmos import is_cosmos, iterations, newest_iteration, read_cosmos, write_cosmos
from ckpt.interop.dcp import read_dcp, read_dcp_nested, write_dcp
from ckpt.interop.foreign import Foreign, foreign_of
from ckpt.interop.inert_pickle import read_inert
from ckpt.interop.zeroband import is_zeroband, read_zeroband, write_zeroband
from ckpt.local import LocalStorage
from ckpt.reader import open_checkpoint
from ckpt.writer import write_checkpoint
from recovery.errors import BadConfiguration, CheckpointFailed, CheckpointRejected
from recovery.types import Cut, PartName, Version
from tests.unit.ckpt.power import Quick
from tests.unit.ckpt.states import RUN, W0, same
from tests.unit.ckpt.workers import Worker

Flat = dict[str, object]


def quiet_save(state: dict[str, object], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=path, no_dist=True)


def names_of(worker: Worker) -> list[str]:
    return [name for name, _ in worker.model.named_parameters()]


def flat_optimizer(worker: Worker) -> Flat:
    """Return the inner optimizer as FSDP's ``flatten_optimizer_state_dict`` does."""
    names = names_of(worker)
    state = worker.inner_optimizer.state_dict()
    flat: Flat = {}
    for index, entry in state["state"].items():
        flat.update({f"state.{names[index]}.{key}": value for key, value in entry.items()})
    for group in state["param_groups"]:
        for index in group["params"]:
            options = {key: value for key, value in group.items() if key != "params"}
            flat.update({f"param_groups.{names[index]}.{key}": value for key, value in options.items()})
    return flat


def golden_zeroband(root: Path, worker: Worker, *, older: bool = False) -> Path:
    """Write a step folder as zeroband's description says."""
    step = root / f"step_{worker.state.local_progress.inner_step}"
    folder = step / "diloco_0" if older else step
    progress = worker.state.run_progress
    quiet_save(
        {
            "model": worker.model.state_dict(),
            "optimizer": flat_optimizer(worker),
            "scheduler": worker.scheduler.state_dict(),
            "training_progress": {
                "total_tokens": progress.tokens,
                "outer_step": progress.outer_step,
                "step": worker.state.local_progress.inner_step,
            },
        },
        folder,
    )
    torch.save({"optimizer": worker.outer_optimizer.state_dict()}, folder / "__0_0.pt")
    (folder / "data").mkdir()
    torch.save({"data_loader": worker.data.state_dict()}, folder / "data" / "_0.pt")
    return step


def golden_cosmos(root: Path, worker: Worker, *, mp_rank: int | None = None) -> None:
    """Write an iteration as Cosmos's description says."""
    root.mkdir(exist_ok=True)
    suffix = "" if mp_rank is None else f"_mp_{mp_rank}"
    for key, state in (
        ("model", worker.model.state_dict()),
        ("optim", worker.inner_optimizer.state_dict()),
        ("scheduler", worker.scheduler.state_dict()),
    ):
        torch.save(state, root / f"iter_000001000_{key}{suffix}.pt")
    trainer = {"grad_scaler": {"scale": 65536.0, "_growth_tracker": 3}, "iteration": 1000, "ema": {"beta": 0.9}}
    torch.save(trainer, root / "iter_000001000.pt")
    (root / "iter_000001000_trained_data_record.json").write_text('{"image": 12, "video": 3}')
    (root / "latest_checkpoint.txt").write_text("iter_000001000.pt\n")


def apply(worker: Worker, foreign: Foreign, leave: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Load another system's checkpoint into a worker, strictly."""
    values = {name: value for name, value in foreign.values.items() if name not in leave}
    return apply_values(
        worker.state,
        values,
        strictness=Strictness.STRICT,
        run_id=RUN,
        worker=W0,
        cut=Cut(Version(1, foreign.outer_step)),
    ).differences


def through_ours(tmp_path: Path, foreign: Foreign) -> Foreign:
    """Save as a checkpoint of ours, and read that."""
    storage = LocalStorage(tmp_path / "ours", Quick())
    source = foreign.source(run_id=RUN, worker=W0)
    write_checkpoint(storage, [source], records=foreign.records)
    version = source.manifest.cut.version
    with (
        open_checkpoint(storage, version, run_id=RUN) as replicated,
        open_checkpoint(storage, version, run_id=RUN, worker_id=W0.worker_id) as private,
    ):
        return foreign_of([replicated, private])


def assert_continues(worker: Worker, fresh: Worker) -> None:
    """The model, both optimizers and the scheduler are equal, and so is the next outer step."""
    for a, b in ((worker.model, fresh.model), (worker.scheduler, fresh.scheduler)):
        assert same(dict(a.state_dict()), dict(b.state_dict()))
    for one, other in (
        (worker.inner_optimizer, fresh.inner_optimizer),
        (worker.outer_optimizer, fresh.outer_optimizer),
    ):
        assert same(one.state_dict()["state"], other.state_dict()["state"])
    fresh.data.at = worker.data.at
    worker.train()
    fresh.train()
    assert same(dict(worker.model.state_dict()), dict(fresh.model.state_dict()))


@pytest.mark.parametrize("older", [False, True])
def test_zeroband_loads_bit_exactly(tmp_path: Path, older: bool) -> None:
    worker = Worker(1).train(2)
    step = golden_zeroband(tmp_path, worker, older=older)
    assert is_zeroband(step)
    foreign = read_zeroband(step)
    assert foreign.outer_step == 2
    fresh = Worker(2)
    assert apply(fresh, foreign, leave=("data_loader",)) == ()
    assert fresh.state.run_progress.tokens == 200
    assert fresh.state.local_progress.inner_step == 6
    assert foreign.values[PartName("data_loader")] == {"at": 6}
    assert_continues(worker, fresh)


def test_zeroband_there_and_back(tmp_path: Path) -> None:
    step = golden_zeroband(tmp_path / "theirs", Worker(1).train(2))
    foreign = through_ours(tmp_path, read_zeroband(step))
    back = write_zeroband(tmp_path / "back", foreign)
    assert back.name == step.name
    assert same(read_dcp(step), read_dcp(back)) or dict_equal(read_dcp(step), read_dcp(back))
    for name in ("__0_0.pt", "data/_0.pt"):
        mine, theirs = (torch.load(folder / name, weights_only=True) for folder in (back, step))
        assert dict_equal(mine, theirs)


def dict_equal(a: object, b: object) -> bool:
    """Return whether two trees are equal whatever the order of dict entries."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(dict_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(dict_equal(x, y) for x, y in zip(a, b, strict=True))
    return same(a, b)


def test_cosmos_loads_bit_exactly(tmp_path: Path) -> None:
    worker = Worker(1).train(2)
    golden_cosmos(tmp_path / "c", worker)
    assert is_cosmos(tmp_path / "c")
    foreign = read_cosmos(tmp_path / "c", parameter_names=names_of(worker))
    assert foreign.records == {"trained_data_record": {"image": 12, "video": 3}}
    fresh = Worker(2)
    assert apply(fresh, foreign, leave=("trainer",)) == ()
    assert fresh.state.local_progress.inner_step == 1000
    assert same(dict(fresh.model.state_dict()), dict(worker.model.state_dict()))
    assert same(fresh.inner_optimizer.state_dict()["state"], worker.inner_optimizer.state_dict()["state"])


def test_cosmos_sets_the_schedulers_epoch_where_asked(tmp_path: Path) -> None:
    worker = Worker(1).train(2)
    golden_cosmos(tmp_path / "c", worker)
    foreign = read_cosmos(tmp_path / "c", parameter_names=names_of(worker), epoch_from_iteration=True)
    fresh = Worker(2)
    apply(fresh, foreign, leave=("trainer",))
    assert fresh.scheduler.last_epoch == 1000
    assert foreign.outer_step == 1000


def test_cosmos_there_and_back(tmp_path: Path) -> None:
    worker = Worker(1).train(2)
    golden_cosmos(tmp_path / "c", worker)
    foreign = through_ours(tmp_path, read_cosmos(tmp_path / "c", parameter_names=names_of(worker)))
    assert write_cosmos(tmp_path / "back", foreign) == 1000
    for key in ("_model", "_optim", "_scheduler", ""):
        name = f"iter_000001000{key}.pt"
        mine, theirs = (torch.load(tmp_path / folder / name, weights_only=True) for folder in ("back", "c"))
        mine.pop("diloco", None)
        assert dict_equal(dict(mine), dict(theirs)), name
    assert json.loads((tmp_path / "back" / "iter_000001000_trained_data_record.json").read_text())["image"] == 12
    assert (tmp_path / "back" / "latest_checkpoint.txt").read_text() == "iter_000001000.pt\n"


def test_cosmos_under_model_parallelism(tmp_path: Path) -> None:
    workers = [Worker(seed).train() for seed in (1, 2)]
    for rank, worker in enumerate(workers):
        golden_cosmos(tmp_path / "c", worker, mp_rank=rank)
    for rank, worker in enumerate(workers):
        foreign = read_cosmos(tmp_path / "c", mp_rank=rank, parameter_names=names_of(worker))
        fresh = Worker(9)
        apply(fresh, foreign, leave=("trainer",))
        assert same(dict(fresh.model.state_dict()), dict(worker.model.state_dict()))
        write_cosmos(tmp_path / "back", foreign, mp_rank=rank)
    assert iterations(tmp_path / "back", mp_rank=1) == [1000]


def test_the_pointer_of_cosmos_is_a_hint(tmp_path: Path) -> None:
    golden_cosmos(tmp_path / "c", Worker(1).train())
    for text in ("iter_000009999.pt\n", "nonsense", ""):
        (tmp_path / "c" / "latest_checkpoint.txt").write_text(text)
        assert newest_iteration(tmp_path / "c") == 1000
    (tmp_path / "c" / "latest_checkpoint.txt").unlink()
    assert newest_iteration(tmp_path / "c") == 1000
    with pytest.raises(BadConfiguration, match="no complete iteration 7"):
        read_cosmos(tmp_path / "c", iteration=7)
    (tmp_path / "c" / "iter_000001000_optim.pt").unlink()
    with pytest.raises(CheckpointRejected, match="no complete iteration"):
        newest_iteration(tmp_path / "c")


def test_names_are_asked_for_where_an_index_does_not_tell(tmp_path: Path) -> None:
    golden_cosmos(tmp_path / "c", Worker(1).train())
    with pytest.raises(BadConfiguration, match="give the names"):
        read_cosmos(tmp_path / "c")


def test_zeroband_to_cosmos_and_back_loses_nothing(tmp_path: Path) -> None:
    worker = Worker(1).train(2)
    step = golden_zeroband(tmp_path / "theirs", worker)
    first = read_zeroband(step)
    write_cosmos(tmp_path / "c", first)
    second = read_cosmos(tmp_path / "c")
    third = write_zeroband(tmp_path / "back", Foreign(values=second.values, outer_step=second.outer_step))
    assert dict_equal(read_dcp(step), read_dcp(third))
    outer = [torch.load(folder / "__0_0.pt", weights_only=True) for folder in (step, third)]
    assert dict_equal(outer[0], outer[1])


def test_ours_to_zeroband_and_back_trains_on_bit_for_bit(tmp_path: Path) -> None:
    worker = Worker(1).train(2)
    storage = LocalStorage(tmp_path / "root", Quick())
    worker.save(storage)
    with (
        open_checkpoint(storage, Version(1, 2)) as replicated,
        open_checkpoint(storage, Version(1, 2), worker_id=W0.worker_id) as private,
    ):
        step = write_zeroband(tmp_path / "z", foreign_of([replicated, private]))
    fresh = Worker(2)
    foreign = read_zeroband(step)
    assert apply(fresh, foreign, leave=("data_loader",)) == ()
    assert_continues(worker, fresh)


def test_dcp_there_and_back_with_nesting(tmp_path: Path) -> None:
    state: dict[str, object] = {
        "a": {"b": torch.arange(6).view(2, 3), "list": [torch.ones(2), 3, {"deep": "text"}]},
        "n": 5,
        "half": torch.randn(3).bfloat16(),
        "zero": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    quiet_save(state, tmp_path / "d")
    assert dict_equal(read_dcp_nested(tmp_path / "d"), state)
    flat = read_dcp(tmp_path / "d")
    write_dcp(tmp_path / "e", flat)
    assert dict_equal(read_dcp(tmp_path / "e"), flat)
    with pytest.raises(CheckpointFailed, match="already"):
        write_dcp(tmp_path / "e", flat)


def shards_on_two_ranks(path: Path) -> torch.Tensor:
    """Write what two ranks of DCP write for one tensor that is sharded over them."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    whole = torch.arange(20.0).view(5, 4)
    path.mkdir()
    chunks, stored = [], {}
    for rank, rows in enumerate((slice(0, 3), slice(3, 5))):
        name = f"__{rank}_0.distcp"
        torch.save(whole[rows].clone(), path / name)
        offset = torch.Size((rows.start, 0))
        chunks.append(ChunkStorageMetadata(offset, whole[rows].shape))
        length = (path / name).stat().st_size
        stored[MetadataIndex("model.w", offset, rank)] = _StorageInfo(name, 0, length)
    entry = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, chunks)
    metadata = Metadata({"model.w": entry}, None, stored)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return whole


def test_dcp_shards_are_put_together_and_a_gap_is_refused(tmp_path: Path) -> None:
    whole = shards_on_two_ranks(tmp_path / "d")
    assert same(read_dcp(tmp_path / "d"), {"model.w": whole})
    torch.save(whole[3:4].clone(), tmp_path / "d" / "__1_0.distcp")
    with pytest.raises(CheckpointRejected):
        read_dcp(tmp_path / "d")


class Bomb:
    """An object whose unpickling runs a command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


def test_metadata_that_brings_code_is_data_only(tmp_path: Path) -> None:
    """pytorch/pytorch: DCP reads ``.metadata`` with pickle.load; here nothing in it is ever called."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(CheckpointRejected, match="does not describe a DCP checkpoint"):
        read_dcp(tmp_path / "d")
    assert not (tmp_path / "exploded").exists()


def test_a_file_that_brings_code_is_refused_unless_one_says_so(tmp_path: Path) -> None:
    worker = Worker(1).train()
    step = golden_zeroband(tmp_path, worker)
    torch.save({"data_loader": Bomb(tmp_path / "exploded")}, step / "data" / "_0.pt")
    with pytest.raises(CheckpointRejected, match="allow_pickle"):
        read_zeroband(step)
    assert not (tmp_path / "exploded").exists()
    read_zeroband(step, allow_pickle=True)
    assert (tmp_path / "exploded").exists()  # the proof that the bomb was live


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"not a pickle", b"\x80\x04.", b"\x80\x04]\x94(K\x01e.", b"cos\nsystem\n."]
)
def test_metadata_that_is_no_metadata(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointRejected):
        read_dcp(tmp_path)


def test_a_place_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    shards_on_two_ranks(tmp_path / "d")
    (tmp_path / "stolen").write_bytes((tmp_path / "d" / "__0_0.distcp").read_bytes())
    content = (tmp_path / "d" / ".metadata").read_bytes().replace(b"__0_0.distcp", b"../stolen\0\0\0")
    (tmp_path / "d" / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointRejected, match="outside"):
        read_dcp(tmp_path / "d")


def test_the_inert_reader_agrees_with_pickle_on_plain_values() -> None:
    value = {"a": [1, -5, 2**70, 1.5, None, True], "b": ("x", "y"), 4: {}, "long": list(range(300))}
    for protocol in range(2, 6):
        assert read_inert(pickle.dumps(value, protocol), "here") == value
    newer = {"set": {3, 4}, "bytes": b"y"}  # protocols before 4 make these by calls
    for protocol in (4, 5):
        assert read_inert(pickle.dumps(newer, protocol), "here") == newer


def test_torchs_golden_file_of_another_protocol_is_read(tmp_path: Path) -> None:
    """pytorch/pytorch#133923: a checkpoint of torch 2.3 was not readable in 2.4. Fields may be absent or more."""
    from torch.distributed.checkpoint.metadata import Metadata

    whole = shards_on_two_ranks(tmp_path / "d")
    metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())  # noqa: S301 - written above
    assert isinstance(metadata, Metadata)
    del metadata.__dict__["storage_meta"]
    metadata.__dict__["unheard_of"] = 1
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata, 2))
    assert same(read_dcp(tmp_path / "d"), {"model.w": whole})


def test_a_model_alone_is_a_state_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    quiet_save({"model": model.state_dict()}, tmp_path / "step_0")
    foreign = read_zeroband(tmp_path / "step_0")
    assert same(dict(foreign.values[PartName("outer_params")]), dict(model.state_dict()))  # type: ignore[call-overload]
