"""Manifests: one canonical encoding; whatever else arrives is refused before anything is allocated for it."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from protos.recovery.v1 import manifest_pb2
from recovery.errors import BadConfiguration, ManifestRejected, UnsupportedLeaf
from recovery.state.chunks import CHUNK_BYTES
from recovery.state.limits import Limits
from recovery.state.manifest import Manifest, ShardSpec, decode, empty_leaf, encode, manifest_digest
from recovery.state.tree import join
from recovery.types import DigestAlgorithm, PartName
from tests.unit.state.build import manifest_of
from tests.unit.state.exact import trees


def sample() -> Manifest:
    shared = [1, 2]
    group = {"lr": 0.1, "betas": (0.9, 0.99)}
    big = torch.zeros(CHUNK_BYTES + 8, dtype=torch.uint8)
    return manifest_of(
        {
            "outer_params": {"a": torch.ones(3, 2), "b": nn.Parameter(torch.ones(2)), "big": big},
            "outer_optimizer": {"state": {"a": {"m": torch.ones(2, 2), "e": torch.empty(0)}}, "groups": [group]},
            "buffers": {"array": np.arange(3), "set": {1, 2}, "shared": [shared, shared]},
        }
    )


class TestEncoding:
    def test_decode_returns_what_was_encoded(self) -> None:
        manifest = sample()
        data = encode(manifest)
        assert decode(data) == manifest
        assert encode(decode(data)) == data
        assert len(manifest_digest(data)) == 32
        assert manifest_digest(data) != manifest_digest(data + b"\0")

    @pytest.mark.parametrize("algorithm", list(DigestAlgorithm))
    def test_both_algorithms(self, algorithm: DigestAlgorithm) -> None:
        manifest = manifest_of({"p": [torch.ones(2), torch.ones(3)]}, algorithm)
        assert decode(encode(manifest)) == manifest

    @given(trees())
    @settings(max_examples=200, deadline=None)
    def test_any_tree_survives(self, value: object) -> None:
        manifest = manifest_of({"p": value, "q": [value, value]})
        assert decode(encode(manifest)) == manifest

    def test_shards_and_other_devices_survive(self) -> None:
        manifest = manifest_of({"p": torch.ones(2, 3)})
        part = manifest.parts[0]
        shard = ShardSpec(global_shape=(4, 3), global_offset=(2, 0), placements=("S(0)",), mesh_shape=(2,))
        spec = replace(part.tensors[0], shard=shard, device_kind="cuda", requires_grad=True, dim_order=(1, 0))
        changed = replace(manifest, parts=(replace(part, tensors=(spec,)),))
        assert decode(encode(changed)) == changed

    def test_equal_bytes_in_another_process(self) -> None:
        code = (
            "from tests.unit.state.test_manifest import canonical; from recovery.state.manifest import encode, "
            "manifest_digest; print(manifest_digest(encode(canonical())).hex())"
        )
        digests = {
            subprocess.run(
                [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
            ).stdout
            for seed in ("1", "2")
        }
        assert digests == {manifest_digest(encode(canonical())).hex() + "\n"}

    def test_lookup_and_sums(self) -> None:
        manifest = sample()
        assert manifest.part(PartName("buffers")).name == "buffers"
        assert manifest.num_bytes == sum(part.num_bytes for part in manifest.parts)
        assert manifest.num_chunks == 5
        with pytest.raises(ManifestRejected, match="no part 'x'"):
            manifest.part(PartName("x"))

    def test_too_large_is_refused_by_the_sender(self) -> None:
        with pytest.raises(UnsupportedLeaf, match="at most 100 are accepted"):
            encode(sample(), Limits(manifest_bytes=100))

    def test_limits_must_make_sense(self) -> None:
        with pytest.raises(BadConfiguration, match=r"Limits\.parts is 0"):
            Limits(parts=0)
        with pytest.raises(BadConfiguration, match="cannot nest deeper"):
            Limits(depth=31)


def canonical() -> Manifest:
    return manifest_of({"p": {"s": {"x", "y", 1, None}, "t": torch.ones(3), "f": 0.1}})


Change = Callable[[manifest_pb2.Manifest], None]


def _tensor(**values: object) -> Change:
    """Return a change of the first part's first tensor."""

    def change(message: manifest_pb2.Manifest) -> None:
        spec = message.parts[0].tensors[0]
        for name, value in values.items():
            if isinstance(value, list):
                spec.ClearField(name)  # type: ignore[arg-type]
                getattr(spec, name).extend(value)
            else:
                setattr(spec, name, value)

    return change


