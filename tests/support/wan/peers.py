"""Donors and a joiner as real processes in the hosts of an emulated network.

Letters go over the donors' peer service, payload over gloo links: what a run uses, without training. A coordinator has
no part in it once it has named the donors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tests.support.processes import ChildProcess
from tests.support.wan.network import Wan

_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    """How an attempt ended. ``error`` empty: every byte is verified and equal to the donors'.

    ``moved``: how many bytes had come over links at which moments of the machine's monotonic clock.
    ``seconds`` runs from dialling to the last verified byte, or to the error; ``connected_seconds`` from the first
    link's opening on.
    """

    error: str
    seconds: float
    connected_seconds: float
    payload_bytes: int
    reused_bytes: int
    verified_bytes: int
    total_bytes: int
    arrived: Mapping[str, int]
    failures: Mapping[str, str]
    rates: Mapping[str, tuple[float, float]]
    moved: list[tuple[float, int]]
    lanes: int
    congestion_control: str


class DonorProcess:
    """A donor in a host. Its state is that of every donor and joiner with the same seed and size."""

    def __init__(self, wan: Wan, host: str, options: Mapping[str, Any]) -> None:
        self.host = host
        self.state_bytes: int = options["state_bytes"]
        plan = {"name": host, "host": wan.address(host), **options}
        self.child = ChildProcess(["-m", "tests.support.wan.donor_process", json.dumps(plan)], prefix=wan.prefix(host))
        self.address = ""
        self.fingerprint = ""

    def ready(self) -> DonorProcess:
        """Wait until it can be dialled."""
        if not self.address:
            found = json.loads(self.child.line("{", _START_SECONDS))
            self.address, self.fingerprint = found["address"], found["fingerprint"]
        return self

    def set_rate(self, bytes_per_second: int) -> None:
        """Change its cap; in force on return."""
        self.child.tell(f"rate {bytes_per_second}")
        self.child.line("rate")

    def results(self) -> list[dict[str, Any]]:
        """Return how each conversation that is over has ended."""
        self.child.tell("results")
        found: list[dict[str, Any]] = json.loads(self.child.line("["))
        return found

    def is_idle(self) -> bool:
        """Return whether every conversation that it began is over."""
        self.child.tell("busy")
        return self.child.line("busy") == "busy 0"


class JoinerProcess:
    """A joiner in a host; keeps destinations and ledger over its attempts unless told to begin afresh."""

    def __init__(self, wan: Wan, host: str, options: Mapping[str, Any]) -> None:
        self.host = host
        plan = {"name": host, "host": wan.address(host), **options}
        self.child = ChildProcess(["-m", "tests.support.wan.joiner_process", json.dumps(plan)], prefix=wan.prefix(host))
        self._number = 0
        self._marks: list[float] = []
        self._is_ready = False

    def ready(self) -> JoinerProcess:
        """Wait until it takes orders."""
        if not self._is_ready:
            self.child.line("ready", _START_SECONDS)
            self._is_ready = True
        return self

    def begin(
        self,
        donors: list[DonorProcess],
        *,
        marks: tuple[float, ...] = (),
        stands: bool = False,
        fresh: bool = True,
        **config: Any,
    ) -> None:
        """Start an attempt.

        Args:
            donors: Whom the ticket names.
            marks: Fractions of the bytes that ``reached`` can wait for.
            stands: At each mark the transfer stands until ``go_on``: it cannot end before.
            fresh: Forget what earlier attempts brought.
            config: Fields of ``JoinerConfig``; ``planner`` as a mapping.
        """
        self._number += 1
        self._marks = sorted(marks)
        order = {
            "number": self._number,
            "fingerprint": donors[0].ready().fingerprint,
            "donors": [{"name": donor.host, "address": donor.ready().address} for donor in donors],
            "marks": self._marks,
            "stands": stands,
            "fresh": fresh,
            "state_bytes": donors[0].state_bytes,
            "config": config,
        }
        self.child.tell(json.dumps(order))

    def reached(self, mark: float, timeout_seconds: float = 100.0) -> None:
        """Return once so large a part of the bytes is verified."""
        assert mark in self._marks
        self.child.line(f"mark {mark}", timeout_seconds)

    def go_on(self) -> None:
        """Let a transfer that stands at a mark go on."""
        self.child.tell("go on")

    def result(self, timeout_seconds: float = 110.0) -> Result:
        """Return how the attempt ended."""
        found = json.loads(self.child.line("{", timeout_seconds))
        return Result(**found)


class Site:
    """The processes of one network; all ended by ``close``."""

    def __init__(self, wan: Wan) -> None:
        self.wan = wan
        self._children: list[ChildProcess] = []

    def donor(self, host: str, state_bytes: int, **options: Any) -> DonorProcess:
        """Start a donor of a state of this size; ``ready`` waits for it."""
        donor = DonorProcess(self.wan, host, {"state_bytes": state_bytes, **options})
        self._children.append(donor.child)
        return donor

    def joiner(self, host: str, **options: Any) -> JoinerProcess:
        """Start a joiner; ``ready`` waits for it."""
        joiner = JoinerProcess(self.wan, host, options)
        self._children.append(joiner.child)
        return joiner

    def close(self) -> None:
        """End every process; twice without harm."""
        while self._children:
            self._children.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def passed_bytes(wan: Wan, host: str) -> int:
    """Return the bytes that a host has sent since the last reset, headers included."""
    return wan.stats().hosts[host].up.bytes


def wait_until(condition: Any, seconds: float = 30.0, *, what: str) -> None:
    """Return once ``condition()`` is true; fails the test after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about in {seconds} s"
        time.sleep(0.02)
