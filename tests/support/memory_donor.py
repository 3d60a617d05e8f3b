"""A donor inside this process: snapshots over plain tensors, served by real ``DonorSession`` threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from recovery.errors import DonorRefused
from recovery.protocol.ports import Admit, DonorPeer, OpenLink
from recovery.protocol.session import OUTER, Attempt, DonorConfig, DonorResult, DonorSession, RateLimiter, Role
from recovery.state.chunks import PartBytes
from recovery.state.digest import chunk_digest
from recovery.state.live_part import LivePart, describe, live_part
from recovery.state.manifest import Manifest, empty_leaf, encode
from recovery.types import (
    Cut,
    Incarnation,
    NumericsId,
    PartClass,
    PartName,
    RunId,
    TransferId,
    Version,
    WorkerId,
    WorkerRef,
)
from tests.support.memory_conversation import MemoryConversation, conversation_pair

RUN = RunId("run")
VERSION = Version(1, 3)
HOST = "127.0.0.1"

_scopes = itertools.count()


def worker(name: str) -> WorkerRef:
    return WorkerRef(WorkerId(name), Incarnation("i1"))


@dataclass(frozen=True)
class MemoryReading:
    data: torch.Tensor
    live: bool


class MemoryLease:
    """Lends parts' memory itself until ``close_views``, then copies made at that moment, as the guard does."""

    def __init__(self, manifest: Manifest, parts: list[LivePart], until_boundary: bool = False) -> None:
        self.manifest = manifest
        self.manifest_bytes = encode(manifest)
        self.until_boundary = until_boundary
        self.released: list[tuple[str, bool]] = []
        self.acknowledged: set[tuple[int, int]] = set()
        self._parts = parts
        self._copies: list[torch.Tensor] | None = None
        self._callbacks: list[Callable[[], int | None]] = []
        self._lock = threading.Lock()

    def read(self, part: int, offset: int, num_bytes: int) -> MemoryReading:
        with self._lock:
            if self._copies is not None:
                return MemoryReading(self._copies[part][offset : offset + num_bytes], live=False)
            view = self._parts[part].bytes.view(offset, num_bytes)
            if view is not None:
                return MemoryReading(view, live=True)
            return MemoryReading(self._parts[part].bytes.read(offset, num_bytes), live=False)

    def acknowledge(self, part: int, chunk: int) -> None:
        self.acknowledged.add((part, chunk))

    def recheck(self, part: int, chunk: int) -> bool:
        spec = self.manifest.parts[part].chunks[chunk]
        data = self.read(part, spec.offset, spec.num_bytes).data
        return chunk_digest(self.manifest.digest_algorithm, data) == spec.digest

    def renew(self) -> None:
        return None

    def release(self, reason: str, *, grace: bool = False) -> None:
        self.released.append((reason, grace))

    def on_closed(self, callback: Callable[[], int | None], /) -> None:
        self._callbacks.append(callback)

    def close_views(self) -> int:
        """Copy everything, as before an outer step; return how many pulls that voided."""
        with self._lock:
            self._copies = [part.bytes.read(0, part.bytes.num_bytes).clone() for part in self._parts]
        return sum(callback() or 0 for callback in self._callbacks)


@dataclass
class MemorySnapshots:
    """Lends two sets of parts at a fixed cut."""

    name: str
    outer: Mapping[str, object]
    private: Mapping[str, object] = field(default_factory=dict)
    version: Version = VERSION
    journal: Mapping[Version, object] = field(default_factory=dict)
    """Entries by the version that they lead to."""
    scalars: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.leases: list[MemoryLease] = []
        self.private_requests: list[Version] = []
        self.outer_manifest, self._outer_parts = self._describe(self.outer, PartClass.REPLICATED, 0)

    def lease_outer(self, version: Version, holder: str) -> MemoryLease:
        if version != self.version:
            raise DonorRefused(f"{self.name} lends {self.version}, not {version}")
        lease = MemoryLease(self.outer_manifest, self._outer_parts)
        self.leases.append(lease)
        return lease

    def lease_private(self, holder: str, not_before: Version) -> Future[MemoryLease]:
        self.private_requests.append(not_before)
        future: Future[MemoryLease] = Future()
        lease = MemoryLease(*self._describe(self.private, PartClass.PRIVATE_COPIED, 7))
        self.leases.append(lease)
        future.set_result(lease)
        return future

    def lease_scalars(self, holder: str, not_before: Version) -> Future[MemoryLease]:
        self.private_requests.append(not_before)
        future: Future[MemoryLease] = Future()
        future.set_result(MemoryLease(*self._describe(self.scalars, PartClass.PRIVATE_COPIED, 9)))
        return future

    def lease_journal(self, version: Version, holder: str) -> MemoryLease:
        if version not in self.journal:
            raise DonorRefused(f"{self.name} keeps no entry that leads to {version}")
        return MemoryLease(
            *self._describe({"journal": self.journal[version]}, PartClass.REPLICATED, 0, version=version)
        )

    def _describe(
        self, values: Mapping[str, object], part_class: PartClass, inner_step: int, version: Version | None = None
    ) -> tuple[Manifest, list[LivePart]]:
        parts = [live_part(PartName(name), part_class, value) for name, value in values.items()]
        manifest = describe(
            parts,
            run_id=RUN,
            worker=worker(self.name),
            cut=Cut(version or self.version, inner_step),
            numerics_id=NumericsId("test"),
            layout_digest=b"l" * 32,
        )
        return manifest, parts


