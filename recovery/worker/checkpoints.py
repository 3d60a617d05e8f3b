"""When this worker saves, and what it restores from disk.

A version is saved once it is sealed: its replicated parts by the one worker that the coordinator names, private parts
and the data position by each worker. The private parts are captured at the instant before the version's first inner
step, because that is the one cut from which a resumed worker continues bit for bit; everything else happens in the
background.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from ckpt.objects import open_storage
from ckpt.probe import probe
from ckpt.record import KEPT
from ckpt.retention import RetentionPolicy
from ckpt.saver import Saver, SaverConfig, SaveSource, SaveTicket
from ckpt.source import CheckpointSource
from recovery.errors import (
    CheckpointFailed,
    CheckpointRejected,
    DonorBusy,
    DonorRefused,
    MisuseError,
    RecoveryError,
    SourcesExhausted,
)
from recovery.events import CheckpointSaveFailed
from recovery.snapshot import Lease
from recovery.types import RunId, Version
from recovery.worker.context import Context
from recovery.worker.kept_parts import KeptParts
from recovery.worker.restored import Restored

logger = logging.getLogger(__name__)

_HOLDER = "checkpoint"
_CAPTURE_TIMEOUT_SECONDS = 60.0
_MAX_IN_FLIGHT = 4
_SAVE_TRIES = 5


@dataclass(frozen=True, slots=True)
class _Capture:
    """One version's private parts, taken at its boundary."""

    copied: Future[Lease]
    kept: KeptParts | None


