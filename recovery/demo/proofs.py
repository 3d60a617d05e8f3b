"""What the demo proved: a pure function from the record to a table. A proof that was not exercised is false."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recovery.demo.history import DISK, ORIGIN, PEERS, Expectation, History, NotProved, Process
from recovery.demo.reports import Entry, parse_cut, parse_version
from recovery.types import Version

COMMITTED = "committed"
ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """One line of the table."""

    name: str
    holds: bool
    detail: str
    """What was compared, or the first thing that is wrong or was not reached."""
    told_in_full: bool = True
    """Whether the story came to its end: if not, what does not hold may only not have been reached."""

    @property
    def verdict(self) -> str:
        """The table's first column."""
        if self.holds:
            return "yes"
        return "NO" if self.told_in_full else "open"


def examine(entries: Sequence[Entry], expectation: Expectation, *, told_in_full: bool = True) -> list[Proof]:
    """Return every proof, in the order of the table; ``told_in_full`` is false for a story that was cut off."""
    history = History(entries)
    proofs = []
    for name, check in _CHECKS:
        try:
            proofs.append(Proof(name=name, holds=True, detail=check(history, expectation), told_in_full=told_in_full))
        except NotProved as failure:
            proofs.append(Proof(name=name, holds=False, detail=str(failure), told_in_full=told_in_full))
    return proofs


def _origin(history: History, expectation: Expectation) -> str:
    origins = [e for e in history.of("LineageStarted") if e.text("cause") == ORIGIN]
    if len(origins) != 1:
        raise NotProved(f"{len(origins)} origins were named, not 1")
    if origins[0].version != Version(1, 0):
        raise NotProved(f"the origin began at {origins[0].version}, not L1.k0")
    by_source = dict.fromkeys((ORIGIN, PEERS), 0)
    first = [f"worker-{index}" for index in range(expectation.workers - 1)]
    for worker_id in first:
        restored = history.of("StateRestored", (worker_id, 1))
        if not restored:
            raise NotProved(f"{worker_id} never got a state")
        source = restored[0].text("source")
        if source not in by_source:
            raise NotProved(f"{worker_id} got its first state from {source}")
        by_source[source] += 1
    if by_source[ORIGIN] != 1:
        raise NotProved(f"{by_source[ORIGIN]} of {len(first)} workers began as origin, not 1")
    return f"1 origin by order, {by_source[PEERS]} others from it, live"


def _sealed(history: History, expectation: Expectation) -> str:
    diverged = history.of("FingerprintDiverged")
    if diverged:
        raise NotProved(f"{diverged[0].text('worker_id')} diverged at {diverged[0].text('version')}")
    compared = 0
    versions = {e.version: e for e in history.of("VersionSealed")}
    if len(versions) < expectation.outer_steps:
        raise NotProved(f"{len(versions)} versions were sealed, fewer than {expectation.outer_steps}")
    for version in versions:
        digests = history.outer_digests(version)
        if len(set(digests.values())) > 1:
            raise NotProved(f"digests differ at {version}: {_short(digests)}")
        compared += len(digests)
    unsealed = {e.version for e in history.of("applied")} - set(versions)
    unfinished = [v for v in unsealed if any(later > v for later in versions if later.lineage == v.lineage)]
    if unfinished:
        raise NotProved(f"{min(unfinished)} was applied and never sealed")
    if compared <= len(versions):
        raise NotProved("no version was held by two workers")
    return f"{len(versions)} sealed versions, {compared} states compared, all equal"


def _survivors(history: History, expectation: Expectation) -> str:
    """Each worker that took a step took the next one too, until it was killed; only the damaged one was replaced."""
    outer_steps = 0
    for process in history.processes:
        outer_steps += _followed_every_step(history, process)
    committed = [e for e in history.of("EpochEnded") if COMMITTED in e.text("verdict").lower()]
    if len(committed) < expectation.outer_steps:
        raise NotProved(f"{len(committed)} boundaries were committed, fewer than {expectation.outer_steps}")
    applied: dict[Version, set[str]] = {}
    for entry in history.of("applied"):
        applied.setdefault(entry.version, set()).add(entry.source)
    if not any(len(sources) == expectation.workers for sources in applied.values()):
        raise NotProved(f"no boundary was committed by all {expectation.workers} workers")
    missing = [v for v in (Version(1, k) for k in range(1, expectation.outer_steps + 1)) if v not in applied]
    if missing:
        raise NotProved(f"nobody applied {missing[0]}")
    return (
        f"{len(committed)} boundaries, {outer_steps} outer steps of {len(history.processes)} processes, none left out"
    )


