"""Carries out a ticket: brings a worker to the run's newest sealed version while the run goes on. Training thread.

A transfer that fits into a phase is one conversation: outer parts, then private parts at a cut of the same version. A
slower one is a base backup plus a short log::

    private parts (they age well) -> outer parts at the newest sealed version -> the averages of each commit since then,
    replayed; the fingerprint compared with the sealed one -> private parts once more, if the time left in the phase
    allows it; else their scalars alone

Whatever step is complete stays so when a later one fails: the next ticket goes on from there.
"""

from __future__ import annotations

import logging

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.control.wire import from_proto
from recovery.errors import (
    BadConfiguration,
    CannotKeepUp,
    DonorBusy,
    DonorRefused,
    NoDonorLeft,
    RecoveryError,
)
from recovery.events import BaseRestored, CatchUpRebased, CommitReplayed
from recovery.protocol.session import OUTER, PRIVATE, Role
from recovery.state.loose import LooseParts
from recovery.types import NO_VERSION, Fingerprint, Version
from recovery.worker.commits import Commits
from recovery.worker.context import Context
from recovery.worker.pace import Pace, TooSlowForOnePhase
from recovery.worker.peer_source import PeerSource
from recovery.worker.private_parts import PrivateParts
from recovery.worker.replay import Replay
from recovery.worker.restored import Restored
from recovery.worker.standing import NO_FINGERPRINT

logger = logging.getLogger(__name__)

MAX_REBASES = 4
"""Outer bases given up in one recovery before it fails."""

_FINGERPRINT_SECONDS = 600.0
_SEAL_SECONDS = 60.0


