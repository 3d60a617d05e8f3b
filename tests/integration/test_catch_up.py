"""Joiners that the run leaves behind, in real processes: they catch up, whoever fails meanwhile.

Boundaries take place when the test says so (``tests.support.steered``), never by the clock.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from recovery.snapshot.journal import KEPT_ENTRIES
from recovery.worker.catch_up import MAX_REBASES
from tests.support.fleet import WAIT_SECONDS, Fleet, Worker
from tests.support.steered import PATIENT, SteeredRun, heard, step_of

REPLICATED = ("outer_params", "outer_optimizer", "run_progress")
PRIVATE = ("inner_optimizer", "scheduler", "local_progress", "buffers")
AT_THE_BASE = {"event": "BaseRestored"}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteeredRun]:
    """One run for all tests that do not mind what its state weighs."""
    with Fleet(tmp_path_factory.mktemp("run"), *PATIENT, "--expected-workers", "3") as fleet:
        yield SteeredRun(fleet, {"hidden": 64, "step_seconds": 0.005, "report_steps": True})


@pytest.fixture
def run(steered: SteeredRun) -> Iterator[SteeredRun]:
    """The run with three members, which have momentum in both optimizers, and nobody else."""
    steered.fill_up(3)
    steered.advance(2)
    yield steered
    steered.end_joiners()


def differing(left: dict[str, str], right: dict[str, str], parts: tuple[str, ...]) -> list[str]:
    return [name for name in parts if left[name] != right[name]]


def moments_of(parts: dict[str, str]) -> list[str]:
    """Return the digests of an inner optimizer's tensors, without its scalars."""
    return parts["inner_optimizer"].split("/")[1:]


def at(worker: Worker, cut: str) -> dict[str, Any]:
    """Return what a worker said before the inner step that follows a cut."""
    version, inner_step = cut.split("+")
    return worker.wait(
        lambda m: m["say"] == "step" and (m["version"], m["inner_step"]) == (version, int(inner_step)), f"step {cut}"
    )


def assert_in_step(run: SteeredRun, joiner: Worker, boundaries: int = 2) -> dict[str, Any]:
    """At admission the joiner held what all members held at that version, and so it does after the next boundaries."""
    joined = run.admitted(joiner)
    assert step_of(joined["version"]) == run.outer_step
    run.advance(boundaries)
    joiner.wait_boundary(run.outer_step)
    mine = {joined["version"]: joined["parts"], **joiner.boundaries()}
    assert len(mine) > boundaries
    for version, parts in mine.items():
        for member in run.members:
            if version in member.boundaries():
                assert differing(parts, member.boundaries()[version], REPLICATED) == [], (version, member.name)
    return joined


def assert_whole_at(joined: dict[str, Any], donor: dict[str, Any]) -> None:
    """Every private part is the donor's at one cut, and so are the next learning rates."""
    assert differing(joined["parts"], donor["parts"], PRIVATE) == []
    assert joined["next_rates"] == donor["next_rates"]
    assert len(joined["next_rates"]) == 21


def left_behind(run: SteeredRun, boundaries: int = 1, **plan: Any) -> tuple[Worker, dict[str, Any]]:
    """Return a joiner that stands still with a whole base while the run took so many boundaries."""
    joiner = run.joiner(halt=AT_THE_BASE, **plan)
    halted = joiner.wait_said("halted")
    assert step_of(halted["version"]) == run.outer_step
    run.advance(boundaries)
    run.tell_seal(joiner)
    return joiner, halted


def private_donor(run: SteeredRun, joiner: Worker) -> Worker:
    """Return the member whose private parts the joiner has."""
    cut = heard(joiner, "PrivatePartsReceived")[-1]["cut"]
    (donor,) = (w for w in run.members if any(m["cut"] == cut for m in heard(w, "SnapshotCaptured")))
    return donor


