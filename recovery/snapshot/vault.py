"""Memory for copies: a budget, and arenas that are touched before anybody waits for them."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import torch

from recovery.types import MIB

logger = logging.getLogger(__name__)

_TOUCH_STEP_BYTES = 2 * MIB
_MADV_POPULATE_WRITE = 23  # Linux 5.14; from <linux/mman.h>: faults pages in for writing and leaves their content alone


@functools.cache
def _populate() -> Callable[[int, int, int], int] | None:
    """Return madvise(2) if it can fault pages in without writing them, else None."""
    if not sys.platform.startswith("linux"):
        return None
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # a ctypes call gives up the GIL; mmap.madvise does not
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as probe:
        address = np.frombuffer(probe, dtype=np.uint8).ctypes.data
        works: bool = madvise(address, mmap.PAGESIZE, _MADV_POPULATE_WRITE) == 0
    return madvise if works else None


class _Memory(mmap.mmap):
    """A mapping that may be lent several times. ``touched``: every page is backed, whatever was asked of it."""

    touched = False


class Arena:
    """One reserved stretch of memory. ``data`` is a 1-d uint8 CPU tensor of ``num_bytes``.

    Its bytes go back to the vault when the arena is dropped *and* no view of ``data`` lives any more: a view behind a
    posted send keeps the memory from being unmapped or handed to somebody else.
    """

    def __init__(self, data: torch.Tensor, memory: _Memory | None = None) -> None:
        self.data = data
        self.num_bytes = data.numel()
        self._memory = memory

    @property
    def touched(self) -> bool:
        """Whether every page is known to be backed by memory."""
        return self._memory is None or self._memory.touched

    def touch(self, pace: Callable[[float], bool] | None = None) -> None:
        """Every page is backed by memory; the content is unchanged. Safe beside writers; gives up the GIL.

        Does nothing where the system cannot do so without writing: there the vault touches before it hands out.

        Args:
            pace: Called after each stretch of a few MiB with the seconds that it took; may rest, and says whether to
                go on. Memory that nobody used before comes at a fraction of a copy's speed, and training, which takes
                memory for its gradients, waits for the same kernel meanwhile.
        """
        populate = _populate()
        if self._memory is None or self._memory.touched or populate is None:
            return
        base = self.data.data_ptr()
        for offset in range(0, self.num_bytes, _TOUCH_STEP_BYTES):
            length = min(_TOUCH_STEP_BYTES, self.num_bytes - offset)
            began = time.perf_counter()
            if populate(base + offset, length, _MADV_POPULATE_WRITE) != 0:
                code = ctypes.get_errno()
                # Not touched is only slower: the page comes when it is written.
                logger.warning("cannot touch memory ahead: %s", errno.errorcode.get(code, os.strerror(code)))
                return
            if pace is not None and not pace(time.perf_counter() - began):
                return
        if self.num_bytes == len(self._memory):
            self._memory.touched = True


class Vault:
    """Hands out arenas within a budget. All methods may be called from any thread.

    Args:
        budget_bytes: Most bytes of arenas alive at once.
        keep: Always keep the memory of arenas that came back for the next reservation that it fits. Without it that is
            done only between ``hold`` and ``let_go``.
        pinned: Take page-locked memory, for copies from CUDA devices; it is not kept.
    """

    def __init__(self, budget_bytes: int, *, keep: bool = False, pinned: bool = False) -> None:
        self._budget_bytes = budget_bytes
        self._keep = keep
        self._holds = False
        self._closed = False
        self._pinned = pinned
        # Re-entrant: a finalizer may run in the middle of an allocation that holds it.
        self._lock = threading.RLock()
        self._used_bytes = 0
        self._peak_bytes = 0
        self._kept: list[_Memory] = []

    @property
    def used_bytes(self) -> int:
        """Bytes of arenas alive now, kept memory included."""
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest ``used_bytes`` so far."""
        return self._peak_bytes

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    def reserve(self, num_bytes: int) -> Arena | None:
        """Return an arena of ``num_bytes``, or None if the budget or the system has no room for it.

        Its pages may not be backed yet: call ``Arena.touch`` from a thread that may wait.
        """
        size = max(num_bytes, 1)
        with self._lock:
            fitting = [memory for memory in self._kept if size <= len(memory) <= 2 * size + MIB]
            if fitting:
                best = min(fitting, key=len)
                self._kept.remove(best)
                return self._lend(best, num_bytes)
            while self._kept and self._used_bytes + size > self._budget_bytes:
                self._used_bytes -= len(self._kept.pop())
            if self._used_bytes + size > self._budget_bytes:
                return None
            self._used_bytes += size
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        try:
            return self._pin(size, num_bytes) if self._pinned else self._map(size, num_bytes)
        except (OSError, RuntimeError, MemoryError) as error:
            # No memory is like no budget: whoever asked is told so, and training goes on.
            logger.warning("the system has no %d bytes for a snapshot: %s", num_bytes, error)
            with self._lock:
                self._used_bytes -= size
            return None

    def charge(self, num_bytes: int) -> bool:
        """Count memory that somebody else owns against the budget; return whether it fits. ``refund`` ends that."""
        with self._lock:
            while self._kept and self._used_bytes + num_bytes > self._budget_bytes:
                self._used_bytes -= len(self._kept.pop())
            if self._used_bytes + num_bytes > self._budget_bytes:
                return False
            self._used_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            return True

    def refund(self, num_bytes: int) -> None:
        """What was charged is no longer held."""
        with self._lock:
            self._used_bytes -= num_bytes

    def hold(self) -> None:
        """Somebody joins: memory that comes back is kept from now on, so that the next one finds it touched."""
        with self._lock:
            self._holds = not self._closed

    def let_go(self) -> None:
        """Nobody joins any more: what was only held goes back to the system, and so does what comes back later."""
        with self._lock:
            self._holds = False
            if not self._keep:
                self._drop()

    def close(self) -> None:
        """Kept memory is dropped; what comes back later is, too. Safe twice."""
        with self._lock:
            self._closed = True
            self._keep = self._holds = False
            self._drop()

    def _drop(self) -> None:
        while self._kept:
            self._used_bytes -= len(self._kept.pop())

    def _map(self, size: int, num_bytes: int) -> Arena:
        memory = _Memory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform.startswith("linux"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)  # several times faster to touch
                # A forked child (a DataLoader worker) does not inherit it: otherwise the next write of each page
                # would copy the page, on the training thread.
                memory.madvise(mmap.MADV_DONTFORK)
            except OSError as error:
                logger.info("the kernel takes no advice about snapshot memory: %s", error)
        if _populate() is None:
            array = np.frombuffer(memory, dtype=np.uint8)
            for offset in range(0, size, _TOUCH_STEP_BYTES):
                np.copyto(array[offset : offset + _TOUCH_STEP_BYTES], 0)
            memory.touched = True
        return self._lend(memory, num_bytes)

    def _lend(self, memory: _Memory, num_bytes: int) -> Arena:
        # The memoryview stands between tensors and memory so that its end tells that the last tensor is gone.
        window = memoryview(memory)
        weakref.finalize(window, self._came_back, memory).atexit = False
        return Arena(torch.frombuffer(window, dtype=torch.uint8)[:num_bytes], memory)

    def _pin(self, size: int, num_bytes: int) -> Arena:
        data = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        weakref.finalize(data.untyped_storage(), self._unpinned, size).atexit = False
        return Arena(data[:num_bytes])

    def _came_back(self, memory: _Memory) -> None:
        with self._lock:
            if self._keep or self._holds:
                self._kept.append(memory)
            else:
                self._used_bytes -= len(memory)

    def _unpinned(self, size: int) -> None:
        with self._lock:
            self._used_bytes -= size
