"""What can happen to a donor, a joiner or a bystander in mid-transfer, each with the proof that it did happen to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.support.processes import ChildProcess
from tests.support.wan.network import Wan
from tests.support.wan.peers import DonorProcess, JoinerProcess, Result, Site, wait_until

DONORS = ("d0", "d1", "d2")
PROGRESS_SECONDS = 2.0
_HELD = "500kbit"
"""What an uplink carries while a fault strikes: the transfer does not end before it."""


class Victim(Protocol):
    """A process in a host."""

    host: str
    child: ChildProcess


@dataclass(frozen=True, slots=True)
class Fault:
    """``strike`` does it; ``proof`` is called after the transfer and fails unless the victim saw it."""

    strike: Callable[[Wan, Victim], None]
    proof: Callable[[Wan, Victim, int], None]
    """Given how many conversations the victim had ended before the transfer, if it is a donor."""


def _kill(wan: Wan, victim: Victim) -> None:
    del wan
    victim.child.kill()


def _was_killed(wan: Wan, victim: Victim, ended_before: int) -> None:
    del wan, ended_before
    assert victim.child.wait() == -9


def _freeze(wan: Wan, victim: Victim) -> None:
    del wan
    victim.child.freeze()  # returns when the kernel shows it stopped


def _was_frozen(wan: Wan, victim: Victim, ended_before: int) -> None:
    del wan
    victim.child.thaw()
    if isinstance(victim, DonorProcess):
        # Waits for the end of the conversation, which broke while it was frozen.
        assert ended(victim, ended_before + 1)[-1]["error"]


def _cut(wan: Wan, victim: Victim) -> None:
    wan.cut(victim.host)


def _was_cut(wan: Wan, victim: Victim, ended_before: int) -> None:
    del ended_before

    def dropped() -> bool:
        link = wan.stats().hosts[victim.host]
        return link.up.drop_cut + link.down.drop_cut > 0

    # At the latest the next keepalive ping of a conversation runs into it.
    wait_until(dropped, what=f"a packet of {victim.host} that the cut dropped")


def _throttle(wan: Wan, victim: Victim) -> None:
    # The lowest rate there is: one packet takes more than ten seconds.
    wan.set(victim.host, up="1kbit")


def _was_throttled(wan: Wan, victim: Victim, ended_before: int) -> None:
    del ended_before
    assert wan.stats().hosts[victim.host].up.queued_packets > 0


FAULTS: Mapping[str, Fault] = {
    "killed": Fault(_kill, _was_killed),
    "frozen": Fault(_freeze, _was_frozen),
    "cut": Fault(_cut, _was_cut),
    "throttled": Fault(_throttle, _was_throttled),
}


def ended(donor: DonorProcess, count: int) -> list[dict[str, object]]:
    """Return how a donor's conversations ended, once so many have."""
    results: list[dict[str, object]] = []

    def enough() -> bool:
        results[:] = donor.results()
        return len(results) >= count

    wait_until(enough, what=f"the end of {count} conversations of {donor.host}")
    return results


