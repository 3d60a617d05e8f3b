"""The run's commits that a joiner missed: fetched as averages from the donors' journals, taken as outer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.errors import ManifestRejected, NoDonorLeft
from recovery.protocol.session import JOURNAL, Role
from recovery.snapshot.journal import JOURNAL_PART
from recovery.state import Manifest, PartBytes
from recovery.state.loose import LooseParts
from recovery.types import MIB, Fingerprint, PartName, Version
from recovery.worker.averaging import decode_averages
from recovery.worker.context import Context
from recovery.worker.gradient_codec import codec_named
from recovery.worker.peer_source import PeerSource
from recovery.worker.replay import Replay, replay_outer_step

_ENTRY_SLACK_BYTES = MIB
_ASKED_AGAIN = 8
_ASK_AGAIN_SECONDS = 0.25
"""A commit is sealed when most have applied it: the donor asked may be one of the last."""


class Commits:
    """Fetches and replays one commit at a time. Training thread.

    Args:
        context: The worker's.
        peers: Holds the conversations.
        replay: How the training loop applies averages; None: ``replay_outer_step``.
    """

    def __init__(self, context: Context, peers: PeerSource, replay: Replay | None) -> None:
        self._context = context
        self._peers = peers
        self._replay = replay
        self._codec = codec_named(context.config.gradient_codec)

    def entry_bytes(self) -> int:
        """Return the bytes of one commit's averages, as they travel."""
        whole = sum(tensor.nbytes for tensor in self._context.state.read_outer_params().values())
        sample = torch.zeros(1, 64 * self._codec.block)
        return math.ceil(whole * self._codec.encode(sample).nbytes / sample.nbytes)

    def fetch(self, ticket: pb.Ticket, version: Version) -> LooseParts | None:
        """Return the averages that led to ``version``, from all donors; None if no donor of the ticket keeps them.

        Raises:
            NoDonorLeft, DonorBusy: the donors failed.
        """
        received: list[LooseParts] = []
        limit = 2 * self.entry_bytes() + _ENTRY_SLACK_BYTES

        def on_manifest(role: Role, manifest: Manifest) -> Mapping[PartName, PartBytes]:
            if [part.name for part in manifest.parts] != [JOURNAL_PART]:
                raise ManifestRejected(f"{manifest.worker} lends {[p.name for p in manifest.parts]} as a journal entry")
            received.append(LooseParts(manifest, limit))
            return received[-1].destinations

        for _ in range(_ASKED_AGAIN):
            try:
                self._peers.fetch(
                    ticket, version=version, fingerprint=Fingerprint(b""), first=JOURNAL, on_manifest=on_manifest
                )
            except NoDonorLeft:
                if not self._peers.all_refused:
                    raise
                self._context.inbox.wait(lambda: None, _ASK_AGAIN_SECONDS, lambda: None)
            else:
                return received[-1]
        return None

    def take_step(self, version: Version, entry: LooseParts) -> None:
        """Take the outer step that led to ``version``; whether the result is the run's is for the caller to compare.

        Raises:
            BadConfiguration: this worker's loop has to say how it applies averages; nothing was changed.
            ManifestRejected: the entry is of another form; nothing was changed.
        """
        context = self._context
        value = entry.value(JOURNAL_PART)
        if not isinstance(value, dict) or value.keys() != {"tokens", "like", "gradients", "encoded"}:
            raise ManifestRejected(f"the journal entry of {version} has another form than this release reads")
        averaged = cast(list[Tensor], value["gradients"])
        if value["encoded"]:
            averaged = decode_averages(value["encoded"], value["like"], self._codec, context.config.bucket_bytes)
        # A worker under resync may be lending its present outer parts: they are saved, as before any outer step.
        context.snapshots.before_outer_update()
        if self._replay is None:
            replay_outer_step(context.state, averaged)
        else:
            self._replay(averaged)
        progress = context.state.run_progress
        progress.outer_step = version.outer_step
        progress.tokens += int(value["tokens"])
