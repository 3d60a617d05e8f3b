"""What a join takes by phase: read from what the joiner said, and predicted by a formula.

The formula, with ``c`` seconds that a conversation costs besides its bytes, ``r`` the link's bytes a second, ``P`` the
outer period, ``O``, ``V`` and ``E`` the bytes of outer parts, private parts and one commit's averages, and ``f`` where
in a phase the base was begun, 0 to 1::

    T = start-up + attach + private + base + n (c + E / r) + again

    fits into a phase:  private + base = c + (O + V) / r                          =: B
    does not:           private = m + c + V / r   and   base = c + O / r          =: B    (m: until that is known)
    n: the least whole number with  floor(f + (B + n (c + E / r)) / P) <= n               (commits to replay)
    again: nothing if n = 0; else c + V / r if 1.5 times that is left of the phase, or c  (private parts or scalars)

Start-up is the median of all joins of the run, ``c`` and attach are those of the smallest state on the same kind of
link without a cap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PHASES = ("start-up", "attach", "private", "base", "catch-up", "admission")
ONE_PHASE = 0.75
JUDGED_SECONDS = 1.25
"""A link is judged after a second of measuring, at the next quarter of a second."""
ROOM = 1.5
MOST_ENTRIES = 50


@dataclass(kw_only=True)
class Join:
    """One join as it was measured.

    Attributes:
        seconds: By phase; ``private`` includes what was fetched to find out that one phase is too short.
        started_in_phase: Where in a phase the base was begun, 0 to 1.
        entries: Commits replayed.
        slow: The transfer did not fit into a phase.
        boundaries: The run's boundaries from the base on until the joiner held the newest version.
    """

    seconds: dict[str, float]
    started_in_phase: float = 0.0
    entries: int = 0
    slow: bool = False
    rebases: int = 0
    boundaries: int = 0
    predicted: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def predicted_total(self) -> float:
        return sum(self.predicted.values())


def read(spawned: float, said: Sequence[dict[str, Any]], boundaries: Sequence[float]) -> Join:
    """Return the phases of a join.

    Args:
        spawned: When the process was started.
        said: Its lines up to the first inner step.
        boundaries: When a survivor's boundaries ended.
    """
    when = {what: _first(said, what) for what in ("agent", "TransferStarted", "BaseRestored", "StateRestored", "step")}
    lines = {what: [m for m in said if m["what"] == what] for what in {m["what"] for m in said}}
    slow = "failure" in lines["TransferEnded"][0] and bool(lines["TransferEnded"][0]["failure"])
    base = max(m["at"] for m in lines["BaseRestored"])
    private_first = lines["PrivatePartsReceived"][0]
    starts = [m["at"] for m in lines["TransferStarted"]]
    base_began = max(at for at in starts if at < base)
    private = private_first["at"] - when["TransferStarted"] if slow else float(private_first["took_seconds"])
    replayed = [m["at"] for m in lines.get("CommitReplayed", ()) if m["at"] > base]
    caught_up = max(replayed, default=base)
    before = [at for at in boundaries if at <= base_began]
    period = (boundaries[-1] - boundaries[0]) / (len(boundaries) - 1) if len(boundaries) > 1 else 0.0
    return Join(
        seconds={
            "start-up": when["agent"] - spawned,
            "attach": when["TransferStarted"] - when["agent"],
            "private": private,
            "base": base - when["TransferStarted"] - private,
            "catch-up": caught_up - base,
            "admission": when["step"] - caught_up,
        },
        started_in_phase=min(1.0, (base_began - before[-1]) / period) if before and period else 0.0,
        entries=len(replayed),
        slow=slow,
        rebases=len(lines.get("CatchUpRebased", ())),
        boundaries=sum(base <= at <= when["StateRestored"] for at in boundaries),
    )


def _first(said: Sequence[dict[str, Any]], what: str) -> float:
    return float(next(m["at"] for m in said if m["what"] == what))


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What is not bytes, in seconds."""

    start_up: float
    attach: float
    conversation: float
    admission: float


def predict(
    join: Join, constants: Constants, *, outer: int, private: int, entry: int, rate: float, period: float
) -> dict[str, float]:
    """Return the formula's seconds by phase for a state of these bytes over a link of ``rate`` bytes per second."""
    c = constants.conversation
    found = {"start-up": constants.start_up, "attach": constants.attach}
    each, again = c + entry / rate, c + private / rate
    if outer <= ONE_PHASE * rate * period or outer / rate < JUDGED_SECONDS:
        found |= {"private": c / 2 + private / rate, "base": c / 2 + outer / rate}
        base = found["private"] + found["base"]
    else:
        base = c + outer / rate
        found |= {"private": JUDGED_SECONDS + again, "base": base}
    position, entries = join.started_in_phase, 0
    while math.floor(position + (base + entries * each) / period) > entries and entries < MOST_ENTRIES:
        entries += 1
    if entries:
        into_phase = math.modf(position + (base + entries * each) / period)[0] * period
        found["admission"] = constants.admission + (again if into_phase + ROOM * again <= period else c)
    else:
        found["admission"] = constants.admission
    return found | {"catch-up": entries * each}
