"""What a worker restores from when no peer can help: the newest whole step that verifies, or the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ckpt.catalog import Catalog, Step
from ckpt.compose import Strictness
from ckpt.loading import ExactLoad, MergedLoad, Private, Request
from ckpt.part_reading import Progress
from ckpt.reader import Checkpoint, open_checkpoint
from ckpt.record import CONVERTED
from ckpt.remote import DownloadCache
from ckpt.storage import Storage
from recovery.clock import Clock, SystemClock
from recovery.errors import BadConfiguration, CheckpointFailed, CheckpointRejected, LayoutMismatch
from recovery.events import CheckpointLoaded, CheckpointSkipped, EventSink
from recovery.state.manifest import Manifest
from recovery.state.parts import WorkerState
from recovery.state.restore import RestoreMode
from recovery.types import Cut, Fingerprint, PartClass, PartName, RunId, Version, WorkerId, WorkerRef

__all__ = ["CheckpointSource", "LoadCallbacks", "Private", "Restored", "Strictness"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadCallbacks:
    """Called around a load, on the loading thread. What they raise ends it."""

    before: Callable[[Checkpoint], None] | None = None
    """The checkpoint was chosen; nothing was read."""
    after: Callable[[Restored], None] | None = None
    """The state is in place and proven."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a restore did."""

    url: str
    version: Version
    cut: Cut
    """Of the private parts where there are any, else the version's boundary."""
    fingerprint: Fingerprint
    """That the run sealed for the version."""
    private_from: WorkerId | None
    """Whose private parts were taken; None: nobody's."""
    own_position: bool
    """The worker's own private-kept parts were restored."""
    num_tensors: int
    num_bytes: int
    created: int
    removed: int
    took_seconds: float
    manifests: tuple[Manifest, ...]
    """Replicated, then private."""
    records: Mapping[str, object] = field(default_factory=dict)
    """Side records of the replicated checkpoint."""
    skipped: tuple[str, ...] = ()
    """One line for each newer step that was not used."""
    differences: tuple[str, ...] = ()
    """Not strict: one line for each leaf that did not fit."""


