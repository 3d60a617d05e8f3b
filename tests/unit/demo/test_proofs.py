"""The table of proofs: all true for a good record, and each false when what it claims is not so, or never happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from recovery.demo.history import Expectation
from recovery.demo.proofs import Proof, examine
from recovery.demo.reports import Entry
from tests.unit.demo.story import OUTER_STEPS, WORKERS, good_story

ORIGIN = "origin by the coordinator's order, the others live"
SEALED = "fingerprints equal at every seal"
SURVIVORS = "every boundary committed with all survivors"
ABORTED = "aborted epochs counted"
STATE_EQUAL = "a joiner's state is bit-equal to its donor's at the cut"
NEXT_STEP = "the next step is bit-equal"
LEARNING_RATES = "the joiner's next 20 learning rates equal the donor's"
BACK = "killed worker came back live, the others went on"
OWN_DATA = "restarted workers went on in their own data"
VERIFY = "verify named exactly the flipped tensors"
RESYNC = "resync healed the worker"
RESUMED = "resumed from disk at the checkpoint's own step"
LEFT = "no process left behind"
ALL = {
    ORIGIN,
    SEALED,
    SURVIVORS,
    ABORTED,
    STATE_EQUAL,
    NEXT_STEP,
    LEARNING_RATES,
    BACK,
    OWN_DATA,
    VERIFY,
    RESYNC,
    RESUMED,
    LEFT,
}

Matches = Callable[[Entry], bool]
Spoil = Callable[[list[Entry]], list[Entry]]


def proofs_of(entries: list[Entry]) -> dict[str, Proof]:
    proofs = examine(entries, Expectation(workers=WORKERS, outer_steps=OUTER_STEPS))
    return {proof.name: proof for proof in proofs}


def without(kind: str, matches: Matches = lambda _: True) -> Spoil:
    """Drop all matching entries."""

    def spoil(entries: list[Entry]) -> list[Entry]:
        kept = [entry for entry in entries if entry.kind != kind or not matches(entry)]
        assert len(kept) < len(entries)
        return kept

    return spoil


def changed(kind: str, matches: Matches, /, **fields: object) -> Spoil:
    """Change fields of the first matching entry."""

    def spoil(entries: list[Entry]) -> list[Entry]:
        index = next(i for i, entry in enumerate(entries) if entry.kind == kind and matches(entry))
        entry = entries[index]
        assert any(entry.fields.get(name) != value for name, value in fields.items())
        spoilt = dataclasses.replace(entry, fields={**entry.fields, **fields})
        return [*entries[:index], spoilt, *entries[index + 1 :]]

    return spoil


def any_entry(entry: Entry) -> bool:
    return True


def at(source: str, version: str = "") -> Matches:
    return lambda entry: entry.source == source and version in ("", entry.text("version"))


def joined(source: str) -> Matches:
    return lambda entry: entry.source == source and entry.text("source") == "peers"


def when(moment: str) -> Matches:
    return lambda entry: entry.text("when") == moment


def test_a_good_record_proves_everything() -> None:
    proofs = proofs_of(good_story())
    assert set(proofs) == ALL
    assert [proof for proof in proofs.values() if not proof.holds] == []
    assert all(proof.detail for proof in proofs.values())


@pytest.mark.parametrize(("digest", "holds"), [("inner-1", True), ("other", False)])
def test_a_joiner_that_caught_up_has_moments_of_an_earlier_cut(digest: str, holds: bool) -> None:
    entries = changed("state", joined("worker-3"), inner_digest=digest)(good_story())
    place = next(index for index, entry in enumerate(entries) if entry.kind == "state" and entry.source == "worker-3")
    state = entries[place]
    refreshed = dataclasses.replace(state, kind="ScalarsRefreshed", fields={"cut": "L1.k1+2"})
    entries.insert(place, refreshed)
    assert proofs_of(entries)[STATE_EQUAL].holds == holds


def test_an_empty_record_proves_nothing() -> None:
    proofs = proofs_of([])
    assert set(proofs) == ALL
    assert [proof for proof in proofs.values() if proof.holds] == []


SPOILT: list[tuple[str, str, Spoil]] = [
    (ORIGIN, "no origin", without("LineageStarted", lambda e: e.text("cause") == "origin")),
    (ORIGIN, "another start", changed("LineageStarted", any_entry, version="L1.k3")),
    (ORIGIN, "two origins", changed("StateRestored", at("worker-1"), source="origin")),
    (ORIGIN, "from disk", changed("StateRestored", at("worker-2"), source="disk")),
    (ORIGIN, "a worker never began", without("StateRestored", at("worker-2"))),
    (SEALED, "a digest differs", changed("applied", at("worker-2", "L1.k5"), outer_digest="other")),
    (SEALED, "a divergence", changed("VersionSealed", any_entry, version="L1.k77")),
    (SEALED, "a version unsealed", without("VersionSealed", lambda e: e.text("version") == "L1.k4")),
    (SEALED, "nothing sealed", without("VersionSealed")),
    (SURVIVORS, "a survivor skipped one", without("applied", at("worker-2", "L1.k5"))),
    (
        SURVIVORS,
        "a survivor stood still",
        without("applied", lambda e: e.source == "worker-2" and e.version.outer_step > 4),
    ),
    (SURVIVORS, "never all together", without("applied", at("worker-3"))),
    (SURVIVORS, "too few", without("EpochEnded", lambda e: e.text("version") in ("L1.k1", "L2.k8"))),
    (ABORTED, "another count", changed("status", when("lineage 2"), aborted_epochs=3)),
    (ABORTED, "never asked", without("status")),
    (ABORTED, "nobody was in a boundary", without("held")),
    (ABORTED, "nobody was killed there", without("killed", at("worker-0"))),
    (ABORTED, "none aborted", without("EpochEnded", lambda e: e.text("verdict") == "aborted")),
    (ABORTED, "no epoch seen", without("EpochEnded")),
    (STATE_EQUAL, "outer state", changed("state", joined("worker-3"), outer_digest="other")),
    (STATE_EQUAL, "inner optimizer", changed("state", joined("worker-3"), inner_digest="other")),
    (STATE_EQUAL, "donor unseen", changed("state", joined("worker-3"), donors=["worker-9"])),
    (STATE_EQUAL, "one joiner fewer", without("state", joined("worker-3"))),
    (NEXT_STEP, "the step", changed("applied", at("worker-3", "L1.k2"), outer_digest="other")),
    (NEXT_STEP, "the one after", changed("applied", at("worker-3", "L1.k2"), next_step_digest="other")),
    (NEXT_STEP, "no momentum", changed("applied", at("worker-3", "L1.k2"), momentum_norm=0.0)),
    (NEXT_STEP, "no learning rate", changed("applied", at("worker-3", "L1.k2"), outer_learning_rate=0.0)),
    (NEXT_STEP, "no step", without("applied", at("worker-3"))),
    (LEARNING_RATES, "stale", changed("state", joined("worker-3"), learning_rates=[0.001] * 20)),
    (LEARNING_RATES, "too few", changed("state", joined("worker-3"), learning_rates=[0.006])),
    (LEARNING_RATES, "not used", changed("inner", at("worker-3", "L1.k1"), learning_rates=[0.5] * 20)),
    (LEARNING_RATES, "no recovery", without("state", lambda e: e.text("source") == "peers")),
    (BACK, "not killed", without("killed", at("worker-0"))),
    (BACK, "not back", without("state", lambda e: e.source == "worker-0" and e.launch == 2)),
    (BACK, "the others stood still", without("applied", lambda e: e.text("version") == "L1.k3")),
    (OWN_DATA, "from the beginning", changed("state", lambda e: e.launch == 2, position=0)),
    (OWN_DATA, "never began", without("state", lambda e: e.launch == 2)),
    (OWN_DATA, "never restarted", without("started", lambda e: e.launch == 2)),
    (VERIFY, "one not named", changed("verified", when("damaged"), different=["outer_params/a"])),
    (VERIFY, "one too many", changed("verified", when("damaged"), different=["outer_params/a", "outer_params/b", "c"])),
    (VERIFY, "named before", changed("verified", when("before"), different=["outer_params/a"])),
    (VERIFY, "nothing flipped", changed("flipped", any_entry, names=[])),
    (VERIFY, "never flipped", without("flipped")),
    (VERIFY, "never asked before", without("verified", when("before"))),
    (RESYNC, "still damaged", changed("verified", when("healed"), different=["outer_params/a"])),
    (RESYNC, "never ordered", without("resynced")),
    (RESYNC, "never asked", without("verified", when("healed"))),
    (RESYNC, "no state came", without("state", lambda e: e.source == "worker-1" and e.text("version") == "L1.k4")),
    (RESYNC, "no boundary after", without("applied", lambda e: e.source == "worker-1" and e.version.outer_step > 4)),
    (RESUMED, "another step", changed("LineageStarted", lambda e: e.text("cause") == "resume", version="L2.k1")),
    (RESUMED, "another parent", changed("LineageStarted", lambda e: e.text("cause") == "resume", parent="L1.k2")),
    (RESUMED, "another state", changed("state", lambda e: e.text("source") == "disk", outer_digest="other")),
    (RESUMED, "loss not recorded", changed("LineageStarted", lambda e: e.text("cause") == "resume", lost_steps=0)),
    (RESUMED, "did not go on", without("VersionSealed", lambda e: e.version.lineage == 2)),
    (RESUMED, "nothing loaded", without("CheckpointLoaded")),
    (LEFT, "one runs", changed("children_ended", any_entry, running=1)),
    (LEFT, "not looked", without("children_ended")),
]


@pytest.mark.parametrize(
    ("name", "spoil"), [(name, spoil) for name, _, spoil in SPOILT], ids=[f"{n}: {w}" for n, w, _ in SPOILT]
)
def test_each_proof_can_fail(name: str, spoil: Spoil) -> None:
    proof = proofs_of(spoil(good_story()))[name]
    assert not proof.holds
    assert proof.detail


def test_every_proof_has_a_way_to_fail() -> None:
    assert {name for name, _, _ in SPOILT} == ALL


def test_a_diverged_fingerprint_is_named() -> None:
    entries = good_story()
    diverged = dataclasses.replace(
        entries[-1], kind="FingerprintDiverged", fields={"worker_id": "worker-2", "version": "L1.k5"}
    )
    assert "worker-2 diverged at L1.k5" in proofs_of([*entries, diverged])[SEALED].detail


def test_a_worker_left_out_of_a_boundary_is_named() -> None:
    """A survivor that missed a commit and recovered afterwards is not a survivor that took part."""
    entries = good_story()
    index = next(i for i, e in enumerate(entries) if e.kind == "applied" and at("worker-2", "L1.k6")(e))
    recovered = dataclasses.replace(entries[index], kind="state")
    proof = proofs_of([*entries[:index], recovered, *entries[index + 1 :]])[SURVIVORS]
    assert not proof.holds
    assert "worker-2 was left out" in proof.detail