def _followed_every_step(history: History, process: Process) -> int:
    """Return how many outer steps the process applied, each the one after the last."""
    held: Version | None = None
    trained_to_here = damaged = False
    num_applied = 0
    for entry in (e for e in history.entries if e.process == process):
        if entry.kind == "applied":
            if held is not None and entry.version != held.next():
                raise NotProved(f"{process[0]} went from {held} to {entry.version}")
            held, trained_to_here = entry.version, True
            num_applied += 1
        elif entry.kind == "flipped":
            damaged = True
        elif entry.kind == "state":
            if trained_to_here and held != entry.version and not damaged:
                raise NotProved(f"{process[0]} was left out of the boundary after {held}")
            held, trained_to_here, damaged = entry.version, False, False
        elif entry.kind == "killed":
            others = [e.version for e in history.of("applied") if e.seconds < entry.seconds]
            newest = max(others, default=None)
            if held is not None and newest is not None and newest > held.next():
                raise NotProved(f"{process[0]} still held {held} when the others had {newest}")
    return num_applied


def _aborted(history: History, expectation: Expectation) -> str:
    ended = history.of("EpochEnded")
    aborted = sum(1 for e in ended if ABORTED in e.text("verdict").lower())
    committed = sum(1 for e in ended if COMMITTED in e.text("verdict").lower())
    status = history.one("status", "the coordinator's own count")
    before = [e for e in ended if e.seconds <= status.seconds]
    counted = sum(1 for e in before if ABORTED in e.text("verdict").lower())
    if status.number("aborted_epochs") not in (counted, aborted):
        raise NotProved(f"the coordinator counts {status.number('aborted_epochs'):.0f} aborted, {counted} were seen")
    held = history.one("held", "a worker inside a boundary, to be killed there")
    if not any(e.process == held.process and e.seconds > held.seconds for e in history.of("killed")):
        raise NotProved(f"{held.source} was not killed where it stood in a boundary")
    if not committed or not aborted:
        raise NotProved(f"{aborted} aborted and {committed} committed epochs were seen: not one of each")
    return f"{aborted} aborted, {committed} committed; the coordinator's count agrees"


def _state_equal(history: History, expectation: Expectation) -> str:
    states = history.live_restorations()
    needed = expectation.live_recoveries
    if len(states) < needed:
        raise NotProved(f"{len(states)} live recoveries were seen, fewer than {needed}")
    aged = 0
    for state in states:
        peers = history.outer_digests(state.version, besides=state.process)
        if not peers:
            raise NotProved(f"nobody else was seen at {state.version}, where {state.source} joined")
        wrong = [process for process, digest in peers.items() if digest != state.text("outer_digest")]
        if wrong:
            raise NotProved(f"{state.source} joined at {state.version} and differs from {wrong[0][0]}")
        if history.took_scalars_later(state):
            aged += 1
            _donor_entry(history, state, "inner_digest", "inner optimizer", earlier=True)
        else:
            _donor_entry(history, state, "inner_digest", "inner optimizer")
    caught_up = f"; {aged} caught up: moments as at an earlier cut of the donor's" if aged else ""
    return f"{len(states)} recoveries: outer state and inner optimizer equal the donor's{caught_up}"


def _next_step(history: History, expectation: Expectation) -> str:
    compared = 0
    for state in history.live_restorations():
        steps = history.until_replaced(state, "applied")
        if not steps:
            continue  # replaced by a newer state before its first boundary: that one is compared
        step = steps[0]
        if not (step.number("momentum_norm") > 0 and step.number("outer_learning_rate") > 0):
            raise NotProved(f"{step.source} took its step to {step.version} without momentum or learning rate")
        peers = [e for e in history.of("applied") if e.version == step.version and e.process != step.process]
        if not peers:
            raise NotProved(f"{step.source} alone applied {step.version}")
        for peer in peers:
            for digest in ("outer_digest", "next_step_digest"):
                if peer.text(digest) != step.text(digest) or not step.text(digest):
                    raise NotProved(f"{digest} of {step.source} at {step.version} differs from {peer.source}'s")
        compared += 1
    if compared < expectation.live_recoveries:
        raise NotProved(f"only {compared} recovered workers took a further step with others")
    return f"{compared} recovered workers: the next step and one more, with the boundary's own pseudo-gradient, equal"


