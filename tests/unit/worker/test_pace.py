"""Which links are too slow for one phase, and which for the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recovery.clock import ManualClock
from recovery.errors import CannotKeepUp, TransferCancelled
from recovery.events import TransferProgress
from recovery.worker.pace import Pace, TooSlowForOnePhase, Watch

CANCELLED = TransferCancelled("cancelled")


class Transfer:
    """A conversation whose donors bring bytes at given rates."""

    def __init__(self, pace: Pace, clock: ManualClock, watch: Watch, **rates: float) -> None:
        self.cancelled: list[str] = []
        self._clock, self._watch, self._rates = clock, watch, rates
        self._arrived = dict.fromkeys(rates, 0.0)
        self.session: Any = SimpleNamespace(
            machine=SimpleNamespace(
                private=None,
                arrived_bytes=lambda: {name: int(n) for name, n in self._arrived.items()},
            ),
            cancel=self._cancel,
        )

    def _cancel(self, reason: str) -> None:
        self.cancelled.append(reason)

    def run(self, seconds: int, total_bytes: int) -> None:
        for _ in range(seconds):
            self._clock.advance(1.0)
            for name, rate in self._rates.items():
                self._arrived[name] += rate
            progress = TransferProgress(
                transfer_id="t",
                verified_bytes=int(sum(self._arrived.values())),
                total_bytes=total_bytes,
                bytes_per_second=sum(self._rates.values()),
            )
            self._watch(progress, self.session)


def pace_of(period: float, entry: int = 1000) -> tuple[Pace, ManualClock]:
    clock = ManualClock()
    pace = Pace(clock)
    pace.period_seconds, pace.entry_bytes = period, entry
    return pace, clock


def test_a_fast_transfer_is_left_alone() -> None:
    pace, clock = pace_of(10.0)
    watch = pace.watch(all_donors=True, one_phase=True)
    transfer = Transfer(pace, clock, watch, d0=300.0, d1=100.0)
    transfer.run(5, total_bytes=2000)
    assert not transfer.cancelled
    assert pace.rate == pytest.approx(400)
    assert watch.judge(CANCELLED) is CANCELLED


def test_a_base_that_fills_most_of_a_phase_is_fetched_in_another_order() -> None:
    pace, clock = pace_of(10.0)
    watch = pace.watch(all_donors=True, one_phase=True)
    transfer = Transfer(pace, clock, watch, d0=200.0)
    transfer.run(2, total_bytes=2000)
    assert transfer.cancelled
    assert isinstance(watch.judge(CANCELLED), TooSlowForOnePhase)


def test_a_base_that_is_whole_is_not_given_up() -> None:
    pace, clock = pace_of(10.0)
    transfer = Transfer(pace, clock, pace.watch(all_donors=True, one_phase=True), d0=200.0)
    transfer.session.machine.private = object()  # its manifest has come
    transfer.run(5, total_bytes=9000)
    assert not transfer.cancelled


def test_less_than_an_entry_a_period_is_refused_with_both_rates() -> None:
    pace, clock = pace_of(10.0, entry=4_000_000)
    watch = pace.watch(all_donors=True)
    transfer = Transfer(pace, clock, watch, d0=100_000.0, d1=200_000.0)
    transfer.run(2, total_bytes=8_000_000)
    assert not transfer.cancelled, "one second is no rate"
    transfer.run(1, total_bytes=8_000_000)
    assert transfer.cancelled
    error = watch.judge(CANCELLED)
    assert isinstance(error, CannotKeepUp)
    assert "0.3 MB/s" in str(error)
    assert "needs 0.4 MB/s" in str(error)
    assert not error.final


@pytest.mark.parametrize(("all_donors", "period"), [(True, 0.0), (False, 10.0)])
def test_nothing_is_refused_on_half_a_measurement(all_donors: bool, period: float) -> None:
    """An unknown period says nothing; private parts come from one donor, whose rate is not the link's."""
    pace, clock = pace_of(period, entry=4_000_000)
    watch = pace.watch(all_donors=all_donors)
    transfer = Transfer(pace, clock, watch, d0=100.0)
    transfer.run(9, total_bytes=8_000_000)
    assert not transfer.cancelled


def test_a_donors_rate_outlives_a_conversation_without_it() -> None:
    pace, clock = pace_of(10.0)
    Transfer(pace, clock, pace.watch(all_donors=True), d0=300.0, d1=100.0).run(3, 10_000)
    Transfer(pace, clock, pace.watch(all_donors=False), d0=200.0).run(3, 10_000)
    assert pace.rates == {"d0": pytest.approx(200), "d1": pytest.approx(100)}


def test_what_fits_into_the_rest_of_a_phase() -> None:
    pace, _ = pace_of(10.0)
    assert pace.fits_into_the_phase(4.0, 3.9, [])
    assert not pace.fits_into_the_phase(4.0, 4.1, []), "half as long again is taken for possible"
    assert not pace.fits_into_the_phase(4.0, None, []), "when the phase began is not known"


def test_the_shortest_period_that_was_seen_counts() -> None:
    pace, _ = pace_of(10.0)
    assert pace.fits_into_the_phase(2.0, 1.0, [5.0, 20.0])
    assert not pace.fits_into_the_phase(2.0, 1.0, [3.9, 20.0])
    unknown, _ = pace_of(0.0)
    assert not unknown.fits_into_the_phase(2.0, 1.0, [])
    assert unknown.fits_into_the_phase(2.0, 1.0, [5.0])
