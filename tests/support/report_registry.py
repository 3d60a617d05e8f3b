"""Where checks of reports from the field are registered, each under a short key."""

from __future__ import annotations

from collections.abc import Callable

from torch import optim
from torch.optim import Optimizer

from tests.support.zoo import Case, Worker, one

REPORTS: dict[str, tuple[str, Callable[[], None]]] = {}
"""By key: the report cited, and its check."""

ADAMW = one(optim.AdamW, lr=1e-2)


def report(key: str, source: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a check."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        assert key not in REPORTS
        REPORTS[key] = (source, check)
        return check

    return register


def pair(case: Case, donor_phases: int = 2, joiner_phases: int = 0) -> tuple[Worker, Worker]:
    """Return a donor and a joiner built from different seeds."""
    donor, joiner = Worker(case, 0), Worker(case, 1)
    donor.train(donor_phases)
    joiner.train(joiner_phases)
    return donor, joiner


def inner(worker: Worker) -> Optimizer:
    """Return the worker's only inner optimizer."""
    return worker.inner["only"]