def test_everything_private_is_of_one_cut_where_the_phase_allows_it(run: SteeredRun) -> None:
    """Phases last as long here as a process needs to start: fetching a few kilobytes again fits into one."""
    run.fill_up(len(run.members) + 1)
    run.advance()
    joiner, halted = left_behind(run)
    donor = private_donor(run, joiner)
    joiner.command(do="go_on")
    joined = assert_in_step(run, joiner)
    cuts = [m["cut"] for m in heard(joiner, "PrivatePartsReceived")]
    assert cuts[-1] == f"{joined['version']}+{joined['inner_step']}"
    assert step_of(joined["version"]) > step_of(halted["version"])
    assert len(cuts) == 2
    assert heard(joiner, "ScalarsRefreshed") == []
    assert_whole_at(joined, at(donor, cuts[-1]))


def test_donor_killed_while_its_joiner_catches_up(run: SteeredRun) -> None:
    """What is complete stays so: the base is not fetched again."""
    joiner, _ = left_behind(run)
    donor = private_donor(run, joiner)
    run.kill(donor)
    joiner.command(do="go_on")
    assert_in_step(run, joiner)
    assert [m["donor"] for m in heard(joiner, "DonorFailed")].count(donor.name) >= 1, "nobody missed the donor"
    assert len(heard(joiner, "BaseRestored")) == 1
    assert heard(joiner, "CatchUpRebased") == []


def test_coordinator_killed_while_a_joiner_catches_up(run: SteeredRun) -> None:
    joiner, _ = left_behind(run)
    before = len(joiner.heard)
    run.fleet.stop_coordinator()
    joiner.command(do="go_on")
    joiner.wait_event("TransferStarted", since=before)  # it asks for the journal, and meets nobody
    run.fleet.start_coordinator()
    assert_in_step(run, joiner)
    assert len(heard(joiner, "BaseRestored")) == 1
    assert heard(joiner, "CatchUpRebased") == []


def test_boundary_aborted_while_a_joiner_catches_up(run: SteeredRun) -> None:
    """An epoch that fails leaves no entry; the one that commits does, and is what the joiner replays."""
    joiner = run.joiner(halt=AT_THE_BASE)
    base = joiner.wait_said("halted")
    victim = run.members[-1]
    victim.command(do="halt", plan={"event": "BoundaryStage", "when": {"stage": "averaging"}})
    since = len(victim.heard)
    run.release(*run.members)
    halted = victim.wait_said("halted", since=since)
    assert halted["version"] == base["version"]
    run.kill(victim)
    run.advance()
    run.tell_seal(joiner)
    joiner.command(do="go_on")
    assert_in_step(run, joiner)
    epochs = {m["epoch"] for m in heard(run.members[0], "BoundaryStage") if m["version"] == base["version"]}
    assert len(epochs - {0}) > 1, "the boundary was not averaged a second time"
    assert [m["version"] for m in heard(joiner, "CommitReplayed")] == [f"L1.k{step_of(base['version']) + 1}"]
    assert heard(joiner, "CatchUpRebased") == []


def test_overflow_takes_a_new_base(run: SteeredRun) -> None:
    """A joiner that stood still for so long that its entries are gone fetches a newer base, once."""
    joiner, _ = left_behind(run, boundaries=KEPT_ENTRIES + 1)
    joiner.command(do="go_on")
    rebased = joiner.wait_event("CatchUpRebased")
    assert "keeps the averages" in rebased["reason"]
    assert_in_step(run, joiner)
    assert [m["times"] for m in heard(joiner, "CatchUpRebased")] == [1]
    assert len(heard(joiner, "BaseRestored")) == 2


def test_rebases_are_bounded(run: SteeredRun) -> None:
    """A joiner whose every base is too old by the time that it can use it ends, and says why."""
    joiner = run.joiner(halt=AT_THE_BASE)
    since = 0
    for _ in range(MAX_REBASES + 1):
        halted = joiner.wait_said("halted", since=since)
        since = joiner.heard.index(halted) + 1
        run.advance(KEPT_ENTRIES + 1)
        run.tell_seal(joiner)
        joiner.command(do="halt", plan=AT_THE_BASE)
        joiner.command(do="go_on")
    error = joiner.wait_said("error")
    assert error["error"] == "CannotKeepUp"
    assert f"gave up {MAX_REBASES + 1} outer bases" in error["message"]
    assert joiner.end() == 1
    assert [m["times"] for m in heard(joiner, "CatchUpRebased")] == list(range(1, MAX_REBASES + 2))


