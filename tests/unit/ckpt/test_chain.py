"""Local disk and remote through one protocol: the newest step that verifies, wherever it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.catalog import Catalog
from ckpt.chain import CheckpointChain
from ckpt.local import LocalStorage
from ckpt.objects import open_storage
from ckpt.remote import DownloadCache
from ckpt.source import CheckpointSource
from ckpt.storage import Storage
from ckpt.transfer import copy_step
from recovery.errors import BadConfiguration, SourcesExhausted
from recovery.events import Recorder
from recovery.types import Version
from tests.unit.ckpt.power import Quick
from tests.unit.ckpt.states import RUN, W0
from tests.unit.ckpt.workers import Worker, differences


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def source(storage: Storage, cache: DownloadCache | None = None) -> CheckpointSource:
    return CheckpointSource(storage, run_id=RUN, worker=W0, events=Recorder(), cache=cache)


@pytest.fixture
def places(tmp_path: Path) -> tuple[LocalStorage, Storage]:
    """Return a disk with steps 1 to 3 and a remote with steps 1 and 2."""
    local = LocalStorage(tmp_path / "local", Quick())
    remote = open_storage(f"memory://{tmp_path}/remote")
    worker = Worker(1)
    for number in (1, 2, 3):
        worker.train().save(local)
        if number < 3:
            copy_step(local, remote, Version(1, number), run_id=RUN)
    return local, remote


def test_the_newest_wherever_it_is(places: tuple[LocalStorage, Storage]) -> None:
    local, remote = places
    chain = CheckpointChain([source(remote), source(local)])
    assert [version.outer_step for version, _ in chain.candidates()] == [3, 2, 2, 1, 1]
    fresh = Worker(2)
    assert chain.restore(fresh.state).version == Version(1, 3)
    assert differences(Worker(1).train(3), fresh) == []


def test_a_damaged_disk_gives_way_to_the_remote(places: tuple[LocalStorage, Storage], tmp_path: Path) -> None:
    """Everything on the disk is damaged: the remote's newest is downloaded, verified and restored."""
    local, remote = places
    for number in (1, 2, 3):
        flip(local.root / f"step_1_{number}" / "replicated" / "outer_params.safetensors")
    cache = DownloadCache(tmp_path / "cache")
    fresh = Worker(2)
    restored = CheckpointChain([source(local), source(remote, cache)]).restore(fresh.state)
    assert restored.version == Version(1, 2)
    assert restored.own_position
    assert differences(Worker(1).train(2), fresh) == []
    assert [step.version for step in Catalog(LocalStorage(tmp_path / "cache"), RUN).whole()] == [Version(1, 2)]


def test_all_exhausted_names_each(places: tuple[LocalStorage, Storage]) -> None:
    local, _ = places
    for number in (1, 2, 3):
        flip(local.root / f"step_1_{number}" / "replicated" / "outer_params.safetensors")
    with pytest.raises(SourcesExhausted) as raised:
        CheckpointChain([source(local)]).restore(Worker(2).state)
    assert all(f"L1.k{number}" in str(raised.value) for number in (1, 2, 3))
    with pytest.raises(SourcesExhausted, match="none is configured"):
        CheckpointChain([]).restore(Worker(2).state)


def test_at_most_and_options_reach_the_source(places: tuple[LocalStorage, Storage]) -> None:
    local, remote = places
    fresh = Worker(2)
    chain = CheckpointChain([source(local), source(remote)])
    assert chain.restore(fresh.state, at_most=Version(1, 2), tokens=7).version == Version(1, 2)
    assert fresh.state.run_progress.tokens == 7


def test_a_cache_must_keep_something() -> None:
    with pytest.raises(BadConfiguration):
        DownloadCache("x", keep=0)
