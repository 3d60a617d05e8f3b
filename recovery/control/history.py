"""The run's history on disk: one SQLite file under a state directory that one coordinator at a time may hold."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sqlite3
from pathlib import Path
from typing import TextIO

from recovery.control.record import (
    COMMITTED,
    KEPT_EPOCHS,
    KEPT_POSITIONS,
    OPEN,
    Change,
    DrainSet,
    EpochClosed,
    EpochOpened,
    EpochRecord,
    HistoryRecord,
    LineageBegun,
    PauseSet,
    PositionRecorded,
    RunSettled,
    VersionSealed,
)
from recovery.errors import BadConfiguration, MisuseError
from recovery.types import Version, checked_id

FORMAT = 1
"""Of the tables below; a file of another format is refused, never rewritten."""

_TABLES = """
CREATE TABLE run (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), format INTEGER NOT NULL, run_id TEXT NOT NULL,
    generation INTEGER NOT NULL, token TEXT NOT NULL, numerics_id TEXT NOT NULL, layout_digest BLOB NOT NULL,
    paused TEXT NOT NULL);
CREATE TABLE lineages (lineage INTEGER PRIMARY KEY, outer_step INTEGER NOT NULL, cause TEXT NOT NULL,
    parent_lineage INTEGER NOT NULL, parent_outer_step INTEGER NOT NULL, lost_steps INTEGER NOT NULL,
    worker_id TEXT NOT NULL, incarnation TEXT NOT NULL, started REAL NOT NULL);
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, lineage INTEGER NOT NULL, outer_step INTEGER NOT NULL,
    members TEXT NOT NULL, verdict TEXT NOT NULL, created_lineage INTEGER NOT NULL, created_outer_step INTEGER NOT NULL,
    digest BLOB NOT NULL, voters TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE seals (lineage INTEGER NOT NULL, outer_step INTEGER NOT NULL, fingerprint BLOB NOT NULL,
    PRIMARY KEY (lineage, outer_step));
CREATE TABLE positions (worker_id TEXT PRIMARY KEY, lineage INTEGER NOT NULL, outer_step INTEGER NOT NULL,
    tokens INTEGER NOT NULL, position BLOB NOT NULL);
CREATE TABLE drained (worker_id TEXT PRIMARY KEY);
"""

_TRAILS = """
CREATE TABLE IF NOT EXISTS trails (worker_id TEXT NOT NULL, lineage INTEGER NOT NULL, outer_step INTEGER NOT NULL,
    tokens INTEGER NOT NULL, position BLOB NOT NULL, PRIMARY KEY (worker_id, lineage, outer_step))