class CheckpointSource:
    """One root, as a source of state. Use from the thread that owns the state."""

    def __init__(
        self,
        storage: Storage,
        *,
        run_id: RunId,
        worker: WorkerRef,
        events: EventSink,
        clock: Clock | None = None,
        callbacks: Sequence[LoadCallbacks] = (),
        cache: DownloadCache | None = None,
    ) -> None:
        """Store references.

        Args:
            storage: The root.
            run_id: Only this run's steps count.
            worker: Who restores: its own private parts come first.
            events: Told what was loaded, and what was skipped and why.
            clock: Measures.
            callbacks: Called around a load, in this order.
            cache: Where a remote's steps are downloaded to, verified, before they are read; processes share it.
        """
        self._storage = storage
        self._run_id = run_id
        self._worker = worker
        self._events = events
        self._clock = clock or SystemClock()
        self._callbacks = tuple(callbacks)
        self._cache = cache
        self._catalog = Catalog(storage, run_id)

    @property
    def name(self) -> str:
        """How messages call it."""
        return self._storage.url

    def whole_steps(self, *, at_most: Version | None = None) -> list[Step]:
        """Return the whole steps, newest first, not newer than ``at_most``. Their bytes were not read."""
        return list(self._whole(at_most, []))

    def newest(self, *, at_most: Version | None = None) -> Step | None:
        """Return the newest whole step, not newer than ``at_most``, or None. Its bytes were not read."""
        return next(iter(self._whole(at_most, [])), None)

    def restore(
        self,
        state: WorkerState,
        *,
        at: Version | None = None,
        at_most: Version | None = None,
        mode: RestoreMode = RestoreMode.STAGED,
        private: Private = Private.OWN_ELSE_ANY,
        parts: Collection[PartName] | None = None,
        exclude: Collection[PartName] = (),
        tokens: int | None = None,
        strictness: Strictness = Strictness.STRICT,
        progress: Progress | None = None,
    ) -> Restored:
        """Make ``state`` what a step holds, proven leaf by leaf. Newest first; what does not verify is skipped, aloud.

        Args:
            state: The worker's.
            at: Exactly this step: there is no other choice then.
            at_most: No newer step than this.
            mode: ``STAGED`` changes nothing before everything was verified; ``IN_PLACE`` saves the memory, and what was
                verified so far is in the state's tensors when it raises.
            private: Which private parts.
            parts: Only these; None: all.
            exclude: All but these.
            tokens: What ``run_progress`` shall count afterwards, instead of what was saved.
            strictness: What becomes of differences between checkpoint and worker. A worker with another number of local
                ranks than the saver had takes its share by global offsets, whatever the strictness.
            progress: Told the bytes verified.

        Raises:
            CheckpointRejected: no step can be restored; one line for each that was looked at.
            BadConfiguration: ``at`` is not there or not whole, or a part's name is unknown.
            LayoutMismatch: the checkpoint is of another model or optimizer. Nothing was changed.
            StateMismatch: after the restore, memory differs from the manifest.
        """
        skipped: list[str] = []
        request = Request(
            mode=mode,
            private=private,
            parts=parts,
            exclude=exclude,
            tokens=tokens,
            strictness=strictness,
            progress=progress,
        )
        steps = iter([self._catalog.get(at)]) if at is not None else self._whole(at_most, skipped)
        for step in steps:
            try:
                restored = self._restore_step(state, step, request, skipped)
            except CheckpointRejected as error:
                self._skip(self._url(step.version), str(error), skipped)
                continue
            self._events(
                CheckpointLoaded(
                    worker_id=self._worker.worker_id,
                    url=restored.url,
                    cut=restored.cut,
                    num_bytes=restored.num_bytes,
                    took_seconds=restored.took_seconds,
                )
            )
            for callback in self._callbacks:
                if callback.after is not None:
                    callback.after(restored)
            return restored
        listed = "".join(f"\n  {line}" for line in skipped) or "\n  it holds no step of this run"
        raise CheckpointRejected(f"{self.name} has no checkpoint of run {self._run_id} to restore:{listed}")

    def _whole(self, at_most: Version | None, skipped: list[str]) -> Iterator[Step]:
        try:
            for step in self._catalog.iterate():
                if at_most is not None and step.version > at_most:
                    continue
                if step.whole:
                    yield step
                else:
                    self._skip(self._url(step.version), f"{step.state.value}: {step.reason}", skipped)
        except OSError as error:
            self._skip(self.name, f"cannot be listed: {error}", skipped)

    def _restore_step(self, state: WorkerState, step: Step, request: Request, skipped: list[str]) -> Restored:
        began = self._clock.monotonic()
        with ExitStack() as opened:
            storage = self._at_hand(step, request)
            shares = self._shares(storage, step, None, opened)
            replicated = shares[0]
            self._check_names(storage, step, state, request, replicated, opened)
            for callback in self._callbacks:
                if callback.before is not None:
                    callback.before(replicated)
            foreign = CONVERTED in replicated.record.records  # does not say classes: compared leaf by leaf instead
            exact = not foreign and request.strictness is Strictness.STRICT
            exact = exact and step.num_local_ranks == self._worker.num_local_ranks
            load = ExactLoad(state, request) if exact else MergedLoad(state, request, self._run_id, self._worker)
            load.read(shares, _chosen(replicated, state, request, own=True))
            donor = self._read_private(storage, state, step, request, load, opened, skipped)
            if foreign and request.strictness is Strictness.STRICT:
                _check_whole(state, request, replicated, donor)
            # Everything is verified: only now does anything of it become the state.
            done = load.commit(donor.manifest.cut if donor is not None else replicated.manifest.cut)
        if request.tokens is not None:
            state.run_progress.tokens = request.tokens
        own = donor is not None and donor.manifest.worker.worker_id == self._worker.worker_id
        restored = Restored(
            url=replicated.url,
            version=step.version,
            cut=donor.manifest.cut if donor is not None else replicated.manifest.cut,
            fingerprint=replicated.manifest.fingerprint,
            private_from=donor.manifest.worker.worker_id if donor is not None else None,
            own_position=donor is not None and own and _has_position(donor),
            num_tensors=sum(report.num_tensors for report in done.reports),
            num_bytes=sum(report.num_bytes for report in done.reports),
            created=sum(report.created for report in done.reports),
            removed=sum(report.removed for report in done.reports),
            took_seconds=self._clock.monotonic() - began,
            manifests=(replicated.manifest, *((donor.manifest,) if donor is not None else ())),
            records=replicated.record.records,
            skipped=tuple(skipped),
            differences=done.differences,
        )
        logger.info(
            "%s (rank %d of %d): restored %s with private parts of %s, %d bytes in %.2f s",
            self._worker,
            self._worker.local_rank,
            self._worker.num_local_ranks,
            restored.url,
            restored.private_from or "nobody",
            restored.num_bytes,
            restored.took_seconds,
        )
        return restored

    def _read_private(
        self,
        storage: Storage,
        state: WorkerState,
        step: Step,
        request: Request,
        load: ExactLoad | MergedLoad,
        opened: ExitStack,
        skipped: list[str],
    ) -> Checkpoint | None:
        """Read the private parts of the first worker whose every byte verifies: this one, the saver, the others."""
        if request.private is Private.NONE:
            return None
        own = self._worker.worker_id
        saver = step.records[0].manifest.worker.worker_id
        order = sorted(step.workers, key=lambda worker_id: (worker_id != own, worker_id != saver, worker_id))
        if own in step.torn_workers:
            self._skip(f"{self._url(step.version)}/worker_{own}", step.torn_workers[own], skipped)
        for worker_id in order:
            try:
                shares = self._shares(storage, step, worker_id, opened)
                load.read(shares, _chosen(shares[0], state, request, own=worker_id == own))
            except CheckpointRejected as error:
                self._skip(f"{self._url(step.version)}/worker_{worker_id}", str(error), skipped)
                continue
            return shares[0]
        logger.warning("%s: step %s has no private parts to restore", self._worker, step.version)
        return None

    def _check_names(
        self,
        storage: Storage,
        step: Step,
        state: WorkerState,
        request: Request,
        replicated: Checkpoint,
        opened: ExitStack,
    ) -> None:
        """Refuse names that neither the step nor the worker knows: a typing error must not load everything."""
        asked = {*(request.parts or ()), *request.exclude}
        known = {*replicated.part_names, *state.part_names}
        for worker_id in step.workers if asked - known else ():
            try:
                known.update(self._shares(storage, step, worker_id, opened)[0].part_names)
            except CheckpointRejected as error:
                logger.debug("%s: the parts of %s are not known: %s", self._worker, worker_id, error)
        unknown = sorted(asked - known)
        if unknown:
            raise BadConfiguration(
                f"step {step.version} has no part {', '.join(map(repr, unknown))}; known are {', '.join(sorted(known))}"
            )

    def _shares(self, storage: Storage, step: Step, worker_id: WorkerId | None, opened: ExitStack) -> list[Checkpoint]:
        """Open this rank's share, or all of them if they were cut for another number of local ranks."""
        num_ranks = step.num_local_ranks if worker_id is None else step.local_ranks_of[worker_id]
        ranks = [self._worker.local_rank] if num_ranks == self._worker.num_local_ranks else range(num_ranks)
        return [
            opened.enter_context(
                open_checkpoint(
                    storage,
                    step.version,
                    run_id=self._run_id,
                    worker_id=worker_id,
                    local_rank=rank,
                    num_local_ranks=num_ranks,
                )
            )
            for rank in ranks
        ]

    def _at_hand(self, step: Step, request: Request) -> Storage:
        """Return where the step is read from: the storage itself, or the cache after it was downloaded."""
        if self._cache is None:
            return self._storage
        workers = step.workers if request.private is not Private.NONE else ()
        try:
            return self._cache.fetch(self._storage, step.version, run_id=self._run_id, workers=workers)
        except (CheckpointFailed, BadConfiguration, OSError) as error:
            raise CheckpointRejected(f"it cannot be downloaded: {error}") from error

    def _url(self, version: Version) -> str:
        return self._storage.url_of(f"step_{version.lineage}_{version.outer_step}")

    def _skip(self, url: str, reason: str, skipped: list[str]) -> None:
        logger.warning("%s: %s is not used: %s", self._worker, url, reason)
        skipped.append(f"{url}: {reason}")
        self._events(CheckpointSkipped(worker_id=self._worker.worker_id, url=url, reason=reason))


