"""The corpus: the same files everywhere, disjoint shards, and a place that is saved and refused to strangers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recovery.demo.corpus import CorpusReader, read_shard, shard_of, standard_library_files
from recovery.errors import BadConfiguration


def write_tree(root: Path, names: list[str]) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


def test_the_library_is_read_in_one_order_without_tests_and_installed_packages(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        ["zlib2.py", "email/b.py", "email/a.py", "test/t.py", "site-packages/x.py", "json/tests/u.py", "c.txt"],
    )
    names = [path.relative_to(tmp_path).as_posix() for path in standard_library_files(tmp_path)]
    assert names == ["email/a.py", "email/b.py", "zlib2.py"]


def test_the_installed_library_gives_every_worker_enough_text() -> None:
    files = standard_library_files()
    for index in range(4):
        assert read_shard(shard_of(files, index=index, count=4)).numel() > 1_000_000


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_shards_are_disjoint_and_together_everything(tmp_path: Path, count: int) -> None:
    write_tree(tmp_path, [f"m{number}.py" for number in range(20)])
    files = standard_library_files(tmp_path)
    shards = [shard_of(files, index=index, count=count) for index in range(count)]
    assert sorted(path for shard in shards for path in shard) == files
    assert shards[count - 1] == shard_of(standard_library_files(tmp_path), index=count - 1, count=count)


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_outside_the_workers_is_refused(tmp_path: Path, index: int) -> None:
    with pytest.raises(BadConfiguration, match="not one of the 3"):
        shard_of([tmp_path], index=index, count=3)


def test_a_shard_is_cut_at_its_cap_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path, ["a.py", "b.py"])
    files = standard_library_files(tmp_path)
    assert bytes(read_shard(files).tolist()) == b"# a.py\n\0# b.py\n\0"
    assert bytes(read_shard(files, max_bytes=9).tolist()) == b"# a.py\n\0#"
    with pytest.raises(BadConfiguration, match="empty"):
        read_shard([])


def reader(*, worker_index: int = 0, size: int = 100) -> CorpusReader:
    return CorpusReader(torch.arange(size, dtype=torch.uint8), worker_index=worker_index, batch_size=4, context=5)


def test_batches_are_windows_spread_over_the_shard_and_move_on_by_the_context() -> None:
    place = reader()
    first, second = place.next_batch(), place.next_batch()
    assert first.dtype == torch.int64
    assert first.tolist() == [list(range(start, start + 6)) for start in (0, 25, 50, 75)]
    assert second[0].tolist() == list(range(5, 11))


def test_no_two_workers_stand_at_the_same_byte() -> None:
    seen = []
    for worker_index in range(4):
        place = reader(worker_index=worker_index)
        cursors = set()
        for _ in range(20):
            cursors.add(place.cursor)
            place.next_batch()
        seen.append(cursors)
    assert sum(map(len, seen)) == len(set.union(*seen)) == 80


def test_windows_wrap_round_at_the_end() -> None:
    place = reader(size=24)
    batches = [place.next_batch() for _ in range(5)]
    assert batches[4][0].tolist() == [20, 21, 22, 23, 0, 1]
    assert place.cursor == 1


def test_the_place_is_a_stateful_part() -> None:
    place = reader()
    for _ in range(7):
        place.next_batch()
    saved = place.state_dict()
    expected = [place.next_batch() for _ in range(30)]

    other = reader()
    other.load_state_dict(saved)
    assert other.batches == 7
    for batch in expected:
        assert torch.equal(other.next_batch(), batch)
    assert other.state_dict() == place.state_dict()


@pytest.mark.parametrize(
    "state",
    [
        {"worker_index": 1, "cursor": 5, "batches": 1},
        {"worker_index": 0, "cursor": 100, "batches": 1},
        {"worker_index": 0, "cursor": -1, "batches": 1},
        {"worker_index": 0, "cursor": 5, "batches": -1},
    ],
)
def test_another_workers_place_and_one_outside_the_shard_are_refused(state: dict[str, int]) -> None:
    place = reader()
    place.next_batch()
    before = place.state_dict()
    with pytest.raises(BadConfiguration):
        place.load_state_dict(state)
    assert place.state_dict() == before


def test_a_shard_smaller_than_one_window_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="needs more than 5"):
        reader(size=5)
