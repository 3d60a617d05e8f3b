"""Captures the scalars of the private parts between two inner steps: small enough for the training thread to take."""

from __future__ import annotations

from collections.abc import Callable

import torch

from recovery.errors import DonorBusy, RecoveryError
from recovery.snapshot.capture_records import Captured
from recovery.snapshot.frozen import freeze
from recovery.snapshot.service import ServiceThread
from recovery.snapshot.stall import StallAccount, StallCause
from recovery.snapshot.waiting import Request, Waiting, running
from recovery.state.parts import WorkerState
from recovery.state.scalars import scalar_parts
from recovery.types import Cut, Version


class ScalarCapture:
    """``request``, ``fail`` and ``tidy`` may be called by any thread; ``take`` by whoever speaks for the training one.

    Args:
        finisher: The thread that calls ``on_captured``.
        on_captured: Called once per capture with the result and those who are to have it.
    """

    def __init__(
        self,
        state: WorkerState,
        stall: StallAccount,
        finisher: ServiceThread,
        on_captured: Callable[[Captured, list[Request]], None],
    ) -> None:
        self._state = state
        self._stall = stall
        self._finisher = finisher
        self._on_captured = on_captured
        self._waiting = Waiting()

    @property
    def wanted(self) -> bool:
        """Whether anybody waits. The only thing that an idle step looks at."""
        return len(self._waiting) > 0

    def request(self, request: Request) -> None:
        """Somebody waits from now on."""
        self._waiting.add(request)

    def fail(self, error: RecoveryError) -> None:
        """All who wait get ``error``."""
        self._waiting.fail(error)

    def tidy(self) -> None:
        """Requests that were cancelled are forgotten."""
        self._waiting.forget_cancelled()

    def take(self, version: Version) -> None:
        """The training thread stands between two inner steps at ``version``: who waits gets what there is now."""
        cut = Cut(version, self._state.local_progress.inner_step)
        takers = running(self._waiting.take(cut))
        if not takers:
            return
        try:
            with self._stall.measure(StallCause.CAPTURE_COPY) as span:
                parts = scalar_parts(self._state)
                data = [
                    part.bytes.read(0, part.bytes.num_bytes, torch.empty(part.bytes.num_bytes, dtype=torch.uint8))
                    for part in parts
                ]
                frozen = tuple(freeze(part, content) for part, content in zip(parts, data, strict=True))
                span.num_bytes = sum(content.numel() for content in data)
        except Exception as error:  # noqa: BLE001 - the user's getter failed: who asked is told, training goes on
            failure = error if isinstance(error, RecoveryError) else DonorBusy(f"reading the scalars failed: {error!r}")
            for request in takers:
                request.future.set_exception(failure)
            return
        captured = Captured(cut, frozen, tuple(data), span.num_bytes, span.seconds)
        self._finisher.submit(lambda: self._on_captured(captured, takers))
