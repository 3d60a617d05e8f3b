"""Which donors a joiner is sent to: a pure function of who holds what, who is free, and what was measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DonorView:
    """A live worker as a possible donor."""

    worker_id: str
    region: str
    holds_sealed: bool
    """At the newest sealed version, with its fingerprint, verified, and not under recovery itself."""
    drained: bool
    free_slots: int


@dataclass(frozen=True, slots=True)
class JoinerView:
    """A worker that needs state."""

    worker_id: str
    region: str
    failures: Mapping[str, int]
    """How often each donor failed this recovery."""
    wanted_donor: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """``donors`` best first, or the reason why there is none. ``expected``: one may come without anybody's help."""

    donors: tuple[str, ...] = ()
    reason: str = ""
    expected: bool = False
    waits_for_slot: bool = False


def match(
    joiner: JoinerView,
    candidates: Collection[DonorView],
    rates: Mapping[tuple[str, str], float],
    *,
    max_donors: int,
    max_failures: int,
) -> Match:
    """Return up to ``max_donors`` donors for one joiner.

    Ranking: measured over unknown over failed [in this recovery], then the higher rate, the joiner's own region, more
    free slots, and at last the name, so that equal inputs give equal tickets.

    Args:
        joiner: Who needs state.
        candidates: Every live worker.
        rates: Bytes per second by (joiner, donor); absent or zero: unknown.
        max_donors: How many a ticket names at most.
        max_failures: A donor that failed this recovery so often is not asked again in it.
    """
    others = [candidate for candidate in candidates if candidate.worker_id != joiner.worker_id]
    if joiner.wanted_donor:
        others = [candidate for candidate in others if candidate.worker_id == joiner.wanted_donor]
        if not others:
            return Match(reason=f"the wanted donor {joiner.wanted_donor} is not attached", expected=False)
    holders = [candidate for candidate in others if candidate.holds_sealed]
    if not holders:
        named = f"the wanted donor {joiner.wanted_donor}" if joiner.wanted_donor else "no live worker"
        verb = "does not hold" if joiner.wanted_donor else "holds"
        return Match(reason=f"{named} {verb} the newest sealed version", expected=True)
    willing = [candidate for candidate in holders if not candidate.drained]
    if not willing:
        return Match(reason=f"every donor is drained: {_names(holders)}", expected=True)
    untired = [candidate for candidate in willing if joiner.failures.get(candidate.worker_id, 0) < max_failures]
    if not untired:
        return Match(reason=f"every donor failed {max_failures} times: {_names(willing)}")
    free = [candidate for candidate in untired if candidate.free_slots > 0]
    if not free:
        return Match(reason=f"no free slot at {_names(untired)}", expected=True, waits_for_slot=True)

    def rank(candidate: DonorView) -> tuple[int, float, bool, int, str]:
        rate = rates.get((joiner.worker_id, candidate.worker_id), 0.0)
        failed = joiner.failures.get(candidate.worker_id, 0)
        trust = 2 + failed if failed else (0 if rate > 0 else 1)
        return (trust, -rate, candidate.region != joiner.region, -candidate.free_slots, candidate.worker_id)

    ranked = sorted(free, key=rank)
    best = [candidate for candidate in ranked if not joiner.failures.get(candidate.worker_id, 0)]
    # Donors that failed are asked again only when no other is left: one at a time is enough to find out.
    chosen = best[:max_donors] if best else ranked[:1]
    return Match(tuple(candidate.worker_id for candidate in chosen))


def _names(candidates: Collection[DonorView]) -> str:
    return ", ".join(sorted(candidate.worker_id for candidate in candidates))
