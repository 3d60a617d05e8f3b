"""The plan of a storm: the same seed the same storm, the asked rate, every kind."""

from __future__ import annotations

import statistics
from collections import Counter

from benchmarks.storm.plan import SECONDS, Kind, draw

WORKERS = ("w0", "w1", "w2", "w3")


def test_the_same_seed_draws_the_same_storm() -> None:
    first = draw(seed=5, seconds=600, faults_per_hour=120, workers=WORKERS)
    assert first == draw(seed=5, seconds=600, faults_per_hour=120, workers=WORKERS)
    assert first != draw(seed=6, seconds=600, faults_per_hour=120, workers=WORKERS)


def test_the_strikes_are_a_poisson_process_of_the_asked_rate() -> None:
    counts = [len(draw(seed=s, seconds=600, faults_per_hour=120, workers=WORKERS)) for s in range(400)]
    # Mean and variance of a Poisson number are equal; 20 of each, within 4 standard errors of 400 draws.
    assert abs(statistics.fmean(counts) - 20) < 4 * (20 / 400) ** 0.5
    assert 0.7 < statistics.variance(counts) / 20 < 1.3


def test_every_round_has_each_kind_once_and_lasts_as_the_kind_may() -> None:
    strikes = draw(seed=3, seconds=3600, faults_per_hour=120, workers=WORKERS)
    whole_rounds = strikes[: len(strikes) // len(Kind) * len(Kind)]
    assert set(Counter(strike.kind for strike in whole_rounds).values()) == {len(whole_rounds) // len(Kind)}
    for strike in strikes:
        least, most = SECONDS[strike.kind]
        assert least <= strike.lasts <= most
        assert sorted(strike.preference) == sorted(WORKERS)
    assert [strike.at for strike in strikes] == sorted(strike.at for strike in strikes)


def test_a_rate_of_zero_is_fair_weather() -> None:
    assert draw(seed=1, seconds=600, faults_per_hour=0, workers=WORKERS) == []
