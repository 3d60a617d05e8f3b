"""Steps on their way to an object store and back: proven, tried again, cut off, cached."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.catalog import Catalog
from ckpt.local import LocalStorage
from ckpt.objects import FsspecStorage, open_storage
from ckpt.reader import open_checkpoint
from ckpt.remote import DownloadCache, Uploader, UploaderConfig
from ckpt.retention import RetentionPolicy
from ckpt.storage import Readable, StorageError, Writable
from ckpt.transfer import copy_step
from ckpt.writer import write_checkpoint
from recovery.clock import ManualClock
from recovery.errors import BadConfiguration, CheckpointFailed
from recovery.events import CheckpointSaved, CheckpointSaveFailed, Recorder
from recovery.types import Version
from tests.support.s3 import S3, WAIT, Relay, flip
from tests.unit.ckpt.states import RUN, W0, W1, private_values, source


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


def test_a_step_is_copied_both_ways_and_proven(tmp_path: Path, remote: FsspecStorage) -> None:
    local, back = LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b")
    write_checkpoint(local, [source(1, large=True)], records={"samples": 3})
    write_checkpoint(local, [source(2, Version(1, 1), of=private_values(2), worker=W1)])
    report = copy_step(local, remote, Version(1, 1), run_id=RUN)
    assert report.workers == ("w0", "w1")
    again = copy_step(local, remote, Version(1, 1), run_id=RUN)
    assert again.moved_bytes == 0
    copy_step(remote, back, Version(1, 1), run_id=RUN, workers=["w1"])  # type: ignore[list-item]
    step = Catalog(back, RUN).get(Version(1, 1))
    assert step.workers == ("w1",)
    assert step.records[0].records == {"samples": 3}
    mine, theirs = (root.root / "step_1_1" / "replicated" / "outer_params.safetensors" for root in (local, back))
    assert mine.read_bytes() == theirs.read_bytes()


def test_equal_size_is_not_taken_for_equal_content(tmp_path: Path, remote: FsspecStorage) -> None:
    """PrimeIntellect-ai/prime-diloco: rsync compares sizes, so that a new state of the same size never arrived."""
    local = LocalStorage(tmp_path / "a")
    write_checkpoint(local, [source(1)])
    copy_step(local, remote, Version(1, 1), run_id=RUN)
    flip(remote, "step_1_1/replicated/outer_params.safetensors")
    copy_step(local, remote, Version(1, 1), run_id=RUN)
    with open_checkpoint(remote, Version(1, 1)) as checkpoint:
        checkpoint.verify()


def test_an_upload_is_proven_and_a_lost_file_is_a_failure(tmp_path: Path) -> None:
    """PrimeIntellect-ai/prime-diloco: an upload's errors were logged and "finish pushing" was logged anyway."""

    class Forgetful(FsspecStorage):
        """Accepts a file and does not have it."""

        lost = 0

        def create(self, path: str, num_bytes: int = 0) -> Writable:
            if path.endswith("outer_params.safetensors"):
                self.lost += 1
                path += ".lost"
            return super().create(path)

    local, remote = LocalStorage(tmp_path / "a"), Forgetful("memory://forgetful/root", clock=ManualClock())
    write_checkpoint(local, [source(1)])
    with pytest.raises(CheckpointFailed, match="does not give back what it took"):
        copy_step(local, remote, Version(1, 1), run_id=RUN)
    assert remote.lost == 1
    assert Catalog(remote, RUN).newest() is None


def test_a_damaged_step_is_not_uploaded(tmp_path: Path) -> None:
    local, events = LocalStorage(tmp_path / "a"), Recorder()
    write_checkpoint(local, [source(1)])
    path = local.root / "step_1_1" / "replicated" / "outer_params.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    remote = open_storage("memory://damaged/root")
    uploader = Uploader(local, remote, UploaderConfig(), run_id=RUN, worker_id=W0.worker_id, events=events)
    uploader.start()
    uploader.upload(Version(1, 1))
    with pytest.raises(CheckpointFailed, match="outer_params"):
        uploader.close()
    assert len(events.of(CheckpointSaveFailed)) == 1
    assert Catalog(remote, RUN).newest() is None


def test_uploads_run_behind_and_the_remote_has_its_own_retention(tmp_path: Path, remote: FsspecStorage) -> None:
    local, events = LocalStorage(tmp_path / "a"), Recorder()
    config = UploaderConfig(retention=RetentionPolicy(keep_newest=1))
    with Uploader(local, remote, config, run_id=RUN, worker_id=W0.worker_id, events=events) as uploader:
        for seed in (1, 2, 3):
            write_checkpoint(local, [source(seed)])
            uploader.upload(Version(1, seed))
            assert uploader.wait_idle(WAIT)
        assert uploader.uploaded == 3
    assert len(events.of(CheckpointSaved)) == 3
    assert [step.version.outer_step for step in Catalog(remote, RUN).steps()] == [3]
    assert [step.version.outer_step for step in Catalog(local, RUN).steps()] == [3, 2, 1]


