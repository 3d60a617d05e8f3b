"""Checkpoints on object stores: in memory, and on a real S3 server on loopback that is cut off and comes back."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import fsspec
import pytest
from moto.server import ThreadedMotoServer

from ckpt.catalog import Catalog
from ckpt.local import LocalStorage
from ckpt.objects import FsspecStorage, open_storage
from ckpt.positions import newest_position, write_position
from ckpt.probe import probe
from ckpt.reader import open_checkpoint
from ckpt.remote import DownloadCache, Uploader, UploaderConfig
from ckpt.retention import Retention, RetentionPolicy
from ckpt.source import CheckpointSource
from ckpt.storage import Readable, Storage, StorageError, Writable
from ckpt.transfer import copy_step
from ckpt.writer import write_checkpoint
from recovery.clock import ManualClock
from recovery.errors import BadConfiguration, CheckpointFailed, CheckpointRejected
from recovery.events import CheckpointSaved, CheckpointSaveFailed, Recorder
from recovery.types import PartClass, PartName, RunId, Version
from tests.unit.ckpt.states import DATA, OUTER, RUN, W0, W1, private_values, replicated_values, source, values
from tests.unit.ckpt.workers import Worker, differences

WAIT = 60.0


class S3:
    """A moto server on a loopback port that stays the same when it is cut off and comes back."""

    def __init__(self) -> None:
        self.server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self.server.start()
        host, self.port = self.server.get_host_and_port()
        self.endpoint = f"http://{host}:{self.port}"
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket="bucket")

    @property
    def options(self) -> dict[str, object]:
        return {
            "key": "test",
            "secret": "test",
            "client_kwargs": {"endpoint_url": self.endpoint, "region_name": "us-east-1"},
            "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 2, "read_timeout": 10},
        }

    def stop(self) -> None:
        self.client.close()
        self.server.stop()


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


def flip(storage: FsspecStorage, path: str) -> None:
    full = storage._full(path)
    content = bytearray(storage._fs.cat_file(full))
    content[-1] ^= 1
    storage._fs.pipe_file(full, bytes(content))


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


class Relay:
    """A TCP relay to a port that refuses connections on command."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.refused = 0
        self._left: int | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut_after(self, requests: int) -> None:
        """Pass on so many requests more, then drop every connection."""
        with self._lock:
            self._left, self.refused = requests, 0

    def heal(self) -> None:
        with self._lock:
            self._left = None

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            self._end(one)
        for thread in self._threads:
            thread.join(WAIT)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._to))
            self._open |= {client, server}
            for a, b, counts in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pump, args=(a, b, counts), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source_: socket.socket, target: socket.socket, counts: bool) -> None:
        try:
            while data := source_.recv(65536):
                if counts and not self._passes(data):
                    break
                target.sendall(data)
        except OSError:
            pass
        self._end(source_)
        self._end(target)

    def _passes(self, data: bytes) -> bool:
        with self._lock:
            if self._left is None:
                return True
            if data[:4] in (b"GET ", b"PUT ", b"HEAD", b"POST", b"DELE"):
                if not self._left:
                    self.refused += 1
                    return False
                self._left -= 1
            return True

    @staticmethod
    def _end(one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


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
