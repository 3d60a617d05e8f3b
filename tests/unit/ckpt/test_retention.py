"""Retention: the last good step, foreign files and steps that are read survive anything."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.catalog import Catalog, Step, StepState
from ckpt.layout import parse_step_folder, step_folder
from ckpt.local import FileSystem, LocalStorage
from ckpt.reader import open_checkpoint
from ckpt.record import KEPT
from ckpt.retention import Retention, RetentionPolicy, decide, delete_step
from ckpt.writer import write_checkpoint
from recovery.errors import BadConfiguration, CheckpointRejected
from recovery.types import RunId, Version
from tests.unit.ckpt.power import Quick
from tests.unit.ckpt.states import RUN, private_values, source, storage


def retention(root: LocalStorage, keep_newest: int = 1, keep_every: int = 0) -> Retention:
    return Retention(root, RUN, RetentionPolicy(keep_newest=keep_newest, keep_every=keep_every))


def kept(root: LocalStorage) -> list[int]:
    return [step.version.outer_step for step in Catalog(root, RUN).steps()]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_newest_and_every_nth_stay(tmp_path: Path) -> None:
    root = storage(tmp_path)
    for seed in range(1, 10):
        write_checkpoint(root, [source(seed)])
    retention(root, keep_newest=2, keep_every=4).run()
    assert kept(root) == [9, 8, 4]
    assert not (root.root / "step_1_1").exists()


def test_a_step_saved_by_order_stays_until_marked_ones_may_go_too(tmp_path: Path) -> None:
    """bghira/SimpleTuner#1954, pytorch/torchtitan#4292: what somebody wanted to keep was deleted with the rest."""
    root = storage(tmp_path)
    for seed in range(1, 6):
        write_checkpoint(root, [source(seed)], records={KEPT: "saved by order"} if seed == 2 else None)
    verdicts = {verdict.version.outer_step: verdict for verdict in retention(root).run()}
    assert kept(root) == [5, 2]
    assert "saved by order" in verdicts[2].reason
    Retention(root, RUN, RetentionPolicy(keep_newest=1, keep_marked=False)).run()
    assert kept(root) == [5]


def test_a_step_that_stands_already_is_marked_when_it_is_saved_by_order(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)], records={"samples": 7})
    (report, _) = write_checkpoint(root, [source(1)], records={KEPT: "saved by order"})
    assert report.already_there
    write_checkpoint(root, [source(1)], records={"samples": 8})  # saved once more without the mark: it stays
    write_checkpoint(root, [source(2)])
    retention(root).run()
    assert kept(root) == [2, 1]
    with open_checkpoint(root, Version(1, 1), run_id=RUN) as checkpoint:
        checkpoint.verify()
        assert checkpoint.record.records == {"samples": 7, KEPT: "saved by order"}


def test_a_torn_or_damaged_newest_step_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    """huggingface/transformers#27138, PrimeIntellect-ai/prime-diloco's delete_topk: an incomplete newest counted."""
    root = storage(tmp_path)
    for seed in range(1, 5):
        write_checkpoint(root, [source(seed)])
    (root.root / "step_1_4" / "manifest.pb").unlink()
    flip(root.root / "step_1_3" / "replicated" / "outer_params.safetensors")
    verdicts = {verdict.version.outer_step: verdict for verdict in retention(root).run()}
    assert kept(root) == [4, 3, 2]
    assert verdicts[1].delete
    assert "damaged" in verdicts[3].reason
    assert "torn" in verdicts[4].reason


def test_nothing_goes_while_too_few_verify(tmp_path: Path) -> None:
    root = storage(tmp_path)
    for seed in (1, 2, 3):
        write_checkpoint(root, [source(seed)])
        flip(root.root / f"step_1_{seed}" / "replicated" / "outer_params.safetensors")
    assert not any(verdict.delete for verdict in retention(root).run())
    assert kept(root) == [3, 2, 1]


def test_old_torn_steps_of_this_run_go(tmp_path: Path) -> None:
    root = storage(tmp_path)
    for seed in (1, 2, 3):
        write_checkpoint(root, [source(seed)])
    (root.root / "step_1_1" / "manifest.pb").unlink()
    retention(root).run()
    assert kept(root) == [3]
    assert not (root.root / "step_1_1").exists()


