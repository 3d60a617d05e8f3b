"""Measuring and limiting bytes per second."""

from __future__ import annotations

import threading
import time

import pytest

from recovery.clock import ManualClock
from recovery.errors import BadConfiguration, MisuseError
from recovery.protocol.rate import RateLimiter, RateMeter
from recovery.types import KIB, MIB


class TestMeter:
    def test_knows_nothing_at_first_unless_told(self) -> None:
        assert RateMeter().rate(0.0) == 0
        assert RateMeter(5e6).rate(0.0) == 5e6

    def test_measures_the_time_in_which_something_was_asked(self) -> None:
        meter = RateMeter()
        meter.begin(10.0)
        for step in range(10):
            meter.add(10.0 + 0.1 * (step + 1), 100_000)
        meter.end(11.0)
        assert meter.rate(11.0) == pytest.approx(1e6)
        meter.begin(500.0)  # idle time does not count
        meter.add(500.2, 200_000)
        assert meter.rate(500.2) == pytest.approx(1e6)

    def test_follows_a_change(self) -> None:
        meter = RateMeter(1e6)
        meter.begin(0.0)
        for step in range(20):
            meter.add(0.2 * (step + 1), 2_000_000)
        assert meter.rate(4.0) == pytest.approx(1e7, rel=0.01)

    def test_sees_a_stream_that_stands_still(self) -> None:
        meter = RateMeter(1e8)
        meter.begin(0.0)
        assert meter.rate(0.5) == 1e8
        assert meter.rate(10.0) <= 1.0

    def test_a_burst_in_no_time_is_not_infinite(self) -> None:
        meter = RateMeter()
        meter.begin(0.0)
        meter.add(0.0, 4 * MIB)
        assert meter.rate(0.0) == 0
        meter.add(0.01, 4 * MIB)
        assert meter.rate(0.01) == pytest.approx(8 * MIB / 0.01)


class TestLimiter:
    def test_without_a_cap_nothing_waits(self) -> None:
        limiter = RateLimiter()
        share = limiter.join("j")
        for _ in range(1000):
            limiter.acquire(share, 100 * MIB)
        assert limiter.bytes_per_second is None

    @pytest.mark.parametrize("rate", [-1.0, -0.001])
    def test_a_negative_cap_is_refused(self, rate: float) -> None:
        with pytest.raises(BadConfiguration):
            RateLimiter(rate)

    def test_a_cap_holds_over_the_time_it_takes(self) -> None:
        limiter = RateLimiter(20 * MIB)
        share = limiter.join("j")
        began = time.monotonic()
        for _ in range(80):
            limiter.acquire(share, 128 * KIB)
        took = time.monotonic() - began
        # Ten MiB at twenty a second; the burst allowance is a twentieth of a second. Never faster than the cap.
        assert took >= (80 * 128 * KIB - 128 * KIB) / (20 * MIB) - RateLimiter.BURST_SECONDS - 0.01

    def test_a_large_message_is_paid_for_afterwards(self) -> None:
        clock = ManualClock()
        limiter = RateLimiter(1 * MIB, clock)
        share = limiter.join("j")
        limiter.acquire(share, 4 * MIB)
        done = threading.Event()

        def second() -> None:
            limiter.acquire(share, 1)
            done.set()

        thread = threading.Thread(target=second)
        thread.start()
        clock.advance(3.9)
        limiter.set_rate(1 * MIB)  # wakes it to look at the clock
        assert not done.is_set()
        clock.advance(0.2)
        limiter.set_rate(1 * MIB)
        thread.join()
        assert done.is_set()

    def test_a_change_is_felt_by_those_who_wait(self) -> None:
        limiter = RateLimiter(1)
        share = limiter.join("j")
        limiter.acquire(share, 10 * MIB)
        thread = threading.Thread(target=limiter.acquire, args=(share, 1))
        thread.start()
        limiter.set_rate(None)
        thread.join()

    def test_leaving_ends_a_wait(self) -> None:
        limiter = RateLimiter(1)
        share = limiter.join("j")
        limiter.acquire(share, 10 * MIB)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                limiter.acquire(share, 1)
            except MisuseError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        limiter.leave(share)
        limiter.leave(share)
        thread.join()
        assert len(errors) == 1
        with pytest.raises(MisuseError):
            limiter.acquire(share, 1)

    def test_two_joiners_share_a_cap_however_many_lanes_they_have(self) -> None:
        """As reported in NousResearch/nousnet#260."""
        limiter = RateLimiter(40 * MIB)
        served = {"many": 0, "one": 0}
        stop = threading.Event()
        lock = threading.Lock()

        def lane(name: str, share: int) -> None:
            while not stop.is_set():
                limiter.acquire(share, 64 * KIB)
                with lock:
                    served[name] += 64 * KIB
                    if sum(served.values()) > 20 * MIB:
                        stop.set()

        shares = {"many": limiter.join("many"), "one": limiter.join("one")}
        threads = [threading.Thread(target=lane, args=("many", shares["many"])) for _ in range(4)]
        threads.append(threading.Thread(target=lane, args=("one", shares["one"])))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 0.6 < served["one"] / served["many"] < 1.7

    def test_a_newcomer_has_no_credit(self) -> None:
        limiter = RateLimiter()
        old = limiter.join("old")
        limiter.acquire(old, 100 * MIB)
        new = limiter.join("new")
        assert limiter._shares[new].served_bytes == limiter._shares[old].served_bytes