def test_a_resync_slower_than_a_phase_ends_well(run: SteeredRun) -> None:
    """A live worker goes through the same steps; until its base is whole it keeps the state that it has."""
    victim = run.members[-1]
    done: list[object] = []
    since = len(victim.heard)
    victim.command(do="halt", plan={"event": "PrivatePartsReceived"})
    with run.fleet.operator() as operator:
        ordering = threading.Thread(target=lambda: done.append(operator.resync(victim.name)))
        ordering.start()
        run.release(victim)
        victim.wait_said("halted", since=since)
        (status,) = (w for w in operator.list().workers if w.worker.worker_id == victim.name)
        assert not status.poisoned
        assert status.version.outer_step == run.outer_step
        victim.command(do="halt", plan=AT_THE_BASE)
        since = len(victim.heard)
        victim.command(do="go_on")
        victim.wait_said("halted", since=since)
        run.advance(2, without=victim)
        run.tell_seal(victim)
        victim.command(do="go_on")
        victim.wait_event("CommitReplayed", since=since)
        ordering.join(WAIT_SECONDS)
    assert len(done) == 1
    run.advance(2)
    version = f"L1.k{run.outer_step}"
    for member in run.members[:-1]:
        assert differing(victim.boundaries()[version], member.boundaries()[version], REPLICATED) == []


BASE_PERIODS = 1.25
"""What the outer copy takes of an outer period; one commit's averages take half of that."""
WORST_START = 0.7
"""Where in a phase a base is begun that costs the most boundaries: the run takes one while it is fetched, and the
entries of three more periods end shortly after a boundary each."""
HEAVY: dict[str, Any] = {
    "hidden": 30_000,
    "step_seconds": 0.1,
    "report_steps": True,
    "agent": {"inner_steps_per_phase": 18, "recover_timeout_seconds": 80.0, "progress_timeout_seconds": 30.0},
}
"""5.5 MB of outer parts, half as much a plain entry, 5.8 MB of private parts, phases of about 1.8 s."""
OUTER_BYTES = 2 * 4 * (16 + 1 + 2 + 4) * HEAVY["hidden"]
"""Parameters and momentum."""


@pytest.fixture(scope="module")
def heavy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteeredRun]:
    """Two members of a run with the parameter's codec, of which one serves."""
    plan = {**HEAVY, "agent": {**HEAVY["agent"], "gradient_codec": request.param}}
    with Fleet(tmp_path_factory.mktemp(request.param), *PATIENT, "--expected-workers", "2") as fleet:
        run = SteeredRun(fleet, plan, gate=17)
        run.fill_up(2)
        with fleet.operator() as operator:
            operator.drain(run.members[1].name)
        yield run


def cap(run: SteeredRun, outer_copies_a_period: float) -> None:
    """Cap the member that serves, by the period that the run has on this machine now."""
    run.advance(2)
    before, after = [m["at"] for m in run.members[0].heard if m["say"] == "boundary"][-2:]
    with run.fleet.operator() as operator:
        operator.set_rate(run.members[0].name, int(outer_copies_a_period * OUTER_BYTES / (after - before)))


