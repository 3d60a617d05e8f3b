"""Captures the private-copied parts at a cut between two inner steps, mostly beside forward and backward.

::

    last post-hook of step i                                                 first pre-hook of step i+1
      |  buffers and whatever forward changes:    boundary() if the loop says so    |  the rest, together
      |  copied here                              |  all scalars, read here         |  with the service thread
      |--- service thread: tensors that only optimizer steps change, copied ------->|
      v           scheduler.step(), scaler.update(), forward, backward              v

A loop that says ``boundary()`` after each inner step has its scalars read there; one that does not, at the pre-hook.

Memory for the copies is touched in the background first, and the capture waits for that, unless somebody wants the very
instant before a version's first inner step (a checkpoint).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

from recovery.errors import DonorBusy, RecoveryError
from recovery.snapshot.capture_records import Capture, Captured
from recovery.snapshot.copy_jobs import CopyJob, CopyJobs
from recovery.snapshot.device import SideStream
from recovery.snapshot.frozen import copy_range, freeze, stretches
from recovery.snapshot.outline import Outline, bytes_in, held, take_apart
from recovery.snapshot.preparation import Preparation, aligned
from recovery.snapshot.rhythm import Rhythm, rhythm
from recovery.snapshot.service import ServiceThread
from recovery.snapshot.stall import StallAccount, StallCause
from recovery.snapshot.vault import Vault
from recovery.snapshot.waiting import Request, Waiting, running
from recovery.state.leaf import memory_key
from recovery.state.live_part import LivePart
from recovery.state.parts import WorkerState
from recovery.types import MIB, Cut, PartName, Version

_JOB_BYTES = 8 * MIB
"""Large enough that taking the interpreter between two copies is rare, small enough that waiting for one is short."""


class _BeginAgain(Exception):
    """What was begun cannot become a snapshot: begin again at the next boundary.

    ``measure``: the parts are not of the size that memory was reserved for.
    """

    def __init__(self, *, measure: bool) -> None:
        super().__init__()
        self.measure = measure


class PrivateCapture:
    """Runs one capture at a time for all who asked. ``request`` may be called by any thread; the rest by training.

    Args:
        state: Whose private-copied parts are captured.
        copier: The thread that copies beside training.
        side_stream: Where copies from a device run.
        finisher: The thread that calls ``on_captured``.
        measure_in_step_bytes, touch_share: See ``SnapshotConfig``.
        on_captured: Called once per capture with the result and those who are to have it.
        on_waited: Called when the training thread waited for the copier: seconds, for whom.

    Attributes:
        hurry: Set while training stands still: nothing rests for its sake.
    """

    def __init__(
        self,
        state: WorkerState,
        vault: Vault,
        stall: StallAccount,
        copier: ServiceThread,
        finisher: ServiceThread,
        side_stream: SideStream,
        *,
        measure_in_step_bytes: int,
        touch_share: float,
        on_captured: Callable[[Captured, list[Request]], None],
        on_waited: Callable[[float, str], None],
    ) -> None:
        self._state = state
        self._vault = vault
        self._stall = stall
        self._copier = copier
        self._finisher = finisher
        self._side_stream = side_stream
        self._measure_in_step_bytes = measure_in_step_bytes
        self._touch_share = touch_share
        self.hurry = threading.Event()
        self._on_captured = on_captured
        self._on_waited = on_waited
        self._waiting = Waiting()
        self._lock = self._waiting.lock
        self._preparation: Preparation | None = None
        self._capture: Capture | None = None

    def request(self, request: Request) -> None:
        """Somebody waits from now on."""
        self._waiting.add(request)

    @property
    def wanted(self) -> bool:
        """Whether anybody waits, or a capture runs. The only thing that an idle step looks at."""
        return len(self._waiting) > 0 or self._capture is not None

    def is_due(self, version: Version) -> bool:
        """Return whether somebody waits for a capture at ``version`` that has not begun."""
        return self._capture is None and bool(self._waiting.due(version))

    def fail(self, error: RecoveryError) -> None:
        """All who wait get ``error``."""
        with self._lock:
            self._preparation = None
        self._waiting.fail(error)

    def tidy(self) -> None:
        """Requests that were cancelled are forgotten; memory that nobody waits for is given back. Any thread."""
        with self._lock:
            self._waiting.forget_cancelled()
            if len(self._waiting):
                return
            self._preparation = None
            # One that runs has no reader either: what is not copied yet is left, and who works on it finds it gone.
            unwanted, self._capture = self._capture, None
        if unwanted is not None:
            unwanted.jobs.cancel()

    # Training thread

    def size(self) -> int:
        """Return about how many bytes a capture takes now."""
        return sum(aligned(bytes_in(value)) for value in self._values().values())

    def prepare(self) -> None:
        """Memory is made ready for a capture that will be due: at the next boundary it is there."""
        if len(self._waiting) and self._preparation is None and self._capture is None:
            self._guarded(self._prepare)

    def step_ended(self, version: Version) -> None:
        """All inner optimizers have stepped; the loop still has to do what else belongs to the step."""
        if self._capture is not None:
            # The steps of the captured inner step were over when it began: another end without a beginning between
            # means that the hooks were changed meanwhile.
            self._abandon()
        if self._prepared(version):
            self._guarded(lambda: self._begin(version))

    def between_steps(self, version: Version, *, whole: bool) -> None:
        """The loop stands between two inner steps, with all done that belongs to the last one.

        Args:
            version: What the outer parts are.
            whole: Nothing will tell when the next step begins: a capture has to be over when this returns.
        """
        if self._capture is None:
            self._waiting.fail_missed(Cut(version, self._state.local_progress.inner_step))
            begun = self._prepared(version) and self._guarded(lambda: self._begin(version))
            if not begun and self._prepared(version):
                # What was prepared no longer fitted; nothing tells when the next chance comes.
                self._guarded(lambda: self._begin(version))
        self._guarded(lambda: self._read_scalars(version))
        if whole:
            self.step_begins(version)

    def step_begins(self, version: Version) -> None:
        """What was captured is about to change: the capture is over when this returns."""
        if self._capture is not None:
            self._guarded(lambda: self._finish(version))
        elif len(self._waiting):
            self._waiting.fail_missed(Cut(version, self._state.local_progress.inner_step + 1))

    # Stages

    def _finish(self, version: Version) -> None:
        self._read_scalars(version)
        capture = self._capture
        if capture is None:
            return
        with self._stall.measure(StallCause.CAPTURE_WAIT) as span:
            capture.jobs.work()
            waited = capture.jobs.wait()
        capture.seconds += span.seconds
        if waited:
            self._on_waited(span.seconds, capture.for_whom)
        self._complete(capture)

    def _prepared(self, version: Version) -> bool:
        """Return whether all is ready for a capture that somebody wants; if not, see to it."""
        due = self._waiting.due(version)
        if not due:
            return False
        if self._preparation is None and not self._guarded(self._prepare):
            return False
        preparation = self._preparation
        if preparation is None:
            return False
        if not preparation.ready and any(request.at_boundary for request in due):
            # This instant does not come again: better to copy into pages that nobody has touched.
            return self._guarded(lambda: self._lay_out(preparation))
        return preparation.ready

    def _prepare(self) -> None:
        with self._stall.measure(StallCause.CAPTURE_MEASURE):
            preparation = Preparation({name: held(value) for name, value in self._values().items()})
            with self._lock:
                if not len(self._waiting):
                    return  # cancelled meanwhile, and nobody tidies up after the last one
                self._preparation = preparation
            if preparation.num_bytes <= self._measure_in_step_bytes:
                preparation.lay_out(self._state, self._vault)
                preparation.touch()
                return
        self._copier.submit(lambda: self._guarded(lambda: self._reserve(preparation)))

    def _lay_out(self, preparation: Preparation) -> None:
        with self._stall.measure(StallCause.CAPTURE_MEASURE):
            preparation.lay_out(self._state, self._vault)

    def _reserve(self, preparation: Preparation) -> None:
        """Memory for every part is ready to be written. On the copier's thread."""
        if self._preparation is preparation:
            preparation.lay_out(self._state, self._vault, turns=True)
            preparation.touch(lambda seconds: self._rest(preparation, seconds))

    def _rest(self, preparation: Preparation, seconds: float) -> bool:
        """Leave memory to training for a while after taking some for ``seconds``; return whether to take more."""
        if not any(request.at_boundary for request in self._waiting):
            self.hurry.wait(seconds * (1 / self._touch_share - 1))
        return self._preparation is preparation

    def _begin(self, version: Version) -> None:
        preparation = self._preparation
        assert preparation is not None
        with self._stall.measure(StallCause.CAPTURE_COPY) as span:
            inner_step = self._state.local_progress.inner_step
            for_whom = ", ".join(request.holder for request in self._waiting.due(version))
            capture = Capture(version, inner_step, for_whom, preparation)
            jobs: list[CopyJob] = []
            self._side_stream.mark()
            for name, outline in preparation.outlines.items():
                when = rhythm(self._state, name)
                if when is Rhythm.CHANGES_IN_FORWARD:
                    span.num_bytes += self._copy_whole(capture, outline, name)
                elif when is Rhythm.CHANGES_IN_STEP:
                    part = self._state.part(name)
                    value = part.read()
                    if not outline.fits(value):
                        outline = Outline(part, held(value))
                    if outline.part.bytes.num_bytes != capture.preparation.regions[name].numel():
                        raise _BeginAgain(measure=True)  # state was created or dropped since it was measured
                    capture.handed[name] = outline
                    jobs += self._jobs_of(outline.part, capture.preparation.regions[name])
            capture.jobs = CopyJobs(jobs)
            capture.copied_bytes = span.num_bytes
            self._capture = capture
        capture.seconds = span.seconds
        self._copier.submit(lambda: self._copy_beside(capture))

    def _jobs_of(self, part: LivePart, region: torch.Tensor) -> list[CopyJob]:
        def copy(offset: int, num_bytes: int) -> None:
            with self._side_stream.after_mark():
                copy_range(part, offset, region[offset : offset + num_bytes])

        return [functools.partial(copy, offset, num_bytes) for offset, num_bytes in stretches(part, _JOB_BYTES)]

    def _copy_beside(self, capture: Capture) -> None:
        capture.jobs.work()
        capture.jobs.wait()
        self._complete(capture)

    def _read_scalars(self, version: Version) -> None:
        capture = self._capture
        if capture is None or capture.cut is not None:
            return
        inner_step = self._state.local_progress.inner_step
        if version != capture.version or not capture.inner_step <= inner_step <= capture.inner_step + 1:
            # A step that no hook saw lies between (a gradient scaler skipped it): scalars of now do not belong to
            # what was copied then.
            raise _BeginAgain(measure=False)
        with self._stall.measure(StallCause.CAPTURE_COPY) as span:
            for name, outline in capture.preparation.outlines.items():
                when = rhythm(self._state, name)
                if when is Rhythm.CHANGES_BETWEEN:
                    span.num_bytes += self._copy_whole(capture, outline, name)
                elif when is Rhythm.CHANGES_IN_STEP:
                    span.num_bytes += self._correct(capture, name)
        with self._lock:
            capture.copied_bytes += span.num_bytes
            capture.seconds += span.seconds
            capture.cut = Cut(version, inner_step)
        self._complete(capture)

    def _values(self) -> dict[PartName, object]:
        return {name: self._state.part(name).read() for name in self._state.private_copied_names}

    def _copy_whole(self, capture: Capture, outline: Outline, name: PartName) -> int:
        part = self._state.part(name)
        value = part.read()
        if not outline.fits(value):
            outline = Outline(part, value)
        region = capture.preparation.regions[name]
        if outline.part.bytes.num_bytes != region.numel():
            raise _BeginAgain(measure=True)
        if region.numel():
            outline.part.bytes.read(0, region.numel(), region)
        capture.values[name] = held(value)
        return region.numel()

    def _correct(self, capture: Capture, name: PartName) -> int:
        """Take over the scalars of a part, and those of its tensors that are not what was handed out for copying."""
        part = self._state.part(name)
        value = part.read()
        before = capture.handed[name]
        live, changed = before.part, before.late
        if not before.holds_same_tensors(value):
            live = take_apart(part, value)
            if [spec.path for spec in before.part.specs] != [spec.path for spec in live.specs]:
                raise _BeginAgain(measure=True)
            leaves = enumerate(zip(before.part.leaves, live.leaves, strict=True))
            changed = sorted({*before.late, *(i for i, (old, new) in leaves if memory_key(old) != memory_key(new))})
        copied = 0
        for spec in (live.specs[i] for i in changed):
            where = capture.preparation.regions[name][spec.offset : spec.offset + spec.num_bytes]
            now = torch.empty(spec.num_bytes, dtype=torch.uint8)
            live.bytes.read(spec.offset, spec.num_bytes, now)
            capture.corrections.append((where, now))
            copied += spec.num_bytes
        capture.values[name] = held(value)
        return copied

    def _complete(self, capture: Capture) -> None:
        """Hand the capture over if it is whole. Any thread; happens once."""
        with self._lock:
            if self._capture is not capture or capture.cut is None or not capture.jobs.done:
                return
            self._capture = None
            self._preparation = None
            cut = capture.cut
            takers = self._waiting.take(cut)
        # On a service thread: it may be the training thread that found the capture whole.
        self._finisher.submit(lambda: self._hand_over(capture, cut, takers))

    def _hand_over(self, capture: Capture, cut: Cut, requests: list[Request]) -> None:
        requests = running(requests)
        if not requests:
            return  # a snapshot without a reader would stay: its memory goes back when the last one's lease ends
        try:
            if capture.jobs.error is not None:
                raise capture.jobs.error
            for where, now in capture.corrections:
                where.copy_(now)
            regions = capture.preparation.regions
            parts = tuple(
                freeze(take_apart(self._state.part(name), capture.values[name], turns=True), region)
                for name, region in regions.items()
            )
        except Exception as error:  # whatever it is, nobody may wait for ever
            for request in requests:
                request.future.set_exception(error)
            if not isinstance(error, RecoveryError):
                raise
            return
        captured = Captured(
            cut,
            parts,
            tuple(regions.values()),
            capture.copied_bytes,
            capture.seconds,
        )
        self._on_captured(captured, requests)

    def _abandon(self) -> None:
        capture = self._capture
        if capture is None:
            return
        capture.jobs.cancel()
        with self._stall.measure(StallCause.CAPTURE_WAIT):
            capture.jobs.wait()
        with self._lock:
            self._capture = None

    def _guarded(self, stage: Callable[[], object]) -> bool:
        """Run ``stage``; what it raises goes to those who asked, never into the user's training step."""
        try:
            stage()
            return True
        except _BeginAgain as reason:
            self._abandon()
            if reason.measure:
                with self._lock:
                    self._preparation = None
        except Exception as error:  # noqa: BLE001 - the user's getter failed: who asked is told, training goes on
            self._abandon()
            failure = (
                error if isinstance(error, RecoveryError) else DonorBusy(f"reading the private parts failed: {error!r}")
            )
            failure.__cause__ = None if failure is error else error
            self.fail(failure)
        return False
