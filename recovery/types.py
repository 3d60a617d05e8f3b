"""The nouns: ids, versions, cuts, classes of parts. No torch, no gRPC, no behaviour beyond order and checks."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import NewType, Protocol

from recovery.errors import BadConfiguration

RunId = NewType("RunId", str)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
TransferId = NewType("TransferId", str)
Epoch = NewType("Epoch", int)
PartName = NewType("PartName", str)
NumericsId = NewType("NumericsId", str)
Fingerprint = NewType("Fingerprint", bytes)
"""BLAKE3 over the replicated parts, 32 bytes; see ``recovery.state.digest``."""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")


def checked_id(what: str, value: str) -> str:
    """Return ``value`` if it can stand in a message, a path and a metric label.

    Raises:
        BadConfiguration: it is empty, too long, starts with a dot, or has a character outside ``A-Z a-z 0-9 . _ -``.
    """
    if not _ID.fullmatch(value) or value.startswith("."):
        raise BadConfiguration(
            f"{what} {value!r} is not usable: take 1 to 200 letters, digits, '.', '_' or '-', not starting with '.'"
        )
    return value


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """A point in a run's history. Ordered by lineage, then outer step: a later lineage beats any number of steps."""

    lineage: int
    outer_step: int

    def __str__(self) -> str:
        return f"L{self.lineage}.k{self.outer_step}"

    def next(self) -> Version:
        """Return the version that the next commit of this lineage creates."""
        return Version(self.lineage, self.outer_step + 1)


NO_VERSION = Version(0, 0)
"""What a fresh worker holds. Older than every real version, whose lineage is at least 1."""


@dataclass(frozen=True, order=True, slots=True)
class Cut:
    """The instant that a snapshot shows: ``inner_step`` inner steps after the boundary of ``version``."""

    version: Version
    inner_step: int = 0

    def __str__(self) -> str:
        return f"{self.version}+{self.inner_step}"


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One process of one worker. A restarted process is a new incarnation of the same worker."""

    worker_id: WorkerId
    incarnation: Incarnation
    local_rank: int = 0
    num_local_ranks: int = 1

    def __str__(self) -> str:
        return self.worker_id if self.num_local_ranks == 1 else f"{self.worker_id}[{self.local_rank}]"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process can be reached: a host name or an IPv4 or IPv6 literal, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str) -> Address:
        """Return the address written as ``host:port``, ``1.2.3.4:port`` or ``[v6]:port``.

        Raises:
            BadConfiguration: another form, or a port outside 0 to 65535.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        if not colon or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and "[" not in text):
            raise BadConfiguration(f"address {text!r} is not of the form host:port (IPv6: [host]:port)")
        return Address(host, int(port))


class PartClass(enum.Enum):
    """Who decides a part's content when a worker joins."""

    REPLICATED = "replicated"
    """Bit-equal on every worker at the same version: outer parameters, outer optimizer, run progress."""
    PRIVATE_COPIED = "private-copied"
    """A joiner takes a donor's: inner optimizer, scheduler, local progress, buffers."""
    PRIVATE_KEPT = "private-kept"
    """Never overwritten by a donor's: data position, random generators."""


class DigestAlgorithm(enum.Enum):
    """Digest of chunks. Neither is keyed: a manifest's own digest is authenticated, and the manifest lists these."""

    XXH3_128 = "xxh3-128"
    BLAKE3 = "blake3"


class KeyValue(Protocol):
    """A blocking key-value store with one scope a process group; the port behind ``ControlStore``.

    All methods may be called from several threads at once. Values are at most 64 KiB.
    """

    def set(self, scope: str, key: str, value: bytes) -> None:
        """Store ``value``, replacing what was there."""

    def get(self, scope: str, keys: list[str], timeout_seconds: float) -> list[bytes]:
        """Return the values, waiting until every key exists.

        Raises:
            PeerUnreachable: ``timeout_seconds`` passed; names the missing keys.
        """

    def wait(self, scope: str, keys: list[str], timeout_seconds: float) -> None:
        """Return when every key exists; errors as ``get``."""

    def exists(self, scope: str, keys: list[str]) -> bool:
        """Return whether all keys exist now."""

    def add(self, scope: str, key: str, amount: int) -> int:
        """Add to an integer that starts at zero; return the sum."""

    def compare_set(self, scope: str, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value equals ``expected`` (empty: the key is absent); return what is stored."""

    def delete(self, scope: str, key: str) -> bool:
        """Remove a key; return whether it existed."""
