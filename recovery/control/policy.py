"""What a run's owner decides once; the coordinator's machine follows it."""

from __future__ import annotations

from dataclasses import dataclass

from recovery.errors import BadConfiguration
from recovery.types import checked_id

RESUME = "resume"
REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPolicy:
    """How a run treats its workers. All times are seconds on the coordinator's monotonic clock."""

    run_id: str
    min_participants: int = 1
    """A boundary commits with at least so many votes, never with fewer, however long that takes."""
    expected_workers: int = 0
    """The origin is chosen as soon as so many workers attached. Zero: after ``origin_wait_seconds``."""
    origin_wait_seconds: float = 2.0
    """From the first worker of a run without history until the origin is chosen; also how long a chosen one that
    lost its connection may come back."""
    origin_apply_seconds: float = 300.0
    """A chosen origin that is alive but does not report its state for so long is replaced."""
    gather_max_wait_seconds: float = 120.0
    """A boundary waits at most so long for ready workers that have not arrived."""
    gather_min_wait_seconds: float = 1.5
    """And at least so long for each, whatever it announced."""
    gather_factor: float = 1.5
    """A boundary waits so many times what the slowest announced."""
    inner_steps_per_phase: int = 0
    """Workers with phases of another length are refused; zero: of another length than the live members'."""
    stall_after_seconds: float = 60.0
    """A trainer whose inner step stands still for so long (or ten of its steps, if that is more) is not waited for."""
    on_all_gone: str = RESUME
    """``resume``: with no holder of the history alive, the newest checkpoint is resumed under a new lineage.
    ``refuse``: workers are turned away until an operator acts."""
    strict_numerics: bool = True
    """Workers of another numerics id than the first member's are refused."""
    lease_seconds: float = 6.0
    """A worker that was silent for so long gives way to a newer incarnation of the same name. After a restart of the
    coordinator, seals wait so long for members that have not come back yet."""
    return_wait_seconds: float = 4.0
    """After a restart of the coordinator, a boundary waits so long for members that have not come back yet; less if
    their phases are shorter. A live member whose connection vanished without a word needs a ping and its timeout to
    notice (up to 3 s), its longest pause between two attempts (0.5 s), and the connecting."""
    expected_return_seconds: float = 30.0
    """A lost holder of the history is expected back for so long before the run is resumed from disk."""
    forget_after_seconds: float = 600.0
    """A lost worker is shown in the status for so long (or as long as it is expected back), then only counted."""
    offer_wait_seconds: float = 2.0
    """From the first offer of a checkpoint until the best is taken, if not everybody asked has answered."""
    offer_answer_seconds: float = 300.0
    """A worker that was asked for a checkpoint and does not answer for so long counts as having none."""
    max_epoch_seconds: float = 600.0
    """An epoch that is not decided for so long is aborted; whoever has not voted is suspected."""
    seal_wait_seconds: float = 10.0
    """A committed step is sealed by those who reported it once so long has passed."""
    adopt_wait_seconds: float = 60.0
    """A worker with a history that the coordinator does not know is kept so long for an operator's ``adopt``."""
    order_timeout_seconds: float = 600.0
    """An order to a worker without a timeout of its own fails after so long."""
    max_donors: int = 3
    donor_failures_per_transfer: int = 3
    """A donor that failed a transfer so often is not asked again in it."""
    retry_after_seconds: float = 1.0
    """What a worker without donor is told to wait; the coordinator also calls it as soon as one is free."""
    save_every_steps: int = 1
    """A saver is named for every so many sealed steps; zero: never."""
    ticket_secret: bytes = b""
    """Key of the tickets' tokens, at most 64 bytes."""

    def __post_init__(self) -> None:
        checked_id("run id", self.run_id)
        for name in ("min_participants", "max_donors", "donor_failures_per_transfer"):
            if getattr(self, name) < 1:
                raise BadConfiguration(f"{name} is {getattr(self, name)}: take 1 or more")
        for name in ("expected_workers", "inner_steps_per_phase", "save_every_steps"):
            if getattr(self, name) < 0:
                raise BadConfiguration(f"{name} is {getattr(self, name)}: take 0 or more")
        for name in (
            "origin_wait_seconds",
            "origin_apply_seconds",
            "gather_max_wait_seconds",
            "gather_min_wait_seconds",
            "gather_factor",
            "stall_after_seconds",
            "lease_seconds",
            "return_wait_seconds",
            "expected_return_seconds",
            "forget_after_seconds",
            "offer_wait_seconds",
            "offer_answer_seconds",
            "max_epoch_seconds",
            "seal_wait_seconds",
            "adopt_wait_seconds",
            "order_timeout_seconds",
            "retry_after_seconds",
        ):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadConfiguration(f"{name} is {getattr(self, name)}: take a finite number, not negative")
        if self.gather_min_wait_seconds > self.gather_max_wait_seconds:
            raise BadConfiguration(
                f"gather_min_wait_seconds {self.gather_min_wait_seconds} is more than gather_max_wait_seconds "
                f"{self.gather_max_wait_seconds}"
            )
        if self.on_all_gone not in (RESUME, REFUSE):
            raise BadConfiguration(f"on_all_gone is {self.on_all_gone!r}: take {RESUME!r} or {REFUSE!r}")
        if len(self.ticket_secret) > 64:
            raise BadConfiguration(f"ticket_secret has {len(self.ticket_secret)} bytes: take at most 64")
