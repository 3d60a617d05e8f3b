"""Digests and the fingerprint: equal for equal values however they lie in memory, different for any other bit."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise

import blake3
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recovery.errors import MisuseError, StateMismatch, UnsupportedLeaf
from recovery.state.chunks import CHUNK_BYTES, PartBytes, chunk_ranges
from recovery.state.digest import (
    BLOCK_BYTES,
    chunk_digest,
    combine_fingerprints,
    digest_part,
    digest_part_and_blocks,
    fingerprint,
    numerics_id,
    part_digests,
    partial_fingerprint,
)
from recovery.state.manifest import ShardSpec
from recovery.types import DigestAlgorithm, Fingerprint
from tests.unit.state.build import Part, part_of
from tests.unit.state.exact import logical_bytes, tensors, trees

XXH3, BLAKE3 = DigestAlgorithm.XXH3_128, DigestAlgorithm.BLAKE3


def of(value: object, name: str = "p", algorithm: DigestAlgorithm = XXH3) -> Fingerprint:
    return fingerprint([part_of(name, value)], algorithm)


class TestChunkDigests:
    def test_they_are_the_published_algorithms(self) -> None:
        data = torch.arange(256, dtype=torch.uint8)
        raw = bytes(range(256))
        assert chunk_digest(XXH3, data) == xxhash.xxh3_128(raw).digest()
        assert chunk_digest(BLAKE3, data) == blake3.blake3(raw).digest()
        assert chunk_digest(XXH3, data[:0]) == xxhash.xxh3_128(b"").digest()

    @pytest.mark.parametrize("algorithm", [XXH3, BLAKE3])
    def test_one_a_chunk_and_one_a_tensor_that_shares(self, algorithm: DigestAlgorithm) -> None:
        large = torch.randint(0, 256, (CHUNK_BYTES + 5,), dtype=torch.uint8)
        values: list[torch.Tensor] = [torch.randn(3), torch.empty(0), torch.randn(2, 3).t(), large, torch.randn(7)]
        part = PartBytes(values)
        chunks, tensors_ = digest_part(part, algorithm)
        whole = b"".join(map(logical_bytes, values))
        ranges = chunk_ranges(part.tensor_num_bytes)
        expected = [torch.frombuffer(bytearray(whole[o : o + n]), dtype=torch.uint8) for o, n in ranges]
        assert chunks == [chunk_digest(algorithm, data) for data in expected]
        assert chunks == part_digests(part, algorithm)
        alone = [torch.frombuffer(bytearray(logical_bytes(values[i])), dtype=torch.uint8) for i in (0, 2)]
        assert tensors_ == [chunk_digest(algorithm, alone[0]), b"", chunk_digest(algorithm, alone[1]), b"", b""]

    def test_hashing_lets_other_threads_run(self) -> None:
        """While one thread hashes, another counts: with the GIL held it could not."""
        data = torch.zeros(512 << 20, dtype=torch.uint8)
        counted = 0
        for algorithm in (XXH3, BLAKE3):
            hasher = threading.Thread(target=chunk_digest, args=(algorithm, data), name="hasher")
            hasher.start()
            counted = 0
            while hasher.is_alive():
                counted += 1
                time.sleep(0)
            hasher.join()
            assert counted > 10


class TestFingerprint:
    @given(trees())
    @settings(max_examples=100, deadline=None)
    def test_a_copy_has_the_same(self, value: object) -> None:
        part = part_of("p", value)
        copies = [_dense_copy(tensor) for tensor in part.tensors]
        other = Part(part.name, part.tree, part.specs, copies, PartBytes(copies, part.specs))
        assert fingerprint([part]) == fingerprint([other])

    @given(tensors().filter(lambda t: t.numel() > 0 and t.dtype is not torch.bool), st.data())
    @settings(max_examples=150, deadline=None)
    def test_any_bit_changes_it(self, value: torch.Tensor, data: st.DataObject) -> None:
        dense = torch.frombuffer(bytearray(logical_bytes(value)), dtype=torch.uint8)
        before = of({"x": dense.view(value.dtype).view(value.shape)})
        dense[data.draw(st.integers(0, dense.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert of({"x": dense.view(value.dtype).view(value.shape)}) != before

    @pytest.mark.parametrize("position", [0, BLOCK_BYTES - 1, BLOCK_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES, 9_999_999])
    def test_any_block_of_a_large_tensor_counts(self, position: int) -> None:
        value = torch.zeros(10_000_000, dtype=torch.uint8)
        before = of([torch.ones(3), value, torch.ones(3)])
        value[position] = 1
        assert of([torch.ones(3), value, torch.ones(3)]) != before

    def test_names_shapes_dtypes_scalars_and_kinds_count(self) -> None:
        one = torch.ones(2, 3)
        state = {"w": one, "lr": 0.5, "n": 1}
        different = [
            {"v": one, "lr": 0.5, "n": 1},
            {"w": one.view(3, 2), "lr": 0.5, "n": 1},
            {"w": one.view(torch.int32), "lr": 0.5, "n": 1},
            {"w": one.numpy(), "lr": 0.5, "n": 1},
            {"w": one, "lr": 0.25, "n": 1},
            {"w": one, "lr": 0.5, "n": True},
            {"w": one, "lr": 0.5, "n": 1.0},
            {"w": one, "lr": 0.5, 1: 1},
            {"w": one, "lr": [0.5], "n": 1},
            {"w": one, "lr": (0.5,), "n": 1},
            {"w": one, "lr": torch.tensor(0.5), "n": 1},
            {"w": one, "lr": 0.5},
            {"w": one, "lr": 0.5, "n": 1, "m": torch.empty(0)},
            {"w": one, "lr": 0.5, "n": 1, "m": torch.empty(0, 2)},
            {"w": one, "lr": 0.5, "n": 1, "m": {}},
            {"w": one, "lr": 0.5, "n": 1, "m": {0: {}}},
            [one, 0.5, 1],
            OrderedDict(state),
        ]
        found = [of(state), *map(of, different), of(state, "q"), of(state, algorithm=BLAKE3)]
        assert len(set(found)) == len(found)
        assert all(len(each) == 32 for each in found)

    def test_zeros_and_nans_differ_by_their_bits(self) -> None:
        assert len({of(0.0), of(-0.0), of(float("nan")), of(float("inf"))}) == 4

    def test_order_of_entries_and_parts_strides_ties_and_parameters_do_not_count(self) -> None:
        w = torch.randn(4, 6)
        a, b = part_of("a", {"x": w, "y": [1, w]}), part_of("b", {"n": {1, 2, 3}})
        strided = torch.empty(6, 4).t().copy_(w)
        c = part_of("a", {"y": [1, w.clone()], "x": nn.Parameter(strided)})
        assert fingerprint([a, b]) == fingerprint([b, c])

    def test_sharing_of_lists_does_not_count(self) -> None:
        betas = [0.9, 0.99]
        assert of([betas, betas]) == of([[0.9, 0.99], [0.9, 0.99]])

    def test_no_two_structures_are_confused(self) -> None:
        values = [[], [[]], [[], []], [[[]]], {}, {"a": []}, {"a": {}}, [{}, []], [[], {}], "", b"", [""], ["", ""]]
        assert len({of(value) for value in values}) == len(values)

    def test_equal_in_another_process(self) -> None:
        code = (
            "import torch; from tests.unit.state.test_digest import of; "
            "print(of({'b': torch.arange(9.), 'a': {'y', 'x', 1, None}, 'n': [1, 2.5]}).hex())"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": "5"}, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == of({"n": [1, 2.5], "a": {None, 1, "x", "y"}, "b": torch.arange(9.0)}).hex()

    @pytest.mark.parametrize("algorithm", [XXH3, BLAKE3])
    def test_one_pass_over_memory_serves_chunks_and_fingerprint(self, algorithm: DigestAlgorithm) -> None:
        part = part_of(
            "p", [torch.randn(5), torch.empty(0), torch.randn(3_000_000), torch.randn(400_000), torch.ones(1)]
        )
        for block_algorithm in (XXH3, BLAKE3):
            digests, blocks = digest_part_and_blocks(part.bytes, algorithm, block_algorithm)
            assert digests == digest_part(part.bytes, algorithm)
            assert fingerprint([part], block_algorithm, {"p": blocks}) == fingerprint([part], block_algorithm)
            assert fingerprint([part], block_algorithm, {"p": [b"x" * 32] * 5}) != fingerprint([part], block_algorithm)
        with pytest.raises(MisuseError, match="3 known digests for 5 tensors"):
            fingerprint([part], known={"p": [b""] * 3})

    def test_equal_names_are_refused(self) -> None:
        with pytest.raises(MisuseError, match="equal names"):
            fingerprint([part_of("p", 1), part_of("p", 2)])


def _dense_copy(value: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
    if isinstance(value, np.ndarray):
        return np.array(value, order="C")
    return (
        torch.frombuffer(bytearray(logical_bytes(value) or b"\0" * 16), dtype=torch.uint8)
        .view(value.dtype)[: value.numel()]
        .view(value.shape)
    )


def shards(value: torch.Tensor, dim: int, cuts: list[int]) -> list[Part]:
    """Return one part a rank, each holding ``value`` between two cuts of ``dim``, and a tensor that all ranks hold."""
    bounds = [0, *cuts, value.shape[dim]]
    parts = []
    for start, end in pairwise(bounds):
        local = value.narrow(dim, start, end - start).clone()
        part = part_of("p", {"w": local, "norm": torch.ones(3)})
        offset = [0] * value.dim()
        offset[dim] = start
        spec = ShardSpec(
            global_shape=tuple(value.shape),
            global_offset=tuple(offset),
            placements=(f"S({dim})",),
            mesh_shape=(len(bounds) - 1,),
        )
        part.specs = (replace(part.specs[0], shard=spec), part.specs[1])
        parts.append(part)
    return parts


class TestSharding:
    @pytest.mark.parametrize("algorithm", [XXH3, BLAKE3])
    @pytest.mark.parametrize(
        ("shape", "dim", "cuts"),
        [
            ((3000, 500), 0, [1500]),  # in the middle of a block
            ((4096, 256), 0, [1024, 2048]),  # at the edges of blocks
            ((3000, 500), 0, [7, 8, 2999]),
            ((3000, 500), 1, [100, 300]),
            ((30, 40, 50), 1, [11]),
            ((30, 40, 50), 2, [1, 49]),
            ((5,), 0, [2]),
            ((7, 3), 0, [7]),  # the last rank holds nothing
            ((0, 3), 0, [0]),
        ],
    )
    def test_shards_combine_to_the_whole(
        self, shape: tuple[int, ...], dim: int, cuts: list[int], algorithm: DigestAlgorithm
    ) -> None:
        value = torch.randn(shape)
        whole = of({"w": value, "norm": torch.ones(3)}, algorithm=algorithm)
        ranks = [partial_fingerprint([part], algorithm) for part in shards(value, dim, cuts)]
        assert combine_fingerprints(ranks) == whole
        assert combine_fingerprints(ranks[::-1]) == whole

    @pytest.mark.parametrize("at", [0, 750_000, 1_499_999])
    def test_a_bit_of_any_shard_counts(self, at: int) -> None:
        value = torch.randn(3000, 500)
        before = combine_fingerprints([partial_fingerprint([part]) for part in shards(value, 0, [1500])])
        value.view(-1)[at] += 1
        assert combine_fingerprints([partial_fingerprint([part]) for part in shards(value, 0, [1500])]) != before

    def test_row_shards_contribute_less_than_two_blocks_of_bytes(self) -> None:
        (_, middle, _) = [partial_fingerprint([part]) for part in shards(torch.randn(9000, 500), 0, [2000, 7000])]
        blocks = middle.parts[0].tensors[0]
        assert not isinstance(blocks, bytes)
        assert sum(map(len, blocks.fragments.values())) < 2 * BLOCK_BYTES

    def test_a_missing_rank_is_named(self) -> None:
        first, _ = shards(torch.randn(3000, 500), 0, [1500])
        with pytest.raises(MisuseError, match="4 of 6 blocks are not complete"):
            fingerprint([first])

    def test_ranks_that_disagree_about_what_all_hold(self) -> None:
        first, second = shards(torch.randn(10, 5), 0, [5])
        assert isinstance(second.tensors[1], torch.Tensor)
        second.tensors[1].add_(1)
        with pytest.raises(StateMismatch, match="tensor 1: local ranks hold different bytes"):
            combine_fingerprints([partial_fingerprint([part]) for part in (first, second)])

    def test_ranks_that_disagree_about_the_same_shard(self) -> None:
        first, second = shards(torch.randn(10, 5), 0, [5])
        twin = shards(torch.zeros(10, 5), 0, [5])[0]
        with pytest.raises(StateMismatch, match="tensor 0: local ranks hold different bytes"):
            combine_fingerprints([partial_fingerprint([part]) for part in (first, second, twin)])

    def test_ranks_that_disagree_about_scalars(self) -> None:
        with pytest.raises(StateMismatch, match="structure or scalars"):
            combine_fingerprints([partial_fingerprint([part_of("p", value)]) for value in (1, 2)])

    def test_ranks_with_other_parts(self) -> None:
        with pytest.raises(MisuseError, match="different parts"):
            combine_fingerprints([partial_fingerprint([part_of(name, 1)]) for name in "pq"])
        with pytest.raises(MisuseError, match="no rank"):
            combine_fingerprints([])

    def test_a_pending_reduction_has_no_value(self) -> None:
        part = part_of("p", {"w": torch.ones(2)})
        spec = ShardSpec(global_shape=(2,), global_offset=(0,), placements=("P(sum)",), mesh_shape=(2,))
        part.specs = (replace(part.specs[0], shard=spec),)
        with pytest.raises(UnsupportedLeaf, match="p/w: a DTensor with a pending reduction"):
            fingerprint([part])


def test_the_numerics_id_names_what_changes_results() -> None:
    release, device, capability = numerics_id().split("/")
    assert release == "torch-" + torch.__version__.split("+")[0]
    assert device == "cpu"
    assert capability == torch.backends.cpu.get_cpu_capability()
