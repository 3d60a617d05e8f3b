"""The record: what a worker's lines become, and waits that end by what they wait for, by a failure, or in time."""

from __future__ import annotations

import json
import threading

import pytest

from recovery.demo.reports import Entry, Record, ScenarioFailed, parse_cut, parse_version
from recovery.types import Cut, Version


def test_versions_and_cuts_are_read_as_they_are_written() -> None:
    for cut in (Cut(Version(1, 0)), Cut(Version(12, 345), 6)):
        assert parse_cut(str(cut)) == cut
        assert parse_version(str(cut.version)) == cut.version
    for text in ("", "L1", "k3", "L1.k3+", "L1.k3+2 ", "xL1.k3"):
        with pytest.raises(ValueError, match="is not a version"):
            parse_cut(text)


def test_an_event_line_becomes_an_entry_of_its_own_name() -> None:
    record = Record()
    line = {"type": "event", "event": "StateRestored", "fields": {"version": "L1.k3", "num_bytes": 7, "donors": ["a"]}}
    entry = record.add_line("worker-1", json.dumps(line), launch=2)
    assert (entry.kind, entry.process) == ("StateRestored", ("worker-1", 2))
    assert entry.version == Version(1, 3)
    assert entry.number("num_bytes") == 7.0
    assert entry.texts("donors") == ("a",)
    assert (entry.text("absent"), entry.number("absent"), entry.texts("absent"), entry.numbers("absent")) == (
        "",
        0.0,
        (),
        (),
    )


@pytest.mark.parametrize("line", ["", "not json", "[]", '"text"', "{}", '{"type": 3}'])
def test_a_line_that_is_no_report_is_refused(line: str) -> None:
    record = Record()
    with pytest.raises(ValueError, match=r"."):
        record.add_line("worker-1", line, launch=1)
    assert record.entries() == []


def test_an_entry_is_one_line_of_json_with_its_own_words_first() -> None:
    entry = Entry(seconds=1.23456, source="worker-1", launch=1, kind="inner", fields={"loss": 3.0, "source": "peers"})
    assert json.loads(entry.to_json()) == {
        "seconds": 1.2346,
        "source": "worker-1",
        "launch": 1,
        "type": "inner",
        "fields": {"loss": 3.0, "source": "peers"},
    }


def test_a_wait_ends_when_another_thread_adds_what_it_waits_for() -> None:
    record = Record()
    adder = threading.Thread(target=record.add, args=("worker-1", "applied"))

    def find(entries: object) -> Entry | None:
        if adder.ident is None:
            adder.start()
        return next((entry for entry in record._entries if entry.kind == "applied"), None)

    assert record.wait_for("a step", find, timeout_seconds=60).source == "worker-1"
    adder.join()


def test_a_wait_for_what_never_comes_names_it() -> None:
    with pytest.raises(ScenarioFailed, match="the moon did not happen within 0 s"):
        Record().wait_for("the moon", lambda entries: None, timeout_seconds=0.01)


def test_a_failure_wakes_a_wait_and_the_first_one_is_told() -> None:
    record = Record()

    def fail_twice() -> None:
        record.fail("worker-1 ended")
        record.fail("worker-2 ended")

    failer = threading.Thread(target=fail_twice)

    def find(entries: object) -> None:
        if failer.ident is None:
            failer.start()

    with pytest.raises(ScenarioFailed, match="while waiting for a step: worker-1 ended"):
        record.wait_for("a step", find, timeout_seconds=60)
    failer.join()
    with pytest.raises(ScenarioFailed, match="worker-1 ended"):
        record.wait_for("another", lambda entries: None, timeout_seconds=60)


def test_what_is_there_already_is_found_even_after_a_failure() -> None:
    record = Record()
    record.add("worker-1", "applied")
    record.fail("later")
    assert record.wait_for("a step", lambda entries: entries[0], timeout_seconds=60).kind == "applied"


def test_listeners_hear_every_entry_in_order() -> None:
    record = Record()
    heard: list[Entry] = []
    record.add("worker-1", "before")
    record.listen(heard.append)
    record.add("worker-1", "first")
    record.add("worker-1", "second", {"x": 1})
    assert [entry.kind for entry in heard] == ["first", "second"]
    assert [entry.kind for entry in record] == ["before", "first", "second"]
    assert heard[0].seconds <= heard[1].seconds
