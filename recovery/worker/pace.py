"""How fast a joiner's link is, against how fast the run moves on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recovery.clock import Clock
from recovery.errors import CannotKeepUp, RecoveryError
from recovery.events import TransferProgress
from recovery.protocol.session import JoinerSession

MEASURED_SECONDS = 1.0
"""A link is judged after so long at the earliest, and refused after twice that: a burst or a gap is no rate."""

ONE_PHASE = 0.75
"""Outer parts that take more of a period than this leave no room for the private ones before the next boundary."""


ROOM = 1.5
"""What took a second may take so many the next time; what does not fit into a phase even then is not tried."""


class TooSlowForOnePhase(Exception):
    """The transfer was ended: the rest of it is better fetched in another order."""


class Pace:
    """What one joiner knows of its link and of the run's outer period. Training thread.

    Attributes:
        entry_bytes: Bytes of one commit's averages.
        period_seconds: The run's outer period; zero: unknown, and nothing is judged.
        rates: Bytes per second of each donor, as measured last.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.entry_bytes = 0
        self.period_seconds = 0.0
        self.rates: dict[str, float] = {}

    @property
    def rate(self) -> float:
        """Bytes per second of all donors together; zero: unknown."""
        return sum(self.rates.values())

    def watch(self, *, all_donors: bool, one_phase: bool = False) -> Watch:
        """Return what judges one conversation while it lasts.

        Args:
            all_donors: It asks every donor, so that its rate is the link's.
            one_phase: It has to end within a phase, or is better held otherwise.
        """
        return Watch(self, self._clock, all_donors=all_donors, one_phase=one_phase)

    @property
    def keeps_up(self) -> bool:
        """Whether one entry per outer period can be moved, as far as is known."""
        return not (self.rate and self.period_seconds) or self.entry_bytes <= self.rate * self.period_seconds

    def fits_into_the_phase(
        self, seconds: float, since_seal_seconds: float | None, periods_seconds: Sequence[float]
    ) -> bool:
        """Return whether work of about ``seconds`` would end before the next boundary; False if that is not known.

        Args:
            seconds: How long it took the last time.
            since_seal_seconds: How long ago the newest version was sealed; None: unknown.
            periods_seconds: Periods that were seen beside ``period_seconds``. The shortest counts: to wait for a
                boundary that came early costs more than scalars alone.
        """
        known = [period for period in (self.period_seconds, *periods_seconds) if period]
        if since_seal_seconds is None or not known:
            return False
        return since_seal_seconds + ROOM * seconds <= min(known)

    def describe(self) -> str:
        """Return the measured and the needed rate in words."""
        return (
            f"the link brings {self.rate / 1e6:.3g} MB/s; one commit of {self.entry_bytes / 1e6:.3g} MB in every outer "
            f"period of {self.period_seconds:.3g} s needs {self.entry_bytes / self.period_seconds / 1e6:.3g} MB/s"
        )


class Watch:
    """Sees the progress of one conversation; ends it if it is too slow for its purpose."""

    def __init__(self, pace: Pace, clock: Clock, *, all_donors: bool, one_phase: bool) -> None:
        self._pace = pace
        self._clock = clock
        self._all_donors = all_donors
        self._one_phase = one_phase
        self._began: tuple[float, dict[str, int]] | None = None
        self._verdict: Callable[[], Exception] | None = None

    def __call__(self, progress: TransferProgress, session: JoinerSession) -> None:
        pace, now = self._pace, self._clock.monotonic()
        arrived = session.machine.arrived_bytes()
        if not any(arrived.values()):
            return
        if self._began is None:
            self._began = (now, arrived)
        since, before = self._began
        elapsed = now - since
        if elapsed < MEASURED_SECONDS or self._verdict is not None:
            return
        measured = {name: (count - before[name]) / elapsed for name, count in arrived.items()}
        pace.rates = measured if self._all_donors else {**pace.rates, **measured}
        if not pace.period_seconds or not self._all_donors:
            return
        if not pace.keeps_up:
            if elapsed >= 2 * MEASURED_SECONDS:
                self._verdict = lambda: CannotKeepUp(f"not admitted: {pace.describe()}")
        elif not self._one_phase or progress.verified_bytes >= progress.total_bytes or session.machine.private:
            pass  # the base is whole: what is left is needed in any order
        elif progress.total_bytes > pace.rate * pace.period_seconds * ONE_PHASE:
            self._verdict = TooSlowForOnePhase
        if self._verdict is not None:
            session.cancel("it would take too long")

    def judge(self, error: RecoveryError) -> Exception:
        """Return what the conversation's end means: this watch's verdict, or the error itself."""
        return error if self._verdict is None else self._verdict()