"""
"""Came later than the format: a history of before gets it when it is loaded, and an older program does not mind it."""


class History:
    """A state directory, held exclusively from ``start`` to ``close``. One thread at a time may call.

    SQLite's integers have 64 signed bits: lineages, steps and epochs above 2**63 - 1 do not occur.
    """

    def __init__(self, path: Path) -> None:
        """Store where the history lies; nothing is opened.

        Args:
            path: The state directory. ``start`` makes it if it does not exist.
        """
        self._path = path
        self._lock: TextIO | None = None
        self._database: sqlite3.Connection | None = None

    @property
    def path(self) -> Path:
        """The state directory."""
        return self._path

    def start(self) -> None:
        """Hold the directory.

        Raises:
            BadConfiguration: another coordinator holds it (named by its process id), or it cannot be made or read.
        """
        if self._database is not None:
            return
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            lock = (self._path / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise BadConfiguration(
                f"state directory {self._path} can be neither made nor written ({error.strerror}): "
                "name a folder on a disk of this machine that this user may write"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read(64).strip() or "unknown"
            lock.close()
            raise BadConfiguration(
                f"state directory {self._path} is held by another coordinator (process {holder}): stop that one, or "
                "give this one its own --state-dir"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        database = sqlite3.connect(self._path / "history.sqlite", isolation_level=None, check_same_thread=False)
        try:
            # A rollback journal with EXTRA also syncs the directory: a commit that returned survives a power cut.
            database.execute("PRAGMA journal_mode = DELETE")
            database.execute("PRAGMA synchronous = EXTRA")
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.DatabaseError as error:
            database.close()
            lock.close()
            raise BadConfiguration(f"{self._path / 'history.sqlite'} is not a history: {error}") from error
        self._lock, self._database = lock, database

    def close(self) -> None:
        """Give the directory back. A second call does nothing."""
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> History:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def exists(self) -> bool:
        """Whether a run was created here."""
        return bool(
            self._open()
            .execute("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'run'")
            .fetchone()[0]
        )

    def create(self, run_id: str) -> None:
        """Begin a run that has no history: an explicit act of a person.

        Raises:
            BadConfiguration: a run exists here already, or the id is not usable.
        """
        checked_id("run id", run_id)
        database = self._open()
        if self.exists:
            raise BadConfiguration(
                f"state directory {self._path} already holds run {self._run_id()!r}: leave --new-run out to go on with "
                "it, or give the new run its own --state-dir"
            )
        token = secrets.token_hex(4) + "-"
        row = f"INSERT INTO run VALUES (1, {FORMAT}, '{run_id}', 0, '{token}', '', x'', '');"  # checked: no quotes
        database.executescript(f"BEGIN IMMEDIATE;{_TABLES}{_TRAILS};{row}COMMIT;")

    def load(self, run_id: str) -> HistoryRecord:
        """Return everything that was stored, under a new generation.

        Epochs that were open are closed as aborted: no commit is told before it is stored, so nobody applied them.

        Raises:
            BadConfiguration: no run was created here, it is another run, or the file's format is another.
        """
        database = self._open()
        if not self.exists:
            raise BadConfiguration(
                f"state directory {self._path} holds no run: start the coordinator with --new-run to create "
                f"{run_id!r}, or name the directory that holds its history"
            )
        if self._run_id() != run_id:
            raise BadConfiguration(
                f"state directory {self._path} holds run {self._run_id()!r}, not {run_id!r}: correct --run-id or "
                "--state-dir"
            )
        (found,) = database.execute("SELECT format FROM run").fetchone()
        if found != FORMAT:
            raise BadConfiguration(f"{self._path / 'history.sqlite'} has format {found}; this program reads {FORMAT}")
        with _Transaction(database):
            database.execute(_TRAILS)
            database.execute("UPDATE run SET generation = generation + 1")
            database.execute(
                "UPDATE epochs SET verdict = 'aborted', reason = 'the coordinator restarted before it was decided' "
                "WHERE verdict = ?",
                (OPEN,),
            )
        return self._read(database, run_id)

    def apply(self, record: Change) -> None:
        """Store one change; when this returns it survives a crash of the machine. The same change again is harmless.

        Raises:
            MisuseError: the history is not open.
            sqlite3.Error: the disk refused. Then nothing of the change is stored, and nobody may be told of it.
        """
        database = self._open()
        with _Transaction(database):
            self._write(database, record)

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            raise MisuseError(f"the history in {self._path} is not open: call start() first")
        return self._database

    def _run_id(self) -> str:
        (run_id,) = self._open().execute("SELECT run_id FROM run").fetchone()
        return str(run_id)

    @staticmethod
    def _write(database: sqlite3.Connection, record: Change) -> None:
        match record:
            case RunSettled():
                database.execute(
                    "UPDATE run SET numerics_id = ?, layout_digest = ?", (record.numerics_id, record.layout_digest)
                )
            case LineageBegun(version=version, parent=parent):
                database.execute(
                    "INSERT OR IGNORE INTO lineages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        version.lineage,
                        version.outer_step,
                        record.cause,
                        parent.lineage,
                        parent.outer_step,
                        record.lost_steps,
                        record.worker_id,
                        record.incarnation,
                        record.started_wall_seconds,
                    ),
                )
            case EpochOpened(version=version):
                database.execute(
                    "INSERT OR IGNORE INTO epochs VALUES (?, ?, ?, ?, ?, 0, 0, x'', '[]', '')",
                    (record.epoch, version.lineage, version.outer_step, json.dumps(record.members), OPEN),
                )
            case EpochClosed(created=created):
                database.execute(
                    "UPDATE epochs SET verdict = ?, created_lineage = ?, created_outer_step = ?, digest = ?, "
                    "voters = ?, reason = ? WHERE epoch = ? AND verdict = ?",
                    (
                        record.verdict,
                        created.lineage,
                        created.outer_step,
                        record.digest,
                        json.dumps(record.voters),
                        record.reason,
                        record.epoch,
                        OPEN,
                    ),
                )
                for position in record.positions:
                    History._write(database, position)
            case VersionSealed(version=version):
                database.execute(
                    "INSERT OR IGNORE INTO seals VALUES (?, ?, ?)",
                    (version.lineage, version.outer_step, record.fingerprint),
                )
            case PositionRecorded(version=version):
                database.execute(
                    "INSERT INTO positions VALUES (?, ?, ?, ?, ?) ON CONFLICT (worker_id) DO UPDATE SET "
                    "lineage = excluded.lineage, outer_step = excluded.outer_step, tokens = excluded.tokens, "
                    "position = excluded.position WHERE (excluded.lineage, excluded.outer_step) >= "
                    "(positions.lineage, positions.outer_step)",
                    (record.worker_id, version.lineage, version.outer_step, record.tokens, record.position),
                )
                database.execute(
                    "INSERT OR REPLACE INTO trails SELECT * FROM positions WHERE worker_id = ?", (record.worker_id,)
                )
                database.execute(
                    "DELETE FROM trails WHERE worker_id = ?1 AND (lineage, outer_step) < (SELECT lineage, outer_step "
                    "FROM trails WHERE worker_id = ?1 ORDER BY lineage DESC, outer_step DESC LIMIT 1 OFFSET ?2)",
                    (record.worker_id, KEPT_POSITIONS - 1),
                )
            case DrainSet(drained=True):
                database.execute("INSERT OR IGNORE INTO drained VALUES (?)", (record.worker_id,))
            case DrainSet():
                database.execute("DELETE FROM drained WHERE worker_id = ?", (record.worker_id,))
            case PauseSet():
                database.execute("UPDATE run SET paused = ?", (record.reason,))

    @staticmethod
    def _read(database: sqlite3.Connection, run_id: str) -> HistoryRecord:
        generation, token, numerics_id, layout_digest, paused = database.execute(
            "SELECT generation, token, numerics_id, layout_digest, paused FROM run"
        ).fetchone()
        record = HistoryRecord(run_id, generation, numerics_id, layout_digest, paused=paused, token=token)
        for lineage, step, cause, parent, parent_step, *rest in database.execute(
            "SELECT * FROM lineages ORDER BY lineage"
        ):
            record.apply(LineageBegun(Version(lineage, step), cause, Version(parent, parent_step), *rest))
        for lineage, step, fingerprint in database.execute("SELECT * FROM seals ORDER BY lineage, outer_step"):
            record.apply(VersionSealed(Version(lineage, step), fingerprint))
        newest = database.execute("SELECT * FROM epochs ORDER BY epoch DESC LIMIT ?", (KEPT_EPOCHS,)).fetchall()
        for epoch, lineage, step, members, verdict, made, made_step, digest, voters, reason in reversed(newest):
            created = Version(made, made_step)
            record.epochs[epoch] = EpochRecord(
                Version(lineage, step), _voters(members), verdict, created, digest, _voters(voters), reason
            )
            record.last_epoch = max(record.last_epoch, epoch)
            # A later lineage starts from what was sealed: an unsealed step of an earlier one is left behind.
            if verdict == COMMITTED and created >= record.committed:
                record.committed, record.committed_epoch = created, epoch
        record.num_committed = database.execute("SELECT count(*) FROM epochs WHERE verdict = 'committed'").fetchone()[0]
        record.num_aborted = database.execute("SELECT count(*) FROM epochs WHERE verdict = 'aborted'").fetchone()[0]
        for worker_id, lineage, step, tokens, position in database.execute(
            "SELECT * FROM (SELECT * FROM trails UNION SELECT * FROM positions) ORDER BY lineage, outer_step"
        ):
            record.apply(PositionRecorded(worker_id, Version(lineage, step), tokens, position))
        record.drained.update(worker_id for (worker_id,) in database.execute("SELECT worker_id FROM drained"))
        return record


class _Transaction:
    """All of the block is stored, or nothing of it."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._database.execute("COMMIT")
        elif self._database.in_transaction:
            self._database.execute("ROLLBACK")


def _voters(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((worker_id, incarnation) for worker_id, incarnation in json.loads(text))
