"""Chunks and byte addressing: any range of any tensors reads and writes as the logical bytes that it names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.errors import MisuseError
from recovery.state.chunks import CHUNK_BYTES, PartBytes, chunk_ranges
from recovery.state.manifest import specs_of
from recovery.state.tree import split
from tests.unit.state.exact import DTYPES, arrays, logical_bytes, random_tensor, tensors

MIB = 1 << 20


class TestChunkRanges:
    @pytest.mark.parametrize(
        ("sizes", "ranges"),
        [
            ([], []),
            ([0, 0], []),
            ([5], [(0, 5)]),
            ([5, 0, 7], [(0, 12)]),
            ([CHUNK_BYTES], [(0, CHUNK_BYTES)]),
            ([CHUNK_BYTES + 1, 3], [(0, CHUNK_BYTES), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 3)]),
            ([3, CHUNK_BYTES], [(0, 3), (3, CHUNK_BYTES)]),
            ([3 * MIB, MIB, 1], [(0, 4 * MIB), (4 * MIB, 1)]),
            ([3 * MIB, MIB + 1], [(0, 3 * MIB), (3 * MIB, MIB + 1)]),
        ],
    )
    def test_table(self, sizes: list[int], ranges: list[tuple[int, int]]) -> None:
        assert chunk_ranges(sizes) == ranges

    @given(st.lists(st.integers(0, 10 * MIB), max_size=20))
    def test_chunks_tile_the_part_and_no_large_tensor_shares_one(self, sizes: list[int]) -> None:
        position = 0
        ranges = chunk_ranges(sizes)
        for offset, num_bytes in ranges:
            assert offset == position
            assert 0 < num_bytes <= CHUNK_BYTES
            position += num_bytes
        assert position == sum(sizes)
        start = 0
        for size in sizes:
            touching = [(o, n) for o, n in ranges if o < start + size and start < o + n]
            if size >= CHUNK_BYTES:
                assert touching[0][0] == start
                assert touching[-1][0] + touching[-1][1] == start + size
            elif size:
                assert len(touching) == 1
            start += size


class TestReadingAndWriting:
    @given(st.lists(st.one_of(tensors(), arrays()), max_size=5), st.data())
    @settings(max_examples=300, deadline=None)
    def test_any_range_reads_its_logical_bytes(
        self, values: list[torch.Tensor | np.ndarray], data: st.DataObject
    ) -> None:
        whole = b"".join(logical_bytes(value) for value in values)
        part = PartBytes(values)
        assert part.num_bytes == len(whole)
        start = data.draw(st.integers(0, len(whole)))
        size = data.draw(st.integers(0, len(whole) - start))
        assert part.read(start, size).numpy().tobytes() == whole[start : start + size]
        backing = torch.zeros(size + 3, dtype=torch.uint8)
        part.read(start, size, out=backing[3:])
        assert backing.numpy().tobytes() == b"\0\0\0" + whole[start : start + size]
        found = part.view(start, size)
        assert found is None or found.numpy().tobytes() == whole[start : start + size]

    @given(st.lists(st.one_of(tensors(), arrays()), max_size=4), st.lists(st.integers(1, 40), min_size=1, max_size=6))
    @settings(max_examples=300, deadline=None)
    def test_pieces_of_any_size_write_every_byte(
        self, values: list[torch.Tensor | np.ndarray], sizes: list[int]
    ) -> None:
        source = PartBytes(values)
        targets = [_blank_like(value) for value in values]
        target = PartBytes(targets)
        position = turn = 0
        while position < source.num_bytes:
            size = min(sizes[turn % len(sizes)], source.num_bytes - position)
            # A clone of a longer piece: its first byte is not aligned to any element.
            padded = torch.cat([torch.zeros(turn % 3, dtype=torch.uint8), source.read(position, size)])
            target.write(position, padded[turn % 3 :])
            position, turn = position + size, turn + 1
        assert [logical_bytes(t) for t in targets] == [logical_bytes(v) for v in values]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_strided_tensors_of_every_dtype(self, dtype: torch.dtype) -> None:
        value = random_tensor(dtype, (7, 5, 6), 3).permute(2, 0, 1)[::2]
        target = torch.empty((4, 5, 7, 6), dtype=dtype).permute(3, 2, 1, 0)[::2, ..., 1]
        source = PartBytes([value])
        assert source.read(0, source.num_bytes).numpy().tobytes() == logical_bytes(value)
        PartBytes([target]).write(0, source.read(0, source.num_bytes))
        assert logical_bytes(target) == logical_bytes(value)

    @pytest.mark.parametrize("dims", [(1, 0), (0, 2, 1), (2, 0, 1), (1, 0, 2)], ids=str)
    def test_large_transposed_tensors(self, dims: tuple[int, ...]) -> None:
        """Their rows are far apart in memory and take another way."""
        shape = (2048, 1024) if len(dims) == 2 else (64, 1024, 40)
        value = random_tensor(torch.float32, shape, 5).permute(dims)
        source = PartBytes([value])
        whole = logical_bytes(value)
        target = torch.zeros(shape).permute(dims)
        for start in range(0, len(whole), 1_500_000):
            data = source.read(start, min(1_500_000, len(whole) - start))
            assert data.numpy().tobytes() == whole[start : start + 1_500_000]
            PartBytes([target]).write(start, data)
        assert logical_bytes(target) == whole

    def test_writing_changes_only_its_range(self) -> None:
        value = torch.arange(24, dtype=torch.uint8).view(4, 6).t()
        before = logical_bytes(value)
        PartBytes([value]).write(5, torch.full((7,), 255, dtype=torch.uint8))
        assert logical_bytes(value) == before[:5] + b"\xff" * 7 + before[12:]

    def test_an_expanded_tensor_is_written_once(self) -> None:
        value = torch.zeros(1, 3).expand(1000, 3)
        part = PartBytes([value])
        part.write(0, torch.ones(1000, 3).view(-1).view(torch.uint8))
        assert torch.equal(value, torch.ones(1000, 3))

    def test_views_are_zero_copy_and_writes_keep_the_memory(self) -> None:
        parameter = torch.nn.Parameter(torch.zeros(8))
        part = PartBytes([torch.zeros(2), parameter])
        view = part.view(8, 32)
        assert view is not None
        assert view.data_ptr() == parameter.data_ptr()
        assert part.view(4, 8) is None
        pointer = parameter.data_ptr()
        part.write(8, torch.ones(8).view(torch.uint8))
        assert parameter.data_ptr() == pointer
        assert parameter.sum() == 8
        assert view.view(torch.float32).sum() == 8

    def test_reads_see_what_the_tensors_hold_now(self) -> None:
        value = torch.zeros(4)
        part = PartBytes([value, torch.zeros(1)])
        first = part.read(0, 20)
        value.fill_(1)
        assert first.view(torch.float32)[:4].sum() == 0
        assert part.read(0, 20).view(torch.float32)[:4].sum() == 4

    def test_no_bytes(self) -> None:
        part = PartBytes([])
        assert part.num_bytes == 0
        assert part.read(0, 0).numel() == 0
        part.write(0, torch.empty(0, dtype=torch.uint8))
        assert PartBytes([torch.empty(0), torch.empty(2, 0)]).read(0, 0).numel() == 0

    @pytest.mark.parametrize(("offset", "size"), [(-1, 2), (0, 5), (4, 1), (0, -1), (5, 0)])
    def test_ranges_outside_are_refused(self, offset: int, size: int) -> None:
        part = PartBytes([torch.zeros(1)])
        for call in (part.view, part.read):
            with pytest.raises(MisuseError, match="of a part of 4 bytes"):
                call(offset, size)

    @pytest.mark.parametrize(
        "payload",
        [torch.zeros(4), torch.zeros(8, dtype=torch.uint8)[::2], torch.zeros(2, 2, dtype=torch.uint8)],
    )
    def test_payloads_are_bytes(self, payload: torch.Tensor) -> None:
        with pytest.raises(MisuseError, match="1-d contiguous uint8"):
            PartBytes([torch.zeros(1)]).write(0, payload)

    def test_a_buffer_of_another_size_is_refused(self) -> None:
        with pytest.raises(MisuseError, match="3 bytes for 4"):
            PartBytes([torch.zeros(1)]).read(0, 4, out=torch.zeros(3, dtype=torch.uint8))

    def test_a_read_only_array_is_not_written(self) -> None:
        array = np.zeros(4, np.uint8)
        array.flags.writeable = False
        with pytest.raises(MisuseError, match="read-only"):
            PartBytes([array]).write(0, torch.ones(4, dtype=torch.uint8))

    def test_specs_must_fit(self) -> None:
        specs = specs_of(split([torch.zeros(2), torch.zeros(3)]).leaves)
        with pytest.raises(MisuseError, match="tensor 1 has 8 and its spec 12 bytes"):
            PartBytes([torch.zeros(2), torch.zeros(2)], specs)
        with pytest.raises(MisuseError, match="1 tensors do not fit 2 specs"):
            PartBytes([torch.zeros(2)], specs)


def _blank_like(value: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
    """Return a writable leaf of the same dtype, shape and strides (arrays: reversed stays reversed)."""
    if isinstance(value, np.ndarray):
        blank: np.ndarray = np.zeros(value.shape, value.dtype)
        return blank[::-1] if value.ndim and value.strides[0] < 0 else blank
    sizes = [(size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True)]
    storage = torch.zeros(max(0, sum(sizes)) + 1, dtype=value.dtype)
    blank_tensor = storage.as_strided(value.shape, value.stride())
    return (
        torch.nn.Parameter(blank_tensor, requires_grad=False) if isinstance(value, torch.nn.Parameter) else blank_tensor
    )
