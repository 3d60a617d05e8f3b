"""Storage behind fsspec: ``memory://``, ``s3://``, ``gs://`` and whatever else it knows.

Only this module and ``uploads`` talk to fsspec. Every backend brings the errors of its own client library; they leave
here as ``StorageError``.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import fsspec

from ckpt.layout import is_manifest_name, is_part_file_name
from ckpt.local import LocalStorage
from ckpt.storage import Entry, Pin, Readable, Storage, StorageError, Writable
from ckpt.uploads import ObjectWritable, S3Writable, abandon, abandoned_uploads, head, is_s3
from recovery.clock import Clock, SystemClock
from recovery.errors import BadConfiguration
from recovery.types import MIB

logger = logging.getLogger(__name__)

READING = ".reading-"
PIN_SECONDS = 6 * 3600.0
"""A reader's mark on an object store counts for this long: a reader that was killed cannot take it away."""

UPLOAD_SECONDS = 24 * 3600.0
"""An upload in parts that was begun longer ago has no living writer: a save gives up long before."""

YOUNG_SECONDS = 600.0
"""An upload is not seen before its end: a step whose newest object is younger counts as being written."""

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""The optional dependency of this package that a protocol needs."""

_S3 = (
    ": set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for one of ~/.aws/credentials; a public bucket "
    'is read with the storage option {"anon": true}'
)
_GCS = ": set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`"
_CREDENTIALS = {
    "NoCredentialsError": _S3,
    "PartialCredentialsError": _S3,
    "ProfileNotFound": _S3,
    "CredentialRetrievalError": _S3,
    "DefaultCredentialsError": _GCS,
}
"""What helps, by the name of the client library's error. Those libraries are optional: their classes may be absent."""

_READING = re.compile(r"\.reading-[0-9a-f]{16}")


def open_storage(url: str, options: Mapping[str, object] | None = None, *, clock: Clock | None = None) -> Storage:
    """Return the storage at ``url``: a path, ``file://...``, or any URL that fsspec knows. Touches nothing yet.

    Args:
        url: Where the checkpoints live.
        options: Passed to the fsspec file system, for example ``client_kwargs``.
        clock: Tells how old a reader's mark is.

    Raises:
        BadConfiguration: no such protocol, its package is missing, or the options do not suit it.
    """
    protocol, separator, rest = url.partition("://")
    if not separator:
        return LocalStorage(url)
    if protocol in ("file", "local"):
        return LocalStorage(rest)
    return FsspecStorage(url, options, clock=clock or SystemClock())


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # backends raise their client libraries' own errors, which share no root
        remedy = _CREDENTIALS.get(type(error).__name__, "")
        raise StorageError(f"{what} failed: {type(error).__name__}: {error}{remedy}") from error


class _ObjectReadable:
    request_bytes = 16 * MIB
    """A request costs a round trip and the server's attention. Measured on loopback: twice the speed of 4 MiB."""

    def __init__(self, fs: Any, path: str, num_bytes: int) -> None:
        self._fs = fs
        self._path = path
        self.num_bytes = num_bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        end = min(offset + len(buffer), self.num_bytes)
        if end <= offset:
            return 0
        with _translated(f"reading {self._path}"):
            data = self._fs.cat_file(self._path, start=offset, end=end)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass


