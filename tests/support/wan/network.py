"""An emulated network that is up: its hosts, what runs in them, its links changed while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.wan import control, instance
from tests.support.wan.config import Settings, WanConfig
from tests.support.wan.errors import WanError
from tests.support.wan.registry import HostRecord, Place, Record, find


@dataclass(frozen=True, slots=True)
class Wan:
    """A handle on an instance. Nothing ends with it: see ``emulated``."""

    place: Place

    @classmethod
    def attached(cls, name: str | None = None) -> Wan:
        """Return a handle on a running instance: the named one, ``$WAN_INSTANCE``, or the only one."""
        return cls(find(name))

    @property
    def record(self) -> Record:
        """What was set up.

        Raises:
            WanError: the instance is gone.
        """
        found = self.place.load()
        if found is None:
            raise WanError(f"no instance {self.place.instance}")
        return found

    def host(self, name: str) -> HostRecord:
        hosts = self.record.hosts
        if name not in hosts:
            raise WanError(f"no host {name}; hosts of {self.place.instance}: {' '.join(hosts)}")
        return hosts[name]

    def address(self, name: str) -> str:
        """Return a host's address."""
        return self.host(name).address

    def prefix(self, name: str) -> list[str]:
        """Return what to put before a command so that it runs in a host; the pid stays that of the command."""
        namespace = self.host(name).namespace
        return ["ip", "netns", "exec", namespace] if namespace else []

    def set(self, target: str, **settings: str) -> None:
        """Change settings of a host, a direction ``a:b``, a pair ``a-b`` or ``all``; in force on return."""
        words = [word for pair in settings.items() for word in pair]
        control.ask(self.place, " ".join(["set", target, *words]))

    def cut(self, *targets: str) -> None:
        """Drop all that would leave or reach a host, or pass a direction or pair; in force on return."""
        control.ask(self.place, " ".join(["cut", *targets]))

    def heal(self, *targets: str) -> None:
        """Undo ``cut``."""
        control.ask(self.place, " ".join(["heal", *targets]))

    def stats(self, *, reset: bool = False) -> control.Stats:
        """Return the counters; ``reset``: then count from zero."""
        found = control.stats(self.place)
        if reset:
            control.ask(self.place, "reset")
        return found

    def show(self) -> dict[str, Any]:
        """Return the settings in force."""
        return control.ask(self.place, "show")

    def down(self) -> bool:
        """Remove the instance; return whether there was anything to remove."""
        return instance.take_down(self.place.instance)


@contextmanager
def emulated(
    hosts: Mapping[str, Settings] | Sequence[str], *, config: WanConfig | None = None, **options: Any
) -> Iterator[Wan]:
    """A network for the duration of a ``with`` block; programs left in its hosts are ended with it.

    Args:
        hosts: Names, or names with settings; ignored if ``config`` is given.
        config: The whole configuration.
        options: Other fields of ``WanConfig``.
    """
    named = hosts if isinstance(hosts, Mapping) else {name: {} for name in hosts}
    wan = Wan(instance.set_up(config or WanConfig(hosts=named, **options)))
    try:
        yield wan
    finally:
        wan.down()