@pytest.mark.parametrize(("heavy", "at_most"), [("plain", 3), ("int8", 2)], indirect=["heavy"])
def test_first_roster_soon_after_the_base(heavy: SteeredRun, at_most: int) -> None:
    """The clock of these phases is the joiner's bytes: a period is over when ``1 / BASE_PERIODS`` of a copy came.

    So the ratios hold on any machine, and the number of boundaries between the base and the joiner's first roster says
    how many times it had to fetch anything.
    Reported in learning-at-home/hivemind#443.
    """
    run, donor = heavy, heavy.members[0]
    cap(run, 1 / BASE_PERIODS)
    joiner = run.joiner(halt={"event": "PrivatePartsReceived"}, report_arrivals=True)
    halted = joiner.wait_said("halted")
    run.advance()  # the base is begun in the phase after this boundary
    run.tell_seal(joiner)
    joiner.command(do="go_on")
    at_base = let_boundaries_pass_by_bytes(run, joiner, OUTER_BYTES / BASE_PERIODS)
    base, joined = joiner.wait_event("BaseRestored"), run.admitted(joiner)
    assert at_base > step_of(base["version"]), "the copy was not slower than a phase: nothing was caught up"
    run.advance()
    first = step_of(joiner.wait_event("BoundaryStage", stage="rostered")["version"]) + 1
    assert first - at_base <= at_most
    replayed = [step_of(m["version"]) for m in heard(joiner, "CommitReplayed")]
    assert replayed == list(range(step_of(base["version"]) + 1, first))
    assert len(heard(joiner, "BaseRestored")) == 1
    joiner.wait_boundary(run.outer_step)
    for version, parts in {joined["version"]: joined["parts"], **joiner.boundaries()}.items():
        for member in run.members:
            assert differing(parts, member.boundaries()[version], REPLICATED) == [], (version, member.name)
    # Private parts take longer than a phase: the moments are of the cut that came first, the scalars of now.
    by_then = joiner.heard[: joiner.heard.index(joined)]
    (received,) = (m for m in heard(joiner, "PrivatePartsReceived") if m in by_then)
    refreshed = [m for m in heard(joiner, "ScalarsRefreshed") if m in by_then][-1]
    assert received["cut"] == halted["cut"]
    assert refreshed["cut"] == f"{joined['version']}+{joined['inner_step']}"
    assert moments_of(joined["parts"]) == moments_of(at(donor, received["cut"])["parts"])
    now = at(donor, refreshed["cut"])
    assert differing(joined["parts"], now["parts"], ("scheduler", "local_progress", "buffers")) == []
    assert joined["parts"]["inner_optimizer"].split("/")[0] == now["parts"]["inner_optimizer"].split("/")[0]
    assert joined["next_rates"] == now["next_rates"]
    assert len(joined["next_rates"]) == 21


def let_boundaries_pass_by_bytes(run: SteeredRun, joiner: Worker, period_bytes: float) -> int:
    """Let a boundary take place whenever the joiner got a period's bytes, until it has joined.

    Returns:
        The outer step that the run was at when the joiner's base was whole.
    """
    got = [m["num_bytes"] for m in joiner.heard if m["say"] == "arrived"]
    due, place, at_base = max(got, default=0) + (1 - WORST_START) * period_bytes, len(joiner.heard), 0
    while True:
        message = joiner.wait(
            lambda m: m["say"] in ("arrived", "joined") or m.get("event") == "BaseRestored",
            "brought bytes or joined",
            since=place,
        )
        place = next(i for i in range(place, len(joiner.heard)) if joiner.heard[i] is message) + 1
        if message["say"] == "joined":
            for member in run.members:
                member.wait_boundary(run.outer_step)
            return at_base
        if message["say"] == "event":
            at_base = run.outer_step
        while message["say"] == "arrived" and message["num_bytes"] >= due:
            run.release(*run.members)
            run.outer_step += 1
            due += period_bytes


@pytest.mark.parametrize("heavy", ["plain"], indirect=True)
def test_a_link_too_slow_is_not_admitted_and_status_says_what_it_needs(heavy: SteeredRun) -> None:
    """Five times too slow: no load makes that right. With a faster link the same process joins."""
    run = heavy
    run.end_joiners()
    cap(run, 0.1)
    joiner = run.joiner()
    deadline, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
    with run.fleet.operator() as operator:
        says = ""
        while "not admitted" not in says and time.monotonic() < deadline:
            says = next((w.waiting_for for w in operator.list().workers if w.worker.worker_id == joiner.name), "")
            pause.wait(0.1)
        assert "not admitted: the link brings" in says
        assert re.search(r"one commit of 2\.\d+ MB in every outer period of \S+ s needs \S+ MB/s", says)
        assert heard(joiner, "BaseRestored") == []
        operator.set_rate(run.members[0].name, 0)
    assert_in_step(run, joiner, boundaries=1)
