"""Which steps exist, and which of them are whole. Judged by manifests and files, never by a pointer or a name alone."""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckpt.layout import (
    LATEST,
    REPLICATED_FOLDER,
    is_manifest_name,
    manifest_names,
    parse_step_folder,
    parse_worker_folder,
    step_folder,
)
from ckpt.reader import check_place
from ckpt.record import CheckpointRecord, decode_record
from ckpt.storage import Entry, Storage, read_whole
from recovery.errors import BadConfiguration, CheckpointRejected
from recovery.types import RunId, Version, WorkerId

logger = logging.getLogger(__name__)

OWNER = "run_"
"""A file ``run_<run id>`` in a step's folder says whose it is before the manifest does."""
_OWNER = re.compile(r"run_([A-Za-z0-9_-][A-Za-z0-9._-]{0,199})")


_ONLY_PRIVATE = (
    "it holds the private parts of {workers} and no replicated ones, which one worker saves for all: restore from that "
    "worker's folder or the remote, or bring them here with `recovery ckpt copy`"
)


class StepState(enum.Enum):
    """What a step's folder is worth."""

    WHOLE = "whole"
    """The manifest of every local rank verifies and every file has its size. Its bytes were not read."""
    PRIVATE = "private parts only"
    """Of this run, and as its saver left it: the replicated parts were another worker's to save, in another place."""
    TORN = "torn"
    """Of this run, but not (or no longer) restorable: interrupted or damaged."""
    FOREIGN = "foreign"
    """Another run's, or nobody's that can be told. Never touched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step's folder. Ordered by version: a later lineage beats any number of steps."""

    version: Version
    state: StepState
    reason: str = ""
    """Why it is not whole."""
    records: tuple[CheckpointRecord, ...] = ()
    """The replicated record of each local rank that could be read."""
    workers: tuple[WorkerId, ...] = ()
    """Those whose private parts are whole, sorted."""
    local_ranks_of: Mapping[WorkerId, int] = field(default_factory=dict)
    """Into how many shares each whole worker's private parts are cut."""
    torn_workers: Mapping[WorkerId, str] = field(default_factory=dict)
    """Those whose private parts are not whole, and why."""
    unfinished: frozenset[WorkerId | None] = frozenset()
    """Whose parts lack a manifest and show no other fault, None for the replicated ones: a save that has not ended,
    or was interrupted."""
    num_bytes: int = 0
    files: tuple[str, ...] = field(default=(), repr=False)
    """Paths inside the storage of every file that a readable manifest of this run names, the manifests included."""

    @property
    def whole(self) -> bool:
        """Whether it can be restored, as far as can be told without reading its bytes."""
        return self.state is StepState.WHOLE

    @property
    def kept(self) -> str:
        """Why retention must leave it alone; empty: it need not."""
        return next((record.kept for record in self.records if record.kept), "")

    @property
    def num_local_ranks(self) -> int:
        """Of the worker that saved the replicated parts."""
        return self.records[0].manifest.worker.num_local_ranks if self.records else 1


