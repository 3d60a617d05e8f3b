"""What a joiner makes of averages that travelled rounded is, bit for bit, what every member got."""

from __future__ import annotations

import pytest
import torch

from recovery.errors import ManifestRejected
from recovery.worker.averaging import Averager, decode_averages
from recovery.worker.gradient_codec import CODEC_NAMES, codec_named

LIKE = [
    (torch.Size([700, 3]), torch.float32),
    (torch.Size([]), torch.float64),
    (torch.Size([5]), torch.bfloat16),
    (torch.Size([0]), torch.float32),
    (torch.Size([2000]), torch.float64),
]


@pytest.mark.parametrize("name", [name for name in CODEC_NAMES if name != "plain"])
@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20])
def test_decoding_gives_the_averages(name: str, bucket_bytes: int) -> None:
    codec = codec_named(name)
    averager = Averager(bucket_bytes, codec)
    torch.manual_seed(0)
    mine = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape, dtype in LIKE]
    averaged = averager.average(mine, [1.0], 0, None, 10.0)
    encoded = averager.take_encoded()
    assert averager.take_encoded() == []
    assert sum(rows.nbytes for rows in encoded) < sum(tensor.nbytes for tensor in averaged)
    found = decode_averages(encoded, LIKE, codec, bucket_bytes)
    for one, other in zip(found, averaged, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    with pytest.raises(ManifestRejected, match="buckets"):
        decode_averages(encoded[:-1], LIKE, codec, bucket_bytes)
    with pytest.raises(ManifestRejected, match=r"buckets|too few"):
        decode_averages(encoded, [(torch.Size([9000]), torch.float32), *LIKE[1:]], codec, bucket_bytes)


def test_plain_averages_have_no_other_form() -> None:
    averager = Averager(1024)
    averager.average([torch.ones(5)], [1.0], 0, None, 10.0)
    assert averager.take_encoded() == []
