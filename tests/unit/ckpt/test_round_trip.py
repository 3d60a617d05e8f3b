"""A checkpoint comes back bit for bit, and its files are plain safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt.catalog import Catalog
from ckpt.layout import is_part_file_name, part_file_name
from ckpt.reader import open_checkpoint
from ckpt.values import source_of, value_of
from ckpt.writer import write_checkpoint
from recovery.errors import BadConfiguration, CheckpointFailed, CheckpointRejected
from recovery.types import Cut, PartClass, PartName, RunId, Version
from tests.unit.ckpt.states import (
    DATA,
    INNER,
    OUTER,
    RUN,
    W0,
    W1,
    private_values,
    replicated_values,
    same,
    source,
    storage,
    values,
)


def test_every_part_comes_back(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(3, large=True)])
    with open_checkpoint(root, Version(1, 3), run_id=RUN) as checkpoint:
        checkpoint.verify()
        for name, (_, value) in replicated_values(3, large=True).items():
            assert same(value_of(checkpoint, name), value)
    with open_checkpoint(root, Version(1, 3), run_id=RUN, worker_id=W0.worker_id) as checkpoint:
        assert set(checkpoint.part_names) == {INNER, DATA}
        for name, (_, value) in private_values(3).items():
            assert same(value_of(checkpoint, name), value)


def test_parts_are_files_that_safetensors_reads(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(3, large=True)])
    loaded = load_file(root.root / "step_1_3" / "replicated" / "outer_params.safetensors")
    params = replicated_values(3, large=True)[OUTER][1]
    assert isinstance(params, dict)
    assert set(loaded) == set(params)
    for name, tensor in params.items():
        if tensor.dtype is torch.complex128:  # not a safetensors dtype: its bytes
            assert loaded[name].dtype is torch.uint8
            continue
        assert same(loaded[name], tensor.contiguous()), name


def test_tensors_are_aligned(tmp_path: Path) -> None:
    """Item sizes fall through the file, so that every tensor stands at a multiple of its own."""
    root = storage(tmp_path)
    write_checkpoint(root, [source(3)])
    raw = (root.root / "step_1_3" / "replicated" / "outer_params.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    assert start % 8 == 0
    for name, tensor in load_file(root.root / "step_1_3" / "replicated" / "outer_params.safetensors").items():
        if tensor.numel():
            at = raw.index(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), start)
            assert at % tensor.itemsize == 0, name


def test_the_folder_holds_what_the_layout_says_and_no_temporary_file(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(3)])
    found = {str(path.relative_to(root.root)) for path in root.root.rglob("*") if path.is_file()}
    step = "step_1_3"
    assert found == {
        "latest",
        f"{step}/manifest.pb",
        f"{step}/run_{RUN}",
        f"{step}/replicated/outer_params.safetensors",
        f"{step}/replicated/outer_optimizer.safetensors",
        f"{step}/replicated/run_progress.safetensors",
        f"{step}/worker_w0/manifest.pb",
        f"{step}/worker_w0/inner_optimizer.safetensors",
        f"{step}/worker_w0/data.safetensors",
    }


def test_long_part_names_get_short_file_names(tmp_path: Path) -> None:
    root = storage(tmp_path)
    names = [PartName("x" * 200), PartName("x" * 199 + "y")]
    of = {name: (PartClass.REPLICATED, {"t": torch.tensor([i])}) for i, name in enumerate(names)}
    write_checkpoint(root, [source(1, of=dict(of))])
    with open_checkpoint(root, Version(1, 1)) as checkpoint:
        for i, name in enumerate(names):
            assert same(value_of(checkpoint, name), {"t": torch.tensor([i])})


def test_names_that_a_file_system_cannot_take_are_quoted() -> None:
    names = ["../up", ".hidden", "a b/c", "x" * 300, "ümlaut", "a\0b", "%2E"]
    files = [part_file_name(name, W0) for name in names]
    assert len(set(files)) == len(files)
    assert all(is_part_file_name(name) and "/" not in name and not name.startswith(".") for name in files)


def test_paths_that_collide_in_a_file_stay_apart(tmp_path: Path) -> None:
    root = storage(tmp_path)
    tree = {"a/b": torch.tensor([1]), "a": {"b": torch.tensor([2])}, "__metadata__": torch.tensor([3])}
    write_checkpoint(root, [source(1, of={OUTER: (PartClass.REPLICATED, tree)})])
    with open_checkpoint(root, Version(1, 1)) as checkpoint:
        assert same(value_of(checkpoint, OUTER), tree)
    assert len(load_file(root.root / "step_1_1" / "replicated" / "outer_params.safetensors")) == 3


def test_an_unchanged_part_is_linked(tmp_path: Path) -> None:
    root = storage(tmp_path)
    first = values(1)
    write_checkpoint(root, [source(1, of=first)])
    second = {**values(2), OUTER: first[OUTER]}
    with open_checkpoint(root, Version(1, 1)) as previous:
        report = write_checkpoint(root, [source(2, of=second)], previous=[previous])[0]
    a, b = (root.root / f"step_1_{k}" / "replicated" / "outer_params.safetensors" for k in (1, 2))
    progress = a.parent / "run_progress.safetensors"  # holds no tensors, so that its file is always the same
    assert report.linked_bytes == a.stat().st_size + progress.stat().st_size
    assert a.samefile(b)
    assert not (a.parent / "outer_optimizer.safetensors").samefile(b.parent / "outer_optimizer.safetensors")


def test_a_damaged_file_is_not_linked_to(tmp_path: Path) -> None:
    root = storage(tmp_path)
    same_values = values(1)
    write_checkpoint(root, [source(1, of=same_values)])
    a, b = (root.root / f"step_1_{k}" / "replicated" / "outer_params.safetensors" for k in (1, 2))
    content = bytearray(a.read_bytes())
    content[-1] ^= 1
    a.write_bytes(content)
    with open_checkpoint(root, Version(1, 1)) as previous:
        write_checkpoint(root, [source(2, of=same_values)], previous=[previous])
    assert not a.samefile(b)
    with open_checkpoint(root, Version(1, 2)) as checkpoint:
        checkpoint.verify()


def test_the_same_checkpoint_again_is_verified_and_not_written(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    before = {path: path.stat().st_ino for path in root.root.rglob("*") if path.name != "latest"}
    reports = write_checkpoint(root, [source(1)])
    assert [report.already_there for report in reports] == [True, True]
    assert before == {path: path.stat().st_ino for path in root.root.rglob("*") if path.name != "latest"}


def test_another_history_does_not_overwrite_a_whole_step(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    with pytest.raises(CheckpointFailed, match="another content"):
        write_checkpoint(root, [source(2, Version(1, 1))])
    with open_checkpoint(root, Version(1, 1)) as checkpoint:
        checkpoint.verify()


def test_a_damaged_step_is_written_anew(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    path = root.root / "step_1_1" / "replicated" / "outer_params.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    write_checkpoint(root, [source(1)])
    with open_checkpoint(root, Version(1, 1)) as checkpoint:
        checkpoint.verify()


def test_a_second_life_replaces_its_private_parts(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1, of=private_values(1))])
    write_checkpoint(root, [source(2, Version(1, 1), of=private_values(2))])
    with open_checkpoint(root, Version(1, 1), worker_id=W0.worker_id) as checkpoint:
        assert same(value_of(checkpoint, DATA), private_values(2)[DATA][1])


def test_two_workers_share_a_step(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    write_checkpoint(root, [source(2, Version(1, 1), of=private_values(2), worker=W1)])
    step = Catalog(root, RUN).get(Version(1, 1))
    assert step.workers == ("w0", "w1")


def test_parts_can_be_chosen_and_excluded_and_unknown_ones_are_errors(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    with open_checkpoint(root, Version(1, 1)) as checkpoint:
        assert checkpoint.chosen([OUTER]) == (OUTER,)
        assert OUTER not in checkpoint.chosen(exclude=[OUTER])
        with pytest.raises(BadConfiguration, match="no part 'modle'"):
            checkpoint.chosen(exclude=[PartName("modle")])
        with pytest.raises(BadConfiguration, match="no part 'modle'"):
            checkpoint.chosen([PartName("modle")])


def test_a_chunk_that_a_peer_has_too_is_filled_from_disk(tmp_path: Path) -> None:
    """A joiner starts from its own checkpoint and asks only for the chunks that differ."""
    root = storage(tmp_path)
    old = values(1, large=True)
    write_checkpoint(root, [source(1, of=old, large=True)])
    params = old[OUTER][1]
    assert isinstance(params, dict)
    new = {name: tensor.clone() for name, tensor in params.items()}
    new["large"][0] += 1
    peer = source(2, of={OUTER: (PartClass.REPLICATED, new)})
    wanted = peer.manifest.parts[0]
    into = torch.zeros(wanted.num_bytes, dtype=torch.uint8)

    class Flat:
        def write(self, offset: int, data: torch.Tensor) -> None:
            into[offset : offset + data.numel()].copy_(data)

    with open_checkpoint(root, Version(1, 1)) as checkpoint:
        filled = checkpoint.fill(wanted, Flat())
    differing = {i for i in range(len(wanted.chunks)) if i not in filled}
    assert len(differing) == 1
    for i in filled:
        chunk = wanted.chunks[i]
        assert torch.equal(
            into[chunk.offset : chunk.offset + chunk.num_bytes], peer.read(0, chunk.offset, chunk.num_bytes).data
        )


def test_side_records_come_back(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)], records={"trained_samples": {"image": 12, "video": 3}})
    with open_checkpoint(root, Version(1, 1)) as checkpoint:
        assert checkpoint.record.records == {"trained_samples": {"image": 12, "video": 3}}


def test_sources_of_two_versions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFailed, match="one version of one worker"):
        write_checkpoint(storage(tmp_path), [source(1), source(2)])


def test_memory_that_was_written_round_the_guard_is_never_saved(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    of = values(2)
    late = source(2, of=of)
    params = of[OUTER][1]
    assert isinstance(params, dict)
    params["a.weight"][0, 0] += 1
    with pytest.raises(CheckpointFailed, match=r"a\.weight"):
        write_checkpoint(root, [late])
    assert [step.version for step in Catalog(root, RUN).whole()] == [Version(1, 1)]
    left = [path for path in (root.root / "step_1_2").rglob("*") if path.is_file()]
    assert [path.name for path in left] == [f"run_{RUN}"]


def test_open_refuses_what_belongs_elsewhere(tmp_path: Path) -> None:
    """pytorch/pytorch#76395: nothing in a checkpoint said what it is and where it belongs."""
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    write_checkpoint(root, [source(2)])
    with pytest.raises(CheckpointRejected, match="run is run-a, not run-b"):
        open_checkpoint(root, Version(1, 1), run_id=RunId("run-b"))
    with pytest.raises(CheckpointRejected, match="does not exist"):
        open_checkpoint(root, Version(1, 7))
    (root.root / "step_1_1" / "manifest.pb").replace(root.root / "step_1_2" / "manifest.pb")
    with pytest.raises(CheckpointRejected, match=r"version is L1\.k1, not L1\.k2"):
        open_checkpoint(root, Version(1, 2))


def test_a_part_without_tensors_has_a_file_too(tmp_path: Path) -> None:
    root = storage(tmp_path)
    nothing = source_of({OUTER: (PartClass.REPLICATED, {"n": 1})}, run_id=RUN, worker=W0, cut=Cut(Version(1, 1)))
    write_checkpoint(root, [nothing])
    assert load_file(root.root / "step_1_1" / "replicated" / "outer_params.safetensors") == {}