class Catalog:
    """The steps under one root. Holds no state: each call looks again. May be used from any thread."""

    def __init__(self, storage: Storage, run_id: RunId | None = None) -> None:
        """Store references.

        Args:
            storage: The root.
            run_id: Whose steps count; None takes every run's, for people who look at a folder.
        """
        self._storage = storage
        self._run_id = run_id

    @property
    def storage(self) -> Storage:
        """The root."""
        return self._storage

    @property
    def run_id(self) -> RunId | None:
        """Whose steps count."""
        return self._run_id

    def versions(self) -> list[Version]:
        """Return the versions that folders, and ``latest``, are named after, newest first. Nothing else is read."""
        found = {version for entry in self._storage.entries("") if (version := _step_of(entry)) is not None}
        hinted = self.hint()
        # A listing may be stale; the hint may too. Both only say where to look.
        return sorted(found | ({hinted} if hinted is not None else set()), reverse=True)

    def steps(self) -> list[Step]:
        """Return every step's folder, newest first."""
        return list(self.iterate())

    def iterate(self) -> Iterator[Step]:
        """Yield what ``steps`` lists, looking at each only when it is asked for."""
        for version in self.versions():
            try:
                step = self.look(version)
            except OSError as error:
                # One folder that the storage does not give must not hide the others: whose it is cannot be told.
                step = Step(version=version, state=StepState.FOREIGN, reason=f"it cannot be looked at: {error}")
            if step is not None:
                yield step

    def whole(self) -> list[Step]:
        """Return the whole steps, newest first."""
        return [step for step in self.iterate() if step.whole]

    def newest(self) -> Step | None:
        """Return the newest whole step, or None."""
        return next((step for step in self.iterate() if step.whole), None)

    def get(self, version: Version) -> Step:
        """Return one step.

        Raises:
            BadConfiguration: there is none, or it is not whole; names those that are. An explicit wish is never
                replaced by something else.
            CheckpointRejected: the storage does not give it.
        """
        try:
            step = self.look(version)
        except OSError as error:
            raise CheckpointRejected(f"step {version} in {self._storage.url} cannot be looked at: {error}") from error
        if step is None or not step.whole:
            have = ", ".join(str(one.version) for one in self.whole()) or "none"
            why = "does not exist" if step is None else f"is {step.state.value} ({step.reason})"
            raise BadConfiguration(f"step {version} in {self._storage.url} {why}; whole steps: {have}")
        return step

    def hint(self) -> Version | None:
        """Return the version that ``latest`` names, or None if it cannot be read or understood."""
        try:
            text = read_whole(self._storage, LATEST, limit=200)
        except OSError:
            return None
        return parse_step_folder(text.decode("ascii", "replace").strip())

    def look(self, version: Version) -> Step | None:
        """Return what a version's folder is worth, or None if there is none.

        Raises:
            OSError: the storage does not give it.
        """
        folder = step_folder(version)
        entries = self._storage.entries(folder)
        if not entries:
            return None
        owners = {match[1] for entry in entries if not entry.is_folder and (match := _OWNER.fullmatch(entry.name))}
        replicated = self._share(version, folder, entries, None)
        named = list(replicated.paths)
        workers: list[WorkerId] = []
        torn: dict[WorkerId, str] = {}
        ranks: dict[WorkerId, int] = {}
        unfinished: set[WorkerId | None] = {None} if replicated.unfinished else set()
        num_bytes = replicated.num_bytes
        runs = {record.manifest.run_id for record in replicated.records}
        for entry in entries:
            worker_id = parse_worker_folder(entry.name) if entry.is_folder else None
            if worker_id is None:
                continue
            try:
                share = self._share(version, f"{folder}/{entry.name}", None, worker_id)
            except OSError as error:  # another user's folder, perhaps: the replicated parts are whole without it
                torn[worker_id] = f"it cannot be looked at: {error}"
                continue
            if share.reason:
                torn[worker_id] = share.reason
                if share.unfinished:
                    unfinished.add(worker_id)
            else:
                workers.append(worker_id)
                ranks[worker_id] = len(share.records)
            named.extend(share.paths)
            num_bytes += share.num_bytes
            runs.update(record.manifest.run_id for record in share.records)
        state, reason = self._judge(replicated, runs, owners)
        if state is StepState.TORN and workers and not replicated.paths and not _has_replicated(entries):
            state, reason = StepState.PRIVATE, _ONLY_PRIVATE.format(workers=", ".join(sorted(workers)))
        return Step(
            version=version,
            state=state,
            reason=reason,
            records=tuple(replicated.records),
            workers=tuple(sorted(workers)),
            local_ranks_of=ranks,
            torn_workers=torn,
            unfinished=frozenset(unfinished),
            num_bytes=num_bytes,
            files=tuple(named),
        )

    def _judge(self, replicated: _Share, runs: set[RunId], owners: set[str]) -> tuple[StepState, str]:
        mine = self._run_id
        foreign = sorted(
            {str(run) for run in runs if mine is not None and run != mine}
            | {owner for owner in owners if mine is not None and owner != mine}
        )
        if foreign:
            return StepState.FOREIGN, f"it belongs to run {', '.join(foreign)}"
        if not replicated.reason:
            return StepState.WHOLE, ""
        if not runs and not owners:
            return StepState.FOREIGN, f"nothing says whose it is, and {replicated.reason}"
        return StepState.TORN, replicated.reason

    def _share(self, version: Version, folder: str, entries: list[Entry] | None, worker_id: WorkerId | None) -> _Share:
        listed = self._storage.entries(folder) if entries is None else entries
        names = {entry.name for entry in listed if not entry.is_folder and is_manifest_name(entry.name)}
        share = _Share()
        if not names:
            share.reason = "it has no manifest"
            share.unfinished = True
            return share
        for name in sorted(names):
            path = f"{folder}/{name}"
            try:
                record = decode_record(read_whole(self._storage, path), self._storage.url_of(path))
            except FileNotFoundError:
                continue  # deleted since the listing
            except (CheckpointRejected, OSError) as error:
                share.problems.append(str(error))
                continue
            share.records.append(record)
            share.paths.append(path)
            share.paths.extend(f"{folder}/{file.path}" for file in record.files)
        self._judge_share(share, version, folder, names, worker_id)
        return share

    def _judge_share(
        self, share: _Share, version: Version, folder: str, names: set[str], worker_id: WorkerId | None
    ) -> None:
        records = {record.manifest.worker.local_rank: record for record in share.records}
        try:
            if share.problems:
                raise CheckpointRejected("; ".join(share.problems))
            if not records:
                share.unfinished = True
                raise CheckpointRejected("its manifest is gone")
            num_ranks = share.records[0].manifest.worker.num_local_ranks
            share.unfinished = names < set(manifest_names(num_ranks))
            if names != set(manifest_names(num_ranks)) or set(records) != set(range(num_ranks)):
                raise CheckpointRejected(f"it has the manifests {sorted(names)} for {num_ranks} local ranks")
            sizes: dict[str, int] = {}
            for sub in {f"{folder}/{file.path}".rpartition("/")[0] for r in share.records for file in r.files}:
                sizes.update({f"{sub}/{entry.name}": entry.num_bytes for entry in self._storage.entries(sub)})
            first = share.records[0]
            for rank, record in records.items():
                where = self._storage.url_of(f"{folder}/{manifest_names(num_ranks)[rank]}")
                check_place(record, where, version, self._run_id, worker_id, rank, num_ranks)
                if (record.manifest.cut, record.manifest.fingerprint) != (
                    first.manifest.cut,
                    first.manifest.fingerprint,
                ):
                    raise CheckpointRejected(f"{where} is of another save than its neighbours")
                for file in record.files:
                    path = f"{folder}/{file.path}"
                    # A listing may lag behind: only the store itself says that a file is missing.
                    size = sizes.get(path)
                    if size != file.num_bytes:
                        size = self._storage.num_bytes(path)
                    if size != file.num_bytes:
                        have = "is missing" if size is None else f"has {size} of {file.num_bytes} bytes"
                        raise CheckpointRejected(f"{self._storage.url_of(path)} {have}")
            share.num_bytes = sum(record.num_bytes for record in share.records)
        except CheckpointRejected as error:
            share.reason = str(error)


class _Share:
    """The manifests of one scope in one folder."""

    def __init__(self) -> None:
        self.records: list[CheckpointRecord] = []
        self.problems: list[str] = []
        self.paths: list[str] = []
        self.reason = ""
        self.unfinished = False
        self.num_bytes = 0


def _has_replicated(entries: list[Entry]) -> bool:
    """Return whether a save of the replicated parts was here, however far it came."""
    return any(
        entry.name == REPLICATED_FOLDER if entry.is_folder else is_manifest_name(entry.name) for entry in entries
    )


def _step_of(entry: Entry) -> Version | None:
    return parse_step_folder(entry.name) if entry.is_folder else None