def test_a_worker_that_did_not_save_the_replicated_parts_uploads_its_private_ones(tmp_path: Path) -> None:
    local, remote = LocalStorage(tmp_path / "a"), open_storage("memory://privates/root")
    write_checkpoint(local, [source(1, of=private_values(1))])
    with Uploader(local, remote, UploaderConfig(), run_id=RUN, worker_id=W0.worker_id, events=Recorder()) as uploader:
        uploader.upload(Version(1, 1))
    step = Catalog(remote, RUN).look(Version(1, 1))
    assert step is not None
    assert step.workers == ("w0",)


def test_a_remote_that_is_gone_is_tried_again(tmp_path: Path) -> None:
    class Gone(FsspecStorage):
        refused = 0
        back = threading.Event()

        def create(self, path: str, num_bytes: int = 0) -> Writable:
            if self.refused < 3:
                self.refused += 1
                raise StorageError("connection refused")
            return super().create(path)

    local, remote = LocalStorage(tmp_path / "a"), Gone("memory://gone/root", clock=ManualClock())
    write_checkpoint(local, [source(1)])
    config = UploaderConfig(first_pause_seconds=0.001, longest_pause_seconds=0.002)
    with Uploader(local, remote, config, run_id=RUN, worker_id=W0.worker_id, events=Recorder()) as uploader:
        uploader.upload(Version(1, 1))
    assert remote.refused == 3
    assert Catalog(remote, RUN).newest() is not None


@pytest.mark.timeout(300)
def test_a_server_that_is_cut_off_at_every_request_of_a_save_leaves_the_last_step_and_the_next_save_works(
    s3: S3,
) -> None:
    """The server's answers stop at request n: whatever arrived, the newest whole step verifies."""
    relay = Relay(s3.port)
    options = {**s3.options, "client_kwargs": {"endpoint_url": relay.endpoint, "region_name": "us-east-1"}}
    direct = open_storage("s3://bucket/cut/root", s3.options)
    write_checkpoint(direct, [source(1)])
    failed = 0
    try:
        for n in range(1, 60, 4):
            through = open_storage("s3://bucket/cut/root", options)
            assert isinstance(through, FsspecStorage)
            through._fs.retries = 1  # s3fs tries five times with pauses: not what is tested here
            relay.cut_after(n)
            try:
                write_checkpoint(through, [source(2)])
            except CheckpointFailed:
                failed += 1
                assert relay.refused > 0
            relay.heal()
            newest = Catalog(direct, RUN).newest()
            assert newest is not None
            with open_checkpoint(direct, newest.version) as checkpoint:
                checkpoint.verify()
            if newest.version == Version(1, 2):
                write_checkpoint(direct, [source(3)])
                break
            write_checkpoint(through, [source(4, Version(1, 2), of=private_values(n + 1))])
    finally:
        relay.close()
    assert failed >= 3


def test_a_download_cache_is_verified_and_shared(tmp_path: Path, remote: FsspecStorage) -> None:
    for seed in (1, 2, 3):
        write_checkpoint(remote, [source(seed)])
    cache = DownloadCache(tmp_path / "cache", keep=1)
    local = cache.fetch(remote, Version(1, 2), run_id=RUN)
    assert [step.version.outer_step for step in Catalog(local, RUN).steps()] == [2]
    # A damaged file of the cache is found and fetched again; the rest is not.
    path = local.root / "step_1_2" / "replicated" / "outer_params.safetensors"
    inode = (path.parent / "run_progress.safetensors").stat().st_ino
    path.write_bytes(b"x" * path.stat().st_size)
    cache.fetch(remote, Version(1, 2), run_id=RUN)
    with open_checkpoint(local, Version(1, 2)) as checkpoint:
        checkpoint.verify()
    assert (path.parent / "run_progress.safetensors").stat().st_ino == inode
    cache.fetch(remote, Version(1, 3), run_id=RUN)
    assert [step.version.outer_step for step in Catalog(local, RUN).steps()] == [3]
    with pytest.raises(BadConfiguration, match="does not exist"):
        cache.fetch(remote, Version(1, 9), run_id=RUN)


def test_several_processes_of_a_machine_download_once(tmp_path: Path) -> None:
    """The first fills the cache, the others read it: a broadcast through the file system."""

    class Counting(FsspecStorage):
        opened: list[str]

        def open(self, path: str) -> Readable:
            self.opened.append(path)
            return super().open(path)

    remote = Counting("memory://several/root", clock=ManualClock())
    remote.opened = []
    write_checkpoint(remote, [source(1)])
    remote.opened.clear()
    found: list[LocalStorage] = []

    def fetch() -> None:
        found.append(DownloadCache(tmp_path / "cache").fetch(remote, Version(1, 1), run_id=RUN))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert len(found) == 4
    data = [path for path in remote.opened if path.endswith(".safetensors")]
    assert sorted(data) == sorted(set(data))
