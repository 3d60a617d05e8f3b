"""What a person and a machine see: lines with bytes, seconds and rates; a table; valid JSON; a picture."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from recovery.demo import plot
from recovery.demo.display import JsonDisplay, LiveDisplay, PlainDisplay, choose
from recovery.demo.history import Expectation
from recovery.demo.narration import narrate, stalls
from recovery.demo.proofs import Proof, examine
from recovery.demo.reports import Entry
from tests.unit.demo.story import good_story

PROOFS = [
    Proof(name="whole", holds=True, detail="all equal"),
    Proof(name="healed", holds=False, detail="verify [still] names a"),
]


def told(kind: str, fields: Mapping[str, object], source: str = "worker-1") -> str:
    return narrate(Entry(seconds=12.34, source=source, launch=1, kind=kind, fields=fields)) or ""


def test_a_transfer_is_told_with_bytes_seconds_and_rate() -> None:
    line = told(
        "TransferEnded",
        {"payload_bytes": 15_000_000, "reused_bytes": 2_000_000, "took_seconds": 0.5, "cut": "L1.k3+2", "failure": ""},
    )
    assert line.startswith("[  12.3s] worker-1 received 15.00 MB in 0.500 s, 0.030 GB/s; 2.00 MB it already had")
    assert "L1.k3+2" in line
    assert "donor lost" in told("TransferEnded", {"failure": "donor lost", "attempt": 1})


def test_who_waited_how_long_for_whom_is_told_unless_it_is_nothing() -> None:
    waited = {"what": "roster", "for_whom": "worker-3", "waited_seconds": 1.5}
    assert told("TrainingThreadWaited", waited).endswith("worker-1 waited 1.50 s for worker-3 (roster)")
    assert told("TrainingThreadWaited", {**waited, "waited_seconds": 0.01}) == ""
    roster = {"version": "L1.k3", "members": ["a", "b"], "missing": ["c"], "waited_seconds": 0.0}
    assert "not there: c" in told("RosterIssued", roster)
    assert told("RosterIssued", {**roster, "missing": []}) == ""


def test_a_record_is_told_without_its_inner_steps() -> None:
    lines = [narrate(entry) for entry in good_story()]
    assert any(line and "lineage begins at L2.k7: resume of L1.k7, 1 step(s) lost" in line for line in lines)
    assert any(line and "worker-1 inverted one bit in each of b, a" in line for line in lines)
    assert [narrate(entry) for entry in good_story() if entry.kind == "inner"].count(None) == sum(
        entry.kind == "inner" for entry in good_story()
    )


def test_plain_lines_and_the_table() -> None:
    out = io.StringIO()
    display = choose(out, as_json=False, inner_steps=4, outer_steps=8)
    assert isinstance(display, PlainDisplay)
    for entry in good_story():
        display.entry(entry)
    display.result(PROOFS, ["picture: x.png"], 61.0)
    display.close()
    text = out.getvalue()
    assert "  yes   whole " in text
    assert "  NO    healed" in text
    assert "in 61 s" in text
    assert text.endswith("picture: x.png\n")
    assert "\x1b" not in text


def test_json_is_one_object_a_line_and_ends_with_the_result() -> None:
    out = io.StringIO()
    display = choose(out, as_json=True, inner_steps=4, outer_steps=8)
    assert isinstance(display, JsonDisplay)
    story = good_story()
    for entry in story:
        display.entry(entry)
    display.result(PROOFS, [], 61.0)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["type"] for line in lines[:-1]] == [entry.kind for entry in story]
    assert lines[-1]["proved"] is False
    assert [proof["holds"] for proof in lines[-1]["proofs"]] == [True, False]


def test_the_live_view_shows_workers_and_gives_the_terminal_back() -> None:
    out = io.StringIO()
    display = LiveDisplay(
        Console(file=out, force_terminal=True, width=160, color_system=None), inner_steps=4, outer_steps=8
    )
    for entry in good_story():
        display.entry(entry)
    display.result(PROOFS, ["picture: x.png"], 61.0)
    display.close()
    display.close()
    text = out.getvalue()
    assert "verify [still] names a" in text
    assert "lineage 2, outer step 8 of 8" in text
    assert text.rstrip().endswith("picture: x.png")


def test_each_process_has_a_curve_and_what_happened_is_marked() -> None:
    curves = plot.loss_curves(good_story())
    assert set(curves) == {
        "worker-0",
        "worker-0 (start 2)",
        "worker-1",
        "worker-1 (start 2)",
        "worker-2",
        "worker-3",
    }
    assert all(len(times) == len(losses) and times == sorted(times) for times, losses in curves.values())
    marked = [what for _, what in plot.marks(good_story())]
    assert "worker-0 killed" in marked
    assert "worker-1: bits flipped" in marked
    assert "worker-1 from disk" in marked


@pytest.mark.skipif(not plot.matplotlib_present(), reason="matplotlib is an extra of this package")
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    plot.draw(good_story(), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_training_threads_stalls_are_summed() -> None:
    assert "No training thread" in stalls(good_story())
    captured = {"training_thread_seconds": 0.002, "copied_on_training_thread_bytes": 1_000_000}
    guarded = {"training_thread_seconds": 0.0005, "copied_bytes": 500_000}
    entries = [
        Entry(seconds=1.0, source="worker-1", launch=1, kind="SnapshotCaptured", fields=captured),
        Entry(seconds=2.0, source="worker-2", launch=1, kind="GuardCopied", fields=guarded),
    ]
    line = stalls(entries)
    assert "gave 2 ms in all" in line
    assert "at most 2.0 ms at once" in line
    assert "1.50 MB" in line


def test_what_an_interrupted_story_did_not_reach_is_open_and_not_refuted() -> None:
    entries = good_story()[:3]
    expectation = Expectation(workers=4, outer_steps=8)
    assert {proof.verdict for proof in examine(entries, expectation)} == {"NO"}
    assert {proof.verdict for proof in examine(entries, expectation, told_in_full=False)} == {"open"}
