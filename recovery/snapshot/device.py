"""Copies from a CUDA device that neither wait for training's later kernels nor hold them up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from recovery.state.parts import WorkerState


def device_of(state: WorkerState) -> torch.device | None:
    """Return the CUDA device on which an optimizer of ``state`` has parameters, or None."""
    for optimizer in (*state.inner_optimizers, *state.outer_optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.is_cuda:
                    device: torch.device = parameter.device
                    return device
    return None


class SideStream:
    """A stream for copies to the host. Without a CUDA device it does nothing.

    The training thread calls ``mark`` when what is to be copied stands still; copies under ``after_mark``, on any
    thread, begin once the kernels queued before the mark are through, and run beside those queued after it. Copies to
    the host return when they are done, so whoever waits for the copying thread has waited for the device as well.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._marked: torch.cuda.Event | None = None

    def mark(self) -> None:
        """What training has queued so far comes before the copies."""
        if self._device is None:
            return
        self._marked = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._marked.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def after_mark(self) -> Iterator[None]:
        """Copies in the block run on the side stream, after the mark."""
        if self._device is None or self._marked is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(self._marked)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
