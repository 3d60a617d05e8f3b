"""Verified chunks of an attempt whose version has moved on, taken along into the memory of the next."""

from __future__ import annotations

from collections.abc import Mapping

from recovery.protocol.ledger import ChunkLedger, ChunkName
from recovery.protocol.ports import Destination
from recovery.state.manifest import Manifest
from recovery.types import PartName


def carry_over(
    ledger: ChunkLedger,
    manifest: Manifest,
    before: Mapping[PartName, Destination],
    after: Mapping[PartName, Destination],
) -> int:
    """Copy what was verified in ``before`` and stands in ``manifest`` too to its place in ``after``; return its bytes.

    Nothing is believed: the next attempt hashes what it finds before it relies on it. Memory that both share (tensors
    that training uses) is left as it is.
    """
    carried = 0
    for part in manifest.parts:
        old, new = before.get(part.name), after.get(part.name)
        if old is None or new is None:
            continue
        for chunk in part.chunks:
            name = ChunkName(part.name, chunk.offset, chunk.num_bytes, chunk.digest)
            if name not in ledger or chunk.offset + chunk.num_bytes > old.num_bytes:
                continue
            source, target = old.view(chunk.offset, chunk.num_bytes), new.view(chunk.offset, chunk.num_bytes)
            if source is not None and target is not None and source.data_ptr() == target.data_ptr():
                continue
            new.write(chunk.offset, old.read(chunk.offset, chunk.num_bytes))
            carried += chunk.num_bytes
    return carried
