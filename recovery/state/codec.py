"""Python values that are not tensors, to and from ``manifest_pb2.Value``, exactly: bits of floats, kinds, key types."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable

import numpy as np
import torch

from protos.recovery.v1 import manifest_pb2
from recovery.errors import ManifestRejected
from recovery.state.leaf import NUMPY_DTYPES, NUMPY_NAMES, TORCH_DTYPES, unsupported
from recovery.state.limits import Limits

_DOUBLE = struct.Struct("<d")
_BITS = struct.Struct("<Q")
_SMALL_MIN, _SMALL_MAX = -(1 << 63), (1 << 63) - 1
_DEVICE = re.compile(r"[a-z]{1,16}(:(0|[1-9][0-9]{0,3}))?")


def float_to_bits(value: float) -> int:
    """Return the IEEE 754 bits of ``value``, NaN payload included."""
    bits: int = _BITS.unpack(_DOUBLE.pack(value))[0]
    return bits


def float_from_bits(bits: int) -> float:
    """Return the float that has these IEEE 754 bits."""
    value: float = _DOUBLE.unpack(_BITS.pack(bits))[0]
    return value


def int_to_bytes(value: int) -> bytes:
    """Return the shortest two's complement form, big-endian."""
    return value.to_bytes((value + (value < 0)).bit_length() // 8 + 1, "big", signed=True)


# Writing. Each writer sets exactly one kind of `out`; `path` is for the error's text.


def _write_none(value: object, out: manifest_pb2.Value, path: str, limits: Limits) -> None:
    out.none.SetInParent()


def _write_bool(value: bool, out: manifest_pb2.Value, path: str, limits: Limits) -> None:
    out.boolean = value


def _write_int(value: int, out: manifest_pb2.Value, path: str, limits: Limits) -> None:
    if _SMALL_MIN <= value <= _SMALL_MAX:
        out.small_int = value
    elif value.bit_length() > 8 * limits.text_bytes:
        raise unsupported(path, value, f"an int has at most {limits.text_bytes} bytes, this one has more")
    else:
        out.big_int = int_to_bytes(value)


def _write_float(value: float, out: manifest_pb2.Value, path: str, limits: Limits) -> None:
    out.float_bits = float_to_bits(value)


def _write_complex(value: complex, out: manifest_pb2.Value, path: str, limits: Limits) -> None:
    out.complex_bits.real = float_to_bits(value.real)
    out.complex_bits.imag = float_to_bits(value.imag)
    out.complex_bits.SetInParent()


def _write_str(value: str, out: manifest_pb2.Value, path: str, limits: Limits) -> None:
    try:
        num_bytes = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        raise unsupported(path, value, "it has a lone surrogate and no UTF-8 form: store bytes") from None
    if num_bytes > limits.text_bytes:
        raise unsupported(path, value, f"a text has at most {limits.text_bytes} bytes: store a uint8 tensor")
    out.text = value


def _write_bytes(value: bytes, out: manifest_pb2.Value, path: str, limits: Limits) -> None:
    if len(value) > limits.text_bytes:
        raise unsupported(path, value, f"bytes have at most {limits.text_bytes} of them: store a uint8 tensor")
    out.blob = value


def _write_dtype(value: torch.dtype, out: manifest_pb2.Value, path: str, limits: Limits) -> None:
    out.torch_dtype = str(value).removeprefix("torch.")


def _write_device(value: torch.device, out: manifest_pb2.Value, path: str, limits: Limits) -> None:
    out.torch_device = str(value)


ScalarWriter = Callable[..., None]
SCALAR_WRITERS: dict[type, ScalarWriter] = {
    type(None): _write_none,
    bool: _write_bool,
    int: _write_int,
    float: _write_float,
    complex: _write_complex,
    str: _write_str,
    bytes: _write_bytes,
    torch.dtype: _write_dtype,
    torch.device: _write_device,
}
"""By exact type: a subclass would come back as its base, so it is not found here."""


def write_numpy_scalar(value: np.generic, out: manifest_pb2.Value, path: str) -> None:
    """Set ``out`` to a numpy scalar.

    Raises:
        UnsupportedLeaf: its dtype is not one that arrays may have.
    """
    name = NUMPY_NAMES.get(value.dtype)
    if name is None:
        raise unsupported(path, value, f"its dtype {value.dtype!r} is not one of {', '.join(NUMPY_DTYPES)}")
    out.numpy_scalar.dtype = name
    out.numpy_scalar.data = value.tobytes()


def write_key(key: object, out: manifest_pb2.Value, path: str, limits: Limits, depth: int = 0) -> None:
    """Set ``out`` to a dict's key or a set's item: str, int, bool, float, None or a tuple of these.

    Raises:
        UnsupportedLeaf: another type, a NaN (no two are equal, so it could not be found again), or too long.
    """
    kind = type(key)
    if kind is str:
        if len(key) > limits.path_chars:  # type: ignore[arg-type]
            raise unsupported(path, key, f"a key has at most {limits.path_chars} characters")
        _write_str(key, out, path, limits)  # type: ignore[arg-type]
    elif kind is tuple:
        if depth >= 4:
            raise unsupported(path, key, "tuples in a key nest at most 4 deep")
        out.tuple.SetInParent()
        for item in key:  # type: ignore[attr-defined]
            write_key(item, out.tuple.items.add(), path, limits, depth + 1)
    elif kind is float and key != key:
        raise unsupported(path, key, "NaN cannot be found again as a key")
    elif kind in (int, bool, float, type(None)):
        SCALAR_WRITERS[kind](key, out, path, limits)
    else:
        raise unsupported(path, key, "keys and set items are str, int, bool, float, None or tuples of these")


def path_step(key: object) -> str:
    """Return a key as one step of a path; different keys of one dict give different steps.

    A str stands for itself, with ``~``, ``/`` and a leading ``<`` escaped as ``~0``, ``~1`` and ``~2``, and the empty
    one as ``~3``; any other key is its repr in angle brackets.
    """
    if type(key) is str:
        if not key:
            return "~3"
        if "~" in key or "/" in key:
            key = key.replace("~", "~0").replace("/", "~1")
        return "~2" + key[1:] if key.startswith("<") else key
    return "<" + repr(key).replace("~", "~0").replace("/", "~1") + ">"


# Reading. Whatever is read may come from a stranger.


def read_scalar(value: manifest_pb2.Value, kind: str, path: str, limits: Limits) -> object:
    """Return the scalar that ``value`` holds; ``kind`` is its set field.

    Raises:
        ManifestRejected: not a scalar, over a limit, or not in canonical form.
    """
    reader = _READERS.get(kind)
    if reader is None:
        raise ManifestRejected(f"{path or '(root)'}: {kind!r} is not a scalar")
    return reader(value, path, limits)


def read_key(value: manifest_pb2.Value, path: str, limits: Limits, depth: int = 0) -> object:
    """Return a dict's key or a set's item.

    Raises:
        ManifestRejected: of another type, NaN, too long, or tuples nested too deep.
    """
    kind = value.WhichOneof("kind")
    if kind == "tuple":
        if depth >= 4:
            raise ManifestRejected(f"{path or '(root)'}: tuples in a key nest more than 4 deep")
        return tuple(read_key(item, path, limits, depth + 1) for item in value.tuple.items)
    if kind not in ("text", "small_int", "big_int", "boolean", "float_bits", "none"):
        raise ManifestRejected(f"{path or '(root)'}: a key of kind {kind!r}")
    key = read_scalar(value, kind, path, limits)
    if isinstance(key, str) and len(key) > limits.path_chars:
        raise ManifestRejected(f"{path or '(root)'}: a key of {len(key)} characters, at most {limits.path_chars} are")
    if isinstance(key, float) and math.isnan(key):
        raise ManifestRejected(f"{path or '(root)'}: NaN as a key")
    return key


def _read_big_int(value: manifest_pb2.Value, path: str, limits: Limits) -> int:
    data = _capped(value.big_int, path, limits)
    number = int.from_bytes(data, "big", signed=True)
    if _SMALL_MIN <= number <= _SMALL_MAX or int_to_bytes(number) != data:
        raise ManifestRejected(f"{path or '(root)'}: an int that is not in its shortest form")
    return number


def _read_text(value: manifest_pb2.Value, path: str, limits: Limits) -> str:
    text = value.text
    if 4 * len(text) > limits.text_bytes:  # a character has at most four bytes: most texts need no second look
        _capped(text.encode(), path, limits)
    return text


def _read_dtype(value: manifest_pb2.Value, path: str, limits: Limits) -> torch.dtype:
    name = value.torch_dtype
    found = TORCH_DTYPES.get(name) or (getattr(torch, name, None) if name.isidentifier() else None)
    if not isinstance(found, torch.dtype) or str(found) != f"torch.{name}":
        raise ManifestRejected(f"{path or '(root)'}: unknown dtype {name[:80]!r}")
    return found


def _read_device(value: manifest_pb2.Value, path: str, limits: Limits) -> torch.device:
    name = value.torch_device
    if not _DEVICE.fullmatch(name):
        raise ManifestRejected(f"{path or '(root)'}: unknown device {name[:80]!r}")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ManifestRejected(f"{path or '(root)'}: unknown device {name!r}") from None


def _read_numpy(value: manifest_pb2.Value, path: str, limits: Limits) -> np.generic:
    scalar = value.numpy_scalar
    dtype = NUMPY_DTYPES.get(scalar.dtype)
    if dtype is None or len(scalar.data) != dtype.itemsize:
        raise ManifestRejected(
            f"{path or '(root)'}: a numpy scalar of dtype {scalar.dtype[:80]!r} in {len(scalar.data)} bytes"
        )
    found: np.generic = np.frombuffer(scalar.data, dtype)[0]
    return found


def _read_complex(value: manifest_pb2.Value, path: str, limits: Limits) -> complex:
    return complex(float_from_bits(value.complex_bits.real), float_from_bits(value.complex_bits.imag))


_READERS: dict[str, Callable[[manifest_pb2.Value, str, Limits], object]] = {
    "none": lambda value, path, limits: None,
    "boolean": lambda value, path, limits: value.boolean,
    "small_int": lambda value, path, limits: value.small_int,
    "big_int": _read_big_int,
    "float_bits": lambda value, path, limits: float_from_bits(value.float_bits),
    "text": _read_text,
    "blob": lambda value, path, limits: _capped(value.blob, path, limits),
    "torch_dtype": _read_dtype,
    "torch_device": _read_device,
    "numpy_scalar": _read_numpy,
    "complex_bits": _read_complex,
}


def _capped(data: bytes, path: str, limits: Limits) -> bytes:
    if len(data) > limits.text_bytes:
        raise ManifestRejected(f"{path or '(root)'}: {len(data)} bytes in one value, at most {limits.text_bytes} are")
    return data
