"""The remote side: uploads in the background that are proven afterwards, and a local cache of verified downloads."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckpt.background import Background
from ckpt.catalog import Catalog
from ckpt.layout import step_folder
from ckpt.local import LocalStorage
from ckpt.part_reading import Progress
from ckpt.retention import Retention, RetentionPolicy, delete_step
from ckpt.storage import Storage
from ckpt.transfer import copy_step
from recovery.clock import Clock, SystemClock
from recovery.errors import BadConfiguration, CheckpointFailed, CheckpointRejected
from recovery.events import CheckpointSaved, CheckpointSaveFailed, EventSink
from recovery.types import Cut, RunId, Version, WorkerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class UploaderConfig:
    """How uploads behave."""

    give_up_after_seconds: float = 600.0
    """An upload is tried again for this long; a remote that is gone for a minute costs nothing but time."""
    first_pause_seconds: float = 1.0
    """Before the second try; doubled for each further one."""
    longest_pause_seconds: float = 60.0
    retention: RetentionPolicy | None = None
    """Of the remote; separate from the local one. None: everything stays."""
    close_timeout_seconds: float = 600.0
    """How long ``close`` waits for uploads under way."""

    def __post_init__(self) -> None:
        for name in ("give_up_after_seconds", "first_pause_seconds", "longest_pause_seconds", "close_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise BadConfiguration(f"{name} is {getattr(self, name)}: it must be above 0")


class Uploader:
    """Copies steps to a remote on a thread of its own, newest wish first, and proves each where it arrived.

    ``upload`` and ``status`` may be called from any thread; it does not wait and does not raise.
    """

    def __init__(
        self,
        local: Storage,
        remote: Storage,
        config: UploaderConfig,
        *,
        run_id: RunId,
        worker_id: WorkerId,
        events: EventSink,
        clock: Clock | None = None,
    ) -> None:
        """Store references.

        Args:
            local: Where steps are saved.
            remote: Where they shall be too.
            config: Behaviour.
            run_id: Whose steps.
            worker_id: Whose private parts are uploaded; the replicated ones by whoever saved them.
            events: Told each proven upload and each failure.
            clock: Measures.
        """
        self._local = local
        self._remote = remote
        self._config = config
        self._run_id = run_id
        self._worker_id = worker_id
        self._events = events
        self._clock = clock or SystemClock()
        self._retention = Retention(remote, run_id, config.retention) if config.retention else None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        # The newest is worth most if this machine dies.
        self._jobs: Background[Version] = Background("ckpt-upload", self._upload, choose=max)
        self._failures: list[str] = []
        self._uploaded = 0

    def start(self) -> None:
        """Start the thread; a second call does nothing."""
        self._jobs.start()

    def __enter__(self) -> Uploader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def uploaded(self) -> int:
        """Uploads that were proven."""
        return self._uploaded

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each upload that was given up, oldest first."""
        with self._lock:
            return tuple(self._failures)

    def upload(self, version: Version) -> None:
        """Have a step uploaded; one that waits already is not queued twice.

        Raises:
            MisuseError: not started, or closed.
        """
        self._jobs.put(version, once=True)

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Return whether nothing is queued or under way within the time."""
        return self._jobs.wait_below(1, timeout_seconds)

    def close(self) -> None:
        """End the thread after what is queued; a second call does nothing.

        Raises:
            CheckpointFailed: an upload was given up, or has not ended in time.
        """
        ended = self._jobs.end(self._config.close_timeout_seconds)
        if ended is None:
            return
        if not ended:
            self._stop.set()
            raise CheckpointFailed(
                f"an upload to {self._remote.url} has not ended within "
                f"{self._config.close_timeout_seconds:g} s of close"
            )
        if self._failures:
            raise CheckpointFailed(f"{len(self._failures)} uploads failed, the last one: {self._failures[-1]}")

    def _upload(self, version: Version) -> None:
        try:
            self._try_upload(version)
        except Exception as error:  # the thread's root: one upload must not take the next with it
            logger.exception("uploading %s to %s failed", version, self._remote.url)
            self._failed(version, f"{type(error).__name__}: {error}")

    def _try_upload(self, version: Version) -> None:
        began = self._clock.monotonic()
        pause = self._config.first_pause_seconds
        while True:
            try:
                report = copy_step(
                    self._local,
                    self._remote,
                    version,
                    run_id=self._run_id,
                    workers=[self._worker_id],
                    replicated=None,
                )
                break
            except CheckpointFailed as error:
                left = self._config.give_up_after_seconds - (self._clock.monotonic() - began)
                if left <= 0:
                    self._failed(version, str(error))
                    return
                logger.warning("uploading %s is tried again in %.1f s: %s", version, pause, error)
                if self._stop.wait(min(pause, left)):
                    self._failed(version, f"the process ends: {error}")
                    return
                pause = min(2 * pause, self._config.longest_pause_seconds)
            except (CheckpointRejected, BadConfiguration) as error:
                self._failed(version, str(error))  # what is here is damaged: another try reads the same
                return
        with self._lock:
            self._uploaded += 1
        self._events(
            CheckpointSaved(
                worker_id=self._worker_id,
                url=report.url,
                cut=Cut(version),
                num_bytes=report.num_bytes,
                took_seconds=self._clock.monotonic() - began,
            )
        )
        if self._retention is not None:
            self._retention.run()

    def _failed(self, version: Version, reason: str) -> None:
        url = self._remote.url_of(step_folder(version))
        logger.error("%s is not uploaded: %s", url, reason)
        with self._lock:
            self._failures.append(f"{url}: {reason}")
        self._events(CheckpointSaveFailed(worker_id=self._worker_id, url=url, reason=reason))


class DownloadCache:
    """A local folder of steps that were downloaded and verified. Processes of one machine share it."""

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        """Store references.

        Args:
            folder: Where.
            keep: Steps that stay; at least 1.
        """
        if keep < 1:
            raise BadConfiguration(f"keep is {keep}: the step that was asked for must stay")
        self._folder = Path(folder)
        self._keep = keep

    def fetch(
        self,
        remote: Storage,
        version: Version,
        *,
        run_id: RunId,
        workers: Collection[WorkerId] | None = None,
        progress: Progress | None = None,
    ) -> LocalStorage:
        """Return a local storage that holds the step; the first process downloads it, the others wait for that.

        Raises:
            CheckpointRejected: the remote's step is damaged.
            CheckpointFailed: it cannot be downloaded.
            BadConfiguration: the remote has no whole step of that version.
        """
        storage = LocalStorage(self._folder)
        with self._locked():
            copy_step(remote, storage, version, run_id=run_id, workers=workers, progress=progress)
            others = [step for step in Catalog(storage, run_id).steps() if step.version != version]
            for step in others[self._keep - 1 :]:
                reason = delete_step(storage, step, run_id)
                if reason:
                    logger.info("the cache keeps %s: %s", step.version, reason)
        return storage

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
