"""How pseudo-gradients travel: exact, or in fewer bytes by a fixed rounding that every member reproduces bit for bit.

A codec works on rows of float32 values, one row a segment of a bucket, and is used twice in each boundary: each
member's contribution is encoded for the swap, and each segment's mean is encoded for the gathering. Everybody, the
member that computed a mean included, goes on with the *decoded* mean; so the results stay bit-equal whatever the
rounding.

======  ==========================  ====================================================================
name    bytes an element            decoded value of x
======  ==========================  ====================================================================
plain   4 (float64: 8)              x
bf16    2                           x rounded to bfloat16, to nearest, ties to even; overflow is infinite
int8    1 + 4/256                   q * s in float32, with s = m / 127 rounded to float32, m the largest |x| of the
                                    block, q = x / s rounded to float32, then to an integer, to nearest, ties to even,
                                    limited to -127..127. Where s is 0, everything is 0; where m is not finite,
                                    the whole block is NaN: a broken gradient is never averaged away.
======  ==========================  ====================================================================

Blocks are 256 consecutive elements of all tensors of one dtype, laid end to end. Under bf16 and int8, float64 values
are rounded to float32 first.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from recovery.errors import BadConfiguration

INT8_BLOCK = 256
_INT8_LARGEST = 127.0
_SCALE_BYTES = 4


class GradientCodec(Protocol):
    """Turns rows of values into rows of bytes and back; no state."""

    name: str
    block: int
    """A row's length is a multiple of this."""

    def encode(self, rows: Tensor) -> Tensor:
        """Return the bytes of ``rows`` (2-d, contiguous, float32 or wider): 2-d uint8, one row each."""

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of ``encode``'s rows as ``dtype``."""


class PlainCodec:
    """The values themselves."""

    name = "plain"
    block = 1

    def encode(self, rows: Tensor) -> Tensor:
        return rows.view(torch.uint8)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        return encoded.view(dtype)


class Bfloat16Codec:
    """Half the bytes: eight bits of mantissa."""

    name = "bf16"
    block = 1

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(torch.float32).to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        return encoded.view(torch.bfloat16).to(dtype)


class Int8Codec:
    """A quarter of the bytes: whole multiples of a scale for each block. A row is its scales, then its integers."""

    name = "int8"
    block = INT8_BLOCK

    def encode(self, rows: Tensor) -> Tensor:
        num_rows, length = rows.shape
        blocks = rows.to(torch.float32).reshape(num_rows, length // INT8_BLOCK, INT8_BLOCK)
        scales = blocks.abs().amax(dim=2, keepdim=True).div_(_INT8_LARGEST)
        # Zero over zero, and everything under a scale that is not finite, becomes 0: the scale alone tells them apart.
        multiples = (blocks / scales).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-_INT8_LARGEST, _INT8_LARGEST)
        encoded = torch.empty(num_rows, length // INT8_BLOCK * _SCALE_BYTES + length, dtype=torch.uint8)
        at = encoded.shape[1] - length
        encoded[:, :at] = scales.reshape(num_rows, -1).view(torch.uint8)
        encoded[:, at:] = multiples.reshape(num_rows, length).to(torch.int8).view(torch.uint8)
        return encoded

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows, num_bytes = encoded.shape
        num_blocks = num_bytes // (_SCALE_BYTES + INT8_BLOCK)
        at = num_blocks * _SCALE_BYTES
        scales = encoded[:, :at].contiguous().view(torch.float32).reshape(num_rows, num_blocks, 1)
        multiples = encoded[:, at:].contiguous().view(torch.int8).reshape(num_rows, num_blocks, INT8_BLOCK)
        return (multiples.to(torch.float32) * scales).reshape(num_rows, num_blocks * INT8_BLOCK).to(dtype)


_CODECS: dict[str, GradientCodec] = {codec.name: codec for codec in (PlainCodec(), Bfloat16Codec(), Int8Codec())}

CODEC_NAMES = tuple(_CODECS)


def codec_named(name: str) -> GradientCodec:
    """Return the codec of that name.

    Raises:
        BadConfiguration: there is none.
    """
    if name not in _CODECS:
        raise BadConfiguration(f"gradient_codec is {name!r}: take one of {', '.join(CODEC_NAMES)}")
    return _CODECS[name]
