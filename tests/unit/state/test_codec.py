"""Scalars and keys: one encoding each, exact; the encodings that nobody writes are refused when read."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos.recovery.v1 import manifest_pb2
from recovery.errors import ManifestRejected, UnsupportedLeaf
from recovery.state.codec import (
    SCALAR_WRITERS,
    float_from_bits,
    float_to_bits,
    int_to_bytes,
    path_step,
    read_key,
    read_scalar,
    write_key,
    write_numpy_scalar,
)
from recovery.state.leaf import NUMPY_DTYPES
from recovery.state.limits import DEFAULT_LIMITS, Limits
from tests.unit.state.exact import keys, same


def through(value: object) -> object:
    """Write a scalar and read it back from its bytes."""
    out = manifest_pb2.Value()
    if isinstance(value, np.generic):
        write_numpy_scalar(value, out, "")
    else:
        SCALAR_WRITERS[type(value)](value, out, "", DEFAULT_LIMITS)
    back = manifest_pb2.Value.FromString(out.SerializeToString(deterministic=True))
    kind = back.WhichOneof("kind")
    assert kind is not None
    return read_scalar(back, kind, "", DEFAULT_LIMITS)


@given(st.integers(0, (1 << 64) - 1))
def test_every_float_keeps_its_bits(bits: int) -> None:
    assert float_to_bits(float_from_bits(bits)) == bits
    assert same(through(float_from_bits(bits)), float_from_bits(bits))


@given(
    st.one_of(st.integers(), st.integers(-(1 << 300), 1 << 300), st.sampled_from([(1 << 63) - 1, 1 << 63, -(1 << 63)]))
)
def test_every_int(value: int) -> None:
    assert same(through(value), value)
    assert int.from_bytes(int_to_bytes(value), "big", signed=True) == value


@given(st.integers(-(1 << 70), 1 << 70))
def test_ints_have_one_shortest_form(value: int) -> None:
    data = int_to_bytes(value)
    if len(data) > 1:
        assert int.from_bytes(data[1:], "big", signed=True) != value


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_every_numpy_scalar(name: str) -> None:
    dtype = NUMPY_DTYPES[name]
    raw = bytes([1] * dtype.itemsize)
    (value,) = np.frombuffer(raw, dtype)
    assert same(through(value), value)


@given(st.complex_numbers())
def test_complex(value: complex) -> None:
    assert same(through(value), value)


def test_dtypes_and_devices() -> None:
    for value in (torch.float16, torch.float8_e5m2, torch.qint8, torch.device("cpu"), torch.device("cuda", 3)):
        assert through(value) == value


@given(keys())
def test_every_key(key: object) -> None:
    out = manifest_pb2.Value()
    write_key(key, out, "", DEFAULT_LIMITS)
    assert same(read_key(manifest_pb2.Value.FromString(out.SerializeToString()), "", DEFAULT_LIMITS), key)


@given(st.lists(keys(), unique_by=lambda key: (type(key).__name__, repr(key)), max_size=30))
def test_different_keys_are_different_steps_of_a_path(several: list[object]) -> None:
    steps = [path_step(key) for key in several]
    assert len(set(steps)) == len(steps)
    assert all(step and "/" not in step for step in steps)


@given(st.text(), st.text())
def test_texts_never_share_a_step(a: str, b: str) -> None:
    assert (path_step(a) == path_step(b)) == (a == b)


def test_deep_tuples_are_no_keys() -> None:
    deep: object = 1
    for _ in range(4):
        deep = (deep,)
    out = manifest_pb2.Value()
    write_key(deep, out, "", DEFAULT_LIMITS)
    assert read_key(out, "", DEFAULT_LIMITS) == deep
    with pytest.raises(UnsupportedLeaf, match="at most 4 deep"):
        write_key((deep,), manifest_pb2.Value(), "", DEFAULT_LIMITS)
    outer = manifest_pb2.Value()
    outer.tuple.items.add().CopyFrom(out)
    with pytest.raises(ManifestRejected, match="more than 4 deep"):
        read_key(outer, "", DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("text", "x" * 11), ("text", "é" * 6), ("blob", b"x" * 11), ("big_int", b"\x01" * 11)],
)
def test_long_scalars_are_refused(kind: str, value: object) -> None:
    message = manifest_pb2.Value()
    setattr(message, kind, value)
    with pytest.raises(ManifestRejected, match="bytes in one value, at most 10 are"):
        read_scalar(message, kind, "p", Limits(text_bytes=10))


def test_containers_are_no_scalars() -> None:
    with pytest.raises(ManifestRejected, match="'list' is not a scalar"):
        read_scalar(manifest_pb2.Value(), "list", "p", DEFAULT_LIMITS)


def test_a_signalling_nan_stays_signalling() -> None:
    (value,) = struct.unpack("<d", struct.pack("<Q", 0x7FF0_0000_0000_0001))
    back = through(value)
    assert isinstance(back, float)
    assert float_to_bits(back) == 0x7FF0_0000_0000_0001
