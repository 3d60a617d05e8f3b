"""A flight is hashed once, by whoever saw it arrive, and what was hashed then is what is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recovery.protocol import chunk_memory
from recovery.protocol.chunk_memory import ChunkMemory
from recovery.protocol.ledger import ChunkLedger
from recovery.protocol.planner import ChunkKey
from recovery.protocol.ports import OUTER
from recovery.protocol.spool import ChunkSpool
from recovery.state.digest import chunk_digest
from recovery.state.live_part import describe, live_part
from recovery.types import (
    Cut,
    DigestAlgorithm,
    Incarnation,
    NumericsId,
    PartClass,
    PartName,
    RunId,
    Version,
    WorkerId,
    WorkerRef,
)

KEY = ChunkKey(OUTER, 0, 0)
GOOD = torch.arange(256, dtype=torch.uint8)


class Hashing:
    """Counts digests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(chunk_memory, "chunk_digest", self._digest)

    def _digest(self, algorithm: DigestAlgorithm, data: torch.Tensor) -> bytes:
        self.count += 1
        return chunk_digest(algorithm, data)


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Hashing:
    return Hashing(monkeypatch)


def memory(destination: torch.Tensor, spool: ChunkSpool | None = None) -> tuple[ChunkMemory, ChunkLedger]:
    """Return a joiner's memory of one chunk, ``GOOD``, that belongs into ``destination``."""
    lent = live_part(PartName("p"), PartClass.REPLICATED, {"t": GOOD})
    manifest = describe(
        [lent],
        run_id=RunId("r"),
        worker=WorkerRef(WorkerId("w"), Incarnation("i")),
        cut=Cut(Version(1, 1)),
        numerics_id=NumericsId("n"),
        layout_digest=b"l" * 32,
    )
    ledger = ChunkLedger()
    made = ChunkMemory(ledger, spool)
    own = live_part(PartName("p"), PartClass.REPLICATED, {"t": destination})
    made.prepare(OUTER, manifest, {PartName("p"): own.bytes}, delta=False)
    return made, ledger


def test_what_was_hashed_on_arrival_is_not_hashed_again(hashing: Hashing) -> None:
    made, ledger = memory(torch.zeros_like(GOOD))
    made.open_flight(1, KEY, direct=True).copy_(GOOD)
    assert made.check_hashed(1, KEY) is None, "nobody has hashed it"
    made.hash(1, KEY)
    assert made.check_hashed(1, KEY) == (True, True)
    assert made.check(1, KEY, write=True) == (True, True)
    assert hashing.count == 1
    assert len(ledger) == 1


def test_damage_is_seen_by_the_digest_of_the_arrival(hashing: Hashing) -> None:
    made, ledger = memory(torch.zeros_like(GOOD))
    made.open_flight(1, KEY, direct=True).copy_(GOOD.flip(0))
    made.hash(1, KEY)
    assert made.check_hashed(1, KEY) == (False, False)
    assert made.check(1, KEY, write=True) == (False, False)
    assert hashing.count == 1
    assert len(ledger) == 0
    # The next flight of the chunk is judged by its own bytes.
    made.close_flight(1)
    made.open_flight(2, KEY, direct=True).copy_(GOOD)
    assert made.check_hashed(2, KEY) is None
    assert made.check(2, KEY, write=True) == (True, True)


def test_what_has_to_be_copied_or_written_to_disk_is_left_to_the_checking_thread(
    hashing: Hashing, tmp_path: Path
) -> None:
    destination = torch.zeros_like(GOOD)
    made, _ = memory(destination)
    made.open_flight(1, KEY, direct=False).copy_(GOOD)
    made.hash(1, KEY)
    assert made.check_hashed(1, KEY) is None
    assert made.check(1, KEY, write=True) == (True, True)
    assert torch.equal(destination, GOOD)
    spool = ChunkSpool(tmp_path / "spool")
    spool.start()
    spooled, _ = memory(torch.zeros_like(GOOD), spool)
    spooled.open_flight(1, KEY, direct=True).copy_(GOOD)
    spooled.hash(1, KEY)
    assert spooled.check_hashed(1, KEY) is None
    assert spooled.check(1, KEY, write=True) == (True, True)
    assert len(spool) == 1
    spool.close()
    assert hashing.count == 2


def test_a_flight_that_is_over_leaves_nothing_behind() -> None:
    made, _ = memory(torch.zeros_like(GOOD))
    for flight in range(1, 50):
        made.open_flight(flight, KEY, direct=True).copy_(GOOD)
        made.hash(flight, KEY)
        made.close_flight(flight)
    assert not made._digests
