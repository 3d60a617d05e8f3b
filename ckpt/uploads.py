"""Writing one object: whole if it is small, else in parts that travel side by side while the next one is filled.

fsspec's own files send the parts of one object one after the other, and copy every byte three times on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import io
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import fsspec

from ckpt.storage import StorageError
from recovery.types import MIB

logger = logging.getLogger(__name__)

Translated = Callable[[str], contextlib.AbstractContextManager[None]]
"""Turns a client library's errors into ``StorageError``; its argument names what was being done."""

WHOLE_BYTES = 48 * MIB
"""An object up to this size goes in one request: parts cost a server more than they gain, as files go side by side."""

PART_BYTES = 16 * MIB
PARTS_UNDER_WAY = 2
"""Beside the part that is being filled; with ``PART_BYTES`` as much memory as one whole object takes."""

_MAX_PARTS = 9000
"""A server takes 10,000 at most; the rest is for a file that is longer than was said."""

_BUFFERED_BYTES = 50 * MIB


class ObjectWritable:
    """An object on any backend, through the file that fsspec offers for it."""

    def __init__(self, fs: Any, path: str, num_bytes: int, translated: Translated) -> None:
        self._fs = fs
        self._path = path
        self._translated = translated
        # Parts of one upload go one after the other, so that large ones cost least.
        block = max(_BUFFERED_BYTES, _part_bytes(num_bytes))
        with translated(f"writing {path}"):
            self._file = fs.open(path, "wb", block_size=block)
        self._open = True

    def write(self, data: memoryview) -> None:
        with self._translated(f"writing {self._path}"):
            self._file.write(bytes(data))

    def commit(self) -> None:
        with self._translated(f"writing {self._path}"):
            self._file.close()
        self._open = False

    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        # Without a discard the file's own close, at the latest by the garbage collector, would upload the torso.
        try:
            with self._translated(f"discarding {self._path}"):
                if isinstance(self._file, fsspec.spec.AbstractBufferedFile):
                    self._file.discard()
                    self._file.closed = True
                else:  # one that was visible from its opening on
                    self._file.close()
                    self._fs.rm_file(self._path)
        except OSError as error:
            logger.warning("what was written of %s may stay at the server: %s", self._path, error)


class S3Writable:
    """An object on S3. It appears under its name when it is complete, and not before."""

    def __init__(self, fs: Any, path: str, num_bytes: int, translated: Translated) -> None:
        """Touch nothing yet.

        Args:
            fs: An ``s3fs.S3FileSystem`` with a loop of its own.
            path: Bucket and key.
            num_bytes: How large it will be; 0 if that is not known.
            translated: Names what failed.
        """
        self._fs = fs
        self._path = path
        self._translated = translated
        bucket, key, _ = fs.split_path(path)
        self._name = {"Bucket": bucket, "Key": key}
        self._limit = num_bytes if 0 < num_bytes <= WHOLE_BYTES else _part_bytes(num_bytes)
        self._buffer = io.BytesIO()
        self._upload_id: str | None = None
        self._parts: list[dict[str, object]] = []
        self._under_way: deque[tuple[int, Future[Any]]] = deque()
        self._num_parts = 0
        self._open = True

    def write(self, data: memoryview) -> None:
        with self._translated(f"writing {self._path}"):
            while len(data):
                if self._buffer.tell() == self._limit:  # not before more comes: the last part may be the only one
                    self._send_part()
                room = self._limit - self._buffer.tell()
                self._buffer.write(data[:room])
                data = data[room:]

    def commit(self) -> None:
        with self._translated(f"writing {self._path}"):
            if self._upload_id is None:
                self._fs.call_s3("put_object", **self._name, Body=self._taken())
            else:
                self._send_part()
                while self._under_way:
                    self._await_oldest()
                self._fs.call_s3(
                    "complete_multipart_upload",
                    **self._name,
                    UploadId=self._upload_id,
                    MultipartUpload={"Parts": self._parts},
                )
        self._open = False

    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        self._buffer = io.BytesIO()
        for _, part in self._under_way:
            part.cancel()
        if self._upload_id is None:
            return
        try:
            with self._translated(f"discarding {self._path}"):
                abandon(self._fs, self._path, self._upload_id)
        except OSError as error:  # the cause of the abort is the error that the caller must see
            logger.warning("parts of %s stay at the server until a later save's clean-up: %s", self._path, error)

    def _taken(self) -> bytes:
        """Return what was filled, uncopied, and begin anew. Bytes: a client's second try sends them from the start."""
        full, self._buffer = self._buffer, io.BytesIO()
        return full.getvalue()

    def _send_part(self) -> None:
        if self._upload_id is None:
            self._upload_id = str(self._fs.call_s3("create_multipart_upload", **self._name)["UploadId"])
        if len(self._under_way) >= PARTS_UNDER_WAY:
            self._await_oldest()
        self._num_parts += 1
        sending = self._fs._call_s3(
            "upload_part", **self._name, UploadId=self._upload_id, PartNumber=self._num_parts, Body=self._taken()
        )
        self._under_way.append((self._num_parts, asyncio.run_coroutine_threadsafe(sending, self._fs.loop)))

    def _await_oldest(self) -> None:
        number, part = self._under_way[0]
        try:
            answer = part.result()
        except CancelledError as error:  # not an Exception's business: it would pass for the caller's own
            raise StorageError("the client ended while it sent") from error
        self._under_way.popleft()
        kept = {name: answer[name] for name in ("ETag", "ChecksumSHA256") if name in answer}
        self._parts.append({"PartNumber": number, **kept})


def abandoned_uploads(fs: Any, folder: str, older_than: datetime.datetime) -> Iterator[tuple[str, str]]:
    """Yield name and id of each upload below ``folder`` that was begun before that time and never ended.

    A writer that was killed leaves them: they show in no listing and cost as much as what they hold.
    """
    bucket, prefix, _ = fs.split_path(folder)
    more: dict[str, str] = {}
    while True:
        # No delimiter: several servers do not know it here.
        found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/", **more)
        for upload in found.get("Uploads", ()):
            name = upload["Key"].removeprefix(f"{prefix}/")
            if upload["Initiated"] < older_than:
                yield name, upload["UploadId"]
        if not found.get("IsTruncated"):
            return
        more = {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}


def abandon(fs: Any, path: str, upload_id: str) -> None:
    """Have the server forget an upload and its parts."""
    bucket, key, _ = fs.split_path(path)
    fs.abort_mpu(bucket, key, upload_id)


def head(fs: Any, path: str) -> dict[str, Any]:
    """Return an S3 object's size as fsspec gives it.

    Raises:
        FileNotFoundError: there is none.
    """
    bucket, key, _ = fs.split_path(path)
    return {"size": fs.call_s3("head_object", Bucket=bucket, Key=key)["ContentLength"]}


def is_s3(fs: Any) -> bool:
    """Return whether ``fs`` is the S3 client."""
    return "s3" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _part_bytes(num_bytes: int) -> int:
    return max(PART_BYTES, -(-num_bytes // _MAX_PARTS // MIB) * MIB)