def _chosen(checkpoint: Checkpoint, state: WorkerState, request: Request, *, own: bool) -> tuple[PartName, ...]:
    # By the class that either side gives it: a data position is never taken from another worker by mistake.
    kept = {part.name for part in checkpoint.manifest.parts if part.part_class is PartClass.PRIVATE_KEPT}
    kept |= set(state.private_kept_names)
    return tuple(
        name
        for name in checkpoint.part_names
        if (request.parts is None or name in request.parts)
        and name not in request.exclude
        and (own or name not in kept)
    )


def _check_whole(state: WorkerState, request: Request, replicated: Checkpoint, donor: Checkpoint | None) -> None:
    """Refuse what another system left out: half a state must not pass for the whole.

    Raises:
        LayoutMismatch: one line for each missing part, with why it is missing and the remedy.
    """
    wanted = [
        name
        for name in state.part_names
        if state.part_class(name) is PartClass.REPLICATED
        or (state.part_class(name) is PartClass.PRIVATE_COPIED and request.private is not Private.NONE)
    ]
    here = {*replicated.part_names, *(donor.part_names if donor is not None else ())}
    missing = [
        name
        for name in wanted
        if name not in here and name not in request.exclude and (request.parts is None or name in request.parts)
    ]
    if not missing:
        return
    converted = replicated.record.records[CONVERTED]
    said = converted if isinstance(converted, dict) else {}
    absent = said.get("absent")
    why = absent if isinstance(absent, dict) else {}
    lines = "".join(f"\n  {name}: {why.get(name, 'it has no such part')}" for name in missing)
    raise LayoutMismatch(
        f"{replicated.url} was converted from {said.get('from', 'another system')} and lacks parts of this worker; "
        f"nothing was changed:{lines}\nRestore with exclude=[{', '.join(map(repr, map(str, missing)))}] to keep the "
        "worker's own, or convert again with --rename OLD=NEW if a part is only called otherwise"
    )


def _has_position(checkpoint: Checkpoint) -> bool:
    return any(part.part_class is PartClass.PRIVATE_KEPT for part in checkpoint.manifest.parts)
