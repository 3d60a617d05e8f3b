"""Captures the private-copied parts at a cut between two inner steps, mostly beside forward and backward.

::

    last post-hook of step i                                                 first pre-hook of step i+1
      |  buffers and whatever forward changes:    boundary() if the loop says so    |  the rest, together
      |  copied here                              |  all scalars, read here         |  with the service thread
      |--- service thread: tensors that only optimizer steps change, copied ------->|
      v           scheduler.step(), scaler.update(), forward, backward              v

A loop that says ``boundary()`` after each inner step has its scalars read there; one that does not, at the pre-hook.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from recovery.errors import DonorBusy, RecoveryError
from recovery.snapshot.copy_jobs import CopyJob, CopyJobs
from recovery.snapshot.frozen import copy_range, freeze
from recovery.snapshot.lease import Lease
from recovery.snapshot.service import ServiceThread
from recovery.snapshot.stall import StallAccount, StallCause
from recovery.snapshot.vault import Arena, Vault
from recovery.state.chunks import chunk_ranges
from recovery.state.leaf import memory_key
from recovery.state.live_part import LivePart
from recovery.state.optimizer_part import OptimizerPart
from recovery.state.parts import LOCAL_PARAMS, WorkerState
from recovery.types import Cut, PartName, Version

_ALIGNMENT_BYTES = 64


class Rhythm(enum.Enum):
    """When a private-copied part may be read."""

    CHANGES_IN_FORWARD = "changes in forward"
    """Buffers and the like: right after the step, on the training thread."""
    CHANGES_IN_STEP = "changes in optimizer steps only"
    """Optimizer state and unsynchronised parameters: at leisure until the next step. Scalars: at the end."""
    CHANGES_BETWEEN = "changes between steps"
    """Schedulers, scalers, averages, progress: once the training loop has done all that belongs to the step."""


def rhythm(state: WorkerState, name: PartName) -> Rhythm:
    """Return when part ``name`` may be read."""
    if state.changes_in_forward(name):
        return Rhythm.CHANGES_IN_FORWARD
    if name == LOCAL_PARAMS or isinstance(state.part(name), OptimizerPart):
        return Rhythm.CHANGES_IN_STEP
    return Rhythm.CHANGES_BETWEEN


@dataclass(frozen=True, slots=True)
class Request:
    """Somebody wants the private parts, not before a version."""

    holder: str
    not_before: Version
    future: Future[Lease]


@dataclass(slots=True)
class Capture:
    """One capture while it runs. Filled by the training thread, but for the copies that ``jobs`` lists."""

    version: Version
    inner_step: int
    arena: Arena
    layout_digest: bytes
    regions: dict[PartName, torch.Tensor]
    parts: dict[PartName, LivePart] = field(default_factory=dict)
    jobs: CopyJobs = field(default_factory=lambda: CopyJobs(()))
    cut: Cut | None = None
    corrections: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(where, bytes): tensors that changed after they were handed to ``jobs``; written when ``jobs`` is through."""
    copied_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Captured:
    """A finished capture: frozen parts in the order of registration, and what it cost the training thread."""

    cut: Cut
    layout_digest: bytes
    parts: tuple[LivePart, ...]
    data: tuple[torch.Tensor, ...]
    copied_on_training_thread_bytes: int
    training_thread_seconds: float


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
        finisher: The thread that calls ``on_captured``.
        on_captured: Called once per capture with the result and those who are to have it.
        on_waited: Called when the training thread waited for the copier: seconds, for whom.
    """

    def __init__(
        self,
        state: WorkerState,
        vault: Vault,
        stall: StallAccount,
        copier: ServiceThread,
        finisher: ServiceThread,
        *,
        measure_in_step_bytes: int,
        on_captured: Callable[[Captured, list[Request]], None],
        on_waited: Callable[[float, str], None],
    ) -> None:
        self._state = state
        self._vault = vault
        self._stall = stall
        self._copier = copier
        self._finisher = finisher
        self._measure_in_step_bytes = measure_in_step_bytes
        self._on_captured = on_captured
        self._on_waited = on_waited
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._arena: Arena | None = None
        self._sizes: dict[PartName, int] = {}
        self._touched = False
        self._layout_digest = b""
        self._capture: Capture | None = None

    def request(self, request: Request) -> None:
        """Somebody waits from now on."""
        with self._lock:
            self._requests.append(request)

    @property
    def wanted(self) -> bool:
        """Whether anybody waits, or a capture runs. The only thing that an idle step looks at."""
        return bool(self._requests) or self._capture is not None

    def fail(self, error: RecoveryError) -> None:
        """All who wait get ``error``."""
        with self._lock:
            requests, self._requests = self._requests, []
            self._drop_arena()
        for request in requests:
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(error)

    def tidy(self) -> None:
        """Requests that were cancelled are forgotten; memory that nobody waits for is given back. Any thread."""
        with self._lock:
            self._requests = [request for request in self._requests if not request.future.cancelled()]
            if not self._requests and self._capture is None:
                self._drop_arena()

    # Training thread

    def size(self) -> int:
        """Return the bytes that a capture takes now."""
        self._sizes = {name: self._state.read_part(name).bytes.num_bytes for name in self._state.private_copied_names}
        return sum(_aligned(size) for size in self._sizes.values())

    def step_ended(self, version: Version) -> None:
        """All inner optimizers have stepped; the loop still has to do what else belongs to the step."""
        if self._capture is not None:
            # The steps of the captured inner step were over when it began: another end without a beginning between
            # means that the hooks were changed meanwhile.
            self._abandon()
        if self._prepared(version, now=False):
            self._guarded(lambda: self._begin(version))

    def between_steps(self, version: Version, *, whole: bool, now: bool = False) -> None:
        """The loop stands between two inner steps, with all done that belongs to the last one.

        Args:
            version: What the outer parts are.
            whole: Nothing will tell when the next step begins: a capture has to be over when this returns.
            now: Do not wait for memory to be touched first.
        """
        if self._capture is None:
            if not self._prepared(version, now=now):
                return
            self._guarded(lambda: self._begin(version))
        self._guarded(lambda: self._read_scalars(version))
        if whole:
            self.step_begins(version)

    def step_begins(self, version: Version) -> None:
        """What was captured is about to change: the capture is over when this returns."""
        if self._capture is not None:
            self._guarded(lambda: self._finish(version))

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
            self._on_waited(span.seconds, ", ".join(request.holder for request in self._eligible(capture.version)))
        self._complete(capture)

    def _eligible(self, version: Version) -> list[Request]:
        with self._lock:
            return [request for request in self._requests if request.not_before <= version]

    def _prepared(self, version: Version, *, now: bool) -> bool:
        """Return whether memory is ready for a capture that somebody wants; if not, see to it."""
        if not self._requests or not self._eligible(version):
            return False
        if self._arena is None and not self._guarded(self._measure):
            return False
        if self._arena is None:
            self.fail(
                DonorBusy(
                    f"{sum(self._sizes.values())} bytes of private state do not fit beside {self._vault.used_bytes} in "
                    f"use into the snapshot budget of {self._vault.budget_bytes} bytes"
                )
            )
            return False
        return self._touched or now

    def _measure(self) -> None:
        with self._stall.measure(StallCause.CAPTURE_MEASURE):
            total = self.size()
            self._layout_digest = self._state.layout_digest()
            arena = self._vault.reserve(total)
            self._arena = arena
            self._touched = total <= self._measure_in_step_bytes
        if arena is not None and not self._touched:

            def touch() -> None:
                arena.touch()
                with self._lock:
                    self._touched = self._touched or self._arena is arena

            self._copier.submit(touch)

    def _begin(self, version: Version) -> None:
        with self._stall.measure(StallCause.CAPTURE_COPY) as span:
            assert self._arena is not None
            regions, start = {}, 0
            for name, size in self._sizes.items():
                regions[name] = self._arena.data[start : start + size]
                start += _aligned(size)
            inner_step = self._state.local_progress.inner_step
            capture = Capture(version, inner_step, self._arena, self._layout_digest, regions)
            jobs: list[CopyJob] = []
            for name in self._state.private_copied_names:
                when = rhythm(self._state, name)
                if when is Rhythm.CHANGES_BETWEEN:
                    continue
                part = self._read(capture, name)
                if when is Rhythm.CHANGES_IN_FORWARD:
                    span.num_bytes += self._copy_whole(capture, part)
                else:
                    capture.parts[name] = part
                    jobs += _jobs_of(part, regions[name])
            capture.jobs = CopyJobs(jobs)
            capture.copied_bytes = span.num_bytes
            self._capture = capture
        capture.seconds = span.seconds
        self._copier.submit(lambda: self._copy_beside(capture))

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
            for name in self._state.private_copied_names:
                when = rhythm(self._state, name)
                if when is Rhythm.CHANGES_IN_FORWARD:
                    continue
                part = self._read(capture, name)
                if when is Rhythm.CHANGES_BETWEEN:
                    span.num_bytes += self._copy_whole(capture, part)
                else:
                    span.num_bytes += self._correct(capture, part)
        with self._lock:
            capture.copied_bytes += span.num_bytes
            capture.seconds += span.seconds
            capture.cut = Cut(version, inner_step)
        self._complete(capture)

    def _read(self, capture: Capture, name: PartName) -> LivePart:
        part = self._state.read_part(name)
        region = capture.regions.get(name)
        if region is None or part.bytes.num_bytes != region.numel():
            raise _BeginAgain(measure=True)  # state was created or dropped since it was measured
        return part

    def _copy_whole(self, capture: Capture, part: LivePart) -> int:
        region = capture.regions[part.name]
        if region.numel():
            part.bytes.read(0, region.numel(), region)
        capture.parts[part.name] = part
        return region.numel()

    def _correct(self, capture: Capture, part: LivePart) -> int:
        """Take over the scalars of ``part``, and those of its tensors that are not what was handed out for copying."""
        before = capture.parts.get(part.name)
        if before is None or [spec.path for spec in before.specs] != [spec.path for spec in part.specs]:
            raise _BeginAgain(measure=True)
        copied = 0
        for old, new, spec in zip(before.leaves, part.leaves, part.specs, strict=True):
            # A learning rate may be a tensor, which the scheduler changes in place.
            if not spec.num_bytes or (memory_key(old) == memory_key(new) and not spec.path.startswith("param_groups")):
                continue
            where = capture.regions[part.name][spec.offset : spec.offset + spec.num_bytes]
            now = torch.empty(spec.num_bytes, dtype=torch.uint8)
            part.bytes.read(spec.offset, spec.num_bytes, now)
            capture.corrections.append((where, now))
            copied += spec.num_bytes
        capture.parts[part.name] = part
        return copied

    def _complete(self, capture: Capture) -> None:
        """Hand the capture over if it is whole. Any thread; happens once."""
        with self._lock:
            if self._capture is not capture or capture.cut is None or not capture.jobs.done:
                return
            self._capture = None
            self._drop_arena()
            takers = [request for request in self._requests if request.not_before <= capture.version]
            self._requests = [request for request in self._requests if request.not_before > capture.version]
        cut = capture.cut
        # On a service thread: it may be the training thread that found the capture whole.
        self._finisher.submit(lambda: self._hand_over(capture, cut, takers))

    def _hand_over(self, capture: Capture, cut: Cut, requests: list[Request]) -> None:
        requests = [request for request in requests if request.future.set_running_or_notify_cancel()]
        if capture.jobs.error is not None:
            for request in requests:
                request.future.set_exception(capture.jobs.error)
            return
        for where, now in capture.corrections:
            where.copy_(now)
        order = [name for name in self._state.private_copied_names if name in capture.parts]
        data = tuple(capture.regions[name] for name in order)
        parts = tuple(freeze(capture.parts[name], capture.regions[name]) for name in order)
        self._on_captured(
            Captured(cut, capture.layout_digest, parts, data, capture.copied_bytes, capture.seconds), requests
        )

    def _abandon(self) -> None:
        capture = self._capture
        if capture is None:
            return
        capture.jobs.cancel()
        capture.jobs.wait()
        with self._lock:
            self._capture = None

    def _guarded(self, stage: Callable[[], None]) -> bool:
        """Run ``stage``; what it raises goes to those who asked, never into the user's training step."""
        try:
            stage()
            return True
        except _BeginAgain as reason:
            self._abandon()
            if reason.measure:
                with self._lock:
                    self._drop_arena()
        except Exception as error:  # noqa: BLE001 - the user's getter failed: who asked is told, training goes on
            self._abandon()
            failure = (
                error if isinstance(error, RecoveryError) else DonorBusy(f"reading the private parts failed: {error!r}")
            )
            failure.__cause__ = None if failure is error else error
            self.fail(failure)
        return False

    def _drop_arena(self) -> None:
        self._arena = None
        self._touched = False


def _jobs_of(part: LivePart, region: torch.Tensor) -> list[CopyJob]:
    def job(offset: int, num_bytes: int) -> CopyJob:
        return lambda: copy_range(part, offset, region[offset : offset + num_bytes])

    return [job(offset, num_bytes) for offset, num_bytes in chunk_ranges([spec.num_bytes for spec in part.specs])]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
