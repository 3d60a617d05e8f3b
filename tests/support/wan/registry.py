"""The folder of instances: one folder each, with a lock, the record, the daemon's socket, pid and log."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.wan import namespaces
from tests.support.wan.config import INSTANCE
from tests.support.wan.errors import WanError

_POLL_SECONDS = 0.05


def root() -> Path:
    """Return the folder of all instances: ``$WAN_STATE_DIR``, or ``/run/recovery-wan``."""
    return Path(os.environ.get("WAN_STATE_DIR") or "/run/recovery-wan").absolute()


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRecord:
    """One host. ``namespace`` None: the machine's own."""

    namespace: str | None
    address: str
    device: str


@dataclass(kw_only=True, slots=True)
class Record:
    """What is known of an instance; written before anything is made, so that it can be removed at any stage."""

    instance: str
    hosts: dict[str, HostRecord]
    subnet: str
    mtu: int
    seed: int
    pid: int = 0
    guarded: bool = False

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Place:
    """One instance's files."""

    instance: str
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", root() / self.instance)

    @property
    def control(self) -> Path:
        return self.folder / "ctl"

    @property
    def pid_file(self) -> Path:
        return self.folder / "pid"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def save(self, record: Record) -> None:
        partial = self.folder / "record.partial"
        partial.write_text(json.dumps(record.as_json(), indent=1))
        partial.rename(self.folder / "record.json")

    def load(self) -> Record | None:
        """Return the record; None if there is none (any more)."""
        try:
            raw = json.loads((self.folder / "record.json").read_text())
            raw["hosts"] = {name: HostRecord(**host) for name, host in raw["hosts"].items()}
            return Record(**raw)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @contextlib.contextmanager
    def locked(self, wait_seconds: float) -> Iterator[bool]:
        """Be alone in setting up or removing the instance. Yields False if the instance has no folder.

        Raises:
            WanError: somebody else holds it for longer.
        """
        deadline = time.monotonic() + wait_seconds
        try:
            lock = (self.folder / "lock").open("w")
        except FileNotFoundError:
            yield False
            return
        with lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise WanError(
                            f"instance {self.instance} is being set up or removed by another process"
                        ) from None
                    time.sleep(_POLL_SECONDS)
            yield True


def instances() -> list[str]:
    """Return the ids of all instances, also of those whose daemon has died."""
    try:
        return sorted(entry.name for entry in root().iterdir() if INSTANCE.fullmatch(entry.name))
    except FileNotFoundError:
        return []


def reserve(wanted: str) -> Place:
    """Make an instance's folder; of several processes that want one id, one gets it. Empty: draw an id.

    Raises:
        WanError: the id is taken.
    """
    root().mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(100):
        instance = wanted or f"{secrets.randbelow(10)}{secrets.token_hex(3)}"
        if namespaces.existing(instance):
            if wanted:
                raise WanError(f"namespaces of an instance {instance} exist: take it down first")
            continue
        place = Place(instance)
        try:
            place.folder.mkdir(mode=0o700)
        except FileExistsError:
            if wanted:
                raise WanError(f"instance {instance} exists") from None
            continue
        return place
    raise WanError("no free instance id")


def find(instance: str | None) -> Place:
    """Return the instance that is meant: the named one, ``$WAN_INSTANCE``, or the only one.

    Raises:
        WanError: there is no such instance, or more than one to choose from.
    """
    chosen = instance or os.environ.get("WAN_INSTANCE")
    if not chosen:
        have = instances()
        if len(have) != 1:
            raise WanError(f"which instance? up now: {' '.join(have) or 'none'}")
        chosen = have[0]
    place = Place(chosen)
    if not INSTANCE.fullmatch(chosen) or not place.folder.is_dir():
        raise WanError(f"no instance {chosen}")
    return place