@pytest.mark.parametrize(
    "name",
    [
        "step_1_1.backup",
        "step-1-1",
        "step_1_01",
        "step_01_1",
        "step_0_1",
        "step_1_-1",
        "xstep_1_1",
        "step_1_1 ",
        "step_x_1",
        "step_1_1_1",
        "step_1_\u0661",
        "step_1_99999999999999999999",
    ],
)
def test_names_that_only_look_like_ours_are_not(tmp_path: Path, name: str) -> None:
    """pytorch/torchtitan#4292, #4197: `step-100.backup` was deleted; prime-diloco: a stray `step_x` ended the run."""
    assert parse_step_folder(name) is None
    root = storage(tmp_path)
    stranger = root.root / name
    stranger.mkdir(parents=True)
    (stranger / "manifest.pb").write_text("mine")
    for seed in (2, 3):
        write_checkpoint(root, [source(seed)])
    retention(root).run()
    assert (stranger / "manifest.pb").read_text() == "mine"
    assert kept(root) == [3]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    """huggingface/transformers#11748 and others: string order deleted step 1000 before step 900."""
    root = storage(tmp_path)
    for step in (9, 10, 100, 99):
        write_checkpoint(root, [source(1, Version(1, step), fingerprint=bytes([step]) * 32)])
    write_checkpoint(root, [source(1, Version(2, 3), fingerprint=b"2" * 32)])
    retention(root, keep_newest=2).run()
    assert [str(step.version) for step in Catalog(root, RUN).steps()] == ["L2.k3", "L1.k100"]


def test_another_runs_steps_stay(tmp_path: Path) -> None:
    """pytorch/torchtitan#4197, huggingface/transformers#37260: folders that were not the run's own were deleted."""
    root = storage(tmp_path)
    write_checkpoint(root, [source(1, run_id=RunId("run-b"))])
    torn = source(2, run_id=RunId("run-b"))
    write_checkpoint(root, [torn])
    (root.root / "step_1_2" / "manifest.pb").unlink()
    theirs = sorted(path for path in root.root.rglob("*") if path.name != "latest")
    for seed in (3, 4):
        write_checkpoint(root, [source(seed)])
    retention(root).run()
    assert kept(root) == [4, 2, 1]
    assert all(path.exists() for path in theirs)


def test_files_that_no_manifest_names_stay_and_their_folder(tmp_path: Path) -> None:
    root = storage(tmp_path)
    for seed in (1, 2):
        write_checkpoint(root, [source(seed)])
    mine = [
        root.root / "step_1_1" / "notes.txt",
        root.root / "step_1_1" / "replicated" / "mine.safetensors",
        root.root / "step_1_1" / "worker_w0" / "more.txt",
        root.root / "step_1_1" / "folder" / "manifest.pb",
    ]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("keep")
    retention(root).run()
    left = sorted(path for path in (root.root / "step_1_1").rglob("*") if path.is_file())
    assert left == sorted(mine)


def test_a_step_that_is_read_stays_until_it_was_read(tmp_path: Path) -> None:
    """pytorch/torchtitan#909: the purge of old steps ran into those who used them."""
    root = storage(tmp_path)
    for seed in (1, 2):
        write_checkpoint(root, [source(seed)])
    for worker_id in (None, source(1).manifest.worker.worker_id):
        with open_checkpoint(root, Version(1, 1), worker_id=worker_id) as checkpoint:
            verdicts = retention(root).run()
            assert "is being read" in verdicts[1].reason
            checkpoint.verify()
    retention(root).run()
    assert kept(root) == [2]


