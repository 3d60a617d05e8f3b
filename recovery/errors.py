"""The error tree. Each class says what its catcher does next; every message names the thing, the value and the remedy.

::

    RecoveryError
    ├── RetrySameDonor          the same donor may be asked again
    │   ├── DonorBusy               no free slot, or the version is being closed
    │   └── ChunkDamaged            bytes differ from the manifest's digest
    ├── TryOtherDonor           this donor cannot help; another may
    │   ├── DonorLost               its stream ended, its sockets broke, or it made no progress in time
    │   ├── PeerUnreachable         not at the rendezvous, or cannot be dialled
    │   ├── DonorRefused            wrong version, incarnation, token, or drained
    │   ├── DonorMemoryChanged      its memory was written round the guard
    │   └── ManifestRejected        malformed, hostile, or not of the promised digest
    ├── TryNextSource           peers cannot help; disk or remote may
    │   ├── NoDonorLeft             every donor was tried
    │   ├── CannotKeepUp            the run moves on faster than its state arrives
    │   └── CheckpointRejected      a checkpoint is torn, damaged, or of another run
    ├── Stop                    a person has to act
    │   ├── BadConfiguration        a setting, flag or address
    │   ├── LayoutMismatch          the two models, optimizers or schedulers differ
    │   ├── UnsupportedLeaf         a value that has no exact form on the wire
    │   ├── StateMismatch           after restoring, memory differs from the manifest
    │   ├── SourcesExhausted        peers, disk and remote all failed
    │   ├── RunRefused              wrong run, numerics id, protocol, credentials, or policy
    │   ├── RunPaused               disagreement or missing members that only an operator can resolve
    │   ├── CoordinatorUnreachable  not at the address, or gone for longer than the deadline
    │   ├── WorkerPoisoned          the state was written and not verified
    │   ├── TransferCancelled       an operator, or the worker's end, stopped a recovery
    │   ├── MisuseError             a call out of order, from the wrong thread, or after close
    │   └── CheckpointFailed        saving failed, as often as the policy allows
    └── ControlFlow             not failures: they carry the training loop to where it goes on
        ├── EpochAborted            this boundary's epoch is void: average again
        └── StateReplaced           the worker's state was replaced by a recovery: begin the next phase
"""

from __future__ import annotations


class RecoveryError(Exception):
    """Root of every error that this package raises on purpose."""

    @property
    def kind(self) -> str:
        """The class's name, as it crosses process boundaries."""
        return type(self).__name__


class RetrySameDonor(RecoveryError):
    """The same donor may be asked again."""


class DonorBusy(RetrySameDonor):
    """No free slot, or the version is being closed. ``retry_after_seconds`` says when to ask again."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ChunkDamaged(RetrySameDonor):
    """A chunk's bytes differ from the manifest's digest."""


class TryOtherDonor(RecoveryError):
    """This donor cannot help; another may."""


class DonorLost(TryOtherDonor):
    """The donor's stream ended, its sockets broke, or it made no progress within the deadline."""


class PeerUnreachable(TryOtherDonor):
    """A peer did not show up at the rendezvous, or cannot be dialled."""


class DonorRefused(TryOtherDonor):
    """The donor declined: wrong version, incarnation or token, or drained."""


class DonorMemoryChanged(TryOtherDonor):
    """The donor's memory was written round the guard: an error of the code that trains there."""


class ManifestRejected(TryOtherDonor):
    """A manifest is malformed, over a cap, or not of the promised digest. Nothing was allocated for it."""


class TryNextSource(RecoveryError):
    """Peers cannot help; local disk or remote storage may."""


class NoDonorLeft(TryNextSource):
    """Every donor was tried, or none exists."""


class CannotKeepUp(TryNextSource):
    """The run moves on faster than its state arrives, or can be replayed: a faster link or longer phases are needed.

    ``final``: trying again will not help.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class CheckpointRejected(TryNextSource):
    """A checkpoint is torn, damaged, or belongs to another run, lineage, step or rank."""


class Stop(RecoveryError):
    """A person has to act."""


class BadConfiguration(Stop):
    """A setting, flag, environment variable or address is not usable."""


class LayoutMismatch(Stop):
    """Two workers' models, optimizers or schedulers differ. Nothing moved, nothing changed."""


class UnsupportedLeaf(Stop):
    """A state holds a value that has no exact form on the wire. Nothing moved."""


class StateMismatch(Stop):
    """After restoring, memory differs from the manifest."""


class SourcesExhausted(Stop):
    """Peers, disk and remote storage all failed; the message has one line for each."""


class RunRefused(Stop):
    """The coordinator or a peer refuses this worker: run id, numerics id, protocol, credentials, or policy."""


class RunPaused(Stop):
    """The run waits for an operator's choice, which the message names."""


class CoordinatorUnreachable(Stop):
    """Nothing answers at the coordinator's address within the deadline."""


class WorkerPoisoned(Stop):
    """The worker's state was written and not verified: it may recover again or stop."""


class TransferCancelled(Stop):
    """An operator, or the end of the worker, stopped a recovery. What was verified is kept."""


class MisuseError(Stop):
    """A call out of order, from the wrong thread, or after ``close()``."""


class CheckpointFailed(Stop):
    """Saving failed as often as the policy allows."""


class ControlFlow(RecoveryError):
    """Not a failure: carries the training loop to where it goes on."""


class EpochAborted(ControlFlow):
    """The boundary's epoch is void; nothing was applied anywhere; average again."""


class StateReplaced(ControlFlow):
    """The worker's state was replaced by a recovery; the next phase begins from it."""


def find(kind: str) -> type[RecoveryError] | None:
    """Return the class of this tree whose name is ``kind``, or None."""
    found = [RecoveryError]
    while found:
        candidate = found.pop()
        if candidate.__name__ == kind:
            return candidate
        found.extend(candidate.__subclasses__())
    return None
