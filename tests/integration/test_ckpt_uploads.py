"""One object on its way to a real S3 server: in parts side by side, and nothing left of what was given up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fsspec.asyn import sync

from ckpt import uploads
from ckpt.catalog import Catalog
from ckpt.objects import UPLOAD_SECONDS, FsspecStorage, open_storage
from ckpt.reader import open_checkpoint
from ckpt.writer import write_checkpoint
from recovery.clock import ManualClock
from recovery.errors import CheckpointFailed
from recovery.types import MIB, PartClass, PartName, Version
from tests.support.s3 import S3, WAIT
from tests.unit.ckpt.states import RUN, source

PART = 5 * MIB
"""A server takes no smaller ones but the last."""
BIG = PartName("big")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    found = S3()
    yield found
    found.stop()


@pytest.fixture
def remote(request: pytest.FixtureRequest, s3: S3, monkeypatch: pytest.MonkeyPatch) -> FsspecStorage:
    monkeypatch.setattr(uploads, "PART_BYTES", PART)
    monkeypatch.setattr(uploads, "WHOLE_BYTES", PART)
    storage = open_storage(f"s3://bucket/{request.node.name}/root", s3.options)
    assert isinstance(storage, FsspecStorage)
    return storage


class Calls:
    """Stands between the storage and its client: counts parts under way, holds them, or makes them fail."""

    def __init__(self, storage: FsspecStorage) -> None:
        self._fs = storage._fs
        self._true = self._fs._call_s3
        self._fs._call_s3 = self
        self.begun = self.most = self.now = 0
        self.hold_until = 0
        """A part is passed on only when so many have begun."""
        self.fail_from = 0
        """Parts fail from this one on; 0: none."""

    async def __call__(self, method: str, *arguments: object, **named: object) -> Any:
        if method != "upload_part":
            return await self._true(method, *arguments, **named)
        self.begun += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.fail_from and self.begun >= self.fail_from:
                raise ConnectionResetError("cut off")
            async with asyncio.timeout(WAIT):
                while self.begun < self.hold_until:
                    await asyncio.sleep(0)
            return await self._true(method, *arguments, **named)
        finally:
            self.now -= 1


def left_open(s3: S3, storage: FsspecStorage) -> list[str]:
    """Return the keys below the storage of which an upload was begun and neither completed nor aborted."""
    prefix = storage.url.removeprefix("s3://bucket/") + "/"
    found = s3.client.list_multipart_uploads(Bucket="bucket", Prefix=prefix).get("Uploads", [])
    return [upload["Key"].removeprefix(prefix) for upload in found]


def big(step: int = 1) -> Any:
    tensor = torch.randn(5 * PART // 4 - 1000, generator=torch.Generator().manual_seed(step))  # in five parts
    return source(step, of={BIG: (PartClass.REPLICATED, {"w": tensor})})


def test_parts_travel_side_by_side_and_no_more_of_them_than_memory_is_meant_for(remote: FsspecStorage, s3: S3) -> None:
    calls = Calls(remote)
    calls.hold_until = uploads.PARTS_UNDER_WAY  # one after the other they would wait for ever
    write_checkpoint(remote, [big()])
    assert calls.begun == 5
    assert calls.most == uploads.PARTS_UNDER_WAY
    assert left_open(s3, remote) == []
    with open_checkpoint(remote, Version(1, 1), run_id=RUN) as checkpoint:
        checkpoint.verify()


@pytest.mark.parametrize("num_bytes", [0, 1, PART - 1, PART, PART + 1, 2 * PART])
@pytest.mark.parametrize("announced", [True, False])
def test_every_size_arrives_as_it_was_written(remote: FsspecStorage, s3: S3, num_bytes: int, announced: bool) -> None:
    content = torch.arange(num_bytes, dtype=torch.int32).to(torch.uint8).numpy().tobytes()
    handle = remote.create("a/file", num_bytes if announced else 0)
    for start in range(0, num_bytes, 3 * MIB):
        handle.write(memoryview(content)[start : start + 3 * MIB])
    assert remote.num_bytes("a/file") is None
    handle.commit()
    handle.abort()
    found = s3.client.get_object(Bucket="bucket", Key=remote._full("a/file").removeprefix("bucket/"))
    assert found["Body"].read() == content
    assert left_open(s3, remote) == []


def test_a_part_whose_answer_is_lost_is_sent_again_from_its_start(remote: FsspecStorage) -> None:
    """fsspec/s3fs: a second try that reads on where the first one ended stores an empty part."""
    remote.num_bytes("a")  # opens the client
    client = sync(remote._fs.loop, remote._fs.get_s3)
    true, lost = client.upload_part, 0

    async def once_deaf(**named: object) -> Any:
        nonlocal lost
        answer = await true(**named)
        if named["PartNumber"] == 2 and not lost:
            lost += 1
            raise socket.timeout("no answer")  # noqa: UP041 - the one that the client tries again
        return answer

    once_deaf.__name__ = "upload_part"
    client.upload_part = once_deaf
    write_checkpoint(remote, [big()])
    assert lost == 1
    with open_checkpoint(remote, Version(1, 1), run_id=RUN) as checkpoint:
        checkpoint.verify()


def test_a_save_that_fails_between_two_parts_leaves_nothing_at_the_server(remote: FsspecStorage, s3: S3) -> None:
    write_checkpoint(remote, [big(1)])
    calls = Calls(remote)
    calls.fail_from = 3
    with pytest.raises(CheckpointFailed, match="cut off"):
        write_checkpoint(remote, [big(2)])
    assert calls.begun >= 3
    assert left_open(s3, remote) == []
    assert not remote.entries("step_1_2/replicated")
    newest = Catalog(remote, RUN).newest()
    assert newest is not None
    assert newest.version == Version(1, 1)


def test_an_abort_ends_the_parts_that_are_under_way(remote: FsspecStorage, s3: S3) -> None:
    calls = Calls(remote)
    calls.hold_until = 99
    handle = remote.create("a/file")
    handle.write(memoryview(bytes(2 * PART + 1)))
    assert left_open(s3, remote) == ["a/file"]
    assert calls.now == 2
    handle.abort()
    handle.abort()
    assert calls.now == 0  # what they hold is let go with the save, not when the server has taken it
    assert left_open(s3, remote) == []
    assert remote.num_bytes("a/file") is None


def test_what_a_killed_writer_had_sent_is_cleaned_up_when_it_is_old_enough(s3: S3, remote: FsspecStorage) -> None:
    """Its parts show in no listing and are paid for until somebody ends the upload. This server dates all 2010."""
    for name in ("outer_params.safetensors", "not-ours", "below/data.safetensors"):
        remote.create(f"step_1_1/replicated/{name}").write(memoryview(bytes(PART + 1)))
    begun = 1289422113.0
    young = FsspecStorage(remote.url, s3.options, clock=ManualClock(begun + UPLOAD_SECONDS - 1))
    assert young.sweep("step_1_1/replicated") == 0
    assert len(left_open(s3, remote)) == 3
    write_checkpoint(remote, [source(1)])
    assert sorted(left_open(s3, remote)) == [
        "step_1_1/replicated/below/data.safetensors",
        "step_1_1/replicated/not-ours",
    ]


def test_a_server_that_lists_no_uploads_does_not_stop_a_save(remote: FsspecStorage) -> None:
    true, refused = remote._fs.call_s3, []

    def denied(method: str, *arguments: object, **named: object) -> Any:
        if method == "list_multipart_uploads":
            refused.append(method)
            raise PermissionError("Access Denied")
        return true(method, *arguments, **named)

    remote._fs.call_s3 = denied
    write_checkpoint(remote, [source(1)])
    assert refused
    with open_checkpoint(remote, Version(1, 1), run_id=RUN) as checkpoint:
        checkpoint.verify()
