"""The history on disk: explicit creation, one holder, and what a restart finds."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.control.history import History
from recovery.control.record import (
    ABORTED,
    COMMITTED,
    Change,
    DrainSet,
    EpochClosed,
    EpochOpened,
    HistoryRecord,
    LineageBegun,
    PauseSet,
    PositionRecorded,
    RunSettled,
    VersionSealed,
    copy_of,
)
from recovery.errors import BadConfiguration, MisuseError
from recovery.types import NO_VERSION, Version

VOTERS = (("a", "i1"), ("b", "i1"))


def story() -> list[Change]:
    return [
        RunSettled("torch-2.13.0/cpu/AVX2", b"l" * 32),
        LineageBegun(Version(1, 0), "origin", NO_VERSION, 0, "a", "i1", 12.5),
        VersionSealed(Version(1, 0), b"0" * 32),
        EpochOpened(1, Version(1, 0), VOTERS),
        EpochClosed(1, ABORTED, NO_VERSION, b"", (), "lost before its vote: b"),
        EpochOpened(2, Version(1, 0), VOTERS),
        EpochClosed(2, COMMITTED, Version(1, 1), b"d" * 32, VOTERS, "2 equal votes"),
        PositionRecorded("a", Version(1, 1), 4096, b"position"),
        VersionSealed(Version(1, 1), b"1" * 32),
        DrainSet("a", True),
        DrainSet("b", True),
        DrainSet("b", False),
        EpochOpened(3, Version(1, 1), VOTERS),
        EpochClosed(3, COMMITTED, Version(1, 2), b"e" * 32, VOTERS[:1], "1 equal vote"),
        LineageBegun(Version(2, 1), "resume", Version(1, 1), 1, "b", "i2", 99.0),
        PauseSet("a person has to choose"),
    ]


def test_a_run_is_created_only_by_an_explicit_act(tmp_path: Path) -> None:
    with History(tmp_path) as history:
        with pytest.raises(BadConfiguration, match="--new-run"):
            history.load("run")
        history.create("run")
        assert history.load("run").run_id == "run"
        with pytest.raises(BadConfiguration, match="already holds run 'run'"):
            history.create("run")


def test_another_run_is_refused_by_name(tmp_path: Path) -> None:
    with History(tmp_path) as history:
        history.create("mine")
        with pytest.raises(BadConfiguration, match="holds run 'mine', not 'yours'"):
            history.load("yours")


def test_a_second_coordinator_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with History(tmp_path) as history:
        history.create("run")
        code = (
            "import sys, pathlib\n"
            "from recovery.control.history import History\n"
            "from recovery.errors import BadConfiguration\n"
            "try: History(pathlib.Path(sys.argv[1])).start()\n"
            "except BadConfiguration as error: print(error)\n"
        )
        found = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
        )
        assert "held by another coordinator (process " in found.stdout
        history.apply(PauseSet("still here"))
    with History(tmp_path) as again:
        assert again.load("run").paused == "still here"


def test_everything_comes_back(tmp_path: Path) -> None:
    expected = HistoryRecord("run")
    with History(tmp_path) as history:
        history.create("run")
        history.load("run")
        for change in story():
            history.apply(change)
            expected.apply(change)
    with History(tmp_path) as history:
        found = history.load("run")
    assert found.generation == 2
    assert found.token
    found.generation, found.token = expected.generation, expected.token
    assert found == expected
    assert found.committed == Version(1, 2)
    assert found.unsealed_lineage is not None


def test_an_epoch_that_was_open_at_the_crash_is_aborted(tmp_path: Path) -> None:
    with History(tmp_path) as history:
        history.create("run")
        history.load("run")
        history.apply(EpochOpened(1, Version(1, 0), VOTERS))
    with History(tmp_path) as history:
        found = history.load("run")
    assert found.epochs[1].verdict == ABORTED
    assert found.num_aborted == 1
    assert found.last_epoch == 1, "its number is never used again"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 15), max_size=30))
def test_disk_and_memory_agree_on_any_order_and_repetition(order: list[int]) -> None:
    import tempfile

    changes = story()
    expected = HistoryRecord("run")
    with tempfile.TemporaryDirectory() as folder:
        with History(Path(folder)) as history:
            history.create("run")
            for index in order:
                history.apply(changes[index])
                expected.apply(changes[index])
        with History(Path(folder)) as history:
            found = history.load("run")
    for epoch in expected.epochs.values():
        if epoch.verdict == "open":
            epoch.verdict, epoch.reason = ABORTED, "the coordinator restarted before it was decided"
            expected.num_aborted += 1
    assert found.seals == expected.seals
    assert found.epochs == expected.epochs
    assert found.positions == expected.positions
    assert found.trails == expected.trails
    assert found.drained == expected.drained
    assert found.sealed == expected.sealed
    assert (found.num_committed, found.num_aborted) == (expected.num_committed, expected.num_aborted)


def test_a_foreign_file_is_refused_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "history.sqlite").write_bytes(b"not a database, but somebody's file" * 100)
    with pytest.raises(BadConfiguration, match="not a history"):
        History(tmp_path).start()
    assert (tmp_path / "history.sqlite").read_bytes().startswith(b"not a database")


def test_another_format_is_refused(tmp_path: Path) -> None:
    with History(tmp_path) as history:
        history.create("run")
    database = sqlite3.connect(tmp_path / "history.sqlite")
    database.execute("UPDATE run SET format = 99")
    database.commit()
    database.close()
    with History(tmp_path) as history, pytest.raises(BadConfiguration, match="format 99"):
        history.load("run")


def test_use_before_start_is_a_misuse(tmp_path: Path) -> None:
    history = History(tmp_path)
    with pytest.raises(MisuseError, match="not open"):
        history.apply(PauseSet("x"))
    history.close()


def test_a_path_into_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadConfiguration, match=r"neither made nor written \(Not a directory\): name a folder"):
        History(tmp_path / "file" / "state").start()


def test_steps_that_a_rollback_left_are_not_on_the_path() -> None:
    record = HistoryRecord("run")
    record.apply(LineageBegun(Version(1, 0), "origin", NO_VERSION, 0, "a", "i", 0.0))
    for step in range(9):
        record.apply(VersionSealed(Version(1, step), bytes(32)))
    record.apply(LineageBegun(Version(2, 5), "rollback", Version(1, 5), 3, "a", "i", 0.0))
    record.apply(VersionSealed(Version(2, 5), bytes(32)))
    assert record.on_path(Version(1, 5))
    assert record.on_path(Version(2, 5))
    assert not record.on_path(Version(1, 6)), "left behind by the rollback"
    assert not record.on_path(Version(2, 4))
    assert not record.on_path(Version(2, 6))
    assert not record.on_path(NO_VERSION)
    assert copy_of(record) == record
