"""Chunks on the joiner's disk: found again, never trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from recovery.errors import BadConfiguration, MisuseError
from recovery.protocol.ledger import ChunkLedger, ChunkName
from recovery.protocol.spool import ChunkSpool
from recovery.state.digest import chunk_digest
from recovery.types import DigestAlgorithm, PartName


def chunk(seed: int, num_bytes: int = 1000, offset: int = 0) -> tuple[ChunkName, torch.Tensor]:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return ChunkName(PartName("p"), offset, num_bytes, chunk_digest(DigestAlgorithm.XXH3_128, data)), data


def loaded(spool: ChunkSpool, name: ChunkName) -> torch.Tensor:
    data = spool.load(name)
    assert data is not None
    return data


def test_what_was_stored_is_found_after_a_restart(tmp_path: Path) -> None:
    chunks = [chunk(seed, 100 + seed) for seed in range(20)]
    spool = ChunkSpool(tmp_path / "spool")
    spool.start()
    for name, data in chunks:
        assert name not in spool
        spool.store(name, data)
        spool.store(name, data)
    spool.close()
    spool.close()
    again = ChunkSpool(tmp_path / "spool")
    again.start()
    assert len(again) == 20
    for name, data in chunks:
        assert name in again
        assert torch.equal(loaded(again, name), data)
    assert again.load(chunk(99)[0]) is None
    again.remove()
    assert not (tmp_path / "spool").exists()


def test_a_record_cut_off_by_a_crash_ends_the_readable_part(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spool = ChunkSpool(path)
    spool.start()
    (first, first_data), (second, second_data), (third, third_data) = chunk(1), chunk(2), chunk(3)
    spool.store(first, first_data)
    spool.store(second, second_data)
    spool.close()
    os.truncate(path, path.stat().st_size - 10)
    again = ChunkSpool(path)
    again.start()
    assert first in again
    assert second not in again
    again.store(third, third_data)
    again.close()
    last = ChunkSpool(path)
    last.start()
    assert torch.equal(loaded(last, first), first_data)
    assert torch.equal(loaded(last, third), third_data)
    last.close()


def test_a_full_spool_keeps_what_it_has(tmp_path: Path) -> None:
    spool = ChunkSpool(tmp_path / "spool", max_bytes=3000)
    spool.start()
    chunks = [chunk(seed) for seed in range(5)]
    for name, data in chunks:
        spool.store(name, data)
    assert [name in spool for name, _ in chunks] == [True, True, False, False, False]
    spool.close()


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    path.write_bytes(b"something else entirely")
    with pytest.raises(BadConfiguration, match="not a spool"):
        ChunkSpool(path).start()
    assert path.read_bytes() == b"something else entirely"
    with pytest.raises(BadConfiguration, match="cannot be used"):
        ChunkSpool(tmp_path / "no" / "such" / "folder").start()


def test_a_closed_spool_is_not_used(tmp_path: Path) -> None:
    spool = ChunkSpool(tmp_path / "spool")
    name, data = chunk(1)
    with pytest.raises(MisuseError):
        spool.store(name, data)


def test_the_ledger_knows_one_chunk_for_each_place() -> None:
    ledger = ChunkLedger()
    old, new = chunk(1)[0], chunk(2)[0]
    ledger.add(old)
    assert old in ledger
    ledger.add(new)
    assert old not in ledger
    assert new in ledger
    assert ledger.num_bytes == 1000
    ledger.discard(old)
    assert len(ledger) == 1
    ledger.discard(new)
    assert len(ledger) == 0
