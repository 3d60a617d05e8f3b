"""Memory for copies: budget, touching, giving back."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from recovery.snapshot import vault as vault_module
from recovery.snapshot.vault import Vault
from recovery.types import MIB


def test_budget_is_counted_until_the_last_view_is_gone() -> None:
    vault = Vault(10 * MIB)
    arena = vault.reserve(8 * MIB)
    assert arena is not None
    assert (arena.num_bytes, arena.data.numel(), vault.used_bytes) == (8 * MIB, 8 * MIB, 8 * MIB)
    assert vault.reserve(4 * MIB) is None
    behind_a_send = arena.data[100:200]
    del arena
    assert vault.used_bytes == 8 * MIB
    behind_a_send.fill_(3)
    del behind_a_send
    assert vault.used_bytes == 0
    assert vault.reserve(10 * MIB) is not None
    assert vault.peak_bytes == 10 * MIB


@pytest.mark.parametrize("populates", [True, False])
def test_touching_keeps_the_content(populates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not populates:
        monkeypatch.setattr(vault_module, "_populate", lambda: None)
    arena = Vault(64 * MIB).reserve(9 * MIB + 5)
    assert arena is not None
    arena.data.random_(0, 255)
    copy = arena.data.clone()
    arena.touch()
    arena.touch()
    assert torch.equal(arena.data, copy)


def test_touching_beside_a_writer_loses_nothing() -> None:
    arena = Vault(64 * MIB).reserve(32 * MIB)
    assert arena is not None
    toucher = threading.Thread(target=arena.touch)
    toucher.start()
    for start in range(0, arena.num_bytes, MIB):
        arena.data[start : start + MIB].fill_(start // MIB + 1)
    toucher.join()
    for start in range(0, arena.num_bytes, MIB):
        assert arena.data[start : start + MIB].eq(start // MIB + 1).all()


def test_kept_memory_is_reused_evicted_and_dropped() -> None:
    vault = Vault(20 * MIB, keep=True)
    arena = vault.reserve(8 * MIB)
    assert arena is not None
    where = arena.data.data_ptr()
    del arena
    assert vault.used_bytes == 8 * MIB, "kept"
    smaller = vault.reserve(7 * MIB)
    assert smaller is not None
    assert (smaller.num_bytes, smaller.data.data_ptr(), vault.used_bytes) == (7 * MIB, where, 8 * MIB)
    del smaller
    larger = vault.reserve(16 * MIB)
    assert larger is not None
    assert vault.used_bytes == 16 * MIB, "the kept memory made room"
    del larger
    vault.close()
    vault.close()
    assert vault.used_bytes == 0


def test_held_memory_is_reused_as_touched_and_let_go() -> None:
    vault = Vault(20 * MIB)
    vault.hold()
    arena = vault.reserve(8 * MIB)
    assert arena is not None
    arena.touch()
    where = arena.data.data_ptr()
    del arena
    assert vault.used_bytes == 8 * MIB, "held"
    again = vault.reserve(8 * MIB)
    assert again is not None
    assert (again.data.data_ptr(), again.touched) == (where, True)
    del again
    vault.let_go()
    assert vault.used_bytes == 0
    late = vault.reserve(8 * MIB)
    assert late is not None
    del late
    assert vault.used_bytes == 0, "nobody joins any more"
    vault.close()
    vault.hold()
    late = vault.reserve(8 * MIB)
    del late
    assert vault.used_bytes == 0, "closed"


def test_letting_go_leaves_what_is_always_kept() -> None:
    vault = Vault(20 * MIB, keep=True)
    vault.hold()
    arena = vault.reserve(8 * MIB)
    del arena
    vault.let_go()
    assert vault.used_bytes == 8 * MIB


def test_part_of_the_memory_touched_is_not_all_of_it() -> None:
    vault = Vault(20 * MIB, keep=True)
    arena = vault.reserve(8 * MIB)
    assert arena is not None
    if not arena.touched:  # else the system cannot touch without writing, and the vault has touched all
        arena.touch(lambda seconds: False)
        assert not arena.touched
        del arena
        smaller = vault.reserve(7 * MIB)
        assert smaller is not None
        smaller.touch()
        del smaller
        arena = vault.reserve(8 * MIB)
        assert arena is not None
        assert not arena.touched


def test_memory_that_comes_back_after_close_is_not_kept() -> None:
    vault = Vault(20 * MIB, keep=True)
    arena = vault.reserve(MIB)
    vault.close()
    del arena
    assert vault.used_bytes == 0


def test_no_memory_is_like_no_budget() -> None:
    vault = Vault(1 << 62)
    assert vault.reserve(1 << 60) is None
    assert vault.used_bytes == 0


def test_an_empty_part_reserves_next_to_nothing() -> None:
    arena = Vault(MIB).reserve(0)
    assert arena is not None
    assert arena.data.numel() == 0
    arena.touch()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_neither_inherits_nor_breaks_the_memory() -> None:
    # In a process of its own: what else this one has loaded (gRPC's threads) does not survive a fork.
    script = """
import gc, os
from recovery.snapshot.vault import Vault
from recovery.types import MIB
arena = Vault(8 * MIB).reserve(8 * MIB)
arena.data.fill_(7)
child = os.fork()
if not child:
    del arena  # unmaps what the child does not have
    gc.collect()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0 and arena.data.eq(7).all()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.skipif(vault_module._populate() is None, reason="the system cannot touch without writing")
def test_touching_rests_where_asked_and_stops_where_told() -> None:
    arena = Vault(64 * MIB).reserve(10 * MIB)
    assert arena is not None
    stretches: list[float] = []

    def pace(seconds: float) -> bool:
        stretches.append(seconds)
        return len(stretches) < 3

    arena.touch(pace)
    assert len(stretches) == 3
    assert all(seconds > 0 for seconds in stretches)
    arena.touch()
    arena.touch(pace)
    assert len(stretches) == 3, "all of it is touched"
