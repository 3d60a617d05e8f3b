"""The rounding rules of the gradient codecs, against their documented formulas computed by other means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.errors import BadConfiguration
from recovery.worker.gradient_codec import CODEC_NAMES, INT8_BLOCK, Bfloat16Codec, Int8Codec, codec_named

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


def round_trip(name: str, values: list[float]) -> torch.Tensor:
    codec = codec_named(name)
    rows = torch.tensor([values], dtype=torch.float32)
    return codec.decode(codec.encode(rows), torch.float32)[0]


def block_of(values: list[float]) -> list[float]:
    return values + [0.0] * (INT8_BLOCK - len(values))


def int8_formula(values: list[float]) -> list[float]:
    """The formula of the module's table, in numpy's float32."""
    block = np.array(values, dtype=np.float32)
    with np.errstate(all="ignore"):
        scale = np.float32(np.max(np.abs(block)) / np.float32(127))
        if scale == 0:
            return [0.0] * len(values)
        multiples = np.clip(np.round(block / scale), -127, 127).astype(np.float32)
        return [float(value) for value in multiples * scale]


@settings(max_examples=200, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=INT8_BLOCK))
def test_int8_is_its_formula(values: list[float]) -> None:
    assert round_trip("int8", block_of(values)).tolist() == int8_formula(block_of(values))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=INT8_BLOCK))
def test_int8_is_within_half_a_scale(values: list[float]) -> None:
    block = torch.tensor(block_of(values))
    scale = float(block.abs().max()) / 127
    assert float((round_trip("int8", block.tolist()) - block).abs().max()) <= 0.5001 * scale + 1e-38


def test_int8_blocks_do_not_touch_each_other() -> None:
    codec = Int8Codec()
    rows = torch.cat([torch.full((INT8_BLOCK,), 1e20), torch.full((INT8_BLOCK,), 1e-20)]).reshape(1, -1)
    decoded = codec.decode(codec.encode(rows), torch.float32)
    assert torch.allclose(decoded, rows, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_gradient_is_never_averaged_away(broken: float) -> None:
    """Field report: Megatron-LM#5281, NaN after a restore, found 44 restarts later."""
    assert bool(round_trip("int8", block_of([broken, 1.0])).isnan().all())
    assert not bool(round_trip("bf16", [broken, 1.0])[0].isfinite())


def test_bf16_rounds_to_nearest_ties_to_even() -> None:
    # A bfloat16 has 7 bits after the leading one: between 1 and 2 they are 1/128 apart.
    exact, tie_down, tie_up, above = 1.0, 1 + 1 / 256, 1 + 3 / 256, 1 + 1 / 256 + 1e-6
    assert round_trip("bf16", [exact, tie_down, tie_up, above]).tolist() == [1.0, 1.0, 1 + 2 / 128, 1 + 1 / 128]
    assert round_trip("bf16", [3.4e38, -3.4e38, 3.4028e38]).tolist()[-1] == float("inf")


def test_encoding_what_was_decoded_changes_nothing() -> None:
    rows = torch.randn(2, 4 * INT8_BLOCK, generator=torch.Generator().manual_seed(1))
    codec = Bfloat16Codec()
    once = codec.decode(codec.encode(rows), torch.float32)
    assert torch.equal(codec.decode(codec.encode(once), torch.float32), once)


def test_names() -> None:
    assert CODEC_NAMES == ("plain", "bf16", "int8")
    with pytest.raises(BadConfiguration, match="plain, bf16, int8"):
        codec_named("int4")