class MemoryDonor:
    """Accepts conversations and serves each with a ``DonorSession`` in a thread of its own."""

    def __init__(
        self,
        snapshots: MemorySnapshots,
        open_link: OpenLink,
        *,
        config: DonorConfig | None = None,
        limiter: RateLimiter | None = None,
        admit: Admit = lambda letter: None,
        private_parts: bool = False,
        measured_rate: float = 0.0,
    ) -> None:
        self.snapshots = snapshots
        self.peer = DonorPeer(worker=worker(snapshots.name), private_parts=private_parts, measured_rate=measured_rate)
        self.limiter = limiter or RateLimiter()
        self.sessions: list[DonorSession] = []
        self.results: list[DonorResult] = []
        self.ends: list[tuple[MemoryConversation, MemoryConversation]] = []  # type: ignore[type-arg]
        self._config = config or DonorConfig(data_host=HOST)
        self._open_link = open_link
        self._admit = admit
        self._threads: list[threading.Thread] = []

    def dial(self) -> MemoryConversation:  # type: ignore[type-arg]
        """Open a conversation with this donor; return the joiner's end."""
        mine, theirs = conversation_pair()
        session = DonorSession(
            theirs,
            self.snapshots,
            scope=f"test/{next(_scopes)}",
            config=self._config,
            admit=self._admit,
            open_link=self._open_link,
            limiter=self.limiter,
        )
        self.sessions.append(session)
        self.ends.append((mine, theirs))
        thread = threading.Thread(target=lambda: self.results.append(session.run()), name=f"donor-{self.peer.name}")
        self._threads.append(thread)
        thread.start()
        return mine

    def die(self, reason: str = "killed") -> None:
        """Break every conversation as the loss of the process would."""
        for mine, _ in self.ends:
            mine.close(reason)

    def join(self) -> list[DonorResult]:
        """Return the results after every conversation has ended."""
        for thread in self._threads:
            thread.join()
        return self.results


class Destinations:
    """The joiner's side: memory made from manifests, kept across attempts, compared with the donor's."""

    def __init__(self) -> None:
        self.leaves: dict[str, list[torch.Tensor]] = {}
        self.manifests: list[Manifest] = []

    def __call__(self, role: int, manifest: Manifest) -> dict[PartName, PartBytes]:
        self.manifests.append(manifest)
        made = {}
        for part in manifest.parts:
            old = self.leaves.get(part.name)
            if old is None:
                old = [torch.as_tensor(empty_leaf(spec)) for spec in part.tensors]
                for leaf in old:
                    leaf.zero_()
                self.leaves[part.name] = old
            made[part.name] = PartBytes(old, part.tensors)
        return made

    def holds(self, name: str, value: object) -> bool:
        """Return whether the part's memory equals that of ``value``, byte for byte."""
        wanted = live_part(PartName(name), PartClass.REPLICATED, value).bytes
        found = PartBytes(self.leaves[name])
        return torch.equal(wanted.read(0, wanted.num_bytes), found.read(0, found.num_bytes))


def attempt(
    donors: list[MemoryDonor],
    *,
    number: int = 1,
    want_private: bool = True,
    lends: Role = OUTER,
    version: Version | None = None,
) -> Attempt:
    first = donors[0].snapshots
    return Attempt(
        run_id=RUN,
        transfer_id=TransferId("t1"),
        number=number,
        version=version or first.version,
        fingerprint=first.outer_manifest.fingerprint,
        token=b"token",
        joiner=worker("joiner"),
        layout_digest=b"l" * 32,
        data_host=HOST,
        donors=tuple(donor.peer for donor in donors),
        want_private=want_private,
        first=lends,
    )
