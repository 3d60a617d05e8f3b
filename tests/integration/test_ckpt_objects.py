"""Checkpoints on object stores: in memory, and on a real S3 server on loopback that is cut off and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from ckpt.catalog import Catalog
from ckpt.local import LocalStorage
from ckpt.objects import FsspecStorage, open_storage
from ckpt.positions import newest_position, write_position
from ckpt.probe import probe
from ckpt.reader import open_checkpoint
from ckpt.retention import Retention, RetentionPolicy
from ckpt.source import CheckpointSource
from ckpt.storage import Storage
from ckpt.writer import write_checkpoint
from recovery.clock import ManualClock
from recovery.errors import BadConfiguration, CheckpointFailed, CheckpointRejected
from recovery.events import Recorder
from recovery.types import PartClass, PartName, RunId, Version
from tests.support.s3 import S3, flip
from tests.unit.ckpt.states import DATA, OUTER, RUN, W0, W1, private_values, replicated_values, source, values
from tests.unit.ckpt.workers import Worker, differences


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    found = S3()
    yield found
    found.stop()


@pytest.fixture(params=["memory", "s3"])
def remote(request: pytest.FixtureRequest) -> FsspecStorage:
    name = request.node.name.replace("[", "-").replace("]", "")
    if request.param == "memory":
        storage = open_storage(f"memory://{name}/root")
    else:
        s3: S3 = request.getfixturevalue("s3")
        storage = open_storage(f"s3://bucket/{name}/root", s3.options)
    assert isinstance(storage, FsspecStorage)
    return storage


def test_a_worker_saves_to_an_object_store_and_restores_from_it(remote: FsspecStorage) -> None:
    worker = Worker(1).train()
    worker.save(remote)  # type: ignore[arg-type]
    worker.train().save(remote)  # type: ignore[arg-type]
    fresh = Worker(2)
    restored = CheckpointSource(remote, run_id=RUN, worker=W0, events=Recorder()).restore(fresh.state)
    assert restored.version == Version(1, 2)
    assert differences(worker, fresh) == []


def test_a_file_of_several_chunks_and_dtypes(remote: FsspecStorage) -> None:
    write_checkpoint(remote, [source(1, large=True)])
    with open_checkpoint(remote, Version(1, 1), run_id=RUN) as checkpoint:
        checkpoint.verify()


def test_a_flipped_bit_is_found(remote: FsspecStorage) -> None:
    write_checkpoint(remote, [source(1)])
    for path in ("step_1_1/manifest.pb", "step_1_1/replicated/outer_params.safetensors"):
        flip(remote, path)
        with pytest.raises(CheckpointRejected), open_checkpoint(remote, Version(1, 1)) as checkpoint:
            checkpoint.verify()
        flip(remote, path)
    with open_checkpoint(remote, Version(1, 1)) as checkpoint:
        checkpoint.verify()


def test_retention_on_an_object_store(remote: FsspecStorage) -> None:
    for seed in range(1, 5):
        write_checkpoint(remote, [source(seed)])
    stranger = remote.create("step_1_1.backup/manifest.pb")
    stranger.write(memoryview(b"mine"))
    stranger.commit()
    with open_checkpoint(remote, Version(1, 2)) as reading:
        verdicts = Retention(remote, RUN, RetentionPolicy(keep_newest=2)).run()
        reading.verify()
    assert [v.version.outer_step for v in verdicts if v.delete] == [1]
    assert "is being read" in next(v.reason for v in verdicts if v.version.outer_step == 2)
    Retention(remote, RUN, RetentionPolicy(keep_newest=2)).run()
    assert [step.version.outer_step for step in Catalog(remote, RUN).steps()] == [4, 3]
    assert remote.num_bytes("step_1_1.backup/manifest.pb") == 4
    assert not [e for e in remote.entries("step_1_3") if e.name.startswith(".reading")]


def test_the_mark_of_a_reader_that_was_killed_expires() -> None:
    clock = ManualClock(0.0)
    remote = FsspecStorage("memory://mark/root", clock=clock)
    write_checkpoint(remote, [source(1)])
    pin = remote.pin("step_1_1/manifest.pb")
    assert pin is not None
    assert remote.claim("step_1_1/manifest.pb") is None
    clock.advance(1e12)
    assert remote.claim("step_1_1/manifest.pb") is not None
    assert remote.sweep("step_1_1") == 1


def test_unchanged_parts_are_copied_by_the_server(remote: FsspecStorage) -> None:
    write_checkpoint(remote, [source(1)])
    with open_checkpoint(remote, Version(1, 1)) as previous:
        of = {**values(2), OUTER: values(1)[OUTER]}
        report = write_checkpoint(remote, [source(2, of=of)], previous=[previous])[0]
    assert report.linked_bytes > 0
    with open_checkpoint(remote, Version(1, 2)) as checkpoint:
        checkpoint.verify()


def test_stale_listings_do_not_mislead(tmp_path: Path) -> None:
    """A listing that still shows a deleted step, or does not show a new one yet."""

    class Stale(FsspecStorage):
        frozen: list[object] | None = None

        def entries(self, folder: str) -> list:  # type: ignore[type-arg]
            if folder == "" and self.frozen is not None:
                return self.frozen
            return super().entries(folder)

    remote = Stale("memory://stale/root", clock=ManualClock())
    for seed in (1, 2):
        write_checkpoint(remote, [source(seed)])
    remote.frozen = list(remote.entries(""))
    Retention(remote, RUN, RetentionPolicy(keep_newest=1)).run()
    write_checkpoint(remote, [source(3)])
    # Step 1 is listed but gone; step 3 is there but not listed: the hint names it, its manifest proves it.
    assert [step.version.outer_step for step in Catalog(remote, RUN).steps()] == [3, 2]


def test_the_newest_data_position_of_each_worker(remote: FsspecStorage) -> None:
    """PrimeIntellect-ai/prime-diloco: two positions of 1161 bytes each, and the second never arrived."""
    for seed in (1, 2, 10):
        write_position(remote, source(seed, of={DATA: private_values(seed)[DATA]}))
    write_position(remote, source(7, of={DATA: private_values(7)[DATA]}, worker=W1))
    fresh = Worker(1)
    fresh.state.add("more", lambda: {"at": 0}, PartClass.PRIVATE_KEPT)
    position = newest_position(remote, RUN, W0.worker_id)
    assert position is not None
    assert position.cut.version == Version(1, 10)
    assert newest_position(remote, RunId("run-b"), W0.worker_id) is None
    # A damaged newest position gives way to the one before it.
    flip(remote, "positions/w0/1_10_0.pb")
    position = newest_position(remote, RUN, W0.worker_id)
    assert position is not None
    assert position.cut.version == Version(1, 2)
    assert len(remote.entries("positions/w0")) == 2
    other = newest_position(remote, RUN, W1.worker_id)
    assert other is not None
    assert other.cut.version == Version(1, 7)


def test_a_data_position_goes_back_into_its_worker(remote: FsspecStorage) -> None:
    from ckpt.values import standing_source
    from recovery.types import Cut

    worker = Worker(1).train()
    part = PartName("data")
    kept = standing_source(worker.state, [part], run_id=RUN, worker=W0, cut=Cut(worker.version), copy=True)
    worker.train()  # a copy: going on does not change what is saved
    write_position(remote, kept)
    fresh = Worker(2)
    position = newest_position(remote, RUN, W0.worker_id)
    assert position is not None
    position.restore(fresh.state)
    assert fresh.data.at == 3


def test_only_private_kept_parts_are_a_position() -> None:
    with pytest.raises(CheckpointFailed, match="outer_params"):
        write_position(open_storage("memory://kinds/root"), source(1, of=replicated_values(1)))


def test_every_configured_place_is_probed_at_the_start(tmp_path: Path, remote: FsspecStorage) -> None:
    good: list[Storage] = [LocalStorage(tmp_path / "a"), remote]
    probe(good)
    assert not list((tmp_path / "a").iterdir())
    assert not remote.entries("")
    (tmp_path / "file").write_text("")
    bad = [LocalStorage(tmp_path / "file" / "below"), LocalStorage("/proc/nowhere")]
    with pytest.raises(BadConfiguration, match=r"below.*; /proc/nowhere"):
        probe([*good, *bad])


def test_a_url_that_cannot_be_opened_is_a_configuration_error() -> None:
    with pytest.raises(BadConfiguration, match="nosuchprotocol"):
        open_storage("nosuchprotocol://x")


def test_file_urls_are_local_paths(tmp_path: Path) -> None:
    assert isinstance(open_storage(f"file://{tmp_path}"), LocalStorage)
    assert isinstance(open_storage(str(tmp_path)), LocalStorage)


def test_other_users_of_fsspec_in_the_process_are_left_alone() -> None:
    assert fsspec.filesystem("memory") is not None
    assert FsspecStorage("memory://x/y", clock=ManualClock()).url == "memory://x/y"