def _learning_rates(history: History, expectation: Expectation) -> str:
    places = set()
    followed = 0
    for state in history.live_restorations():
        rates = state.numbers("learning_rates")
        if len(rates) != expectation.num_learning_rates:
            raise NotProved(f"{state.source} reported {len(rates)} rates, not {expectation.num_learning_rates}")
        if rates[0] <= 0:
            raise NotProved(f"{state.source} joined at a learning rate of zero")
        _donor_entry(history, state, "learning_rates", f"next {len(rates)} learning rates")
        used = [e.numbers("learning_rates")[0] for e in history.until_replaced(state, "inner")]
        for mine, donors in zip(used, rates, strict=False):
            if mine != donors:
                raise NotProved(f"{state.source} used learning rate {mine} where its donor's is {donors}")
        followed += bool(used)
        places.add(rates[0])
    if followed < expectation.live_recoveries:
        raise NotProved(
            f"only {followed} recovered workers took an inner step, fewer than {expectation.live_recoveries}"
        )
    return f"{followed} recoveries at {len(places)} places of the schedule: the donor's next rates, and then used"


def _donor_entry(history: History, state: Entry, name: str, what: str, *, earlier: bool = False) -> Entry:
    """Return a donor's report of the same place of the schedule (or an earlier one) whose field ``name`` is equal."""
    donors = history.donors_of(state)
    candidates = [e for e in history.at_epoch(donors, state.number("epoch"), earlier=earlier) if e is not state]
    if not candidates:
        raise NotProved(
            f"{state.source} joined after {state.number('epoch'):.0f} inner steps, where none of its donors "
            f"({', '.join(donor for donor, _ in donors) or 'none'}) was seen"
        )
    for candidate in candidates:
        if candidate.fields.get(name) == state.fields.get(name):
            return candidate
    raise NotProved(f"{state.source} joined at {state.text('cut') or state.version} with another {what} than its donor")


def _killed_and_back(history: History, expectation: Expectation) -> str:
    again = [process for process in history.processes if process == ("worker-0", 2)]
    killed = [e for e in history.of("killed") if e.process == ("worker-0", 1)]
    if not again or not killed:
        raise NotProved("worker-0 was not killed and started again")
    back = [e for e in history.of("state", again[0]) if e.text("source") == PEERS]
    if not back:
        raise NotProved("worker-0 did not get its state back from its peers")
    meanwhile = {
        e.version
        for e in history.of("applied")
        if killed[0].seconds < e.seconds < back[0].seconds and e.source != "worker-0"
    }
    if not meanwhile:
        raise NotProved("the survivors committed no boundary while worker-0 was away")
    gap = back[0].seconds - killed[0].seconds
    return f"survivors committed {len(meanwhile)} boundaries meanwhile; back at {back[0].version} after {gap:.1f} s"


def _own_data(history: History, expectation: Expectation) -> str:
    places = []
    for process in history.processes:
        if process[1] == 1:
            continue
        states = history.of("state", process)
        if not states:
            raise NotProved(f"{process[0]} was started again and never got a state")
        place = states[0].number("position")
        been = {e.number("position") for e in history.of("inner") if e.source == process[0] and e.launch < process[1]}
        if place not in been:
            raise NotProved(f"{process[0]} went on at byte {place:.0f} of its data, where it never was")
        places.append(f"{process[0]} at byte {place:.0f}")
    if not places:
        raise NotProved("no worker was started again")
    return f"{', '.join(places)}: places of their own, neither the beginning nor a donor's"