class CatchUp:
    """One worker's way to the run's state, over as many tickets as it takes.

    Args:
        context: The worker's.
        peers: Holds the conversations.
        replay: How the training loop applies averages; None: ``replay_outer_step``.
    """

    def __init__(self, context: Context, peers: PeerSource, replay: Replay | None = None) -> None:
        self._context = context
        self._peers = peers
        self._pace = Pace(context.clock)
        self._commits = Commits(context, peers, replay)
        self._private = PrivateParts(context, peers, self._pace)
        self._staged = False
        self._outer: Version | None = None
        self._cut: Version | None = None
        self._private_committed = False
        self._fetched_again = False
        self._rebases = 0
        self._last_end: Version | None = None
        self._inner_step_at_end = 0
        self._num_tensors = self._num_bytes = 0

    def begin(self) -> None:
        """A recovery begins: what an earlier one left half done counts for nothing."""
        stand = self._context.standing.read()
        self._staged = stand.version != NO_VERSION and not stand.poisoned
        self._rebases = 0
        self._fetched_again = False
        self._forget()
        self._peers.begin_recovery()
        self._num_tensors = self._num_bytes = 0

    def carry_out(self, ticket: pb.Ticket) -> Restored:
        """Return when this worker holds the newest sealed version, verified and published.

        Raises:
            CannotKeepUp: the link is too slow for this run (says which rate is needed), or ``MAX_REBASES`` is used up.
            NoDonorLeft, DonorBusy: the ticket's donors failed. What is complete is kept for the next ticket.
            LayoutMismatch: the donors train another model; nothing was changed.
            StateMismatch: what was written is not what was received.
            TransferCancelled: an operator cancelled it.
        """
        self._peers.begin(staged=self._staged)
        self._pace.entry_bytes = self._commits.entry_bytes()
        period = ticket.outer_period.ToTimedelta().total_seconds()
        self._pace.period_seconds = self._context.inbox.outer_period_seconds or period
        if self._goes_on_from_its_last_end(ticket):
            self._outer = self._last_end
            if self._context.state.local_progress.inner_step == self._inner_step_at_end:
                self._cut, self._private_committed = self._last_end, True
            # Otherwise it trained since: its private parts are those of no cut any more, and are fetched again.
        self._last_end = None
        try:
            return self._carry_out(ticket)
        finally:
            self._lift_poison_of_a_whole_state()

    def _carry_out(self, ticket: pb.Ticket) -> Restored:
        if self._outer is None and self._cut is None:
            self._at_once(ticket)
        while True:
            if self._cut is None:
                self._fetch_private(ticket)
                if self._outer is not None:
                    self._commit_private()
            if self._outer is None:
                self._fetch_base(ticket)
            self._replay_commits(ticket)
            if self._outer is None:
                continue
            if self._cut != self._outer:
                self._bring_private_parts_to(ticket, self._outer)
            if self._cut == self._outer and self._newest(ticket) <= self._outer:
                return self._end(self._outer)

    # Steps

    def _at_once(self, ticket: pb.Ticket) -> None:
        """Outer parts and private ones in one conversation, as long as that can end before the next boundary."""
        version, fingerprint = from_proto(ticket.version), Fingerprint(ticket.fingerprint)
        watch = self._pace.watch(all_donors=True, one_phase=True)
        try:
            result = self._peers.fetch(
                ticket, version=version, fingerprint=fingerprint, want_private=True, on_progress=watch
            )
        except RecoveryError as error:
            judged = watch.judge(error)
            if judged is error:
                raise
            if not isinstance(judged, TooSlowForOnePhase):
                raise judged from error
            logger.info("%s: %s; private parts first", self._context.worker, self._pace.describe())
            return
        assert result.private is not None
        share = result.private.num_bytes / max(1, result.private.num_bytes + result.first.num_bytes)
        self._private.received(result.private.cut, result.took_seconds * share)
        self._cut = result.private.cut.version
        self._commit_base(version, fingerprint)

    def _fetch_private(self, ticket: pb.Ticket) -> None:
        self._say(f"private parts of {self._newest(ticket)} or later")
        self._cut = self._private.fetch(ticket, self._newest(ticket))

    def _fetch_base(self, ticket: pb.Ticket) -> None:
        version = self._newest(ticket)
        fingerprint = self._fingerprint(ticket, version)
        self._say(f"outer parts of {version}")
        watch = self._pace.watch(all_donors=True)
        try:
            self._peers.fetch(ticket, version=version, fingerprint=fingerprint, on_progress=watch)
        except RecoveryError as error:
            judged = watch.judge(error)
            if judged is not error:
                raise judged from error
            if not isinstance(error, NoDonorLeft) or not self._peers.all_refused:
                raise
            # Its donors hold the next version, which is not sealed yet.
            self._wait_for_seal(version.next(), error)
            return
        self._commit_base(version, fingerprint)

    def _commit_private(self) -> None:
        """Take a donor's private parts beside an outer state that this worker already holds."""
        self._context.standing.update(poisoned=True, ready=False)
        report = self._peers.commit(PRIVATE)
        self._num_tensors += report.num_tensors
        self._num_bytes += report.num_bytes
        self._private_committed = True

    def _commit_base(self, version: Version, fingerprint: Fingerprint) -> None:
        """The first write into a live worker's state: both kinds of parts are whole and verified."""
        self._context.standing.update(poisoned=True, ready=False)
        roles: list[Role] = [OUTER, PRIVATE] if self._peers.holds(PRIVATE) else [OUTER]
        for role in roles:
            report = self._peers.commit(role)
            self._num_tensors += report.num_tensors
            self._num_bytes += report.num_bytes
        self._private_committed = True
        if found := self._stand_at(version, fingerprint):
            self._outer = None
            raise DonorRefused(f"the restored state is not the run's: {found}")
        self._context.events(BaseRestored(worker_id=self._worker_id, version=version))

    def _replay_commits(self, ticket: pb.Ticket) -> None:
        """Replay what the run committed since this worker's base; without a base afterwards: a newer one is needed."""
        while self._outer is not None and (newest := self._newest(ticket)) > self._outer:
            version = self._outer.next()
            if version.lineage != newest.lineage:
                self._rebase(f"the run left lineage {version.lineage}")
                return
            self._say(f"the commit of {version}; the run is at {newest}")
            began = self._context.clock.monotonic()
            entry = self._commits.fetch(ticket, version)
            if entry is None:
                self._rebase(f"no donor keeps the averages that led to {version} any more")
                return
            fetched = self._context.clock.monotonic()
            if self._take_step(ticket, version, entry):
                self._context.events(
                    CommitReplayed(
                        worker_id=self._worker_id,
                        version=version,
                        num_bytes=entry.manifest.num_bytes,
                        fetch_seconds=fetched - began,
                        replay_seconds=self._context.clock.monotonic() - fetched,
                    )
                )

    def _take_step(self, ticket: pb.Ticket, version: Version, entry: LooseParts) -> bool:
        """Replay one commit; False: the result is not the run's, and a newer base is needed."""
        try:
            self._commits.take_step(version, entry)
        except BadConfiguration as error:
            self._rebase(f"a commit cannot be replayed: {error}")
            return False
        if found := self._stand_at(version, self._fingerprint(ticket, version)):
            self._rebase(f"replaying a commit gave another state: {found}")
            return False
        return True

    def _bring_private_parts_to(self, ticket: pb.Ticket, version: Version) -> None:
        """Have private parts of a cut at ``version``: whole if there is time for that, else their scalars alone."""
        if not self._fetched_again and self._private.fit_into_the_phase:
            # Once: if the boundary comes first after all, another attempt could lose the same race for ever.
            self._fetched_again, self._cut = True, None
            return
        self._say(f"scalars of {version} or later")
        cut = self._private.refresh_scalars(ticket, version)
        if cut == version:
            self._cut = cut
        else:
            self._wait_for_seal(cut, DonorBusy(f"{cut} is committed and was not sealed in time"))

    def _rebase(self, reason: str) -> None:
        assert self._outer is not None
        self._rebases += 1
        event = CatchUpRebased(worker_id=self._worker_id, version=self._outer, times=self._rebases, reason=reason)
        self._context.events(event)
        logger.warning(
            "%s gives up its base at %s (%d. time): %s", self._context.worker, self._outer, self._rebases, reason
        )
        self._outer = None
        if self._rebases > MAX_REBASES:
            pace = f"; {self._pace.describe()}" if self._pace.rate and self._pace.period_seconds else ""
            raise CannotKeepUp(
                f"{self._context.worker} gave up {self._rebases} outer bases, the last because {reason}{pace}",
                final=True,
            )

    def _end(self, version: Version) -> Restored:
        self._context.snapshots.phase_begins()
        self._last_end = version
        self._inner_step_at_end = self._context.state.local_progress.inner_step
        restored = Restored(
            version=version,
            source="peers",
            num_tensors=self._num_tensors,
            num_bytes=self._num_bytes,
            payload_bytes=self._peers.payload_bytes,
            reused_bytes=self._peers.reused_bytes,
        )
        self._forget()
        return restored

    # Inside

    @property
    def _worker_id(self) -> str:
        return self._context.worker.worker_id

    def _newest(self, ticket: pb.Ticket) -> Version:
        return max(from_proto(ticket.version), self._context.inbox.sealed)

    def _fingerprint(self, ticket: pb.Ticket, version: Version) -> Fingerprint:
        """Return the sealed fingerprint; empty only for one of several commits that were missed while detached."""
        if version == from_proto(ticket.version):
            return Fingerprint(ticket.fingerprint)
        return self._context.inbox.fingerprint_of(version)

    def _stand_at(self, version: Version, expected: Fingerprint) -> str:
        """Publish the replicated parts as ``version``; return how their fingerprint differs from the sealed one."""
        context = self._context
        context.snapshots.before_outer_update()
        context.snapshots.publish(version)
        fingerprint = context.snapshots.manifest(version, _FINGERPRINT_SECONDS).fingerprint
        self._outer = version
        if expected and fingerprint != expected:
            context.standing.update(version=NO_VERSION, fingerprint=NO_FINGERPRINT, poisoned=True)
            return f"{version} has fingerprint {fingerprint.hex()[:12]} here, {expected.hex()[:12]} in the run"
        context.standing.update(version=version, fingerprint=fingerprint)
        return ""

    def _wait_for_seal(self, version: Version, otherwise: RecoveryError) -> None:
        inbox = self._context.inbox
        if inbox.wait(lambda: inbox.sealed >= version or None, _SEAL_SECONDS, lambda: None) is None:
            raise otherwise

    def _goes_on_from_its_last_end(self, ticket: pb.Ticket) -> bool:
        """Return whether the state that the last catch-up gave this worker is as good as what the ticket would give.

        The run may have moved on while its end was reported; or a coordinator that came back wrote the ticket while
        the catch-up went on, and is told now how that ended.
        """
        stand, end = self._context.standing.read(), self._last_end
        asked = ticket.reason in ("behind", "fresh")
        return end is not None and asked and stand.version == end and not stand.poisoned

    def _lift_poison_of_a_whole_state(self) -> None:
        """A live worker whose catch-up failed between two steps still holds a state: verified, only not the newest."""
        if self._staged and self._outer is not None and self._private_committed:
            self._context.standing.update(poisoned=False)

    def _say(self, what: str) -> None:
        rate = f" at {self._pace.rate / 1e6:.3g} MB/s" if self._pace.rate else ""
        self._context.standing.waits_for(f"{what}{rate}")

    def _forget(self) -> None:
        self._outer = self._cut = None
        self._private_committed = False
        self._peers.forget()