def _shard(**values: list[object]) -> Change:
    def change(message: manifest_pb2.Manifest) -> None:
        shard = message.parts[0].tensors[0].shard
        good: dict[str, list[object]] = {
            "global_shape": [3, 2], "global_offset": [0, 0], "placements": ["S(0)"], "mesh_shape": [1],
        }  # fmt: skip
        for name, value in (good | values).items():
            getattr(shard, name).extend(value)

    return change


def _part(**values: object) -> Change:
    def change(message: manifest_pb2.Manifest) -> None:
        for name, value in values.items():
            setattr(message.parts[0], name, value)

    return change


def _tree(text: Callable[[manifest_pb2.Value], None]) -> Change:
    """Return a change of the value of a new entry of the last part's tree."""

    def change(message: manifest_pb2.Manifest) -> None:
        entry = message.parts[2].tree.dict.entries.add()
        entry.key.text = "new"
        text(entry.value)

    return change


def _do(*steps: str) -> Change:
    """Return a change written as statements about ``m``, the message, and ``p``, its parts."""

    def change(message: manifest_pb2.Manifest) -> None:
        for step in steps:
            exec(step, {"m": message, "p": message.parts})  # noqa: S102 - a table of statements reads best

    return change


def _nested(levels: int) -> Change:
    def nest(value: manifest_pb2.Value) -> None:
        for _ in range(levels):
            value = value.list.items.add()
        value.none.SetInParent()

    return _tree(nest)


def _set_of(*numbers: int) -> Callable[[manifest_pb2.Value], None]:
    def fill(value: manifest_pb2.Value) -> None:
        for number in numbers:
            value.set.items.add().small_int = number

    return fill


