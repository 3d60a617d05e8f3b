"""``recovery ckpt verify`` while the run saves and deletes in the same folder, and of private parts alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt.catalog import Catalog, Step
from ckpt.local import YOUNG_SECONDS, LocalStorage
from ckpt.retention import Retention, RetentionPolicy, Verdict
from ckpt.writer import write_checkpoint
from recovery.cli import ckpt_verify
from recovery.cli.main import run
from recovery.errors import BadConfiguration
from recovery.types import Version
from tests.unit.ckpt.power import Quick
from tests.unit.ckpt.states import RUN, W1, private_values, replicated_values, source
from tests.unit.ckpt.workers import Worker


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "root", Quick())
    worker = Worker(1)
    for _ in range(3):
        worker.train().save(storage)
    return storage


def verify(capsys: pytest.CaptureFixture[str], storage: LocalStorage, expect: int) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    code = run(["ckpt", "verify", str(storage.root), "--json"])
    out, err = capsys.readouterr()
    assert code == expect, out + err
    return {row["step"]: row for row in map(json.loads, out.splitlines())}


def age(folder: Path) -> None:
    """Let everything in a folder be long ago."""
    for path in (folder, *folder.rglob("*")):
        before = path.stat().st_mtime - 10 * YOUNG_SECONDS
        os.utime(path, (before, before))


def test_a_step_that_is_being_written_is_no_damage(storage: LocalStorage, capsys: pytest.CaptureFixture[str]) -> None:
    folder = storage.root / "step_1_3"
    (folder / "worker_w0" / "manifest.pb").unlink()
    rows = verify(capsys, storage, 0)
    assert rows["L1.k3"]["finding"] == "being_written"
    assert rows["L1.k3"]["problems"] == ["worker w0: it has no manifest"]
    assert rows["L1.k2"]["finding"] == "whole"
    age(folder)
    assert verify(capsys, storage, 3)["L1.k3"]["finding"] == "damaged"  # interrupted long ago


def test_a_write_that_takes_long_is_known_by_its_lock(
    storage: LocalStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = storage.root / "step_1_3"
    (folder / "worker_w0" / "manifest.pb").unlink()
    writing = storage.create("step_1_3/worker_w0/scheduler.safetensors")
    age(folder)
    assert verify(capsys, storage, 0)["L1.k3"]["finding"] == "being_written"
    writing.abort()
    age(folder)
    assert verify(capsys, storage, 3)["L1.k3"]["finding"] == "damaged"


def test_damage_in_a_step_that_is_being_written_is_damage(
    storage: LocalStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = storage.root / "step_1_3"
    (folder / "worker_w0" / "manifest.pb").unlink()
    (folder / "replicated" / "outer_params.safetensors").write_bytes(b"short")
    assert verify(capsys, storage, 3)["L1.k3"]["finding"] == "damaged"


def test_a_step_deleted_meanwhile_does_not_end_the_check(
    storage: LocalStorage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Catalog.look
    pruned: list[Verdict] = []

    def late(catalog: Catalog, step: Step) -> Any:
        """The run deletes step 1 after it was looked at and before it is opened."""
        if step.version.outer_step == 1 and not pruned:
            found = before(catalog, step.version)
            policy = RetentionPolicy(keep_newest=2)
            pruned.extend(v for v in Retention(storage, RUN, policy).run() if v.delete)
            return found
        return before(catalog, step.version)

    monkeypatch.setattr(ckpt_verify, "_look", late)
    rows = verify(capsys, storage, 0)
    assert [verdict.version.outer_step for verdict in pruned] == [1]
    assert rows["L1.k1"]["finding"] == "pruned"
    assert {rows["L1.k2"]["finding"], rows["L1.k3"]["finding"]} == {"whole"}


def test_a_step_whose_deletion_has_begun_is_no_damage(
    storage: LocalStorage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests go first; the rest of a large step may take a while, longer than a step counts as being written."""
    before, folder = Catalog.look, storage.root / "step_1_1"
    unlinked: list[Path] = []

    def late(catalog: Catalog, step: Step) -> Any:
        found = before(catalog, step.version)
        if step.version.outer_step == 1 and not unlinked:
            unlinked.extend(folder.rglob("manifest.pb"))
            for path in unlinked:
                path.unlink()
            age(folder)
        return found

    monkeypatch.setattr(ckpt_verify, "_look", late)
    assert verify(capsys, storage, 0)["L1.k1"]["finding"] == "pruned"
    assert len(unlinked) == 2
    assert list((folder / "replicated").iterdir())


def test_a_step_deleted_before_its_turn_is_named(
    storage: LocalStorage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Catalog.steps

    def steps(catalog: Catalog) -> list[Step]:
        found = before(catalog)
        shutil.rmtree(storage.root / "step_1_1")
        return found

    monkeypatch.setattr(Catalog, "steps", steps)
    assert verify(capsys, storage, 0)["L1.k1"]["finding"] == "pruned"


def test_private_parts_alone_are_called_so_and_what_to_do_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker that does not save the replicated parts has a folder of its private ones: nothing of it is torn."""
    saver, other = LocalStorage(tmp_path / "saver", Quick()), LocalStorage(tmp_path / "other", Quick())
    write_checkpoint(saver, [source(1, of=replicated_values(1))])
    write_checkpoint(other, [source(1, of=private_values(1), worker=W1)])
    age(other.root / "step_1_1")
    row = verify(capsys, other, 0)["L1.k1"]
    assert (row["finding"], row["ok"]) == ("private_only", True)
    assert "the private parts of w1 and no replicated ones" in row["problems"][0]
    with pytest.raises(BadConfiguration, match=r"is private parts only .*recovery ckpt copy"):
        Catalog(other, RUN).get(Version(1, 1))
    # What it says helps.
    assert run(["ckpt", "copy", str(saver.root), "L1.k1", str(other.root)]) == 0
    assert verify(capsys, other, 0)["L1.k1"]["finding"] == "whole"


def test_damage_in_private_parts_alone_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = LocalStorage(tmp_path, Quick())
    write_checkpoint(storage, [source(1, of=private_values(1), worker=W1)])
    age(tmp_path / "step_1_1")
    path = tmp_path / "step_1_1" / "worker_w1" / "data.safetensors"
    path.write_bytes(b"x" * path.stat().st_size)
    row = verify(capsys, storage, 3)["L1.k1"]
    assert row["finding"] == "damaged"
    assert "torn" not in " ".join(row["problems"])


def test_an_interrupted_save_of_replicated_parts_beside_private_ones_is_torn(
    storage: LocalStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    (storage.root / "step_1_3" / "manifest.pb").unlink()
    age(storage.root / "step_1_3")
    row = verify(capsys, storage, 3)["L1.k3"]
    assert row["finding"] == "damaged"
    assert row["problems"] == ["torn: it has no manifest"]