def _verify_names(history: History, expectation: Expectation) -> str:
    flipped = history.one("flipped", "bits flipped on purpose")
    before = history.one("verified", "a verify before the flip", lambda e: e.text("when") == "before")
    damaged = history.one("verified", "a verify after the flip", lambda e: e.text("when") == "damaged")
    if before.texts("different"):
        raise NotProved(f"verify named {before.texts('different')[0]} before anything was flipped")
    chosen = sorted(f"outer_params/{name}" for name in flipped.texts("names"))
    named = sorted(damaged.texts("different"))
    if not chosen or named != chosen:
        raise NotProved(f"flipped {', '.join(chosen) or 'nothing'}; verify named {', '.join(named) or 'nothing'}")
    return f"none before; then exactly {', '.join(flipped.texts('names'))}"


def _resync_heals(history: History, expectation: Expectation) -> str:
    flipped = history.one("flipped", "bits flipped on purpose")
    resynced = history.one("resynced", "a resync by RPC")
    healed = history.one("verified", "a verify after the resync", lambda e: e.text("when") == "healed")
    if healed.texts("different"):
        raise NotProved(f"verify still names {', '.join(healed.texts('different'))}")
    states = [e for e in history.of("state", flipped.process) if e.seconds > flipped.seconds]
    if not states or states[0].text("source") != PEERS:
        raise NotProved(f"{flipped.source} did not take its state from its peers")
    sealed = [
        e.version
        for e in history.of("applied", flipped.process)
        if e.seconds > resynced.seconds and len(history.outer_digests(e.version)) > 1
    ]
    if not sealed:
        raise NotProved(f"{flipped.source} took part in no boundary after the resync")
    return f"verify names none; {flipped.source} went on with the others at {sealed[0]}"


def _resumed(history: History, expectation: Expectation) -> str:
    lineage = history.one("LineageStarted", "a new lineage", lambda e: e.version.lineage == 2)
    loaded = history.one("CheckpointLoaded", "a checkpoint loaded")
    cut = parse_cut(loaded.text("cut"))
    if lineage.version != Version(2, cut.version.outer_step):
        raise NotProved(f"the checkpoint holds {cut}, the new lineage began at {lineage.version}")
    if parse_version(lineage.text("parent")) != cut.version:
        raise NotProved(f"the new lineage names {lineage.text('parent')} as its parent, not {cut.version}")
    states = [e for e in history.of("state", loaded.process) if e.text("source") == DISK]
    if not states:
        raise NotProved(f"{loaded.source} did not take its state from disk")
    before = history.outer_digests(cut.version, besides=loaded.process)
    if not before or set(before.values()) != {states[0].text("outer_digest")}:
        raise NotProved(f"the state from disk differs from what the workers held at {cut.version}")
    if not any(e.version.lineage == 2 for e in history.of("VersionSealed")):
        raise NotProved("no outer step was sealed after the resume")
    lost = lineage.number("lost_steps")
    newest = max((e.version for e in history.of("VersionSealed") if e.version.lineage == 1), default=cut.version)
    if lost != newest.outer_step - cut.version.outer_step:
        raise NotProved(f"{newest} was sealed and {cut.version} resumed, yet {lost:.0f} lost steps were recorded")
    return f"{cut.version} from disk became {lineage.version}, bit-equal; {lost:.0f} lost step(s) recorded"


def _nothing_left(history: History, expectation: Expectation) -> str:
    left = history.one("children_ended", "the end of all child processes")
    if left.number("running"):
        raise NotProved(f"{left.number('running'):.0f} processes still run")
    return f"{left.number('started'):.0f} processes started, all ended and reaped"


_CHECKS: list[tuple[str, Callable[[History, Expectation], str]]] = [
    ("origin by the coordinator's order, the others live", _origin),
    ("fingerprints equal at every seal", _sealed),
    ("every boundary committed with all survivors", _survivors),
    ("aborted epochs counted", _aborted),
    ("a joiner's state is bit-equal to its donor's at the cut", _state_equal),
    ("the next step is bit-equal", _next_step),
    ("the joiner's next 20 learning rates equal the donor's", _learning_rates),
    ("killed worker came back live, the others went on", _killed_and_back),
    ("restarted workers went on in their own data", _own_data),
    ("verify named exactly the flipped tensors", _verify_names),
    ("resync healed the worker", _resync_heals),
    ("resumed from disk at the checkpoint's own step", _resumed),
    ("no process left behind", _nothing_left),
]


def _short(digests: dict[Process, str]) -> str:
    return ", ".join(f"{worker} {digest[:8]}" for (worker, _), digest in digests.items())
