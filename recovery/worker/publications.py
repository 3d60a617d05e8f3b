"""Versions that this worker made by an all-reduce of its own: reported, and waited for until the run holds the same."""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.control.wire import to_proto
from recovery.errors import RunPaused
from recovery.types import Fingerprint, Version
from recovery.worker.context import Context
from recovery.worker.epochs import Epochs


class Publications:
    """Training thread only."""

    def __init__(self, context: Context, epochs: Epochs) -> None:
        self._context = context
        self._epochs = epochs

    def seal(self, version: Version, position: bytes) -> Fingerprint | None:
        """Report the state in memory as ``version``; return its fingerprint once the run has sealed just that.

        Returns None if the run goes on with another state instead: the directive that says from where stays in the
        inbox.

        Args:
            version: What the snapshots have published already.
            position: This worker's data position at that version, for the coordinator to keep; empty: none.

        Raises:
            RunPaused: neither happened within ``boundary_timeout_seconds``.
        """
        context = self._context
        seconds = context.config.boundary_timeout_seconds
        context.standing.waits_for(f"the digests of {version}")
        fingerprint = context.snapshots.manifest(version, seconds).fingerprint
        report = pb.WorkerMessage(
            applied=pb.Applied(
                version=to_proto(version),
                fingerprint=fingerprint,
                tokens=context.state.run_progress.tokens,
                data_position=position,
            )
        )
        said_at = -1

        def meanwhile() -> None:
            nonlocal said_at
            if said_at != context.inbox.attachments:
                said_at = context.inbox.attachments
                self._epochs.pass_stage("reporting")
                context.client.send(report)
                self._epochs.pass_stage("reported")

        def decided() -> bool | None:
            sealed = context.inbox.fingerprint_of(version)
            if sealed == fingerprint:
                return True
            return False if context.inbox.has_directive() else None

        context.standing.waits_for(f"the other workers to publish {version}")
        with context.snapshots.standing():
            same = context.inbox.wait(decided, seconds, meanwhile)
        if same is None:
            raise RunPaused(
                f"{context.worker}: {version} was not sealed within {seconds} s after it was published: ask "
                "`recovery status` who has not published it"
            )
        context.standing.waits_for("")
        return fingerprint if same else None
