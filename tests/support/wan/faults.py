"""What can happen to a donor in mid-transfer, each with the proof that it did happen to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.support.wan.network import Wan
from tests.support.wan.peers import DonorProcess, JoinerProcess, Result, Site, wait_until

DONORS = ("d0", "d1", "d2")
PROGRESS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Fault:
    """``strike`` does it; ``proof`` is called after the transfer and fails unless the victim saw it."""

    strike: Callable[[Wan, DonorProcess], None]
    proof: Callable[[Wan, DonorProcess], None]


def _kill(wan: Wan, donor: DonorProcess) -> None:
    del wan
    donor.child.kill()


def _was_killed(wan: Wan, donor: DonorProcess) -> None:
    del wan
    assert donor.child.wait() == -9


def _freeze(wan: Wan, donor: DonorProcess) -> None:
    del wan
    donor.child.freeze()  # returns when the kernel shows it stopped


def _was_frozen(wan: Wan, donor: DonorProcess) -> None:
    del wan
    donor.child.thaw()
    results: list[dict[str, object]] = []

    def ended() -> bool:
        results[:] = donor.results()
        return len(results) > 0

    wait_until(ended, what="the end of the frozen donor's conversation")
    assert results[-1]["error"], "the conversation broke while it was frozen"


def _cut(wan: Wan, donor: DonorProcess) -> None:
    wan.cut(donor.host)


def _was_cut(wan: Wan, donor: DonorProcess) -> None:
    assert wan.stats().hosts[donor.host].up.drop_cut > 0


def _throttle(wan: Wan, donor: DonorProcess) -> None:
    # The lowest rate there is: one packet takes more than ten seconds.
    wan.set(donor.host, up="1kbit")


def _was_throttled(wan: Wan, donor: DonorProcess) -> None:
    assert wan.stats().hosts[donor.host].up.queued_packets > 0


FAULTS: Mapping[str, Fault] = {
    "killed": Fault(_kill, _was_killed),
    "frozen": Fault(_freeze, _was_frozen),
    "cut": Fault(_cut, _was_cut),
    "throttled": Fault(_throttle, _was_throttled),
}


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
                self._donors[key] = self._site.donor(key[0], size, congestion_control=congestion_control)
        return [self._donors[key].ready() for key in keys]

    def joiner(self, *, congestion_control: str | None = "bbr") -> JoinerProcess:
        """Return a joiner that takes orders."""
        if congestion_control not in self._joiners:
            self._joiners[congestion_control] = self._site.joiner("j", congestion_control=congestion_control)
        return self._joiners[congestion_control].ready()

    def warm_up(self) -> None:
        """Start the processes beside each other, which is quicker than one after the other."""
        for host in DONORS:
            self._donors[host, "bbr", self.state_bytes] = self._site.donor(
                host, self.state_bytes, congestion_control="bbr"
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

    def _struck(self, name: str, moment: float, donors: list[DonorProcess]) -> Result:
        fault, joiner = FAULTS[name], self.joiner()
        joiner.begin(donors, marks=(moment,), progress_seconds=PROGRESS_SECONDS)
        joiner.reached(moment)
        fault.strike(self.wan, donors[0])
        result = joiner.result()
        fault.proof(self.wan, donors[0])
        if name == "killed":
            del self._donors[DONORS[0], "bbr", self.state_bytes]
        return result

    def moved_bytes(self) -> int:
        """Return what left the donors' uplinks since the last reset, headers and repetitions included."""
        hosts = self.wan.stats().hosts
        return sum(hosts[host].up.bytes for host in DONORS)