class Scene:
    """Three donors and a joiner on one site, kept from test to test unless a fault took them.

    Args:
        site: With hosts ``j`` and those of ``DONORS``.
        state_bytes: Size of the donors' state.
    """

    def __init__(self, site: Site, state_bytes: int) -> None:
        self._site = site
        self.wan = site.wan
        self.state_bytes = state_bytes
        self._donors: dict[tuple[str, str | None, int], DonorProcess] = {}
        self._joiners: dict[str | None, JoinerProcess] = {}
        self._uplink = "0"

    def uplinks(self, rate: str) -> None:
        """Give every donor this uplink."""
        self._uplink = rate
        for host in DONORS:
            self.wan.set(host, up=rate)

    def donors(
        self,
        count: int = len(DONORS),
        *,
        congestion_control: str | None = "bbr",
        state_bytes: int = 0,
    ) -> list[DonorProcess]:
        """Return donors that can be dialled."""
        size = state_bytes or self.state_bytes
        keys = [(host, congestion_control, size) for host in DONORS[:count]]
        for key in keys:
            if key not in self._donors:
                self._donors[key] = self._site.donor(
                    key[0], size, congestion_control=congestion_control, progress_seconds=PROGRESS_SECONDS
                )
        donors = [self._donors[key].ready() for key in keys]
        for donor in donors:
            wait_until(donor.is_idle, what=f"the end of {donor.host}'s earlier conversations")
        return donors

    def joiner(self, *, congestion_control: str | None = "bbr") -> JoinerProcess:
        """Return a joiner that takes orders."""
        if congestion_control not in self._joiners:
            self._joiners[congestion_control] = self._site.joiner("j", congestion_control=congestion_control)
        return self._joiners[congestion_control].ready()

    def warm_up(self) -> None:
        """Start the processes beside each other, which is quicker than one after the other."""
        for host in DONORS:
            self._donors[host, "bbr", self.state_bytes] = self._site.donor(
                host, self.state_bytes, congestion_control="bbr", progress_seconds=PROGRESS_SECONDS
            )
        self.joiner()
        self.donors()

    def with_fault(self, name: str, moment: float) -> Result:
        """Let a fault strike the first of three donors when so large a part is verified; return the transfer's end.

        Fails unless the fault reached its victim.
        """
        return self._struck(name, moment, self.donors())

    def alone_then_another(self, name: str, moment: float) -> tuple[Result, Result]:
        """Let a fault strike the only donor, then name another one to the same joiner; return both attempts' ends."""
        donors = self.donors()
        failed = self._struck(name, moment, donors[:1])
        joiner = self.joiner()
        joiner.begin(donors[1:2], fresh=False)
        return failed, joiner.result()

    def joiner_struck(self, name: str, moment: float, spool: Path) -> tuple[Result | None, Result]:
        """Let a fault strike the joiner; return how that attempt ended for it, and the next one.

        Every donor has given it up before the next attempt. One that was killed comes back as another process with the
        same spool.
        """
        donors = self.donors(2)
        before = [len(donor.results()) for donor in donors]
        fault = FAULTS[name]
        joiner = self._site.joiner("j", congestion_control="bbr", spool=str(spool)).ready()
        joiner.begin(donors, marks=(moment,), stands=True, progress_seconds=PROGRESS_SECONDS)
        joiner.reached(moment)
        self._strike(fault, joiner, donors)
        if name != "killed":
            joiner.go_on()
        for donor, count in zip(donors, before, strict=True):
            assert ended(donor, count + 1)[-1]["error"], "the donor noticed"
        fault.proof(self.wan, joiner, 0)
        failed = None
        if name == "killed":
            joiner = self._site.joiner("j", congestion_control="bbr", spool=str(spool)).ready()
            wait_until(lambda: not self._queued_packets(), what="the end of what the donors' uplinks still carried")
        else:
            failed = joiner.result()
            self.wan.heal("all")
        joiner.begin(donors, fresh=name == "killed", progress_seconds=PROGRESS_SECONDS)
        return failed, joiner.result()

    def bystander_struck(self, name: str, moment: float) -> Result:
        """Let a fault strike a worker that has no part in the transfer; return the transfer's end."""
        *donors, bystander = self.donors()
        fault, joiner = FAULTS[name], self.joiner()
        joiner.begin(donors, marks=(moment,), stands=True, progress_seconds=PROGRESS_SECONDS)
        joiner.reached(moment)
        self._strike(fault, bystander, donors)
        joiner.go_on()
        if name == "cut":
            knock = f"import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ({self.wan.address('j')!r}, 9))"
            with ChildProcess(["-c", knock], prefix=self.wan.prefix(bystander.host)) as knocking:
                assert knocking.wait() == 0
        result = joiner.result()
        if name == "frozen":
            bystander.child.thaw()
            assert bystander.results() is not None, "it lives"
        else:
            fault.proof(self.wan, bystander, 0)
        self._bury(name, bystander)
        return result

    def _struck(self, name: str, moment: float, donors: list[DonorProcess]) -> Result:
        fault, joiner = FAULTS[name], self.joiner()
        before = len(donors[0].results())
        joiner.begin(donors, marks=(moment,), stands=True, progress_seconds=PROGRESS_SECONDS)
        joiner.reached(moment)
        self._strike(fault, donors[0], donors)
        joiner.go_on()
        result = joiner.result()
        fault.proof(self.wan, donors[0], before)
        self._bury(name, donors[0])
        return result

    def _strike(self, fault: Fault, victim: Victim, donors: list[DonorProcess]) -> None:
        """Strike while the transfer stands, with next to nothing coming: it is in its middle for donor and joiner."""
        for donor in donors:
            self.wan.set(donor.host, up=_HELD)
        fault.strike(self.wan, victim)
        for donor in donors:
            if donor is not victim:
                self.wan.set(donor.host, up=self._uplink)

    def _bury(self, name: str, donor: DonorProcess) -> None:
        if name == "killed":
            del self._donors[donor.host, "bbr", self.state_bytes]

    def _queued_packets(self) -> int:
        hosts = self.wan.stats().hosts
        return sum(hosts[host].up.queued_packets for host in DONORS)

    def moved_bytes(self) -> int:
        """Return what left the donors' uplinks since the last reset, headers and repetitions included."""
        hosts = self.wan.stats().hosts
        return sum(hosts[host].up.bytes for host in DONORS)
