"""Bytes per second: measured at the joiner, limited at the donor."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from recovery.clock import Clock, SystemClock
from recovery.errors import BadConfiguration, MisuseError

_SAMPLE_SECONDS = 0.1
_SAMPLE_BYTES = 16 << 20
"""Enough for a sample sooner than that, so that a fast link's window opens before much of a state has moved."""
_FIRST_SAMPLE_BYTES = 1 << 20
_STALE_SECONDS = 1.0


class RateMeter:
    """Measures a stream's rate over the time in which something was asked of it. Not thread-safe.

    Args:
        initial: Rate seen before, in bytes per second; 0: unknown.
    """

    def __init__(self, initial: float = 0.0) -> None:
        self._rate = initial
        self._since: float | None = None
        self._bytes = 0

    def begin(self, now: float) -> None:
        """Something is asked of the stream from now on; no-op if something already was."""
        if self._since is None:
            self._since, self._bytes = now, 0

    def end(self, now: float) -> None:
        """Nothing is asked of the stream any more."""
        self._take_sample(now, _SAMPLE_SECONDS)
        self._since = None

    def add(self, now: float, num_bytes: int) -> None:
        """``num_bytes`` arrived."""
        self._bytes += num_bytes
        enough = self._bytes >= (_FIRST_SAMPLE_BYTES if self._rate == 0 else _SAMPLE_BYTES)
        self._take_sample(now, 0.0 if enough else _SAMPLE_SECONDS)

    def rate(self, now: float) -> float:
        """Return bytes per second; 0: unknown. A stream that stands still is seen to slow down."""
        if self._since is not None and now - self._since > _STALE_SECONDS:
            return min(self._rate, max(1.0, self._bytes / (now - self._since)))
        return self._rate

    def _take_sample(self, now: float, at_least_seconds: float) -> None:
        if self._since is None or self._bytes == 0 or now - self._since <= max(at_least_seconds, 0.0):
            return
        sample = self._bytes / (now - self._since)
        self._rate = sample if self._rate == 0 else 0.5 * self._rate + 0.5 * sample
        self._since, self._bytes = now, 0


@dataclass(slots=True)
class _Share:
    name: str
    served_bytes: int = 0
    waiting: int = 0
    leaving: bool = field(default=False)


class RateLimiter:
    """Keeps the bytes that one donor sends to all its joiners together under a rate. Thread-safe; changeable live.

    Whoever was served least goes next, so joiners share the rate equally, however many lanes each has.

    Args:
        bytes_per_second: The cap; None or 0: no cap.
        clock: Source of time.
    """

    BURST_SECONDS = 0.05

    def __init__(self, bytes_per_second: float | None = None, clock: Clock | None = None) -> None:
        self._changed = threading.Condition()
        self._clock = clock or SystemClock()
        self._rate = 0.0
        self._tokens = 0.0
        self._filled_at = self._clock.monotonic()
        self._shares: dict[int, _Share] = {}
        self._next_id = 0
        self.set_rate(bytes_per_second)

    @property
    def bytes_per_second(self) -> float | None:
        """The cap in force; None: none."""
        with self._changed:
            return self._rate or None

    def set_rate(self, bytes_per_second: float | None) -> None:
        """Change the cap; it holds from the next message on. None or 0: no cap.

        Raises:
            BadConfiguration: a negative rate.
        """
        if bytes_per_second is not None and bytes_per_second < 0:
            raise BadConfiguration(f"a rate limit of {bytes_per_second} bytes per second is not possible")
        with self._changed:
            self._fill()
            self._rate = float(bytes_per_second or 0)
            self._tokens = min(self._tokens, self._rate * self.BURST_SECONDS)
            self._changed.notify_all()

    def join(self, name: str) -> int:
        """Register a joiner and return its share's id. It starts level with the others: no credit for its absence."""
        with self._changed:
            self._next_id += 1
            level = min((share.served_bytes for share in self._shares.values()), default=0)
            self._shares[self._next_id] = _Share(name, served_bytes=level)
            return self._next_id

    def leave(self, share_id: int) -> None:
        """Forget a share; its waits in progress end with ``MisuseError``. Twice without harm."""
        with self._changed:
            share = self._shares.pop(share_id, None)
            if share is not None:
                share.leaving = True
            self._changed.notify_all()

    def acquire(self, share_id: int, num_bytes: int) -> None:
        """Return when ``num_bytes`` may be sent.

        Raises:
            MisuseError: the share has left.
        """
        with self._changed:
            share = self._shares.get(share_id)
            if share is None:
                raise MisuseError("this share has left the rate limiter")
            if self._rate == 0:
                share.served_bytes += num_bytes
                return
            if share.waiting == 0:
                # Not having asked gives no credit: level with the least served of those that ask now.
                asking = [each.served_bytes for each in self._shares.values() if each.waiting]
                share.served_bytes = max(share.served_bytes, min(asking, default=share.served_bytes))
            share.waiting += 1
            try:
                while True:
                    if share.leaving:
                        raise MisuseError("this share has left the rate limiter")
                    self._fill()
                    if self._rate == 0:
                        break
                    if self._tokens >= 0:
                        if share.served_bytes <= min(e.served_bytes for e in self._shares.values() if e.waiting):
                            break
                        self._changed.wait()  # somebody else's turn; it notifies when it has taken it
                    else:
                        self._changed.wait(-self._tokens / self._rate)
                # The balance may go below zero: a large message is paid for afterwards, by waiting longer.
                self._tokens -= num_bytes
                share.served_bytes += num_bytes
            finally:
                share.waiting -= 1
                self._changed.notify_all()

    def _fill(self) -> None:
        now = self._clock.monotonic()
        self._tokens = min(self._tokens + (now - self._filled_at) * self._rate, self._rate * self.BURST_SECONDS)
        self._filled_at = now