def test_a_step_that_is_being_deleted_cannot_be_opened(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    claim = root.claim("step_1_1/manifest.pb")
    assert claim is not None
    with pytest.raises(CheckpointRejected, match="being deleted"):
        open_checkpoint(root, Version(1, 1))
    claim.close()
    open_checkpoint(root, Version(1, 1)).close()


def test_an_error_is_told_and_does_not_end_anything(tmp_path: Path) -> None:
    """pytorch/torchtitan#909: a purge crashed the run."""

    class ReadOnly(FileSystem):
        refused = 0

        def unlink(self, path: str) -> None:
            self.refused += 1
            raise OSError(30, "Read-only file system", path)

    for seed in (1, 2):
        write_checkpoint(storage(tmp_path), [source(seed)])
    files = ReadOnly()
    root = LocalStorage(tmp_path / "root", files)
    verdicts = retention(root).run()
    assert files.refused == 1
    assert "cannot be deleted" in verdicts[1].reason
    assert [step.whole for step in Catalog(root, RUN).steps()] == [True, True]


def test_a_root_that_is_absent_is_no_error(tmp_path: Path) -> None:
    assert retention(LocalStorage(tmp_path / "nowhere")).run() == []


def test_a_policy_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(BadConfiguration):
        RetentionPolicy(keep_newest=0)
    with pytest.raises(BadConfiguration):
        RetentionPolicy(keep_every=-1)


STEPS = st.builds(
    lambda lineage, number, state: Step(version=Version(lineage, number), state=state, reason="r"),
    st.integers(1, 3),
    st.integers(0, 30),
    st.sampled_from(StepState),
)


@given(
    steps=st.lists(STEPS, max_size=25, unique_by=lambda step: step.version),
    keep=st.integers(1, 5),
    every=st.integers(0, 5),
    damaged=st.sets(st.integers(0, 30)),
)
def test_what_goes_has_enough_newer_verified_steps(steps: list[Step], keep: int, every: int, damaged: set[int]) -> None:
    def verified(step: Step) -> bool:
        assert step.whole
        return step.version.outer_step not in damaged

    verdicts = decide(steps, RetentionPolicy(keep_newest=keep, keep_every=every), verified)
    assert [v.version for v in verdicts] == sorted((step.version for step in steps), reverse=True)
    good = [step.version for step in steps if step.whole and verified(step)]
    by_version = {step.version: step for step in steps}
    gone = {v.version for v in verdicts if v.delete}
    for version in gone:
        assert by_version[version].state is not StepState.FOREIGN
        assert sum(other > version for other in good) >= keep
    whole = [step.version for step in steps if step.whole]
    if whole:
        assert max(whole) not in gone
    assert len(set(good) - gone) >= min(keep, len(good))


NAMES = st.one_of(
    st.sampled_from(
        ["step_1_1", "step_1_2", "step_2_1", "latest", "step_1_3.tmp", "positions", "step_1_1~", ".hidden"]
    ),
    st.text(string.ascii_letters + string.digits + "_.-", min_size=1, max_size=12).filter(lambda n: n.strip(".")),
)
INNER = st.one_of(
    st.sampled_from(
        [
            "manifest.pb",
            "manifest.0-of-2.pb",
            "replicated",
            "worker_w0",
            "worker_zz",
            "run_run-b",
            "outer_params.safetensors",
            ".tmp-0123456789abcdef-",
        ]
    ),
    st.text(string.ascii_letters + "_.", min_size=1, max_size=8).filter(lambda n: n.strip(".")),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    litter=st.lists(st.tuples(NAMES, st.lists(INNER, max_size=3), st.binary(max_size=20)), max_size=12),
    real=st.sets(st.tuples(st.integers(1, 2), st.integers(1, 4)), min_size=1, max_size=4),
    reading=st.integers(0, 3),
    keep=st.integers(1, 3),
)
def test_random_folders(
    tmp_path_factory: pytest.TempPathFactory,
    litter: list[tuple[str, list[str], bytes]],
    real: set[tuple[int, int]],
    reading: int,
    keep: int,
) -> None:
    root = LocalStorage(tmp_path_factory.mktemp("random") / "root", Quick())
    root.root.mkdir()
    strange: dict[Path, bytes] = {}
    for name, inner, content in litter:
        path = root.root.joinpath(name, *inner)
        if any(parent.is_file() for parent in path.parents) or path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        strange[path] = content
    versions = []
    for lineage, number in sorted(real):
        version = Version(lineage, number)
        if any(path.is_relative_to(root.root / step_folder(version)) for path in strange):
            continue  # a real save would replace what is in its way: that is the writer's business, not retention's
        of = private_values(number) if number == 4 else None
        write_checkpoint(root, [source(number, version, of=of)])
        if of is None:
            versions.append(version)
    before = Catalog(root, RUN).newest()
    assert (before.version if before else None) == (max(versions) if versions else None)
    opened = [open_checkpoint(root, version) for version in versions[:reading]]
    retention(root, keep).run()
    for checkpoint in opened:
        checkpoint.verify()
        checkpoint.close()
    for path, content in strange.items():
        if path != root.root / "latest":
            assert path.read_bytes() == content, path
    after = [step.version for step in Catalog(root, RUN).whole()]
    assert set(sorted(versions, reverse=True)[:keep]) <= set(after)
    for version in after:
        with open_checkpoint(root, version) as checkpoint:
            checkpoint.verify()


def test_deleting_begins_with_the_manifest(tmp_path: Path) -> None:
    """Killed anywhere in between, what is left is a torn step and never a whole one that is damaged."""

    class Stops(FileSystem):
        def __init__(self, after: int) -> None:
            self.left = after

        def unlink(self, path: str) -> None:
            if not self.left:
                raise OSError(5, "gone", path)
            self.left -= 1
            super().unlink(path)

    for after in range(1, 8):
        write_checkpoint(storage(tmp_path), [source(1)])
        root = LocalStorage(tmp_path / "root", Stops(after))
        step = Catalog(root, RUN).get(Version(1, 1))
        with pytest.raises(OSError, match="gone"):
            delete_step(root, step, RUN)
        found = Catalog(root, RUN).look(Version(1, 1))
        assert found is not None
        assert not found.whole
        assert not found.workers or after < 2
