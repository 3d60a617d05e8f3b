"""Carries out a ticket: brings a worker to the run's newest sealed version while the run goes on. Training thread.

A transfer that fits into a phase is one conversation: outer parts, then private parts at a cut of the same version. A
slower one is a base backup plus a short log::

    private parts (they age well) -> outer parts at the newest sealed version -> the averages of each commit since then,
    replayed; the fingerprint compared with the sealed one -> scalars of the private parts once more

Whatever step is complete stays so when a later one fails: the next ticket goes on from there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.control.wire import from_proto
from recovery.errors import (
    BadConfiguration,
    CannotKeepUp,
    DonorBusy,
    DonorRefused,
    ManifestRejected,
    NoDonorLeft,
    RecoveryError,
)
from recovery.events import BaseRestored, CatchUpRebased, CommitReplayed, ScalarsRefreshed
from recovery.protocol.ports import OnManifest
from recovery.protocol.session import JOURNAL, OUTER, PRIVATE, SCALARS, Role, TransferResult
from recovery.snapshot.journal import JOURNAL_PART
from recovery.state import Manifest, PartBytes
from recovery.state.loose import LooseParts
from recovery.state.scalars import restore_scalars
from recovery.types import MIB, NO_VERSION, Fingerprint, PartName, Version
from recovery.worker.averaging import decode_averages
from recovery.worker.context import Context
from recovery.worker.gradient_codec import codec_named
from recovery.worker.pace import Pace, TooSlowForOnePhase, Watch
from recovery.worker.peer_source import PeerSource
from recovery.worker.replay import Replay, replay_outer_step
from recovery.worker.restored import Restored
from recovery.worker.standing import NO_FINGERPRINT

logger = logging.getLogger(__name__)

MAX_REBASES = 4
"""Outer bases given up in one recovery before it fails."""

_FINGERPRINT_SECONDS = 600.0
_SEAL_SECONDS = 60.0
_SCALARS_LIMIT_BYTES = 256 * MIB
_ENTRY_SLACK_BYTES = MIB
_ASKED_AGAIN = 8
_ASK_AGAIN_SECONDS = 0.25
"""A commit is sealed when most have applied it: the donor asked may be one of the last."""


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
        self._replay = replay
        self._codec = codec_named(context.config.gradient_codec)
        self._pace = Pace(context.clock)
        self._staged = False
        self._outer: Version | None = None
        self._cut: Version | None = None
        self._private_committed = False
        self._rebases = 0
        self._last_end: Version | None = None
        self._inner_step_at_end = 0
        self._payload_bytes = self._reused_bytes = self._num_tensors = self._num_bytes = 0

    def begin(self) -> None:
        """A recovery begins: what an earlier one left half done counts for nothing."""
        stand = self._context.standing.read()
        self._staged = stand.version != NO_VERSION and not stand.poisoned
        self._rebases = 0
        self._forget()
        self._payload_bytes = self._reused_bytes = self._num_tensors = self._num_bytes = 0

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
        whole = sum(t.nbytes for t in self._context.state.read_outer_params().values())
        sample = torch.zeros(1, 64 * self._codec.block)
        self._pace.entry_bytes = math.ceil(whole * self._codec.encode(sample).nbytes / sample.nbytes)
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
            if self._outer is not None and self._cut != self._outer:
                self._refresh_scalars(ticket, self._outer)
            if self._outer is not None and self._cut == self._outer and self._newest(ticket) <= self._outer:
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
        self._count(result)
        self._cut = result.private.cut.version
        self._commit_base(version, fingerprint)

    def _fetch_private(self, ticket: pb.Ticket) -> None:
        self._say(f"private parts of {self._newest(ticket)} or later")
        watch = self._pace.watch(all_donors=False)
        result = self._from_one(ticket, PRIVATE, self._newest(ticket), watch, None)
        self._cut = result.first.cut.version

    def _fetch_base(self, ticket: pb.Ticket) -> None:
        version = self._newest(ticket)
        fingerprint = self._fingerprint(ticket, version)
        self._say(f"outer parts of {version}")
        watch = self._pace.watch(all_donors=True)
        try:
            result = self._peers.fetch(ticket, version=version, fingerprint=fingerprint, on_progress=watch)
        except RecoveryError as error:
            judged = watch.judge(error)
            if judged is not error:
                raise judged from error
            if not isinstance(error, NoDonorLeft) or not self._all_refused():
                raise
            # Its donors hold the next version, which is not sealed yet.
            self._wait_for_seal(version.next(), error)
            return
        self._count(result)
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
        roles: list[Role] = [OUTER] if self._private_committed else [OUTER, PRIVATE]
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
            entry = self._fetch_entry(ticket, version)
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

    def _fetch_entry(self, ticket: pb.Ticket, version: Version) -> LooseParts | None:
        """Return the averages that led to ``version``; None if no donor of the ticket keeps them."""
        received: list[LooseParts] = []

        def on_manifest(role: Role, manifest: Manifest) -> Mapping[PartName, PartBytes]:
            if [part.name for part in manifest.parts] != [JOURNAL_PART]:
                raise ManifestRejected(f"{manifest.worker} lends {[p.name for p in manifest.parts]} as a journal entry")
            received.append(LooseParts(manifest, 2 * self._pace.entry_bytes + _ENTRY_SLACK_BYTES))
            return received[-1].destinations

        for _ in range(_ASKED_AGAIN):
            try:
                result = self._peers.fetch(
                    ticket, version=version, fingerprint=Fingerprint(b""), first=JOURNAL, on_manifest=on_manifest
                )
            except NoDonorLeft:
                if not self._all_refused():
                    raise
                self._context.inbox.wait(lambda: None, _ASK_AGAIN_SECONDS, lambda: None)
            else:
                self._count(result)
                return received[-1]
        return None

    def _take_step(self, ticket: pb.Ticket, version: Version, entry: LooseParts) -> bool:
        """Replay one commit; False: the result is not the run's, and a newer base is needed."""
        context = self._context
        value = entry.value(JOURNAL_PART)
        if not isinstance(value, dict) or value.keys() != {"tokens", "like", "gradients", "encoded"}:
            raise ManifestRejected(f"the journal entry of {version} has another form than this release reads")
        averaged = cast(list[Tensor], value["gradients"])
        if value["encoded"]:
            averaged = decode_averages(value["encoded"], value["like"], self._codec, context.config.bucket_bytes)
        # A worker under resync may be lending its present outer parts: they are saved, as before any outer step.
        context.snapshots.before_outer_update()
        try:
            if self._replay is None:
                replay_outer_step(context.state, averaged)
            else:
                self._replay(averaged)
        except BadConfiguration as error:
            self._rebase(f"a commit cannot be replayed: {error}")
            return False
        progress = context.state.run_progress
        progress.outer_step = version.outer_step
        progress.tokens += int(value["tokens"])
        if found := self._stand_at(version, self._fingerprint(ticket, version)):
            self._rebase(f"replaying a commit gave another state: {found}")
            return False
        return True

    def _refresh_scalars(self, ticket: pb.Ticket, at_least: Version) -> None:
        """Take the scalars of now: learning rates, schedules and progress follow the run, whatever the moments' age."""
        self._say(f"scalars of {at_least} or later")
        received: list[LooseParts] = []

        def on_manifest(role: Role, manifest: Manifest) -> Mapping[PartName, PartBytes]:
            received.append(LooseParts(manifest, _SCALARS_LIMIT_BYTES))
            return received[-1].destinations

        result = self._from_one(ticket, SCALARS, at_least, None, on_manifest)
        cut = result.first.cut
        if cut.version == at_least:
            restore_scalars(self._context.state, received[-1])
            self._cut = cut.version
            self._context.events(ScalarsRefreshed(worker_id=self._worker_id, cut=cut))
        else:
            self._wait_for_seal(cut.version, DonorBusy(f"{cut.version} is committed and was not sealed in time"))

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
            payload_bytes=self._payload_bytes,
            reused_bytes=self._reused_bytes,
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

    def _from_one(
        self, ticket: pb.Ticket, first: Role, at_least: Version, watch: Watch | None, on_manifest: OnManifest | None
    ) -> TransferResult:
        """Fetch what is captured at a cut from one donor, the ticket's choice first."""
        failure: RecoveryError = NoDonorLeft(f"transfer {ticket.transfer_id}: the ticket names no donor")
        for donor in sorted(ticket.donors, key=lambda donor: not donor.private_parts):
            try:
                result = self._peers.fetch(
                    ticket,
                    version=at_least,
                    fingerprint=Fingerprint(b""),
                    first=first,
                    donors=[donor],
                    on_manifest=on_manifest,
                    on_progress=watch,
                )
            except (NoDonorLeft, DonorBusy) as error:
                failure = error
            except RecoveryError as error:
                judged = error if watch is None else watch.judge(error)
                if judged is error:
                    raise
                raise judged from error
            else:
                self._count(result)
                return result
        raise failure

    def _all_refused(self) -> bool:
        failures = self._peers.last_failures.values()
        return bool(failures) and all(isinstance(failure, DonorRefused) for failure in failures)

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

    def _count(self, result: TransferResult) -> None:
        self._payload_bytes += result.payload_bytes
        self._reused_bytes += result.reused_bytes

    def _forget(self) -> None:
        self._outer = self._cut = None
        self._private_committed = False
        self._peers.forget()
