"""Equality to the bit, written without the code under test; strategies for random state trees."""

from __future__ import annotations

import collections
import struct

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64, torch.complex128, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip
ARRAY_DTYPES = ["f8", "f4", "f2", "c8", "c16", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]


def logical_bytes(value: torch.Tensor | np.ndarray) -> bytes:
    """Return the row-major bytes of a CPU tensor or array, by way of numpy only."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value.detach().unsqueeze(-1).view(torch.uint8).numpy().tobytes()


def same(a: object, b: object) -> bool:
    """Return whether two trees are equal to the bit: types, order, dtypes, shapes, floats by their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        head = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        return head and logical_bytes(a) == logical_bytes(b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic) and isinstance(b, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(
            same(ka, kb) and same(va, vb) for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex) and isinstance(b, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return a == b


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a dense tensor of random bits (bools: 0 or 1)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).squeeze(-1)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of every dtype in every memory layout."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    value = random_tensor(dtype, shape, draw(st.integers(0, 1 << 30)))
    match draw(st.sampled_from(["dense", "transposed", "sliced", "expanded", "parameter", "offset"])):
        case "transposed" if value.dim() > 1:
            value = value.transpose(0, -1)
        case "sliced" if value.dim() and value.shape[-1] > 1:
            value = value[..., ::2]
        case "expanded":
            value = value.unsqueeze(0).expand(3, *shape)
        case "parameter":
            grad = draw(st.booleans()) and (dtype.is_floating_point or dtype.is_complex)
            return torch.nn.Parameter(value, requires_grad=grad)
        case "offset" if value.dim() and value.shape[0] > 1:
            value = value[1:]
        case _:
            pass
    return value


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Arrays of every dtype; reversed, transposed and read-only ones too."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    dtype = np.dtype(draw(st.sampled_from(ARRAY_DTYPES)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    raw = rng.integers(0, 2 if dtype == np.bool_ else 256, (*shape, dtype.itemsize), dtype=np.uint8)
    value: np.ndarray = np.frombuffer(bytearray(raw.tobytes()), dtype).reshape(shape)
    match draw(st.sampled_from(["dense", "transposed", "reversed", "read-only"])):
        case "transposed":
            value = value.T
        case "reversed" if value.ndim:
            value = value[::-1]
        case "read-only":
            value.flags.writeable = False
        case _:
            pass
    return value


def scalars() -> st.SearchStrategy[object]:
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF4_0000_0000_0001))[0]  # a signalling NaN
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    numpy_scalars = st.builds(
        lambda name, raw: np.frombuffer(raw, name)[0],
        st.sampled_from(["<f4", "<u4", "<i4"]),
        st.binary(min_size=4, max_size=4),
    )
    return st.one_of(
        st.none(), st.booleans(), st.integers(), st.integers(-(1 << 200), 1 << 200), texts, st.binary(max_size=8),
        st.floats(allow_nan=False), st.sampled_from([float("nan"), -0.0, float("inf"), payload]),
        st.complex_numbers(allow_nan=False), numpy_scalars,
        st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)]),
        st.builds(torch.Size, st.lists(st.integers(0, 9), max_size=3)),
    )  # fmt: skip


def keys() -> st.SearchStrategy[object]:
    plain = st.one_of(
        st.sampled_from(["", "a", "a/b", "~", "<0>", "0", "é"]),
        st.integers(-3, 3), st.booleans(), st.none(), st.floats(allow_nan=False), st.integers(1 << 70, 1 << 71),
    )  # fmt: skip
    return st.one_of(plain, st.lists(plain, max_size=2).map(tuple))


def trees() -> st.SearchStrategy[object]:
    """Trees of everything that has an exact form."""
    leaves = st.one_of(scalars(), tensors(), arrays(), st.sets(keys(), max_size=3))

    def grow(children: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
        mappings = st.dictionaries(keys(), children, max_size=4)
        return st.one_of(
            st.lists(children, max_size=4),
            st.lists(children, max_size=4).map(tuple),
            mappings,
            mappings.map(collections.OrderedDict),
            st.dictionaries(keys(), st.integers(), max_size=4).map(collections.Counter),
            mappings.map(lambda items: collections.defaultdict(None, items)),
            children.map(lambda child: [child, {"again": child}]),
        )

    return st.recursive(leaves, grow, max_leaves=12)