class Checkpoints:
    """Owns the thread ``recovery-checkpoints`` and, if a URL is configured, the saver."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._saver: Saver | None = None
        self._lock = threading.Lock()
        self._captures: dict[Version, _Capture] = {}
        self._foreseen: tuple[Version, Future[Lease]] | None = None
        self._jobs: queue.SimpleQueue[tuple[str, Version] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recovery-checkpoints", daemon=True)

    def start(self) -> None:
        """Begin to save, if a URL is configured.

        Raises:
            BadConfiguration: nothing can be written there, or read back.
        """
        config = self._context.config
        if not config.checkpoint_url:
            return
        storage = open_storage(config.checkpoint_url)
        probe([storage])
        self._saver = Saver(
            storage,
            SaverConfig(max_in_flight=_MAX_IN_FLIGHT, retention=RetentionPolicy(keep_newest=config.checkpoint_keep)),
            run_id=RunId(config.run_id),
            worker=self._context.worker,
            events=self._context.events,
            clock=self._context.clock,
        )
        self._saver.start()
        self._thread.start()

    def close(self) -> None:
        """Save what was sealed until now, wait for saves under way, and end the threads.

        Raises:
            CheckpointFailed: a save failed and nobody was told yet.
        """
        if self._saver is None:
            return
        with self._lock:
            waiting = list(self._captures.values())
        for capture in waiting:
            capture.copied.cancel()  # training is over: what was not captured will not be
        self._jobs.put(None)
        self._thread.join()
        saver, self._saver = self._saver, None
        saver.close()

    def awaits_seal(self, version: Version) -> bool:
        """Return whether ``version`` will be saved once it is sealed; any thread."""
        with self._lock:
            return version in self._captures

    def foresee(self, version: Version) -> None:
        """Have memory made ready if ``version`` is to be saved; training thread, before the outer step to it."""
        if self._saver is None or version.outer_step % self._context.config.checkpoint_every:
            return
        if self._foreseen is not None:
            if self._foreseen[0] == version:
                return
            _give_back(self._foreseen[1])
        self._foreseen = (version, self._context.snapshots.lease_at_boundary(f"{_HOLDER}/{version}", version))

    def _captured_at(self, version: Version) -> Future[Lease]:
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None:
            if foreseen[0] == version and not foreseen[1].done():
                return foreseen[1]
            _give_back(foreseen[1])  # another version came of it, or there was no room for it then
        return self._context.snapshots.lease_at_boundary(f"{_HOLDER}/{version}", version)

    def consider(self, version: Version, kept: KeptParts | None) -> None:
        """Have the private parts captured if ``version`` is to be saved; training thread, right after applying."""
        if self._saver is None or version.outer_step % self._context.config.checkpoint_every:
            return
        capture = self._captured_at(version)
        with self._lock:
            outdated = [old for old in self._captures if old < version]
            forgotten = [self._captures.pop(old) for old in outdated]
            self._captures[version] = _Capture(capture, kept)
        for old in forgotten:
            _give_back(old.copied)

    def sealed(self, version: Version) -> None:
        """Save this worker's private parts of a version that the run has sealed; any thread, returns at once."""
        with self._lock:
            due = version in self._captures
        if due:
            self._jobs.put(("private", version))

    def assign(self, version: Version) -> None:
        """Save the replicated parts of ``version``: the coordinator named this worker; any thread, returns at once."""
        if self._saver is not None and version.outer_step % self._context.config.checkpoint_every == 0:
            self._jobs.put(("replicated", version))

    def save_now(self, timeout_seconds: float) -> tuple[Version, str]:
        """Save the version in memory, all parts; return which it is, and where. Any thread but the training thread.

        Retention never deletes it: an operator who asks for a checkpoint wants to find it.

        Raises:
            MisuseError: no checkpoint URL is configured.
            CheckpointFailed: the save failed or did not end in time.
        """
        if self._saver is None:
            raise MisuseError(f"{self._context.worker} has no checkpoint_url: there is nowhere to save")
        holder = f"{_HOLDER}/order"
        snapshots = self._context.snapshots
        for _ in range(_SAVE_TRIES):
            # The private parts first: they are captured when training allows, and tell the version that both are of.
            private = snapshots.lease_private(holder, self._context.standing.read().version).result(timeout_seconds)
            try:
                version = private.manifest.cut.version
                outer = snapshots.lease_outer(version, holder)
            except (DonorBusy, DonorRefused):
                private.release("the version was overwritten meanwhile")
                continue
            ticket = self._save(self._saver, [outer, private], {KEPT: "saved by order"})
            return version, ticket.result(timeout_seconds)[0].url
        raise CheckpointFailed(f"the run went on to the next version {_SAVE_TRIES} times before its state was captured")

    def restore_newest(self, at_most: Version | None) -> Restored:
        """Load the newest checkpoint that verifies, not newer than ``at_most``; training thread.

        Raises:
            SourcesExhausted: there is none; the message has one line for each that was looked at.
            LayoutMismatch: it is of another model or optimizer; nothing was changed.
        """
        context = self._context
        url = context.config.checkpoint_url
        if not url:
            raise SourcesExhausted(
                f"{context.worker}: no peer holds the run's state, and no checkpoint_url is configured to restore from"
            )
        source = CheckpointSource(
            open_storage(url),
            run_id=RunId(context.config.run_id),
            worker=context.worker,
            events=context.events,
            clock=context.clock,
        )
        try:
            loaded = source.restore(context.state, at_most=at_most)
        except CheckpointRejected as error:
            raise SourcesExhausted(f"{context.worker}: no peer holds the run's state, and {error}") from error
        return Restored(
            version=loaded.version,
            source="disk",
            num_tensors=loaded.num_tensors,
            num_bytes=loaded.num_bytes,
            payload_bytes=loaded.num_bytes,
            own_position=loaded.own_position,
        )

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            kind, version = job
            saver = self._saver
            if saver is None:
                continue
            try:
                if kind == "replicated":
                    self._save(saver, [self._context.snapshots.lease_outer(version, f"{_HOLDER}/{version}")])
                else:
                    with self._lock:
                        capture = self._captures.get(version)
                    if capture is None:
                        continue  # a newer version took its place meanwhile
                    copied = capture.copied.result(_CAPTURE_TIMEOUT_SECONDS)
                    with self._lock:
                        if self._captures.pop(version, None) is None:
                            continue  # given back for a newer version's
                    self._save(saver, [copied] if capture.kept is None else [copied, capture.kept])
            except CancelledError:
                logger.info("%s: private parts of %s were not captured in time", self._context.worker, version)
            except (RecoveryError, TimeoutError) as error:
                # Training goes on: the saver's policy decides when failures end it, this is about one version.
                logger.warning("%s: %s parts of %s are not saved: %s", self._context.worker, kind, version, error)
                url = self._context.config.checkpoint_url
                self._context.events(
                    CheckpointSaveFailed(worker_id=self._context.worker.worker_id, url=url, reason=str(error))
                )

    def _save(self, saver: Saver, sources: list[SaveSource], records: Mapping[str, object] | None = None) -> SaveTicket:
        ticket = saver.save(sources, records)
        if ticket is None:
            raise CheckpointFailed(f"{_MAX_IN_FLIGHT} saves are under way: this one is skipped")
        return ticket


def _give_back(capture: Future[Lease]) -> None:
    def release(done: Future[Lease]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().release("not saved")

    capture.cancel()
    capture.add_done_callback(release)