class _Mark:
    def __init__(self, storage: FsspecStorage, path: str | None) -> None:
        self._storage = storage
        self._path = path

    def close(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            try:
                self._storage.delete(path)
            except OSError as error:
                logger.warning("the reader's mark %s stays for %.0f s: %s", path, PIN_SECONDS, error)


class FsspecStorage:
    """A prefix of a bucket, or any other root that fsspec can open."""

    def __init__(self, url: str, options: Mapping[str, object] | None = None, *, clock: Clock) -> None:
        self._url = url.rstrip("/")
        self._clock = clock
        try:
            # No instance and no listing is shared with other users of fsspec in this process: a cached listing
            # shows steps that are gone and hides steps that exist.
            self._fs, root = fsspec.core.url_to_fs(
                url, **{"skip_instance_cache": True, "use_listings_cache": False, **(options or {})}
            )
        except (ValueError, ImportError, TypeError) as error:
            raise BadConfiguration(
                f"{url!r} is not a storage URL that this installation can open: {error}. {_how_to_open(url)}"
            ) from error
        self._root = str(root).rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    def url_of(self, path: str) -> str:
        return f"{self._url}/{path}"

    def entries(self, folder: str) -> list[Entry]:
        path = self._full(folder)
        with _translated(f"listing {path}"):
            self._fs.invalidate_cache()
            try:
                infos = self._fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        found = []
        for info in infos:
            name = str(info["name"]).rstrip("/")
            if name == path or not name:
                continue  # stores list a folder's own marker object
            is_folder = info.get("type") == "directory"
            found.append(
                Entry(
                    name=name.rpartition("/")[2],
                    is_folder=is_folder,
                    num_bytes=0 if is_folder else int(info.get("size") or 0),
                    modified=_modified(info),
                )
            )
        return sorted(found, key=lambda entry: entry.name)

    def num_bytes(self, path: str) -> int | None:
        full = self._full(path)
        with _translated(f"looking at {full}"):
            self._fs.invalidate_cache()
            try:
                # One request: fsspec's own look asks again whether an absent object is a folder.
                info = head(self._fs, full) if is_s3(self._fs) else self._fs.info(full)
            except FileNotFoundError:
                return None
        return None if info.get("type") == "directory" else int(info.get("size") or 0)

    def open(self, path: str) -> Readable:
        size = self.num_bytes(path)
        if size is None:
            raise FileNotFoundError(f"{self.url_of(path)} does not exist")
        return _ObjectReadable(self._fs, self._full(path), size)

    def create(self, path: str, num_bytes: int = 0) -> Writable:
        kind = S3Writable if is_s3(self._fs) else ObjectWritable
        return kind(self._fs, self._full(path), num_bytes, _translated)

    def settle(self, folders: Iterable[str]) -> None:
        """Nothing to do: an object that was put is durable, and its name with it."""

    def duplicate(self, source: str, target: str) -> bool:
        with _translated(f"copying {source} to {target}"):
            try:
                self._fs.cp_file(self._full(source), self._full(target))
            except (NotImplementedError, FileNotFoundError):
                return False
        return True

    def delete(self, path: str) -> None:
        with _translated(f"deleting {path}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(path))

    def remove_folder(self, folder: str) -> None:
        if self.entries(folder):
            return
        # Object stores have no folders: there is nothing left to remove, and some backends say so with an error.
        with contextlib.suppress(OSError, NotImplementedError), _translated(f"removing {folder}"):
            if self._fs.isdir(self._full(folder)):
                self._fs.rmdir(self._full(folder))

    def pin(self, manifest_path: str) -> Pin | None:
        if self.num_bytes(manifest_path) is None:
            return None
        mark = f"{manifest_path.rpartition('/')[0]}/{READING}{secrets.token_hex(8)}"
        try:
            with _translated(f"marking {mark}"):
                self._fs.pipe_file(self._full(mark), b"a reader is here\n")
        except OSError as error:  # read-only credentials: reading goes on, and a lost race is found by the digests
            logger.warning("cannot mark %s as being read: %s", self.url_of(manifest_path), error)
            return _Mark(self, None)
        return _Mark(self, mark)

    def claim(self, manifest_path: str) -> Pin | None:
        folder = manifest_path.rpartition("/")[0]
        for entry in self.entries(folder):
            if _READING.fullmatch(entry.name) and not self._expired(entry):
                return None
        return _Mark(self, None)

    def being_written(self, folder: str) -> bool:
        ages = [self._clock.wall() - e.modified for e in self.entries(folder) if e.modified is not None]
        return any(age < YOUNG_SECONDS for age in ages)

    def sweep(self, folder: str) -> int:
        swept = 0
        for entry in self.entries(folder):
            if _READING.fullmatch(entry.name) and self._expired(entry):
                self.delete(f"{folder}/{entry.name}")
                swept += 1
        return swept + self._sweep_uploads(folder)

    def _sweep_uploads(self, folder: str) -> int:
        if not is_s3(self._fs):
            return 0
        full, swept = self._full(folder), 0
        before = datetime.datetime.fromtimestamp(self._clock.wall() - UPLOAD_SECONDS, datetime.UTC)
        try:
            with _translated(f"looking for abandoned uploads in {full}"):
                for name, upload_id in abandoned_uploads(self._fs, full, before):
                    if is_part_file_name(name) or is_manifest_name(name):
                        abandon(self._fs, f"{full}/{name}", upload_id)
                        swept += 1
        except OSError as error:  # not every server or key may list them: they cost money, and no save
            logger.info("abandoned uploads stay: %s", error)
        return swept

    def _expired(self, entry: Entry) -> bool:
        return entry.modified is not None and self._clock.wall() - entry.modified > PIN_SECONDS

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/") if path else self._root


def _how_to_open(url: str) -> str:
    protocol = url.partition("://")[0]
    if protocol in _EXTRAS:
        return f"Install what {protocol}:// needs: pip install 'diloco-recovery[{_EXTRAS[protocol]}]'"
    if protocol in fsspec.available_protocols():
        return "Install the package it names, or correct the storage options"
    return (
        "Use a folder, file://, memory://, s3:// (pip install 'diloco-recovery[s3]') or gs:// (pip install "
        f"'diloco-recovery[gcs]'); fsspec knows others too: {', '.join(sorted(fsspec.available_protocols()))}"
    )


def _modified(info: Mapping[str, object]) -> float | None:
    for key in ("LastModified", "mtime", "modified", "created", "updated"):
        value = info.get(key)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