HOSTILE: dict[str, tuple[Change, str]] = {
    "format": (_do("m.format = 2"), "format 2"),
    "no format": (_do("m.ClearField('format')"), "format 0"),
    "run id": (_do("m.run_id = '../x'"), "run id"),
    "empty worker": (_do("m.ClearField('worker')"), "worker id"),
    "incarnation": (_do("m.worker.incarnation = 'a b'"), "incarnation"),
    "rank": (_do("m.worker.local_rank = 1"), "rank 1 of 1"),
    "layout digest": (_do("m.layout_digest = b'x' * 31"), "layout digest of 31"),
    "fingerprint": (_do("m.fingerprint = b'x'"), "fingerprint of 1"),
    "algorithm": (_do("m.digest_algorithm = 0"), "digest algorithm 0"),
    "unknown algorithm": (_do("m.digest_algorithm = 77"), "digest algorithm 77"),
    "part name": (_part(name="../../etc"), "not a part's name"),
    "part name dot": (_part(name=".x"), "not a part's name"),
    "duplicate parts": (_part(name="buffers"), "two parts are called 'buffers'"),
    "part class": (_part(part_class=0), "unknown class 0"),
    "unknown part class": (_part(part_class=9), "unknown class 9"),
    "part bytes": (_part(num_bytes=1 << 63), "whose tensors have"),
    "wrong path": (_tensor(path="b"), "where the tree has 'a'"),
    "dtype": (_tensor(dtype="float31"), "unknown dtype 'float31'"),
    "dtype object": (_tensor(dtype="object"), "unknown dtype"),
    "huge shape": (_tensor(shape=[1 << 62, 1 << 62]), "spans more than"),
    "shape overflow": (_tensor(shape=[1 << 32, 1 << 32], num_bytes=0), "spans more than"),
    "huge empty shape": (_tensor(shape=[0, (1 << 64) - 1], num_bytes=0), "spans more than"),
    "many dims": (_tensor(shape=[1] * 65), "65 dimensions"),
    "bytes of a tensor": (_tensor(num_bytes=25), "shape and dtype make 24"),
    "huge bytes of a tensor": (_tensor(num_bytes=(1 << 64) - 1), "shape and dtype make 24"),
    "offset": (_tensor(offset=4), "offset 4 instead of 0"),
    "kind": (_tensor(kind=0), "unknown kind 0"),
    "unknown kind": (_tensor(kind=9), "unknown kind 9"),
    "array on cuda": (_tensor(kind=3, device_kind="cuda"), "numpy cannot have"),
    "array of bf16": (_do("t = p[0].tensors[0]; t.kind = 3; t.dtype = 'bfloat16'; t.num_bytes = 12"), "cannot have"),
    "device": (_tensor(device_kind="/dev/mem"), "device kind"),
    "no device": (_tensor(device_kind=""), "device kind"),
    "grad of ints": (_tensor(dtype="int32", requires_grad=True), "requires_grad for int32"),
    "order": (_tensor(dim_order=[0, 2]), "order of dimensions"),
    "order twice": (_tensor(dim_order=[0, 0]), "order of dimensions"),
    "row-major order": (_tensor(dim_order=[0, 1]), "order of dimensions"),
    "shard dims": (_shard(global_shape=[3]), "other dimensions"),
    "shard outside": (_shard(global_offset=[1, 0]), "from 1 to 4 of 3"),
    "shard huge": (_shard(global_shape=[1 << 63, 2]), "a shard from"),
    "shard mesh": (_shard(mesh_shape=[]), "a mesh of 0"),
    "shard placements": (_shard(placements=[]), "placements"),
    "shard placement": (_shard(placements=["S(0)\n"]), "a placement"),
    "shard ranks": (_shard(mesh_shape=[0]), "a mesh without"),
    "tensor digest": (_tensor(digest=b""), "0 digest bytes, not 16"),
    "long tensor digest": (_tensor(digest=b"x" * 32), "32 digest bytes, not 16"),
    "digest of a large one": (_do("p[0].tensors[2].digest = b'x' * 16"), "chunks of its own"),
    "digest of an empty one": (_do("p[1].tensors[1].digest = b'x' * 16"), "digest for the empty tensor"),
    "overlapping chunks": (_do("p[0].chunks[1].offset -= 1"), "where the rule says"),
    "longer chunk": (_do("p[0].chunks[0].num_bytes = 1 << 63"), "where the rule says"),
    "empty chunk": (_do("p[0].chunks[0].num_bytes = 0"), "where the rule says"),
    "missing chunk": (_do("del p[0].chunks[-1]"), "do not reach its end"),
    "additional chunk": (_do("p[0].chunks.add(offset=9, num_bytes=1, digest=b'x' * 16)"), "the rule says None"),
    "chunk digest": (_do("p[0].chunks[0].digest = b'x'"), "a digest of 1 bytes"),
    "missing tensor": (_do("del p[0].tensors[-1]"), "tensor 2 of 2"),
    "additional tensor": (_do("p[0].tensors.add(path='z')"), "of which its tree names 3"),
    "no tree": (_do("p[0].ClearField('tree')"), "no kind"),
    "tensor out of order": (_do("p[0].tree.dict.entries[0].value.tensor = 1"), ", 0 is the next"),
    "tensor beyond": (_tree(lambda v: setattr(v, "tensor", 1 << 31)), "tensor 2147483648"),
    "value of no kind": (_tree(lambda v: None), "no kind at 'new'"),
    "forward reference": (_tree(lambda v: setattr(v, "shared", 99)), "container 99"),
    "reference to an ancestor": (_tree(lambda v: setattr(v.list.items.add(), "shared", 0)), "container 0"),
    "short big int": (_tree(lambda v: setattr(v, "big_int", b"\x05")), "shortest form"),
    "padded big int": (_tree(lambda v: setattr(v, "big_int", b"\0" * 9 + b"\1" * 9)), "shortest form"),
    "no big int": (_tree(lambda v: setattr(v, "big_int", b"")), "shortest form"),
    "torch dtype": (_tree(lambda v: setattr(v, "torch_dtype", "load")), "unknown dtype 'load'"),
    "torch dtype path": (_tree(lambda v: setattr(v, "torch_dtype", "hub.load")), "unknown dtype"),
    "torch dtype alias": (_tree(lambda v: setattr(v, "torch_dtype", "float")), "unknown dtype"),
    "torch device": (_tree(lambda v: setattr(v, "torch_device", "cuda:99999999999")), "unknown device"),
    "torch device name": (_tree(lambda v: setattr(v, "torch_device", "warp")), "unknown device"),
    "numpy dtype": (_tree(lambda v: setattr(v.numpy_scalar, "dtype", "O")), "numpy scalar of dtype 'O'"),
    "numpy bytes": (_tree(lambda v: setattr(v.numpy_scalar, "dtype", "int8")), "in 0 bytes"),
    "size of texts": (_tree(lambda v: setattr(v.torch_size.items.add(), "text", "x")), "torch.Size"),
    "deep": (_nested(31), "deep"),
    "deeper than protobuf": (_nested(60), "not a manifest|deep"),
    "same key twice": (_do("p[2].tree.dict.entries.add().CopyFrom(p[2].tree.dict.entries[0])"), "twice"),
    "equal keys": (
        _do("e = p[2].tree.dict.entries; e.add().key.small_int = 1; e.add().key.boolean = True",
            "e = p[2].tree.dict.entries; e[-1].value.boolean = e[-2].value.boolean = True"),
        "the key 'True' twice",
    ),
    "key of a list": (_tree(lambda v: v.dict.entries.add().key.list.SetInParent()), "key of kind 'list'"),
    "key of nothing": (_do("p[2].tree.dict.entries.add()"), "key of kind None"),
    "nan key": (_tree(lambda v: setattr(v.dict.entries.add().key, "float_bits", 0x7FF8 << 48)), "NaN as a key"),
    "long key": (_tree(lambda v: setattr(v.dict.entries.add().key, "text", "k" * 5000)), "5000 characters"),
    "set out of order": (_tree(_set_of(2, 1)), "a set out of order"),
    "set with twins": (_tree(_set_of(1, 1)), "a set with equal items"),
}  # fmt: skip


class TestHostile:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_refused_with_a_reason(self, name: str) -> None:
        change, complaint = HOSTILE[name]
        message = manifest_pb2.Manifest.FromString(encode(sample()))
        change(message)
        data = _serialise(message)
        with pytest.raises(ManifestRejected, match=complaint):
            decode(data)

    @pytest.mark.parametrize(
        ("limits", "complaint"),
        [
            (Limits(manifest_bytes=500), "at most 500 are accepted"),
            (Limits(parts=2), "3 parts"),
            (Limits(tensors=5), "more than 5 tensors"),
            (Limits(chunks=4), "more than 4 chunks"),
            (Limits(total_bytes=CHUNK_BYTES), f"more than {CHUNK_BYTES} bytes"),
            (Limits(total_bytes=CHUNK_BYTES + 40), "bytes of tensors"),
            (Limits(dims=1), "2 dimensions"),
            (Limits(depth=2), "more than 2 deep"),
            (Limits(nodes=12), "more than 12 values"),
            (Limits(path_chars=6), "characters"),
            (Limits(text_bytes=1), "in one value"),
        ],
    )
    def test_caps(self, limits: Limits, complaint: str) -> None:
        manifest = sample()
        if limits.text_bytes == 1:
            manifest = manifest_of({"p": "texts"})
        with pytest.raises(ManifestRejected, match=complaint):
            decode(encode(manifest), limits)

    def test_truncated_anywhere(self) -> None:
        """Only a cut exactly between two parts is a manifest, of fewer parts: its digest tells."""
        manifest = sample()
        data = encode(manifest)
        whole = {len(encode(replace(manifest, parts=manifest.parts[:count]))) for count in range(3)}
        for size in set(range(len(data))) - whole:
            with pytest.raises(ManifestRejected):
                decode(data[:size])
        for size in whole:
            assert manifest_digest(data[:size]) != manifest_digest(data)

    def test_unknown_fields_and_other_encodings(self) -> None:
        data = encode(sample())
        varint_field_99 = b"\x98\x06\x01"
        with pytest.raises(ManifestRejected, match="unknown fields or not in canonical form"):
            decode(data + varint_field_99)
        with pytest.raises(ManifestRejected, match="canonical"):
            decode(b"\x08\x81\x00" + data[2:])  # the same format number, spelt in two bytes
        with pytest.raises(ManifestRejected, match="canonical"):
            decode(data + b"\x08\x01")  # the format number twice
        with pytest.raises(ManifestRejected):
            decode(b"")

    def test_huge_claims_allocate_nothing(self) -> None:
        message = manifest_pb2.Manifest.FromString(encode(sample()))
        spec = message.parts[0].tensors[2]
        claimed = 1 << 44
        message.parts[0].num_bytes += claimed - spec.num_bytes
        spec.shape[0] = spec.num_bytes = claimed
        data = _serialise(message)
        tracemalloc.start()
        try:
            with pytest.raises(ManifestRejected, match="where the rule says"):
                decode(data)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("seed", range(40))
    def test_fuzz(self, seed: int) -> None:
        """Flipped, cut and doubled bytes are refused, or decode to something that can be joined and encoded."""
        rng = random.Random(seed)
        data = encode(sample())
        for _ in range(100):
            broken = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(broken))
                match rng.randrange(4):
                    case 0:
                        broken[at] ^= 1 << rng.randrange(8)
                    case 1:
                        del broken[at : at + rng.randint(1, 8)]
                    case 2:
                        broken[at:at] = broken[at : at + rng.randint(1, 16)]
                    case _:
                        broken[at] = rng.randrange(256)
            _must_be_safe(bytes(broken))

    @given(st.binary(max_size=200))
    @settings(max_examples=300, deadline=None)
    def test_noise(self, data: bytes) -> None:
        _must_be_safe(data)


def _must_be_safe(data: bytes) -> None:
    try:
        manifest = decode(data, Limits(total_bytes=64 << 20))
    except ManifestRejected:
        return
    assert encode(manifest) == data
    for part in manifest.parts:
        join(part.tree, [empty_leaf(spec, "cpu") for spec in part.tensors])


def _serialise(message: manifest_pb2.Manifest) -> bytes:
    data = message.SerializeToString(deterministic=True)
    assert data != encode(sample()), "the change did not reach the manifest"
    return data
